#!/usr/bin/env bash
# What `make demo` shows, in the order in which a person meets it. Run it through make, which sets up the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

# vLLM asks the processor for AMX, and multiplies by it through oneDNN. Where oneDNN is kept to AVX2, what is newer is hidden from all.
case "${ONEDNN_MAX_CPU_ISA:-}" in AVX2*) export PYTHONPATH="$PWD/tests/support/as_avx2${PYTHONPATH:+:$PYTHONPATH}" ;; esac

if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; else bold= plain=; fi
step() { printf '\n%s== %s%s\n\n' "$bold" "$1" "$plain"; }

step "nemo-fp8 list: the named precisions"
nemo-fp8 list
step "nemo-fp8 explain bf16_with_fp8_blockwise_mixed: what it stores, and with which scales"
nemo-fp8 explain bf16_with_fp8_blockwise_mixed
step "nemo-fp8 doctor: what this machine makes of each recipe"
nemo-fp8 doctor
step "nemo-fp8 doctor --for h200,cuda12.8,te2.9: and another one"
nemo-fp8 doctor bf16_with_fp8_blockwise_mixed --for h200,cuda12.8,te2.9 || true
step "NeMo's llama3_8b pretraining recipe with an FP8 plugin (loading NeMo takes ten seconds)"
python demo/recipe.py 2> >(grep -v -i -E 'warn|pynvml|OneLogger|exporters|zarr|end of life|deploy|evaluate' >&2)
step "nemo-fp8 compare: NeMo and Megatron train a small Llama in BF16 and in FP8, on two ranks with the distributed optimizer"
rm -rf out/runs out/tiny_llama out/tiny_llama_fp8 && mkdir -p out
precision=bf16_with_fp8_blockwise_mixed
nemo-fp8 compare --recipe tiny_llama --precisions bf16_mixed,$precision --steps 80 --keep out/runs --html out/compare.html
step "Megatron-Bridge trains the same Llama by its own pretrain, under the same contract (importing Bridge takes 15 seconds)"
.venv-bridge/bin/python recipes/bridge_tiny.py $precision --steps 8 2> out/bridge.log |
    awk -F'lm loss: ' '/iteration .* lm loss: / { printf "step %d  loss %.3f\n", ++step, $2; fflush() } END { exit !step }' ||
    { tail -n 30 out/bridge.log >&2; exit 1; }
trained=out/runs/$precision-seed1234
step "nemo-fp8 export: the trained model for Hugging Face and vLLM, in BF16, and in FP8 with a certificate"
nemo-fp8 export --from-nemo "$trained" out/tiny_llama --precision bf16_mixed
nemo-fp8 export --from-nemo "$trained" out/tiny_llama_fp8 --precision $precision --verify --no-vllm
step "FP8 rollout: vLLM starts from random weights, takes the trained ones by a push, and is held against the trainer"
noise='triton|deprecated|FutureWarning|hasattr\(value|wrapper = lookup|NUMA binding|resource_tracker'
VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 \
    .venv-rollout/bin/python demo/rollout.py out/tiny_llama "$trained.log_probs.safetensors" $precision \
    2> >(grep -v -i -E "$noise" >&2)
