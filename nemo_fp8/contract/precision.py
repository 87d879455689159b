"""The contract: one frozen description of a precision, obeyed in training and in rollout.

    p = Precision(format="hybrid", scaling="blockwise", last_layers=1)
    p.operand("weight")                  E4M3 with power-of-2 scales, one for each 128x128 block
    p.operand("weight", "rollout")       the same: the fields of a rollout follow those of training
    p.replace(scaling="mxfp8")           a new contract; rollout blocks become 1x32 and scales E8M0 with it
    Precision.from_yaml(p.to_yaml())     equal to p

Every other module reads a :class:`Precision`: ``render/`` writes it in the settings of NeMo, Megatron, TE and vLLM,
``numerics/`` and the weight quantizer of the rollout compute with it, reports check the result against it. It holds
*decisions*; what a machine can do is in ``preflight/``, what a model looks like in ``models/``.

A contract checks itself when it is constructed and raises one PrecisionError that lists every problem. A field that the
chosen recipe *ignores* is no problem here; ``lint`` reports it. The trade-off of one flat, frozen class: it has
about thirty fields, and needs no code for equality, hashing, diffs and YAML beyond a loop over them.

Standard library only (PyYAML is imported when YAML is read or written).
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
    """The precision of a training run and of the rollout that generates with its weights.

    Five fields default to None in the signature and get a value from the fields that were given (``_derived``).
    Construction raises PrecisionError if a value is outside of its choices, or if two fields contradict each other.
    """

    name: str = field(default="custom", compare=False)
    """Where the contract came from. Equality ignores it."""

    compute: str = "bf16"
    """The dtype of everything that does not run in FP8, and of the parameters: bf16, fp16 or fp32."""
    grad_reduce: str = "fp32"
    """The dtype in which gradients are accumulated and reduced over data-parallel ranks: ``fp32`` or ``compute``."""

    format: str | None = None
    """FP8 element types: ``hybrid`` (E4M3 forward, E5M2 gradients), ``e4m3`` (everywhere), None (no FP8)."""
    scaling: str | None = None
    """How FP8 scales are computed: delayed, tensorwise, blockwise, mxfp8; None without FP8."""
    margin: int = 0
    """Delayed scaling only: divide scales by 2**margin, as headroom for a growing amax."""
    amax_history_len: int = 1
    """Delayed scaling only: how many steps of amaxes are kept for each tensor."""
    amax_compute_algo: str = "most_recent"
    """Delayed scaling only: compute the scale from the ``max`` of the history or from its ``most_recent`` entry."""
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
    """Raise on a layer whose shape FP8 blocks cannot hold, instead of keeping it in the compute dtype."""

    loss_scale: float | None = None
    """FP16 only: a fixed loss scale; None for dynamic loss scaling."""
    initial_loss_scale: float = 4294967296.0
    """FP16 only: the first value of the dynamic loss scale."""
    min_loss_scale: float = 1.0
    """FP16 only: the smallest value of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """FP16 only: steps without overflow after which the loss scale doubles."""
    hysteresis: int = 2
    """FP16 only: overflows that are tolerated before the loss scale halves."""

    rollout: str = None  # type: ignore[assignment]
    """The linears of the rollout run in ``fp8`` or in the ``compute`` dtype. Follows training."""
    rollout_block: str = None  # type: ignore[assignment]
    """The block of a rollout weight that shares one scale: 128x128, 1x32, or the whole ``tensor``."""
    activation_scheme: str = "dynamic"
    """Rollout activations are scaled from their own values (``dynamic``) or by calibrated scales (``static``)."""
    kv_cache: str = "auto"
    """KV-cache dtype in rollout: ``auto`` (the compute dtype) or ``fp8``."""
    deep_gemm: bool = False
    """Run rollout GEMMs on DeepGEMM."""
    importance_sampling: bool = None  # type: ignore[assignment]
    """Correct the policy loss for the difference between trainer and rollout. Follows ``rollout``."""

    # ------------------------------------------------------------------ construction

    def __post_init__(self) -> None:
        if isinstance(self.keep, list):
            object.__setattr__(self, "keep", tuple(self.keep))
        derived = _derived(self.format, self.scaling, self.rollout)
        # ``_said`` is no dataclass field, so contracts with equal values are equal, whichever of them were given.
        object.__setattr__(self, "_said", frozenset(name for name in derived if getattr(self, name) is not None))
        for name, value in derived.items():
            if name not in self.said:
                object.__setattr__(self, name, value)
        # _contradictions compares numbers and strings, so it runs only when every value has its type.
        problems = [*_wrong_values(self)] or [*_contradictions(self)]
        if problems:
            raise PrecisionError(problems)

    def replace(self, **changes: Any) -> Precision:
        """Return a copy with ``changes`` made. Derived fields are derived anew, unless they were given once.

        ``to_yaml`` writes every field, so in a contract read from its output every field was given. To derive one
        again, set it to None: ``replace(weight_scale=None)``. Raises PrecisionError as the constructor does.
        """
        _refuse_unknown(changes)
        not_given = _derived(None, None, None).keys() - self.said
        return Precision(**{**self.to_dict(), **dict.fromkeys(not_given), **changes})

    # ------------------------------------------------------------------ what it says

    @property
    def said(self) -> frozenset[str]:
        """The derivable fields that the caller gave, and that ``replace`` therefore keeps."""
        found: frozenset[str] = self.__dict__.get("_said", frozenset())
        return found

    @property
    def is_fp8(self) -> bool:
        """Whether training runs any GEMM in FP8."""
        return self.format is not None

    def operand(self, role: str, side: str = "train") -> Operand | None:
        """Return how ``input``, ``weight`` or ``grad`` is stored for the FP8 GEMMs of ``train`` or ``rollout``.

        None if that side runs in the compute dtype, and for ``grad`` in a rollout. Raises PrecisionError if ``role``
        or ``side`` is unknown.
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
        # A weight with one scale runs on the kernels for blocks, too, and these take activations in 1x128 tiles.
        return Operand("e4m3", (1, 128), self.activation_scale)

    def gemms(self) -> dict[str, tuple[Operand | None, Operand | None]]:
        """Return the two operands of fprop, dgrad and wgrad in training; None for one in the compute dtype."""
        return {
            gemm: (None, None) if gemm == "wgrad" and not self.wgrad else (self.operand(a), self.operand(b))
            for gemm, (a, b) in GEMMS.items()
        }

    def keeps(self, module: str, layer: int | None = None, layers: int | None = None) -> bool:
        """Whether ``keep`` matches a module's name, or its layer is one of the first or last that stay unquantized.

        ``layer`` is the number of its decoder layer out of ``layers``; without both, only the name counts.
        """
        if (
            layer is not None
            and layers is not None
            and (layer < self.first_layers or layer >= layers - self.last_layers)
        ):
            return True
        return any(_matches(pattern, module) for pattern in self.keep)

    def explain(self) -> str:
        """Return the contract in plain words, a heading and its sentences to a line."""
        from nemo_fp8.contract.explain import explain

        return explain(self)

    def diff(self, other: Precision) -> dict[str, tuple[Any, Any]]:
        """Return the fields in which two contracts differ, as ``{field: (mine, theirs)}``; ``name`` is left out."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if name != "name" and mine[name] != theirs[name]}

    # ------------------------------------------------------------------ in and out

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain value; ``from_dict`` makes an equal contract of them."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Precision:
        """Make a contract from some or all of its fields. Raises PrecisionError if a name is no field."""
        _refuse_unknown(values)
        return cls(**values)

    def to_yaml(self) -> str:
        """Return every field as YAML, in the order of declaration."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> Precision:
        """Make a contract from YAML text. Raises PrecisionError if a key is unknown, or given twice."""
        from nemo_fp8.contract.yaml import load_mapping

        return cls.from_dict(load_mapping(text, "a precision contract"))


def _derived(format: str | None, scaling: str | None, rollout: str | None) -> dict[str, Any]:
    """Return the fields that have no fixed default, with the values that follow from these three."""
    # As in TE: block scales are powers of two unless FP32 is asked for; MX scales are powers of two by definition.
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
    """Whether a pattern of ``keep``, a glob or a regular expression behind ``re:``, matches a module's name."""
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
    """Yield a problem for every value of a wrong type, below its least value, or outside of its field's choices."""
    for name, choices in _CHOICES.items():
        value = getattr(p, name)
        if value not in choices:
            yield unknown(name, value, [c for c in choices if c is not None])
    for name in _FLAGS:
        if not isinstance(getattr(p, name), bool):
            yield _invalid(p, name, "true or false", "Write true or false.")
    for name, least in _COUNTS.items():
        value = getattr(p, name)
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            bound = "" if least is None else f" of at least {least}"
            yield _invalid(p, name, f"a whole number{bound}", f"Give a whole number{bound}.")
    for name in _FACTORS:
        value = getattr(p, name)
        if value is None and name == "loss_scale":
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            yield _invalid(p, name, "a positive, finite number", "Give a positive number, such as 65536.0.")
    if not isinstance(p.name, str):
        yield _invalid(p, "name", "a text", "Give a text, or leave it out.")
    if not isinstance(p.keep, tuple) or not all(isinstance(k, str) and k for k in p.keep):
        yield _invalid(
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


def _invalid(p: Precision, name: str, expected: str, remedy: str) -> Problem:
    return Problem(
        f"{name}={getattr(p, name)!r} is not {expected}.", "A contract only holds values that mean something.", remedy
    )


def _contradictions(p: Precision) -> Iterator[Problem]:
    """Yield a problem for settings that exclude each other. Each row: the condition, then what, why and remedy."""
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
