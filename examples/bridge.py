"""Megatron-Bridge: a preset as its MixedPrecisionConfig, and a config of Bridge's held against a rollout.

    .venv/bin/python examples/bridge.py

You see the Python to paste into a Bridge recipe, which needs megatron-bridge where it is pasted and not here; then what
a trainer that was configured in Bridge's own words and an FP8 rollout disagree in.
"""

from nemo_fp8 import check, preset
from nemo_fp8.render import render
from nemo_fp8.render.bridge import from_bridge

precision = preset("bf16_with_fp8_blockwise_mixed")
rendering = render(precision, "bridge")
print(rendering.text)
assert from_bridge(rendering.data).diff(precision).keys() == set(rendering.lost), (
    "the words of Bridge say all but what is named as lost"
)

theirs = from_bridge({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True})
result = check(train=theirs, rollout=precision)
print(f"\ntensorwise training in Bridge, blockwise rollout: {'they agree' if result.agrees else 'they do not agree'}")
for found in result.findings:
    print(f"- {found.severity}, {found.where}: {found}")
