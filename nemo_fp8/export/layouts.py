"""The layouts of quantized checkpoints that engines read: the names of scales, and the entry in config.json.

    deepseek              128x128       <weight>_scale_inv     quant_method "fp8", weight_block_size [128, 128]
    compressed-tensors    128x128       <module>.weight_scale  quant_method "compressed-tensors", "float-quantized"
    modelopt              every block   <module>.weight_scale  quant_method "modelopt": see render/modelopt.py; the same
                                                               in hf_quant_config.json

The first two hold the same codes and the same scales, FP32 [ceil(n / 128), ceil(k / 128)]. DeepSeek's says with
``scale_fmt: ue8m0`` that every scale is a power of two. Where the contract's rules give modules several formats, only
ModelOpt's names one for each. The trade-off: more tools read compressed-tensors, but it cannot express power-of-two
activation scales, or experts in one stack; nor can ModelOpt's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.export.codings import CODES, INPUT, SCALE, Coding, DeepSeekBlocks, MxBlocks, Nvfp4Blocks
from nemo_fp8.render.modelopt import to_hf_quant_config, to_modelopt
from nemo_fp8.render.vllm import to_hugging_face


@dataclass(frozen=True)
class Layout:
    """A layout of quantized checkpoints: which formats it can hold, and what it calls their parts."""

    name: str
    blocks: tuple[str, ...]
    """The contract's ``rollout_block`` that it can hold; the first layout that holds a contract's is the usual one."""
    scale_name: Callable[[str], str]
    """Returns the name of the scale of a weight."""
    config: Callable[[Mapping[str, Precision], Sequence[str]], dict[str, Any]]
    """Returns the ``quantization_config`` for the contract of each quantized module and the modules that are kept; may
    raise PrecisionError."""
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


def _deepseek(forms: Mapping[str, Precision], kept: Sequence[str]) -> dict[str, Any]:
    configs = [to_hugging_face(p, kept) for p in dict.fromkeys(forms.values())]
    if any(config != configs[0] for config in configs):
        raise PrecisionError(
            "Modules with power-of-two scales beside modules with FP32 scales, in the deepseek layout.",
            "It has one scale_fmt for the whole checkpoint.",
            "Give the rules of 128x128 blocks ('blockwise', 'tensorwise') the scales of the contract.",
        )
    return configs[0]


def _compressed_tensors(forms: Mapping[str, Precision], kept: Sequence[str]) -> dict[str, Any]:
    for precision in dict.fromkeys(forms.values()):
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


def _beside(config: dict[str, Any]) -> dict[str, Any]:
    return {"hf_quant_config.json": to_hf_quant_config(config)}


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("deepseek", ("128x128",), lambda weight: f"{weight}_scale_inv", _deepseek, stacks=True),
        Layout("compressed-tensors", ("128x128",), lambda weight: f"{weight}_scale", _compressed_tensors, stacks=False),
        Layout(
            "modelopt",
            ("1x16", "1x32", "128x128"),
            lambda weight: f"{weight}_scale",
            to_modelopt,
            stacks=False,
            beside=_beside,
        ),
    )
}


def layout_of(name: str | None, contracts: Collection[Precision]) -> Layout:
    """Return the layout of that name, or the usual one for the contracts of a checkpoint's quantized modules.

    Raises PrecisionError if there is none of that name, or it cannot hold the blocks of all of them.
    """
    blocks = [*dict.fromkeys(p.rollout_block for p in contracts)]
    holding = [name for name, layout in LAYOUTS.items() if all(block in layout.blocks for block in blocks)]
    if name is None:
        return LAYOUTS[holding[0]]
    if name not in LAYOUTS:
        raise PrecisionError([unknown("layout", name, LAYOUTS)])
    if name not in holding:
        raise PrecisionError(
            f"rollout_block={' and '.join(map(repr, blocks))} in the {name} layout.",
            f"That layout holds blocks of {' or '.join(LAYOUTS[name].blocks)}.",
            f"Write the {' or the '.join(holding)} layout.",
        )
    return LAYOUTS[name]


def coding_of(precision: Precision, layout: Layout) -> Coding:
    """Return how a quantized rollout stores a weight in a layout."""
    operand = precision.operand("weight", "rollout")
    assert operand is not None
    if operand.format == "e2m1":
        return Nvfp4Blocks(operand, activations=precision.operand("input", "rollout") is not None)
    return MxBlocks(operand) if operand.scale == "e8m0" else DeepSeekBlocks(operand, spread=layout.name == "modelopt")
