#!/usr/bin/env bash
# What `make demo` shows, in the order in which a person meets it. Run it through make, which sets up the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n\033[1m== %s\033[0m\n\n' "$1"; }

step "nemo-fp8 list: the named precisions"
nemo-fp8 list
step "nemo-fp8 explain bf16_with_fp8_blockwise_mixed: what it stores, and with which scales"
nemo-fp8 explain bf16_with_fp8_blockwise_mixed
step "nemo-fp8 doctor: what this machine makes of each recipe"
nemo-fp8 doctor
step "nemo-fp8 doctor --for h200,cuda12.8,te2.9: and another one"
nemo-fp8 doctor bf16_with_fp8_blockwise_mixed --for h200,cuda12.8,te2.9 || true
step "NeMo's llama3_8b pretraining recipe with an FP8 plugin (loading NeMo takes ten seconds)"
python scripts/demo_recipe.py 2> >(grep -v -i -E 'warn|pynvml|OneLogger|exporters|zarr|end of life|deploy|evaluate' >&2)
step "nemo-fp8 compare: NeMo and Megatron train a small Llama in BF16 and in FP8, on two ranks with the distributed optimizer"
mkdir -p out
nemo-fp8 compare --recipe tiny_llama --precisions bf16_mixed,bf16_with_fp8_blockwise_mixed --steps 150 --html out/compare.html
