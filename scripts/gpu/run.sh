#!/bin/bash
# What runs on a lent GPU, in three calls of under ten minutes; docs/benchmarks/gpu.md says how they are made.
#
#   bash scripts/gpu/run.sh pack     here: TE's bundle and megatron-core into .gpu, which git ignores and the calls carry
#   bash scripts/gpu/run.sh bits     there: golden vectors and conformance, kernels, refit
#   bash scripts/gpu/run.sh llama    there: training, four layers of Llama-3.1-8B
#   bash scripts/gpu/run.sh moe      there: training, two layers of Qwen3-30B-A3B
#
# Each script notes every part as soon as it is measured, so that a crash or a time limit keeps what was there.
set -u
cd "$(dirname "$0")/../.."
export OUT="${OUT:-$PWD/out/gpu}"
SITE=/tmp/site

pack() {
  mkdir -p .gpu
  cp -f ../shared/gpu/te/* ../shared/gpu/unpack_on_gpu.sh .gpu/
  # onnx-ir: TE imports onnxscript, which needs it; an image may or may not have it.
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_24_x86_64 -d .gpu megatron-core==0.15.3 onnx-ir==1.0.0
  git describe --always --dirty > .gpu/commit # git's own folder does not travel
  du -sh .gpu
}

setup() {
  mkdir -p "$OUT"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader
  export PYTHONPATH=$SITE:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  export TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
  # TE compiles its norms when they first run, and wants CUDA's headers for that.
  if [ -f /usr/local/cuda/include/cuda_runtime.h ]; then export NVTE_CUDA_INCLUDE_DIR=/usr/local/cuda/include; fi
  [ -f $SITE/.ready ] && return
  timeout 120 bash .gpu/unpack_on_gpu.sh $SITE .gpu && touch $SITE/.ready || echo "TransformerEngine was not installed: what needs it is skipped."
}

supervised() { # seconds for all of it, seconds until nothing begins any more, script
  echo "== $3: ends after $1 s, begins nothing after $2 s"
  python3 scripts/gpu/supervise.py "$1" "$3" --limit "$2" 2>&1 | tee -a "$OUT/log.txt"
}

train() { # the same; every case of it is a process of its own already
  echo "== train.py $3: ends after $1 s, begins nothing after $2 s"
  timeout -k 10 "$1" python3 -W ignore scripts/gpu/train.py "$3" --limit "$2" 2>&1 | tee -a "$OUT/log.txt"
}

case "${1:-}" in
  pack) pack ;;
  bits) setup; supervised 210 170 conformance.py; supervised 180 140 kernels.py; supervised 110 75 refit.py ;;
  llama) setup; train 530 470 llama ;;
  moe) setup; train 530 470 moe ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
rm -f "$OUT"/*.partial # no more than eight files come back
