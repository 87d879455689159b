#!/bin/bash
# What runs on a lent GPU, in three calls of under ten minutes; docs/benchmarks/gpu.md says how they are made.
#
#   bash scripts/gpu/run.sh pack     here: TE's bundle and megatron-core into .gpu, which git ignores and the calls carry
#   bash scripts/gpu/run.sh bits     there: conformance, kernels, refit
#   bash scripts/gpu/run.sh llama    there: training, four layers of Llama-3.1-8B
#   bash scripts/gpu/run.sh moe      there: training, two layers of Qwen3-30B-A3B
#
# Every script goes on where a part of it fails, begins nothing after its --limit, and is ended by timeout in the worst case.
set -u
cd "$(dirname "$0")/../.."
export OUT="${OUT:-$PWD/out/gpu}"
SITE=/tmp/site

pack() {
  mkdir -p .gpu
  cp ../shared/gpu/te/* ../shared/gpu/unpack_on_gpu.sh .gpu/
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_24_x86_64 -d .gpu megatron-core==0.15.3
  du -sh .gpu
}

setup() {
  mkdir -p "$OUT"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader
  [ -d $SITE/transformer_engine ] || bash .gpu/unpack_on_gpu.sh $SITE .gpu || echo "TransformerEngine was not installed: what needs it is skipped."
  export PYTHONPATH=$SITE:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  export TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
  # TE compiles its norms when they first run, and wants CUDA's headers for that.
  if [ -f /usr/local/cuda/include/cuda_runtime.h ]; then export NVTE_CUDA_INCLUDE_DIR=/usr/local/cuda/include; fi
}

run() { # seconds for all of it, seconds until nothing begins any more, script and arguments
  local most=$1 limit=$2
  shift 2
  echo "== $*"
  timeout "$most" python3 -W ignore "scripts/gpu/$1" "${@:2}" --limit "$limit" 2>&1 | tee -a "$OUT/log.txt"
}

case "${1:-}" in
  pack) pack ;;
  bits) setup; run 200 150 conformance.py; run 200 160 kernels.py; run 120 80 refit.py ;;
  llama) setup; run 540 470 train.py llama ;;
  moe) setup; run 540 470 train.py moe ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
