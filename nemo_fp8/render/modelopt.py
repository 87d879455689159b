"""ModelOpt's lists: write and read the ``quantization_config`` of its checkpoints, of one format or of several.

    quant_algo         the format of every quantized module, or MIXED_PRECISION
    quantized_layers   of a mixed checkpoint: module -> its quant_algo and group_size
    config_groups      the same in compressed-tensors' words: a scheme, and the modules that have it as ``targets``
    ignore             modules that stay in the compute dtype; ``exclude_modules`` in hf_quant_config.json

    NVFP4, W4A16_NVFP4   1x16      activations in NVFP4 as well, or in the compute dtype
    MXFP8                1x32
    FP8_PB_WO            128x128   FP32 scales, of weights and of activations in 1x128

A contract's rules have patterns, and these lists have names: :func:`render` takes them from a model's config.json, the
exporter from a checkpoint. They are read as rules with names: other rules than those that were written, and the same
recipe for every module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.models.names import place
from nemo_fp8.models.selection import ALWAYS
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.units import module_of, select
from nemo_fp8.render.rendering import Rendering, lost_fields
from nemo_fp8.render.vllm import REASONS

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


def require_read(forms: Mapping[str, Precision]) -> None:
    """Raise PrecisionError for experts that vLLM reads under other names than ModelOpt writes."""
    wrong = [name for name, p in forms.items() if p.rollout_block == "128x128" and place(name).role == "experts"]
    if wrong:
        raise PrecisionError(
            f"{wrong[0]}: experts in 128x128 blocks in the modelopt layout.",
            "vLLM reads their scales under DeepSeek's names there, and those of other linears under ModelOpt's.",
            "Give the experts a rule ('mxfp8', 'nvfp4', or the compute dtype); or all modules 128x128 blocks, which "
            "the deepseek layout holds.",
        )


def from_modelopt(config: Mapping[str, Any]) -> Precision:
    """Return the contract of a rollout from a checkpoint with this ``quantization_config`` or hf_quant_config.json.

    Of a mixed one, NVFP4 is the contract's own format if it is there, and modules of another one are rules. Raises
    PrecisionError for formats that a contract does not describe.
    """
    said = config.get("quantization", config)
    name, layers = str(said.get("quant_algo", "")).upper(), said.get("quantized_layers") or {}
    problems = [*_not_read(name, layers)]
    if (cache := _cache(said)) not in _CACHES:
        problems.append(unknown("format of the KV cache in ModelOpt's lists:", cache, [c for c in _CACHES if c]))
    if problems:
        raise PrecisionError(problems)
    of = {module: ALGORITHMS[about["quant_algo"].upper()] for module, about in layers.items()} if name == MIXED else {}
    there = [*of.values()] if of else [ALGORITHMS[name]]
    own = min(there, key=[*ALGORITHMS.values()].index)
    ignored = said.get("ignore", said.get("exclude_modules")) or ()
    return own.contract.replace(
        kv_cache=_CACHES[cache],
        keep=tuple(module for module in ignored if module != HEAD),
        modules=tuple((module, algorithm.recipe) for module, algorithm in of.items() if algorithm != own),
    )


# What the lists say of the KV cache, which an engine obeys where nobody gives it a dtype -> Precision.kv_cache.
_CACHES = {None: "auto", "FP8": "fp8"}


def _cache(said: Mapping[str, Any]) -> str | None:
    """Return the format of the KV cache by ModelOpt's name; a scheme in compressed-tensors' words may be no FP8."""
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return "FP8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else str(dict(scheme))
    name = scheme or said.get("kv_cache_quant_algo")
    return None if name is None else str(name).upper()


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


# ---------------------------------------------------------------------- rendering


def render(precision: Precision, model: Model | None = None) -> Rendering:
    """Render the ``quantization_config`` that a checkpoint of a model would have; ModelOpt's own file is in the data.

    Raises PrecisionError without a model, for one whose names in a checkpoint are not known, and for what
    :func:`to_modelopt` refuses.
    """
    if model is None:
        raise PrecisionError(
            "ModelOpt's lists without a model.",
            "They name every module that is quantized, and the contract has patterns.",
            "Give the model's config.json, or its folder: render(precision, 'modelopt', model=...), or --model.",
        )
    forms, kept = modules_of(precision, model)
    require_read(forms)
    config = to_modelopt(forms, kept)
    back = from_modelopt(config)
    carried = _IN_OTHER_WORDS if _stored(modules_of(back, model)[0]) == _stored(forms) else ()
    lost, notes = lost_fields(precision, back, _REASONS, "A checkpoint's config", carried)
    data = {"quantization_config": config, "hf_quant_config": to_hf_quant_config(config)}
    text = json.dumps({"quantization_config": config}, indent=2)
    notes.append("It describes a checkpoint that is written so: `nemo-fp8 export --layout modelopt` writes both.")
    return Rendering("modelopt", text, data, tuple(notes), lost)


# What the names of modules say, each with its format.
_IN_OTHER_WORDS = (
    *("rollout", "rollout_block", "activation_scheme", "weight_scale", "activation_scale"),
    *("first_layers", "last_layers", "keep", "modules"),
)
_REASONS = REASONS | {
    "kv_cache": "It says nothing of the cache; give vLLM --kv-cache-dtype.",
    "strict": "The modules whose shape does not fit are on its list of those that are left out.",
}


def _stored(forms: Mapping[str, Precision]) -> dict[str, tuple[Operand | None, Operand | None]]:
    return {name: (p.operand("weight", "rollout"), p.operand("input", "rollout")) for name, p in forms.items()}


def modules_of(precision: Precision, model: Model) -> tuple[dict[str, Precision], tuple[str, ...]]:
    """Return the contract of each module that a rollout quantizes, and the names of those that it does not.

    Raises PrecisionError for a model whose names are not known, or of which nothing is quantized.
    """
    selection = select(_weights(model), precision, layers=model.layers)
    if not selection.units:
        why = {kept.rule: kept.reason for kept in selection.kept.values() if kept.rule != ALWAYS}
        raise PrecisionError(
            f"A rollout of this {model.type} that quantizes nothing.",
            f"Of its linears, {'; of others, '.join(why.values())}.",
            "Check rollout, first_layers, last_layers, keep and modules.",
        )
    contracts = [(unit, unit.contract(precision)) for unit in selection.units]
    forms = {module_of(name): own for unit, own in contracts for name in unit.tensors}
    return forms, selection.not_converted


def _weights(model: Model) -> dict[str, tuple[int, int]]:
    """Return the weights of a model's checkpoint that could be linears, by Hugging Face's names, and their shapes."""
    if model.type == "gpt2":
        raise PrecisionError(
            "ModelOpt's lists of a gpt2.",
            "Its checkpoints have names of their own, which no engine of this package quantizes.",
            "Give a model of another family.",
        )
    found = {"lm_head.weight": (model.vocab, model.hidden)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        for linear in model.linears(layer):
            for e in range(linear.experts or 1):
                for name, rows in zip(linear.hugging_face, linear.parts, strict=True):
                    found[f"{at}{name.replace('*', str(e))}.weight"] = (rows, linear.columns)
            if linear.experts:
                block = linear.hugging_face[0].partition(".experts.")[0]
                found[f"{at}{block}.gate.weight"] = (linear.experts, model.hidden)
    return found
