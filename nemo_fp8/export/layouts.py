"""The layouts of quantized checkpoints that engines read: the names of scales, and the entry in config.json.

    deepseek              128x128       <weight>_scale_inv     quant_method "fp8", weight_block_size [128, 128]
    compressed-tensors    128x128       <module>.weight_scale  quant_method "compressed-tensors", "float-quantized"
    modelopt              1x16, 1x32    <module>.weight_scale  quant_method "modelopt", quant_algo "NVFP4", "MXFP8" or
                                                               "W4A16_NVFP4"; the same in hf_quant_config.json

The first two hold the same codes and the same scales, FP32 [ceil(n / 128), ceil(k / 128)]. DeepSeek's says with
``scale_fmt: ue8m0`` that every scale is a power of two. The trade-off: more tools read compressed-tensors, but it
cannot express power-of-two activation scales, or experts in one stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.export.codings import CODES, INPUT, SCALE, Coding, DeepSeekBlocks, MxBlocks, Nvfp4Blocks
from nemo_fp8.render.vllm import to_hugging_face


@dataclass(frozen=True)
class Layout:
    """A layout of quantized checkpoints."""

    name: str
    blocks: tuple[str, ...]
    """The contract's ``rollout_block`` that it can hold."""
    scale_name: Callable[[str], str]
    """Returns the name of the scale of a weight."""
    config: Callable[[Precision, Sequence[str]], dict[str, Any]]
    """Returns the ``quantization_config`` for a contract and the modules that are kept; may raise PrecisionError."""
    stacks: bool
    """Whether experts may be in one stack."""
    beside: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}
    """Returns further files that say the same as the ``quantization_config``, by name."""

    def name_of(self, weight: str, part: str) -> str:
        """Return the name of a part of a weight."""
        if part in (CODES, SCALE):
            return self.scale_name(weight) if part else weight
        module = weight.removesuffix(".weight")
        return f"{module}.{part}" if part == INPUT else f"{module}.weight_{part}"


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


_ALGORITHMS = {"1x32": "MXFP8", "1x16": "NVFP4"}


def _modelopt(precision: Precision, kept: Sequence[str]) -> dict[str, Any]:
    weights_only = precision.activation_scheme == "none"
    size = 32 if precision.rollout_block == "1x32" else 16
    number = {"type": "float", "num_bits": 8 if size == 32 else 4, "group_size": size}
    activations = None if weights_only else {**number, "dynamic": size == 32}
    algorithm = _ALGORITHMS[precision.rollout_block]
    return {
        "quant_method": "modelopt",
        "quant_algo": f"W4A16_{algorithm}" if weights_only else algorithm,
        "group_size": size,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "dynamic": False},
                "input_activations": activations,
            }
        },
        # An engine that ties its head to the embedding has no tensor of it, and would look for its codes.
        "ignore": [*dict.fromkeys([*kept, "lm_head"])],
        "kv_cache_scheme": None,
        "producer": {"name": "nemo_fp8"},
    }


def _hf_quant_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return ModelOpt's own file, in the words that it had before config.json said it."""
    said = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": config["group_size"],
        "exclude_modules": config["ignore"],
    }
    return {"hf_quant_config.json": {"producer": config["producer"], "quantization": said}}


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("deepseek", ("128x128",), lambda weight: f"{weight}_scale_inv", to_hugging_face, stacks=True),
        Layout("compressed-tensors", ("128x128",), lambda weight: f"{weight}_scale", _compressed_tensors, stacks=False),
        Layout(
            "modelopt", ("1x16", "1x32"), lambda weight: f"{weight}_scale", _modelopt, False, beside=_hf_quant_config
        ),
    )
}


def layout_of(name: str | None, precision: Precision) -> Layout:
    """Return the layout of that name, or the usual one for a contract.

    Raises PrecisionError if there is none of that name, or it cannot hold the contract's blocks.
    """
    holding = [name for name, layout in LAYOUTS.items() if precision.rollout_block in layout.blocks]
    if name is None:
        return LAYOUTS[holding[0] if holding else "deepseek"]
    if name not in LAYOUTS:
        raise PrecisionError([unknown("layout", name, LAYOUTS)])
    if precision.rolls_out_quantized and holding and name not in holding:
        raise PrecisionError(
            f"rollout_block={precision.rollout_block!r} in the {name} layout.",
            f"That layout holds blocks of {' or '.join(LAYOUTS[name].blocks)}.",
            f"Write the {' or the '.join(holding)} layout.",
        )
    return LAYOUTS[name]


def coding_of(precision: Precision) -> Coding | None:
    """Return how a contract's rollout stores a weight; None if it is in the compute dtype."""
    operand = precision.operand("weight", "rollout")
    if operand is None:
        return None
    if operand.format == "e2m1":
        return Nvfp4Blocks(operand, activations=precision.operand("input", "rollout") is not None)
    return MxBlocks(operand) if operand.scale == "e8m0" else DeepSeekBlocks(operand)
