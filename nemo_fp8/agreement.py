"""Do training and rollout multiply with the same values? A proof from the contracts alone, in words.

The trainer keeps master weights and multiplies with an FP8 copy of them; the rollout multiplies with an FP8 copy of
its own. Both copies are functions of the same weights. With the same format, blocks and kind of scale they are equal code
for code. With powers of two as scales they are equal in value whatever the blocks, but for underflow: such a scale only
moves the exponent, so codes and scales differ where blocks do, and their products only where a code is subnormal or zero.
Any FP32 scale moves the rounding of nearly every value, so FP32 scales of other blocks are other values.
``check`` compares what each contract says of its own side, weights and activations, and names every difference, its cost
and its remedy. Where values are equal, the importance ratio starts from 1.

Three degrees. A ``conflict`` cannot be written as one contract: two settings that ought to be one. A ``difference``
is a choice that a single contract may make (BF16 training with FP8 rollout) and that still has its price. A ``note``
costs nothing, or as little as underflow does.

The costs are distances in norm, relative to the weights, measured on Gaussian BF16 weights; ``tests/render`` measures
them again. A model's own underflow is counted by :func:`nemo_fp8.rollout.mismatch.sides_apart`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError, Problem

# Percent of the weights' norm, in 128x128 blocks: a copy's distance from its master, that of two copies of which one
# or both have FP32 scales of their own, and that of a power-of-2 copy cast again with FP32 scales from its master.
FROM_MASTER = 2.65
BETWEEN_COPIES = 3.7
CAST_TWICE = 3.93
# The most percent of Gaussian weights that underflow makes different in copies with power-of-2 scales of other blocks.
UNDERFLOW = 0.02

_SHARED = ("compute", "weight_scale", "activation_scale", "first_layers", "last_layers", "keep")
_ROLLOUT = ("rollout", "rollout_block", "activation_scheme", "kv_cache", "deep_gemm", "importance_sampling")
_TOPICS = {"weight": "weights", "input": "activations"}
# Modules that Megatron trains in the compute dtype whatever the contract says; see ``explain``.
_NEVER_FP8 = ("router", "mlp.gate", "embed", "lm_head", "output_layer", "norm")


@dataclass(frozen=True)
class Difference:
    """One thing in which the two sides differ."""

    severity: str
    """How grave: ``conflict``, ``difference`` or ``note``."""
    topic: str
    problem: Problem

    def __str__(self) -> str:
        return f"{self.severity}, {self.topic}: {self.problem}"


@dataclass(frozen=True)
class Agreement:
    """What ``check`` found. Ask ``agrees``; the object itself has no truth value, so that it cannot be tested by mistake."""

    findings: tuple[Difference, ...]

    @property
    def agrees(self) -> bool:
        """Whether both sides cast the same weights and inputs to the same values, but for underflow."""
        return all(f.severity == "note" for f in self.findings)

    def require(self) -> Agreement:
        """The same result, or an error with every finding that breaks the agreement."""
        if not self.agrees:
            raise PrecisionError(f.problem for f in self.findings if f.severity != "note")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for ``--json``."""
        rows = [{"severity": f.severity, "topic": f.topic, **vars(f.problem)} for f in self.findings]
        return {"agrees": self.agrees, "findings": rows}

    def __str__(self) -> str:
        apart = ", but for underflow" if any(f.topic in _TOPICS.values() for f in self.findings) else ""
        head = f"Both sides agree: the same weights give the same values{apart}." if self.agrees else "The two sides do not agree."
        return "\n".join([head, *map(str, self.findings)])

    def __bool__(self) -> bool:
        raise TypeError("Ask check(...).agrees, or call check(...).require().")


def check(*, train: Precision, rollout: Precision) -> Agreement:
    """Compare the training side of one contract with the rollout side of another (or of the same)."""
    parts = (_compute, _one_sided, _weights, _activations, _layers, _kept, _kv_cache, _correction)
    return Agreement(tuple(finding for part in parts for finding in part(train, rollout)))


def join(train: Precision, rollout: Precision) -> Precision:
    """One contract that says both sides, or an error with every conflict."""
    conflicts = [f.problem for f in check(train=train, rollout=rollout).findings if f.severity == "conflict"]
    if conflicts:
        raise PrecisionError(conflicts)
    return merge(train, rollout)


def merge(train: Precision, rollout: Precision) -> Precision:
    """The training side of one contract and the rollout side of another, unchecked: where both speak, training wins."""
    values = train.to_dict() | {name: getattr(rollout, name) for name in _ROLLOUT}
    for name in _SHARED:
        if not _says(train, name, "train") and _says(rollout, name, "rollout"):
            values[name] = getattr(rollout, name)
        elif not _says(train, name, "train") and train.is_fp8:
            values[name] = None  # delayed scaling beside a rollout without FP8: a scale of nothing
    return Precision(**values)


def _says(p: Precision, name: str, side: str) -> bool:
    """Whether a shared field means anything on that side of a contract."""
    if name == "compute":
        return True
    if side == "rollout":
        return p.rollout == "fp8"
    # Delayed scaling has FP32 scales and nothing to choose.
    return p.is_fp8 and not (name.endswith("_scale") and p.scaling == "delayed")


# ---------------------------------------------------------------------- what each side holds


def _same_values(a: Operand, b: Operand) -> bool:
    """Whether two casts of one tensor give the same values, but for underflow."""
    exponents_only = {a.scale, b.scale} <= {"pow2", "e8m0"} and not (a.delayed or b.delayed)
    return a.format == b.format and (exponents_only or (a.block == b.block and a.scale == b.scale and not (a.delayed or b.delayed)))


def _words(operand: Operand) -> str:
    scale = {"fp32": "FP32 scales", "pow2": "power-of-2 scales", "e8m0": "E8M0 scales"}[operand.scale]
    tile = "one for the whole tensor" if operand.block is None else "one for each {}x{} block".format(*operand.block)
    return f"{operand.format.upper()} with {scale}, {tile}{', found beforehand' if operand.delayed else ''}"


# ---------------------------------------------------------------------- comparisons


def _compute(train: Precision, rollout: Precision) -> Iterator[Difference]:
    if train.compute != rollout.compute:
        yield _difference(
            "conflict",
            "compute",
            f"Training computes in {train.compute.upper()}, the rollout in {rollout.compute.upper()}.",
            "Every layer rounds differently on the two sides.",
            "Give both the same compute dtype.",
        )


def _one_sided(train: Precision, rollout: Precision) -> Iterator[Difference]:
    if train.is_fp8 == (rollout.rollout == "fp8"):
        return
    where, other = ("Training", "the rollout") if train.is_fp8 else ("The rollout", "training")
    yield _difference(
        "difference",
        "format",
        f"{where} multiplies in FP8 and {other} in {train.compute.upper()}.",
        f"An FP8 copy lies {FROM_MASTER}% in norm from the weights that {other} uses; on long rollouts such a policy was seen to collapse.",
        "Use FP8 on both sides, with the same scales (rollout='fp8', format='e4m3', scaling='blockwise').",
    )


def _weights(train: Precision, rollout: Precision) -> Iterator[Difference]:
    ours, theirs = train.operand("weight", "train"), rollout.operand("weight", "rollout")
    if ours is None or theirs is None:
        return
    what = f"Weights: training holds {_words(ours)}; the rollout holds {_words(theirs)}."
    if _same_values(ours, theirs):
        yield from _underflow("weight", what, ours, theirs)
        return
    cost = f"the copies lie about {BETWEEN_COPIES}% apart in norm, each {FROM_MASTER}% from the master weights"
    if _scale_kind(ours) != _scale_kind(theirs):
        cost += f" (a power-of-2 copy that is cast again with FP32 scales lies {CAST_TWICE}% from them)"
    why = f"Same weights, other values: {cost}."
    yield _difference(_degree("weight_scale", train, rollout), "weights", what, why, _remedy("weight_scale", ours, theirs))


def _activations(train: Precision, rollout: Precision) -> Iterator[Difference]:
    ours, theirs = train.operand("input", "train"), rollout.operand("input", "rollout")
    if ours is None or theirs is None:
        return
    what = f"Activations: training casts to {_words(ours)}; the rollout casts to {_words(theirs)}."
    if _same_values(ours, theirs):
        yield from _underflow("input", what, ours, theirs)
        return
    why = "The same input is rounded to other values on the two sides, in every FP8 layer."
    yield _difference(_degree("activation_scale", train, rollout), "activations", what, why, _remedy("activation_scale", ours, theirs))


def _underflow(role: str, what: str, ours: Operand, theirs: Operand) -> Iterator[Difference]:
    if ours.block != theirs.block:
        why = "Powers of two only move the exponent: codes and scales differ, and values where a code underflows "
        why += f"(up to {UNDERFLOW}% of Gaussian ones)."
        yield _difference("note", _TOPICS[role], what, why, "Nothing to do; nemo_fp8.rollout.mismatch.sides_apart counts it on weights.")


def _layers(train: Precision, rollout: Precision) -> Iterator[Difference]:
    for name, where in (("first_layers", "first"), ("last_layers", "last")):
        ours, theirs = getattr(train, name), getattr(rollout, name)
        if ours != theirs and _says(train, name, "train") and _says(rollout, name, "rollout"):
            yield _difference(
                "conflict",
                "layers",
                f"The {where} {ours} layers train in {train.compute.upper()}, the {where} {theirs} generate in it.",
                "The layers between run in FP8 on one side only.",
                f"Set {name} to the same number on both sides"
                + (", or leave delayed scaling, which cannot leave layers out." if train.scaling == "delayed" else "."),
            )


def _kept(train: Precision, rollout: Precision) -> Iterator[Difference]:
    if not (_says(train, "keep", "train") and _says(rollout, "keep", "rollout")):
        return
    only_here = {p for p in {*train.keep} ^ {*rollout.keep} if not any(word in p for word in _NEVER_FP8)}
    if only_here:
        yield _difference(
            "conflict",
            "modules",
            f"Kept in {train.compute.upper()} on one side only: {', '.join(sorted(only_here))}.",
            "Such a module runs in FP8 on the other side.",
            "Give both sides the same keep.",
        )


def _kv_cache(train: Precision, rollout: Precision) -> Iterator[Difference]:
    if rollout.kv_cache == "fp8" and not train.attention:
        yield _difference(
            "difference",
            "attention",
            f"The rollout keeps its KV cache in FP8, training attends in {train.compute.upper()}.",
            "Attention reads rounded keys and values on one side only.",
            "Set kv_cache='auto', or correct for it (importance_sampling=True).",
        )


def _correction(train: Precision, rollout: Precision) -> Iterator[Difference]:
    if rollout.rollout == "fp8" and not rollout.importance_sampling:
        yield _difference(
            "note",
            "loss",
            "The policy loss is not corrected for the difference between trainer and rollout.",
            "Equal values do not make GEMMs equal: the two sides add up in another order.",
            "Set importance_sampling=True (NeMo RL: loss_fn.use_importance_sampling_correction).",
        )


def _degree(name: str, train: Precision, rollout: Precision) -> str:
    said = _says(train, name, "train") and _says(rollout, name, "rollout")
    return "conflict" if said and getattr(train, name) != getattr(rollout, name) else "difference"


def _scale_kind(operand: Operand) -> str:
    return "fp32" if operand.scale == "fp32" else "pow2"


def _remedy(name: str, ours: Operand, theirs: Operand) -> str:
    if ours.delayed:
        return "Train with scaling='blockwise' or 'tensorwise': scales that come from earlier steps exist on no other side."
    if theirs.delayed:
        return "Set activation_scheme='dynamic': calibrated scales exist on the rollout's side only."
    if _scale_kind(ours) != _scale_kind(theirs):
        return f"Set {name} to the same on both sides: 'pow2' (TransformerEngine's default) or 'fp32' (NeMo RL's)."
    return "Train with scaling='blockwise' and generate with rollout_block='128x128', or set both scales to 'pow2' whatever the blocks."


def _difference(severity: str, topic: str, what: str, why: str, remedy: str) -> Difference:
    return Difference(severity, topic, Problem(what, why, remedy))
