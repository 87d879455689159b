"""The two layouts of FP8 checkpoints that engines read: the names of scales, and the entry in config.json.

    deepseek              <weight>_scale_inv     quant_method "fp8", weight_block_size [128, 128]
    compressed-tensors    <module>.weight_scale  quant_method "compressed-tensors", format "float-quantized"

Both hold the same codes and the same scales, FP32 [ceil(n / 128), ceil(k / 128)]. DeepSeek's says with ``scale_fmt:
ue8m0`` that every scale is a power of two. The trade-off: more tools read compressed-tensors, but it cannot express
power-of-two activation scales, or experts in one stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.render.vllm import to_hugging_face


@dataclass(frozen=True)
class Layout:
    """A layout of FP8 checkpoints."""

    name: str
    scale_name: Callable[[str], str]
    """Returns the name of the scale of a weight."""
    config: Callable[[Precision, Sequence[str]], dict[str, Any]]
    """Returns the ``quantization_config`` for a contract and the modules that are kept; may raise PrecisionError."""
    stacks: bool
    """Whether experts may be in one stack."""


def _compressed_tensors(precision: Precision, kept: Sequence[str]) -> dict[str, Any]:
    if precision.activation_scale != "fp32":
        raise PrecisionError(
            f"activation_scale={precision.activation_scale!r} in a compressed-tensors checkpoint.",
            "That layout has no word for it, and an engine would scale activations with FP32 factors in silence.",
            "Add --set activation_scale=fp32, or write the deepseek layout.",
        )
    to_hugging_face(precision.replace(weight_scale="fp32"), kept)  # raises for what neither layout can express
    one = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**one, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
        "input_activations": {**one, "strategy": "group", "group_size": 128, "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*kept],
        "kv_cache_scheme": None,
    }


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("deepseek", lambda weight: f"{weight}_scale_inv", to_hugging_face, stacks=True),
        Layout("compressed-tensors", lambda weight: f"{weight}_scale", _compressed_tensors, stacks=False),
    )
}


def layout_of(name: str) -> Layout:
    """Return the layout of that name; raise PrecisionError if there is none."""
    if name not in LAYOUTS:
        raise PrecisionError([unknown("layout", name, LAYOUTS)])
    return LAYOUTS[name]
