"""ModelOpt's lists: write and read the ``quantization_config`` of its checkpoints, of one format or of several.

    quant_algo         the format of every quantized module, or MIXED_PRECISION
    quantized_layers   of a mixed checkpoint: module -> its quant_algo and group_size
    config_groups      the same in compressed-tensors' words: a scheme, and the modules that have it as ``targets``
    ignore             modules that stay in the compute dtype; ``exclude_modules`` in hf_quant_config.json

    NVFP4, W4A16_NVFP4   1x16      activations in NVFP4 as well, or in the compute dtype
    MXFP8                1x32
    FP8_PB_WO            128x128   FP32 scales, of weights and of activations in 1x128

A contract's rules have patterns, and these lists have names, so only a caller that has the model can write them. They
are read as rules with names: other rules than those that were written, and the same recipe for every module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem, unknown

MIXED = "MIXED_PRECISION"
HEAD = "lm_head"


@dataclass(frozen=True)
class Algorithm:
    """One of ModelOpt's formats: how its lists describe it, and what a contract calls it."""

    name: str
    recipe: str
    """The recipe of a rule whose rollout has this format."""
    bits: int
    group_size: int
    activations: bool | None
    """Whether activations are quantized by their own values (True), beneath a scale in the file, or not at all."""

    @property
    def contract(self) -> Precision:
        """A rollout that has this format everywhere."""
        if self.recipe == "nvfp4":
            return Precision(rollout="nvfp4", activation_scheme="none" if self.activations is None else "dynamic")
        scale = "pow2" if self.recipe == "mxfp8" else "fp32"
        block = "1x32" if self.recipe == "mxfp8" else "128x128"
        return Precision(rollout="fp8", rollout_block=block, weight_scale=scale, activation_scale=scale)

    @property
    def group(self) -> dict[str, Any]:
        """The scheme in compressed-tensors' words."""
        number = {"type": "float", "num_bits": self.bits, "group_size": self.group_size}
        inputs = None if self.activations is None else {**number, "dynamic": self.activations}
        return {"weights": {**number, "dynamic": False}, "input_activations": inputs}


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("NVFP4", "nvfp4", 4, 16, activations=False),
        Algorithm("W4A16_NVFP4", "nvfp4", 4, 16, activations=None),
        Algorithm("MXFP8", "mxfp8", 8, 32, activations=True),
        Algorithm("FP8_PB_WO", "tensorwise", 8, 128, activations=True),
    )
}


def algorithm_of(precision: Precision) -> Algorithm:
    """Return the format of a contract's rollout. Raises PrecisionError if ModelOpt has no name for it."""
    weights_only = precision.activation_scheme == "none"
    name = {"1x16": "W4A16_NVFP4" if weights_only else "NVFP4", "1x32": "MXFP8", "128x128": "FP8_PB_WO"}.get(
        precision.rollout_block
    )
    if name is None or not precision.rolls_out_quantized:
        raise PrecisionError(
            f"rollout={precision.rollout!r} with rollout_block={precision.rollout_block!r} in ModelOpt's lists.",
            f"They know {', '.join(ALGORITHMS)}.",
            "Set rollout_block to 128x128 or 1x32, or rollout='nvfp4'.",
        )
    if name == "FP8_PB_WO" and precision.activation_scale != "fp32":
        raise PrecisionError(
            f"128x128 blocks with activation_scale={precision.activation_scale!r} in ModelOpt's lists.",
            "Their FP8_PB_WO has no word for it, and an engine would scale activations with FP32 factors in silence.",
            "Give a rule 'tensorwise' in place of 'blockwise': its rollout has the same blocks with FP32 scales; or "
            "'mxfp8'. Of the whole contract, set activation_scale='fp32', or write the deepseek layout.",
        )
    return ALGORITHMS[name]


def to_modelopt(forms: Mapping[str, Precision], kept: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint whose quantized modules have these contracts.

    ``kept`` names the modules that stay in the compute dtype. Raises PrecisionError for formats without a name.
    """
    named: dict[Precision, Algorithm] = {p: algorithm_of(p) for p in dict.fromkeys(forms.values())}
    modules: dict[Algorithm, list[str]] = {}
    for module, p in forms.items():
        modules.setdefault(named[p], []).append(module)
    (first, *others) = modules
    said: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": MIXED if others else first.name}
    if not others:
        said["group_size"] = first.group_size
    else:
        said["quantized_layers"] = {
            module: {"quant_algo": named[p].name, "group_size": named[p].group_size} for module, p in forms.items()
        }
    said["config_groups"] = {
        f"group_{i}": {"targets": sorted(modules[algorithm]) if others else ["Linear"], **algorithm.group}
        for i, algorithm in enumerate(modules)
    }
    # An engine that ties its head to the embedding has no tensor of it, and would look for its codes.
    said["ignore"] = [*dict.fromkeys([*kept, HEAD])]
    return said | {"kv_cache_scheme": None, "producer": {"name": "nemo_fp8"}}


def to_hf_quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ModelOpt's own file, in the words that it had before config.json said it."""
    carried = {name: config[name] for name in ("group_size", "quantized_layers") if name in config}
    said = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        **carried,
        "exclude_modules": config["ignore"],
    }
    return {"producer": config["producer"], "quantization": said}


def from_modelopt(config: Mapping[str, Any]) -> Precision:
    """Return the contract of a rollout from a checkpoint with this ``quantization_config`` or hf_quant_config.json.

    Of a mixed one, NVFP4 is the contract's own format if it is there, and modules of another one are rules. Raises
    PrecisionError for formats that a contract does not describe.
    """
    said = config.get("quantization", config)
    name, layers = str(said.get("quant_algo", "")).upper(), said.get("quantized_layers") or {}
    problems = [*_not_read(name, layers)]
    if problems:
        raise PrecisionError(problems)
    of = {module: ALGORITHMS[about["quant_algo"].upper()] for module, about in layers.items()} if name == MIXED else {}
    there = [*of.values()] if of else [ALGORITHMS[name]]
    own = min(there, key=[*ALGORITHMS.values()].index)
    ignored = said.get("ignore", said.get("exclude_modules")) or ()
    return own.contract.replace(
        keep=tuple(module for module in ignored if module != HEAD),
        modules=tuple((module, algorithm.recipe) for module, algorithm in of.items() if algorithm != own),
    )


def _not_read(name: str, layers: Mapping[str, Any]) -> Iterator[Problem]:
    if name != MIXED and name not in ALGORITHMS:
        yield unknown("quant_algo", name, (*ALGORITHMS, MIXED))
    if name == MIXED and not layers:
        yield Problem(
            f"quant_algo {MIXED} without quantized_layers.",
            "Nothing says which module has which format.",
            "Read the checkpoint's other file: config.json and hf_quant_config.json say the same.",
        )
    found = dict.fromkeys(str(about.get("quant_algo", "")).upper() for about in layers.values())
    yield from (unknown("quant_algo in quantized_layers:", one, ALGORITHMS) for one in found if one not in ALGORITHMS)
    if {"NVFP4", "W4A16_NVFP4"} <= found.keys():
        yield Problem(
            "NVFP4 and W4A16_NVFP4 in one checkpoint.",
            "A contract says once for all modules whether activations are quantized beside NVFP4 weights.",
            "Quantize again, with one of them.",
        )
