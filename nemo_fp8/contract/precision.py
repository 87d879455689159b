"""The contract: one frozen description of a precision, obeyed in training and in rollout.

Everything else in this package reads a :class:`Precision`: renderers write it for somebody else's software,
TransformerEngine and the weight quantizer carry it out, reports prove that they did. It holds *decisions*, never
what a machine can do (``preflight/``) or what a model looks like (``models/``).

A contract checks itself when it is made and reports every contradiction at once. A field that is merely
*ignored* by the chosen recipe is no contradiction: ``lint`` points at those. The trade-off of one flat, frozen
class: about thirty fields in one place, and in return equality, hashing, diffing and YAML for nothing.

Standard library only (YAML is read by PyYAML, imported when used).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nemo_fp8.contract.operands import GEMMS, ROLES, ROLLOUT_BLOCKS, Operand
from nemo_fp8.errors import PrecisionError, Problem, unknown

COMPUTE_DTYPES = ("bf16", "fp16", "fp32")
FORMATS = ("hybrid", "e4m3")
SCALINGS = ("delayed", "tensorwise", "blockwise", "mxfp8")
SIDES = ("train", "rollout")

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "compute": COMPUTE_DTYPES,
    "grad_reduce": ("fp32", "compute"),
    "format": (None, *FORMATS),
    "scaling": (None, *SCALINGS),
    "amax_compute_algo": ("max", "most_recent"),
    "weight_scale": ("fp32", "pow2"),
    "activation_scale": ("fp32", "pow2"),
    "rollout": ("compute", "fp8"),
    "rollout_block": tuple(ROLLOUT_BLOCKS),
    "activation_scheme": ("dynamic", "static"),
    "kv_cache": ("auto", "fp8"),
}
_COUNTS = {
    "margin": None,
    "amax_history_len": 1,
    "first_layers": 0,
    "last_layers": 0,
    "loss_scale_window": 1,
    "hysteresis": 1,
}
_FACTORS = ("loss_scale", "initial_loss_scale", "min_loss_scale")
_FLAGS = ("wgrad", "attention", "multi_head_attention", "fp8_param", "strict", "deep_gemm", "importance_sampling")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Everything about a precision. A field that is not given follows from the others; see ``_follow``."""

    name: str = field(default="custom", compare=False)
    """Where the contract came from. Not part of its identity: two names for one thing are equal."""

    compute: str = "bf16"
    """What layers compute and keep parameters in where nothing else is said: bf16, fp16 or fp32."""
    grad_reduce: str = "fp32"
    """What gradients are accumulated and reduced over data-parallel ranks in: ``fp32`` or ``compute``."""

    format: str | None = None
    """FP8 element types: ``hybrid`` (E4M3 forward, E5M2 gradients), ``e4m3`` (everywhere), None (no FP8)."""
    scaling: str | None = None
    """How FP8 scales are found: delayed, tensorwise, blockwise, mxfp8; None when there is no FP8."""
    margin: int = 0
    """Delayed scaling only: scales are shifted down by 2**margin, headroom for a growing amax."""
    amax_history_len: int = 1
    """Delayed scaling only: how many steps of amaxes are remembered for each tensor."""
    amax_compute_algo: str = "most_recent"
    """Delayed scaling only: ``max`` of the history, or the ``most_recent`` entry."""
    weight_scale: str = None  # type: ignore[assignment]
    """``fp32`` or ``pow2`` scales for weights, in training and in rollout."""
    activation_scale: str = None  # type: ignore[assignment]
    """``fp32`` or ``pow2`` scales for inputs and gradients, in training and in rollout."""
    wgrad: bool = True
    """Whether the weight-gradient GEMM runs in FP8 too."""
    attention: bool = False
    """FP8 dot-product attention (experimental in TE)."""
    multi_head_attention: bool = False
    """FP8 outputs inside the attention block (experimental in TE)."""
    fp8_param: bool = False
    """Keep primary weights in FP8, so that the distributed optimizer gathers one byte an element."""

    first_layers: int = 0
    """Decoder layers at the start that stay in the compute dtype."""
    last_layers: int = 0
    """Decoder layers at the end that stay in the compute dtype."""
    keep: tuple[str, ...] = ()
    """Module names that stay in the compute dtype: globs, or regular expressions behind ``re:``."""
    strict: bool = False
    """Refuse a layer whose shape the format cannot hold, where the default keeps it in the compute dtype."""

    loss_scale: float | None = None
    """FP16 only: a fixed loss scale; None scales dynamically."""
    initial_loss_scale: float = 4294967296.0
    """FP16 only: where dynamic loss scaling starts."""
    min_loss_scale: float = 1.0
    """FP16 only: the floor of dynamic loss scaling."""
    loss_scale_window: int = 1000
    """FP16 only: clean steps after which the loss scale doubles."""
    hysteresis: int = 2
    """FP16 only: overflows that are tolerated before the loss scale halves."""

    rollout: str = None  # type: ignore[assignment]
    """What generation runs in: ``fp8`` or the ``compute`` dtype."""
    rollout_block: str = None  # type: ignore[assignment]
    """The weight block that shares one scale in rollout: 128x128, 1x32, or the whole ``tensor``."""
    activation_scheme: str = "dynamic"
    """Rollout activations scaled from each token (``dynamic``) or from calibrated scales (``static``)."""
    kv_cache: str = "auto"
    """KV-cache dtype in rollout: ``auto`` (the compute dtype) or ``fp8``."""
    deep_gemm: bool = False
    """Run rollout GEMMs on DeepGEMM."""
    importance_sampling: bool = None  # type: ignore[assignment]
    """Correct the policy loss for the difference between trainer and rollout."""

    # ------------------------------------------------------------------ construction

    def __post_init__(self) -> None:
        if isinstance(self.keep, list):
            object.__setattr__(self, "keep", tuple(self.keep))
        followed = _follow(self.format, self.scaling, self.rollout)
        # Not a field: two contracts that come to the same are equal, however they were written.
        object.__setattr__(self, "_said", frozenset(name for name in followed if getattr(self, name) is not None))
        for name, value in followed.items():
            if name not in self.said:
                object.__setattr__(self, name, value)
        # The rules may take for granted that every value has its type.
        problems = [*_wrong_values(self)] or [*_contradictions(self)]
        if problems:
            raise PrecisionError(problems)

    def replace(self, **changes: Any) -> Precision:
        """A copy with some fields changed. A field that was never given goes on following the others; one that was is
        kept.

        A file that holds every field, as ``to_yaml`` writes it, gives every one: a kind of scale from there is changed
        by name, or refused where the changed fields contradict it. ``replace(weight_scale=None)`` lets a field follow
        again.
        """
        _refuse_unknown(changes)
        implied = _follow(None, None, None).keys() - self.said
        return Precision(**{**self.to_dict(), **dict.fromkeys(implied), **changes})

    # ------------------------------------------------------------------ what it says

    @property
    def said(self) -> frozenset[str]:
        """Of the fields that can follow from others, those that were given."""
        found: frozenset[str] = self.__dict__.get("_said", frozenset())
        return found

    @property
    def is_fp8(self) -> bool:
        """Whether training runs any GEMM in FP8."""
        return self.format is not None

    def operand(self, role: str, side: str = "train") -> Operand | None:
        """How ``input``, ``weight`` or ``grad`` is stored for an FP8 GEMM of a side, ``train`` or ``rollout``.

        None where that side runs in the compute dtype, and for the gradients of a rollout, which has none.
        """
        if role not in ROLES:
            raise PrecisionError([unknown("GEMM operand", role, ROLES)])
        if side not in SIDES:
            raise PrecisionError([unknown("side of a contract", side, SIDES)])
        return self._in_training(role) if side == "train" else self._in_rollout(role)

    def _in_training(self, role: str) -> Operand | None:
        if self.format is None:
            return None
        element = "e5m2" if role == "grad" and self.format == "hybrid" else "e4m3"
        scale = self.weight_scale if role == "weight" else self.activation_scale
        if self.scaling == "delayed":
            return Operand(element, None, "fp32", delayed=True)  # TE has no other scale for this recipe
        if self.scaling == "tensorwise":
            return Operand(element, None, scale)
        if self.scaling == "blockwise":
            return Operand(element, (128, 128) if role == "weight" else (1, 128), scale)
        return Operand(element, (1, 32), "e8m0")

    def _in_rollout(self, role: str) -> Operand | None:
        if self.rollout != "fp8" or role == "grad":
            return None
        if self.rollout_block == "1x32":
            return Operand("e4m3", (1, 32), "e8m0")
        if role == "weight":
            return Operand("e4m3", ROLLOUT_BLOCKS[self.rollout_block], self.weight_scale)
        if self.activation_scheme == "static":
            return Operand("e4m3", None, self.activation_scale, delayed=True)
        # One scale a weight runs on the kernels for blocks, so its activations are scaled as theirs are.
        return Operand("e4m3", (1, 128), self.activation_scale)

    def gemms(self) -> dict[str, tuple[Operand | None, Operand | None]]:
        """Both operands of fprop, dgrad and wgrad; None where an operand stays in the compute dtype."""
        return {
            gemm: (None, None) if gemm == "wgrad" and not self.wgrad else (self.operand(a), self.operand(b))
            for gemm, (a, b) in GEMMS.items()
        }

    def keeps(self, module: str, layer: int | None = None, layers: int | None = None) -> bool:
        """Whether a module stays in the compute dtype: by its name, or as decoder layer ``layer`` of ``layers``."""
        if (
            layer is not None
            and layers is not None
            and (layer < self.first_layers or layer >= layers - self.last_layers)
        ):
            return True
        return any(_matches(pattern, module) for pattern in self.keep)

    def explain(self) -> str:
        """The contract in plain words."""
        from nemo_fp8.contract.explain import explain

        return explain(self)

    def diff(self, other: Precision) -> dict[str, tuple[Any, Any]]:
        """The fields in which two contracts differ, as ``{field: (mine, theirs)}``."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if name != "name" and mine[name] != theirs[name]}

    # ------------------------------------------------------------------ in and out

    def to_dict(self) -> dict[str, Any]:
        """Every field as a plain value; ``from_dict`` gives the same contract back."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Precision:
        """A contract from some or all of its fields. A name that is no field is refused, never ignored."""
        _refuse_unknown(values)
        return cls(**values)

    def to_yaml(self) -> str:
        """Every field as YAML, in the order in which they are declared."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> Precision:
        """A contract from YAML text. A key given twice is refused: YAML itself would keep the last in silence."""
        from nemo_fp8.contract.yaml import load_mapping

        return cls.from_dict(load_mapping(text, "a precision contract"))


def _follow(format: str | None, scaling: str | None, rollout: str | None) -> dict[str, Any]:
    """What the fields that were not given follow to, so that two ways to say one thing are equal."""
    # TE's defaults: block scales are powers of two unless asked otherwise; MX scales are nothing else.
    scale = "pow2" if scaling in ("blockwise", "mxfp8") else "fp32"
    rollout = rollout or ("fp8" if format else "compute")
    return {
        "weight_scale": scale,
        "activation_scale": scale,
        "rollout": rollout,
        "rollout_block": "1x32" if scaling == "mxfp8" else "128x128",
        "importance_sampling": rollout == "fp8",
    }


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


# ---------------------------------------------------------------------- checks


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(Precision)]
    problems = [unknown("contract field", name, known) for name in values if name not in known]
    if problems:
        raise PrecisionError(problems)


def _wrong_values(p: Precision) -> Iterator[Problem]:
    """Values of a wrong type, or of none of a field's choices."""
    for name, choices in _CHOICES.items():
        value = getattr(p, name)
        if value not in choices:
            yield unknown(name, value, [c for c in choices if c is not None])
    for name in _FLAGS:
        if not isinstance(getattr(p, name), bool):
            yield _not_a(p, name, "true or false", "Write true or false.")
    for name, least in _COUNTS.items():
        value = getattr(p, name)
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            bound = "" if least is None else f" of at least {least}"
            yield _not_a(p, name, f"a whole number{bound}", f"Give a whole number{bound}.")
    for name in _FACTORS:
        value = getattr(p, name)
        if value is None and name == "loss_scale":
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            yield _not_a(p, name, "a positive, finite number", "Give a positive number, such as 65536.0.")
    if not isinstance(p.name, str):
        yield _not_a(p, "name", "a text", "Give a text, or leave it out.")
    if not isinstance(p.keep, tuple) or not all(isinstance(k, str) and k for k in p.keep):
        yield _not_a(
            p, "keep", "a list of names", "Give globs such as '*.router', or regular expressions behind 're:'."
        )
        return
    for pattern in p.keep:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                yield Problem(
                    f"keep holds {pattern!r}, which is no regular expression.",
                    f"{error}.",
                    "Correct it, or write a glob without 're:'.",
                )


def _not_a(p: Precision, name: str, expected: str, remedy: str) -> Problem:
    return Problem(
        f"{name}={getattr(p, name)!r} is not {expected}.", "A contract only holds values that mean something.", remedy
    )


def _contradictions(p: Precision) -> Iterator[Problem]:
    """Settings that cannot both be meant. Each row: the condition, then what, why and remedy."""
    fp8_rollout = p.rollout == "fp8"
    rows = (
        (
            (p.format is None) != (p.scaling is None),
            f"format={p.format!r} with scaling={p.scaling!r}.",
            "FP8 needs an element type and a way to find its scales; without FP8 there is neither.",
            "Set both (format='hybrid', scaling='blockwise'), or leave both out.",
        ),
        (
            p.fp8_param and not p.is_fp8,
            "fp8_param=True without FP8.",
            "Primary weights are kept in the format of the FP8 GEMMs, and this contract has none.",
            "Set format and scaling, or fp8_param=False.",
        ),
        (
            p.fp8_param and p.compute == "fp32",
            "fp8_param=True with compute='fp32'.",
            "Megatron's distributed optimizer keeps FP8 weights only beside BF16 or FP16 parameters.",
            "Set compute='bf16', or fp8_param=False.",
        ),
        (
            (p.attention or p.multi_head_attention) and not p.is_fp8,
            "FP8 attention without FP8.",
            "Attention takes its scales from the FP8 recipe, and this contract has none.",
            "Set format and scaling, or attention=False and multi_head_attention=False.",
        ),
        (
            (p.attention or p.multi_head_attention) and p.scaling == "blockwise",
            "FP8 attention with blockwise scaling.",
            "TransformerEngine's Float8BlockScaling refuses fp8_dpa and fp8_mha.",
            "Set attention=False and multi_head_attention=False, or scaling='tensorwise'.",
        ),
        (
            p.scaling == "delayed" and (p.first_layers > 0 or p.last_layers > 0),
            f"first_layers={p.first_layers}, last_layers={p.last_layers} with delayed scaling.",
            "Megatron cannot leave single layers out of delayed scaling, whose amaxes are reduced for all layers at "
            "once.",
            "Set scaling='tensorwise' or 'blockwise', or first_layers=0 and last_layers=0.",
        ),
        (
            p.scaling == "mxfp8" and "fp32" in (p.weight_scale, p.activation_scale),
            "FP32 scales with mxfp8.",
            "An MX scale is one E8M0 exponent byte: a power of two by definition.",
            "Set weight_scale='pow2' and activation_scale='pow2', or scaling='blockwise'.",
        ),
        (
            p.scaling == "delayed" and not fp8_rollout and "pow2" in (p.weight_scale, p.activation_scale),
            "Power-of-2 scales with delayed scaling.",
            "TransformerEngine's delayed scaling knows FP32 scales only, and there is no FP8 rollout that they could "
            "be meant for.",
            "Set weight_scale='fp32' and activation_scale='fp32', or scaling='tensorwise'.",
        ),
        (
            fp8_rollout and p.rollout_block == "1x32" and "fp32" in (p.weight_scale, p.activation_scale),
            "FP32 scales with rollout_block='1x32'.",
            "1x32 is the MX block, whose scale is one E8M0 exponent byte.",
            "Set weight_scale='pow2' and activation_scale='pow2', or rollout_block='128x128'.",
        ),
        (
            fp8_rollout and p.activation_scheme == "static" and p.rollout_block != "tensor",
            f"activation_scheme='static' with rollout_block={p.rollout_block!r}.",
            "vLLM scales activations of block-quantized layers for each token; calibrated scales go with one scale a "
            "tensor.",
            "Set activation_scheme='dynamic', or rollout_block='tensor'.",
        ),
        (
            p.deep_gemm and not (fp8_rollout and p.rollout_block == "128x128"),
            "deep_gemm=True without an FP8 rollout in 128x128 blocks.",
            "DeepGEMM holds kernels for FP8 with 128x128 weight blocks only.",
            "Set rollout='fp8' and rollout_block='128x128', or deep_gemm=False.",
        ),
        (
            p.initial_loss_scale < p.min_loss_scale,
            f"initial_loss_scale={p.initial_loss_scale} is below min_loss_scale={p.min_loss_scale}.",
            "Dynamic loss scaling would start under its own floor.",
            "Raise initial_loss_scale, or lower min_loss_scale.",
        ),
    )
    for wrong, what, why, remedy in rows:
        if wrong:
            yield Problem(what, why, remedy)
