"""Decide from two contracts alone whether training and rollout multiply with the same values.

The trainer keeps master weights and multiplies with an FP8 copy of them; the rollout multiplies with an FP8 copy of its
own. Both copies are functions of the same weights. With the same format, blocks and kind of scale they are equal code
for code. With powers of two as scales they are equal in value whatever the blocks, but for underflow: such a scale only
moves the exponent, so codes and scales differ where blocks do, and their products only where a code is subnormal or
zero. Any FP32 scale moves the rounding of nearly every value, so FP32 scales of other blocks are other values.
``check`` compares what each contract says of its own side, weights and activations, and names every difference, its
cost and its remedy. Rules for modules give some linears a contract of their own, so it does this for each pair of
contracts that linears have on the two sides (:mod:`nemo_fp8.models.governed`), or with a model for each of its linears
(:mod:`nemo_fp8.models.both_sides`). If all values are equal, the importance ratio starts from 1.

The severity of a finding: an ``error`` cannot be written as one contract, since two settings exclude each other. A
``warning`` is a choice that a single contract may make (BF16 training with FP8 rollout), at a cost.
An ``info`` costs nothing, or as little as underflow does, or is the engine's to avoid. So two sides agree if there is
no error and no warning, and :func:`join` makes one contract of them if there is no error.

The costs are distances in norm, relative to the weights, measured on Gaussian BF16 weights; ``tests/preflight``
measures them again. A model's own underflow is counted by :func:`nemo_fp8.mismatch.sides_apart`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_fp8.contract import ROLLOUT_FIELDS, Operand, Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.findings import finding
from nemo_fp8.models.both_sides import both_sides, in_short
from nemo_fp8.models.governed import Governed, apart_in_an_engine, governed, kept_on_one_side, scales_tokens
from nemo_fp8.models.selection import SHAPE
from nemo_fp8.models.shapes import Model
from nemo_fp8.moved import renamed

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"Difference": "nemo_fp8.errors.Problem"})

# Distances in percent of the weights' norm, in 128x128 blocks:
#     FROM_MASTER      between a quantized copy and the master that it was cast from
#     BETWEEN_COPIES   between two copies, of which one or both have FP32 scales of their own
#     CAST_TWICE       between the master and a copy with power-of-2 scales that was cast again with FP32 scales
FROM_MASTER = 2.65
BETWEEN_COPIES = 3.7
CAST_TWICE = 3.93
# The same distances for NVFP4: from the master, in 16x16 and in 1x16 blocks; between copies in the one and the other.
FOUR_BITS_FROM_MASTER = (11.1, 9.5)
FOUR_BITS_APART = 14.0
# The most percent of Gaussian weights that underflow makes different in copies with power-of-2 scales of other blocks.
UNDERFLOW = 0.02

_SHARED = ("compute", "weight_scale", "activation_scale", "first_layers", "last_layers", "keep", "modules")
_TOPICS = {"weight": "weights", "input": "activations"}
# The names of the severities in the ``--json`` output of ``check``, unchanged since 0.1.
_IN_JSON = {"error": "conflict", "warning": "difference", "info": "note"}


@dataclass(frozen=True)
class Agreement:
    """The result of ``check``. Read ``agrees``: the object has no truth value, so that it is not tested by mistake."""

    findings: tuple[Problem, ...]
    """What differs; ``where`` names what it is about."""

    @property
    def agrees(self) -> bool:
        """Whether both sides cast the same weights and inputs to the same values, but for underflow."""
        return all(f.severity == "info" for f in self.findings)

    def require(self) -> Agreement:
        """Return self. Raises PrecisionError with every error and warning if the two sides do not agree."""
        if not self.agrees:
            raise PrecisionError(f for f in self.findings if f.severity != "info")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``, where severities keep the names that scripts rely on."""
        rows = [f.to_dict() | {"severity": _IN_JSON[f.severity], "topic": f.where} for f in self.findings]
        return {"agrees": self.agrees, "findings": rows}

    def __str__(self) -> str:
        apart = ", but for underflow" if any(f.where in _TOPICS.values() for f in self.findings) else ""
        head = (
            f"Both sides agree: the same weights give the same values{apart}."
            if self.agrees
            else "The two sides do not agree."
        )
        return "\n".join([head, *(f"{f.severity}, {f.where}: {f}" for f in self.findings)])

    def __bool__(self) -> bool:
        raise TypeError("Ask check(...).agrees, or call check(...).require().")


def check(
    *, train: Precision | str, rollout: Precision | str, model: Model | Mapping[str, Any] | str | Path | None = None
) -> Agreement:
    """Compare the training side of one contract with the rollout side of another (or of the same).

    Each is a contract, or the name of a preset or of a YAML file. With a ``model``, the config.json of a Hugging Face
    model, its linears are compared (whole ones, without tensor parallelism), whatever words name them on the two sides.
    Raises PrecisionError if there is no such contract or model.
    """
    here, there = given(train), given(rollout)
    if model is None:
        of_modules = [part(here, there) for part in (_by_name, _layers, _kept, _units)]
    else:
        of_modules = [_of_model(here, there, model if isinstance(model, Model) else Model.read(model))]
    parts = [_compute(here, there), *of_modules, _attention(here, there), _engine(there), _correction(here, there)]
    return Agreement(tuple(found for part in parts for found in part))


def join(train: Precision, rollout: Precision) -> Precision:
    """Make one contract of both sides. Raises PrecisionError with every setting in which they contradict each other.

    A rule for modules that one side has contradicts the other if the rollout would be stored otherwise without it, even
    where the values are equal: it is a rule for both sides, or for none.
    """
    conflicts = [f for f in check(train=train, rollout=rollout).findings if f.severity == "error"]
    if conflicts:
        raise PrecisionError(conflicts)
    one = merge(train, rollout)
    if one.modules != rollout.modules and (problem := _rules_of_one_side(one, rollout)):
        raise PrecisionError([problem])
    return one


def _rules_of_one_side(one: Precision, rollout: Precision) -> Problem | None:
    """Return the problem that one contract would store linears of the rollout otherwise; None if there is none."""
    apart = []
    for group in governed(one, rollout):
        pairs = ((group.train.operand(role, "rollout"), group.rollout.operand(role, "rollout")) for role in _TOPICS)
        if any(ours != theirs for ours, theirs in pairs):
            apart += group.linears
    if not apart:
        return None
    return Problem(
        f"The two sides have other rules for modules (modules=): {', '.join(apart)}.",
        "One contract has one list of rules, for training and for the rollout. With training's, the rollout would "
        "store these modules otherwise, although the values would be equal.",
        "Give both sides the same rules.",
    )


def merge(train: Precision, rollout: Precision) -> Precision:
    """Combine the training side of one contract and the rollout side of another, unchecked; training wins."""
    values = train.to_dict() | {name: getattr(rollout, name) for name in ROLLOUT_FIELDS}
    for name in _SHARED:
        if not _says(train, name, "train") and _says(rollout, name, "rollout"):
            values[name] = getattr(rollout, name)
        elif name == "modules" and not _says(train, name, "train"):
            values[name] = ()  # neither side has a recipe that rules could change
        elif not _says(train, name, "train") and train.scaling == "delayed":
            values[name] = None  # delayed scaling beside a rollout without FP8 leaves no use for power-of-2 scales
    return Precision(**values)


def _says(p: Precision, name: str, side: str) -> bool:
    """Return whether a shared field has a meaning on that side of a contract."""
    if name == "compute":
        return True
    scale = name.endswith("_scale")
    if side == "rollout":
        return p.rolls_out_quantized and not (scale and p.rollout == "nvfp4")
    # Delayed scaling always has FP32 scales, NVFP4 scales in E4M3.
    return p.is_quantized and not (scale and p.scaling in ("delayed", "nvfp4"))


# ---------------------------------------------------------------------- values


def _same_values(a: Operand, b: Operand) -> bool:
    """Return whether two casts of one tensor give the same values, but for underflow."""
    exponents_only = {a.scale, b.scale} <= {"pow2", "e8m0"} and not (a.delayed or b.delayed)
    if exponents_only:
        return a.format == b.format
    if a.delayed or b.delayed:
        return False
    # The Hadamard transform is for the weight gradient, which a rollout has not.
    return replace(a, hadamard=False) == replace(b, hadamard=False)


# ---------------------------------------------------------------------- comparisons


def _compute(train: Precision, rollout: Precision) -> Iterator[Problem]:
    if train.compute != rollout.compute:
        yield finding("sides-compute", "compute", train=train.compute.upper(), rollout=rollout.compute.upper())


def _by_name(train: Precision, rollout: Precision) -> Iterator[Problem]:
    """Yield the findings about weights and activations: of each pair of contracts that linears can have."""
    groups = governed(train, rollout)
    if train.is_quantized == rollout.rolls_out_quantized:
        yield from _values(groups, train.compute)
    elif copies := [operand for group in groups for operand in _pair(group, "weight") if operand]:
        yield _one_sided(train, copies)


def _of_model(train: Precision, rollout: Precision, model: Model) -> Iterator[Problem]:
    """Yield the findings about the linears of a model."""
    found = both_sides(model, train, rollout)
    if train.is_quantized != rollout.rolls_out_quantized:
        if found.apart:
            yield _one_sided(train, [one.quantized for one in found.apart])
        return
    yield from _values(found.quantized, train.compute)
    kept: dict[str, dict[str, list[str]]] = {}
    for one in found.apart:
        code = "sides-units" if one.as_one else "sides-shapes" if one.kept.rule == SHAPE else "sides-modules"
        side = "in training" if one.in_training else "in the rollout"
        words = f"{train.compute.upper()} {side}: {one.kept.in_short}"
        kept.setdefault(code, {}).setdefault(words, []).append(one.name)
    for name, ours, theirs in found.as_one:
        pair = ours.operand("weight", "train"), theirs.operand("weight", "rollout")
        if not _alike(*pair):
            kept.setdefault("sides-units", {}).setdefault(_elements(*pair, train.compute), []).append(name)
    for code, reasons in kept.items():
        names = [f"{name} ({words})" for words, linears in reasons.items() for name in in_short(linears)]
        yield finding(code, "modules", compute=train.compute.upper(), names="; ".join(names))


def _one_sided(train: Precision, copies: Iterable[Operand]) -> Problem:
    """Return the finding that one side alone quantizes: with the distance of its copies from the weights."""
    one, other = ("Training", "the rollout") if train.is_quantized else ("The rollout", "training")
    costs = {("NVFP4" if c.format == "e2m1" else "FP8"): _from_master(c) for c in sorted(copies, key=_from_master)}
    fields = "rollout='fp8', format='e4m3', scaling='blockwise'"
    if [*costs] == ["NVFP4"]:
        fields = "rollout='nvfp4', scaling='nvfp4', weight_block='1x16', row_scaled=True, backward='dequantized'"
    gaps = {"one": one, "other": other, "compute": train.compute.upper(), "fields": fields}
    words = {"format": " and ".join(costs), "from_master": " or ".join(f"{cost:g}" for cost in costs.values())}
    return finding("sides-format", "format", **gaps, **words)


def _from_master(copy: Operand) -> float:
    return FOUR_BITS_FROM_MASTER[copy.block == (1, 16)] if copy.format == "e2m1" else FROM_MASTER


def _values(groups: Sequence[Governed], compute: str) -> Iterator[Problem]:
    """Yield the findings about weights and activations of linears that both sides quantize, or may."""
    apart = list[str]()
    for group in groups:
        if _rules_differ(group):
            words = _elements(*_pair(group, "weight"), compute)
            apart += [f"{name} ({words})" for name in group.linears]
            continue
        of = "" if len(groups) == 1 else _of_which(group)
        yield from _weights(group.train, group.rollout, of)
        yield from _activations(group.train, group.rollout, of)
    if apart:
        yield finding("sides-recipes", "modules", names="; ".join(apart))


def _pair(group: Governed, role: str) -> tuple[Operand | None, Operand | None]:
    return group.train.operand(role, "train"), group.rollout.operand(role, "rollout")


def _rules_differ(group: Governed) -> bool:
    """Return whether rules that only one side has give these linears other values: no contract can say both."""
    if not any(group.by_rule) or (all(group.by_rule) and group.train.scaling == group.rollout.scaling):
        return False  # one contract says both, and what differs is what the two sides make of it
    return not _alike(*_pair(group, "weight"))


def _alike(ours: Operand | None, theirs: Operand | None) -> bool:
    """Return whether two sides hold a weight in the same values."""
    return _same_values(ours, theirs) if ours and theirs else ours is theirs


def _elements(ours: Operand | None, theirs: Operand | None, compute: str) -> str:
    """Return in words what weights are on the two sides."""
    if ours and theirs and ours.format == theirs.format:
        return f"{ours.words()} in training, {theirs.words()} in the rollout"
    here, there = (operand.format.upper() if operand else compute.upper() for operand in (ours, theirs))
    return f"{here} in training, {there} in the rollout"


def _of_which(group: Governed) -> str:
    """Return in words which linears a finding is about, where there are others."""
    if any(group.by_rule):
        return f" of modules named {', '.join(group.patterns)}"
    if group.by_name:
        return " of modules in the contract's own recipe"
    return " of linears that no rule names, such as mixers (a last rule for '*' would hold for them)"


def _weights(train: Precision, rollout: Precision, of: str) -> Iterator[Problem]:
    ours, theirs = train.operand("weight", "train"), rollout.operand("weight", "rollout")
    if ours is None or theirs is None:
        return
    cost = f": the copies lie about {BETWEEN_COPIES}% apart in norm, each {FROM_MASTER}% from the master weights"
    if "e2m1" in (ours.format, theirs.format):
        square, row = FOUR_BITS_FROM_MASTER
        cost = (
            f": copies in 16x16 and in 1x16 blocks lie about {FOUR_BITS_APART:g}% apart in norm, {square}% and {row}% "
            "from the master weights"
        )
    elif _scale_kind(ours) != _scale_kind(theirs):
        cost += f" (a power-of-2 copy that is cast again with FP32 scales lies {CAST_TWICE}% from them)"
    gaps = {"heading": f"Weights{of}", "does": "holds", "field": "weight_scale", "cost": cost}
    yield from _casts("weights", ours, theirs, _degree("weight_scale", train, rollout), gaps)


def _activations(train: Precision, rollout: Precision, of: str) -> Iterator[Problem]:
    ours, theirs = train.operand("input", "train"), rollout.operand("input", "rollout")
    if ours is not None and theirs is None and rollout.operand("weight", "rollout") is not None:
        gaps = {"heading": f"Activations{of}", "train": ours.words(), "compute": rollout.compute.upper()}
        yield finding("sides-activations", "activation_scheme", **gaps)
    if ours is None or theirs is None:
        return
    cost = ", in each of these layers" if of else ", in every quantized layer"
    gaps = {"heading": f"Activations{of}", "does": "casts to", "field": "activation_scale", "cost": cost}
    yield from _casts("activations", ours, theirs, _degree("activation_scale", train, rollout), gaps)


def _casts(tensors: str, ours: Operand, theirs: Operand, severity: str, gaps: dict[str, str]) -> Iterator[Problem]:
    """Yield the finding about two casts of the same tensors; nothing if codes and scales are equal."""
    gaps |= {"tensors": tensors, "train": ours.words(), "rollout": theirs.words()}
    if not _same_values(ours, theirs):
        yield finding(_cause(ours, theirs), tensors, severity=severity, **gaps)
    elif ours.block != theirs.block:
        yield finding("sides-underflow", tensors, most=UNDERFLOW, **gaps)


def _cause(ours: Operand, theirs: Operand) -> str:
    """Return the first reason why two casts give different values; the hardest to remedy comes first."""
    if ours.delayed:
        return "sides-delayed"
    if theirs.delayed:
        return "sides-calibrated"
    if "e2m1" in (ours.format, theirs.format):
        return "sides-four-bits"
    return "sides-blocks" if _scale_kind(ours) == _scale_kind(theirs) else "sides-scales"


def _degree(name: str, train: Precision, rollout: Precision) -> str:
    """Return ``error`` if the field has a meaning on both sides and differs, since no contract can say both."""
    said = _says(train, name, "train") and _says(rollout, name, "rollout")
    return "error" if said and getattr(train, name) != getattr(rollout, name) else "warning"


def _scale_kind(operand: Operand) -> str:
    return "fp32" if operand.scale == "fp32" else "pow2"


def _layers(train: Precision, rollout: Precision) -> Iterator[Problem]:
    delayed = ", or leave delayed scaling, which cannot leave layers out" if train.scaling == "delayed" else ""
    for name, which in (("first_layers", "first"), ("last_layers", "last")):
        ours, theirs = getattr(train, name), getattr(rollout, name)
        if ours != theirs and _says(train, name, "train") and _says(rollout, name, "rollout"):
            gaps = {"which": which, "train": ours, "rollout": theirs, "field": name, "delayed": delayed}
            yield finding("sides-layers", "layers", compute=train.compute.upper(), **gaps)


def _kept(train: Precision, rollout: Precision) -> Iterator[Problem]:
    if not (_says(train, "keep", "train") and _says(rollout, "keep", "rollout")):
        return
    only_here = kept_on_one_side(train, rollout) if train.keep != rollout.keep else []
    if only_here:
        yield finding("sides-modules", "modules", compute=train.compute.upper(), names=", ".join(only_here))


def _units(train: Precision, rollout: Precision) -> Iterator[Problem]:
    """Yield the finding about linears that an engine holds with others as one, and so otherwise than training."""
    if not (train.is_quantized and rollout.rolls_out_quantized):
        return
    apart = []
    for name, ours, theirs in apart_in_an_engine(train, rollout):
        pair = ours.operand("weight", "train"), theirs.operand("weight", "rollout")
        if not _alike(*pair):
            apart.append(f"{name} ({_elements(*pair, train.compute)})")
    if apart:
        yield finding("sides-units", "modules", names="; ".join(apart))


def _attention(train: Precision, rollout: Precision) -> Iterator[Problem]:
    """Yield what attention rounds on one side only: an FP8 cache has no part of FP8 attention but keys and values."""
    cached = rollout.kv_cache == "fp8"
    if train.attention or train.multi_head_attention:
        beside = ", with keys and values from an FP8 cache" if cached else ""
        yield finding("sides-attention", "attention", compute=rollout.compute.upper(), beside=beside)
    elif cached:
        yield finding("sides-kv-cache", "attention", compute=train.compute.upper())


def _engine(rollout: Precision) -> Iterator[Problem]:
    """Yield what an engine does to the values by default that its contract does not say."""
    if scales_tokens(rollout):
        yield finding("nvfp4-rollout-fixed-scale", "activation_scheme")


def _correction(train: Precision, rollout: Precision) -> Iterator[Problem]:
    if rollout.rolls_out_quantized and not rollout.importance_sampling:
        yield finding("sides-correction", "loss")
