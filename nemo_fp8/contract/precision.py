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
about forty fields, and needs no code for equality, hashing, diffs and YAML beyond a loop over them.

Standard library only (PyYAML is imported when YAML is read or written).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from nemo_fp8.contract.operands import BLOCK, FOUR_BIT_BLOCK, GEMMS, MX_BLOCK, ROLES, ROLLOUT_BLOCKS, Operand
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.findings import finding

COMPUTE_DTYPES = ("bf16", "fp16", "fp32")
FORMATS = ("hybrid", "e4m3", "e2m1")
SCALINGS = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
SIDES = ("train", "rollout")
SCOPES = ("none", "weights", "activations", "all")

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "compute": COMPUTE_DTYPES,
    "grad_reduce": ("fp32", "compute"),
    "format": (None, *FORMATS),
    "scaling": (None, *SCALINGS),
    "amax_compute_algo": ("max", "most_recent"),
    "weight_scale": ("fp32", "pow2"),
    "activation_scale": ("fp32", "pow2"),
    "weight_block": ("16x16", "1x16"),
    "four_over_six": SCOPES,
    "four_over_six_error": ("mae", "mse"),
    "four_over_six_bound_256": SCOPES,
    "backward": ("quantized", "dequantized", "high_precision"),
    "backward_scaling": (None, "mxfp8", "nvfp4"),
    "rollout": ("compute", "fp8", "nvfp4"),
    "rollout_block": tuple(ROLLOUT_BLOCKS),
    "activation_scheme": ("dynamic", "static", "none"),
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
    """Element types: ``hybrid`` (E4M3 forward, E5M2 gradients), ``e4m3`` or ``e2m1`` (everywhere), None (BF16)."""
    scaling: str | None = None
    """How scales are computed: delayed, tensorwise, blockwise, mxfp8; nvfp4 for E2M1; None without a format."""
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

    backward: str = "quantized"
    """What the backward GEMMs multiply: ``quantized`` operands, the forward's own codes ``dequantized``, or the values
    of the compute dtype that these were made from (``high_precision``)."""
    backward_scaling: str | None = None
    """Quantize the backward's operands by another recipe than the forward's: mxfp8 or nvfp4; None for the same."""

    weight_block: str = "16x16"
    """NVFP4 only: the block of a weight that shares one scale. 16x16 is its own transpose; 1x16 is finer, and the
    backward then multiplies by another weight than the forward."""
    hadamard: bool = True
    """NVFP4 only: spread outliers of inputs and gradients over 16 values before the weight gradient's cast."""
    stochastic_rounding: bool = True
    """NVFP4 only: round gradients up or down by chance, so that their mean stays."""
    row_scaled: bool = False
    """NVFP4 only: give each row of an input an FP32 scale of its own, as rollouts do for each token."""
    four_over_six: str = "none"
    """NVFP4 only: which tensors choose for each block between two scales, by their error: weights, activations, all."""
    four_over_six_error: str = "mae"
    """NVFP4 only: the error by which they choose, ``mae`` or ``mse``."""
    four_over_six_bound_256: str = "all"
    """NVFP4 only: which of these tensors bound their block scales by 256 and not by 448, to leave the choice room."""

    first_layers: int = 0
    """Decoder layers at the start that stay in the compute dtype."""
    last_layers: int = 0
    """Decoder layers at the end that stay in the compute dtype."""
    keep: tuple[str, ...] = ()
    """Module names that stay in the compute dtype: globs, or regular expressions behind ``re:``."""
    modules: tuple[tuple[str, str], ...] = ()
    """Recipes by module: (pattern as in ``keep``, a scaling or the compute dtype), of which the first match wins."""
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
    """The linears of the rollout run in ``fp8``, ``nvfp4`` or in the ``compute`` dtype. Follows training."""
    rollout_block: str = None  # type: ignore[assignment]
    """The block of a rollout weight that shares one scale: 128x128, 1x32, the whole ``tensor``; 1x16 for NVFP4."""
    activation_scheme: str = "dynamic"
    """Rollout activations are scaled from their own values (``dynamic``) or by calibrated scales (``static``); or they
    stay in the compute dtype (``none``: only the weights are quantized, as in W4A16)."""
    kv_cache: str = "auto"
    """KV-cache dtype in rollout: ``auto`` (the compute dtype) or ``fp8``."""
    deep_gemm: bool = False
    """Run rollout GEMMs on DeepGEMM."""
    importance_sampling: bool = None  # type: ignore[assignment]
    """Correct the policy loss for the difference between trainer and rollout. Follows ``rollout``."""

    # ------------------------------------------------------------------ construction

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
                object.__setattr__(self, name, value.item())  # np.int64(1) means 1, and YAML has no word for it
        if isinstance(self.keep, list):
            object.__setattr__(self, "keep", tuple(self.keep))
        if isinstance(self.modules, list | tuple):
            rules = tuple(tuple(rule) if isinstance(rule, list) else rule for rule in self.modules)
            object.__setattr__(self, "modules", rules)
        derived = _derived(self.format, self.scaling, self.rollout)
        # ``_said`` is no dataclass field, so contracts with equal values are equal, whichever of them were given.
        object.__setattr__(self, "_said", frozenset(name for name in derived if getattr(self, name) is not None))
        for name, value in derived.items():
            if name not in self.said:
                object.__setattr__(self, name, value)
        # _contradictions compares numbers and strings, so it runs only when every value has its type.
        if problems := [*_wrong_values(self)] or [*_contradictions(self)]:
            raise PrecisionError(problems)
        if self.backward_scaling == self.scaling:  # said twice, and not a second cast of the forward's codes
            object.__setattr__(self, "backward_scaling", None)
        # Each of these is a contract, and checks itself.
        if self.backward_scaling is not None:
            _ = self.in_backward
        if self.modules:
            self.variants()

    def replace(self, **changes: Any) -> Precision:
        """Return a copy with ``changes`` made. Derived fields are derived anew, unless they were given once.

        ``to_yaml`` writes every field, so in a contract read from its output every field was given. To derive one
        again, set it to None: ``replace(weight_scale=None)``. Raises PrecisionError as the constructor does.
        """
        _refuse_unknown(changes)
        anew: dict[str, Any] = dict.fromkeys(_derived(None, None, None).keys() - self.said)
        return dataclasses.replace(self, **anew | changes)

    # ------------------------------------------------------------------ what it says

    @property
    def said(self) -> frozenset[str]:
        """The derivable fields that the caller gave, and that ``replace`` therefore keeps."""
        found: frozenset[str] = self.__dict__.get("_said", frozenset())
        return found

    def definition(self) -> dict[str, Any]:
        """Return the fields that define it: ``Precision(**p.definition())`` equals p, and derives the same fields.

        Derived fields that the caller did not give, and fields that have their default, are left out.
        """
        follow = _derived(None, None, None).keys() - self.said
        own = {f.name: f.default for f in fields(self) if f.name not in follow}
        return {name: value for name, default in own.items() if (value := getattr(self, name)) != default}

    @property
    def is_quantized(self) -> bool:
        """Whether training runs any GEMM in FP8 or NVFP4."""
        return self.format is not None

    @property
    def is_fp8(self) -> bool:
        """Whether training runs its GEMMs in FP8."""
        return self.format in ("hybrid", "e4m3")

    @property
    def rolls_out_quantized(self) -> bool:
        """Whether the rollout holds its linears in FP8 or NVFP4."""
        return self.rollout != "compute"

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
        if self.scaling == "nvfp4":
            return self._in_four_bits(role)
        element = "e5m2" if role == "grad" and self.format == "hybrid" else "e4m3"
        scale = self.weight_scale if role == "weight" else self.activation_scale
        if self.scaling == "delayed":
            return Operand(element, None, "fp32", delayed=True)  # TE has no other scale for this recipe
        if self.scaling == "tensorwise":
            return Operand(element, None, scale)
        if self.scaling == "blockwise":
            return Operand(element, (BLOCK if role == "weight" else 1, BLOCK), scale)
        return Operand(element, (1, MX_BLOCK), "e8m0")

    def _in_four_bits(self, role: str) -> Operand:
        """Return what TransformerEngine's NVFP4BlockScaling does with an operand under the same settings."""
        scope = "weights" if role == "weight" else "activations"
        chooses = role != "grad" and self.four_over_six in (scope, "all")
        bounded = chooses and self.four_over_six_bound_256 in (scope, "all")
        return Operand(
            "e2m1",
            (1 if role != "weight" or self.weight_block == "1x16" else FOUR_BIT_BLOCK, FOUR_BIT_BLOCK),
            "e4m3",
            hadamard=self.hadamard and role != "weight",
            stochastic=self.stochastic_rounding and role == "grad",
            row_scaled=self.row_scaled and role == "input",
            four_over_six=self.four_over_six_error if chooses else None,
            largest_scale=256 if bounded else 448,
        )

    def _in_rollout(self, role: str) -> Operand | None:
        if self.rollout == "compute" or role == "grad" or (role == "input" and self.activation_scheme == "none"):
            return None
        if self.rollout == "nvfp4":
            # The scale of a token must not depend on the other tokens of its batch.
            return Operand("e2m1", ROLLOUT_BLOCKS[self.rollout_block], "e4m3", row_scaled=role == "input")
        if self.rollout_block == "1x32":
            return Operand("e4m3", (1, 32), "e8m0")
        if role == "weight":
            return Operand("e4m3", ROLLOUT_BLOCKS[self.rollout_block], self.weight_scale)
        if self.activation_scheme == "static":
            return Operand("e4m3", None, self.activation_scale, delayed=True)
        # A weight with one scale runs on the kernels for blocks, too, and these take activations in 1x128 tiles.
        return Operand("e4m3", (1, 128), self.activation_scale)

    def gemms(self) -> dict[str, tuple[Operand | None, Operand | None]]:
        """Return the two operands of fprop, dgrad and wgrad in training; None for one in the compute dtype.

        With ``backward="dequantized"`` the backward multiplies, in the compute dtype, the values of the codes that the
        forward made: it has the forward's operands, and None for the gradient.
        """
        return {gemm: self._gemm(gemm, roles) for gemm, roles in GEMMS.items()}

    def _gemm(self, gemm: str, roles: tuple[str, str]) -> tuple[Operand | None, Operand | None]:
        a, b = roles
        if gemm == "fprop":
            return self.operand(a), self.operand(b)
        if self.backward == "high_precision" or (gemm == "wgrad" and not self.wgrad):
            return None, None
        if self.backward == "dequantized":
            return None, self.operand(b)
        behind = self.in_backward
        return behind.operand(a), behind.operand(b)

    @property
    def in_backward(self) -> Precision:
        """The contract whose operands a quantized backward multiplies: this one, unless ``backward_scaling`` is set."""
        return self if self.backward_scaling is None else _variant(self, self.backward_scaling)

    def recipe_of(self, names: Iterable[str]) -> str | None:
        """Return the recipe of a module by its names (Megatron's, Hugging Face's): of the first rule that matches.

        It is a scaling, or the compute dtype; without a rule it is the contract's own scaling.
        """
        rule = self.rule_of(names)
        return self.scaling if rule is None else rule[1]

    def rule_of(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Return the first rule of ``modules`` whose pattern matches one of a module's names; None if there is none."""
        known = (names,) if isinstance(names, str) else tuple(names)
        return next((rule for rule in self.modules if any(_matches(rule[0], name) for name in known)), None)

    def of(self, names: Iterable[str]) -> Precision:
        """Return the contract of one module: this one, with the recipe of the first rule that matches one of its names.

        A rollout that is quantized follows the module's recipe; one in the compute dtype stays so.
        """
        recipe = self.recipe_of(names) if self.modules else self.scaling
        return self if recipe == self.scaling else _variant(self, recipe)

    def variants(self) -> tuple[Precision, ...]:
        """Return the contracts that modules may have, none of which has rules: one for each recipe of the rules, and
        this one, unless the rules give every module another.
        """
        if not self.modules:
            return (self,)
        recipes = dict.fromkeys(recipe for _, recipe in self.modules)
        none_left = any(pattern == "*" for pattern, _ in self.modules) and self.scaling not in recipes
        base = () if none_left else (self.replace(modules=()),)
        return (*base, *(_variant(self, recipe) for recipe in recipes if recipe != self.scaling))

    def keeps(self, module: str, layer: int | None = None, layers: int | None = None) -> bool:
        """Return whether ``keep`` matches a module's name, or its layer is a first or last one that is not quantized.

        ``layer`` is the number of its decoder layer out of ``layers``; without both, only the name counts.
        """
        first, last = self.first_layers, self.last_layers
        if layer is not None and layers is not None and not first <= layer < layers - last:
            return True
        return any(_matches(pattern, module) for pattern in self.keep)

    def explain(self) -> str:
        """Return the contract in plain words, a heading and its sentences to a line."""
        from nemo_fp8.contract.explain import explain

        return explain(self)

    def diff(self, other: Precision) -> dict[str, tuple[Any, Any]]:
        """Return ``{field: (mine, theirs)}`` of what differs but ``name``. Raises PrecisionError for no contract."""
        if not isinstance(other, Precision):
            raise PrecisionError(f"{other!r} is no contract.", "Two contracts differ.", "Give nemo_fp8.preset(NAME).")
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if name != "name" and mine[name] != theirs[name]}

    # ------------------------------------------------------------------ in and out

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain value; ``from_dict`` makes an equal contract of them."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Precision:
        """Make a contract from some or all of its fields. Raises PrecisionError if a name is no field."""
        if not isinstance(values, Mapping):
            raise PrecisionError(f"{values!r} is no contract.", "It is fields by name.", "Give what to_dict() returns.")
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
    quantized = "nvfp4" if format == "e2m1" else "fp8"
    rollout = rollout or (quantized if format else "compute")
    return {
        "weight_scale": scale,
        "activation_scale": scale,
        "rollout": rollout,
        "rollout_block": "1x16" if rollout == "nvfp4" else "1x32" if scaling == "mxfp8" else "128x128",
        "importance_sampling": rollout != "compute",
    }


def _variant(p: Precision, recipe: str | None) -> Precision:
    """Return the contract of a module that runs by another recipe: what follows from a scaling is derived anew.

    What the other recipe cannot have is switched off, so that the result contradicts itself nowhere.
    """
    return _cached_variant(p, recipe, p.name, p.said)


@lru_cache(maxsize=1 << 10)
def _cached_variant(p: Precision, recipe: str | None, name: str, said: frozenset[str]) -> Precision:
    """Make such a contract. ``name`` and ``said`` are p's, which equal contracts may have different."""
    changes: dict[str, Any] = dict.fromkeys(("weight_scale", "activation_scale", "rollout", "rollout_block"))
    changes |= {"modules": (), "backward_scaling": None, "deep_gemm": False}
    if recipe == p.compute:
        changes |= {"format": None, "scaling": None, "backward": "quantized", "fp8_param": False}
        changes |= {"attention": False, "multi_head_attention": False, "rollout": "compute"}
    else:
        four, eight = recipe == "nvfp4", p.format if p.is_fp8 else "e4m3"
        changes |= {"format": "e2m1" if four else eight, "scaling": recipe}
        changes |= {"fp8_param": False, "attention": False, "multi_head_attention": False} if four else {}
        changes |= {"rollout": "compute"} if p.rollout == "compute" else {}
        changes |= {"activation_scheme": "dynamic"} if p.activation_scheme == "none" and not four else {}
    return p.replace(**changes)


def _plain(value: Any) -> Any:
    """Return tuples as lists, at every depth, as YAML and JSON have them."""
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of ``keep``, a glob or a regular expression behind ``re:``, matches a module's name.

    A pattern in place of a name matches itself: it stands for all that it names.
    """
    if pattern == name:
        return True
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


# ---------------------------------------------------------------------- checks


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(Precision)]
    if problems := [unknown("contract field", name, known) for name in values if name not in known]:
        raise PrecisionError(problems)


def _wrong_values(p: Precision) -> Iterator[Problem]:
    """Yield a problem for every value of a wrong type, below its least value, or outside of its field's choices."""
    for name, choices in _CHOICES.items():
        value = getattr(p, name)
        if not isinstance(value, str | None) or value not in choices:
            yield unknown(name, value, [c for c in choices if c is not None])
    for name in (f.name for f in fields(p) if f.type == "bool"):
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
            remedy = "Give a positive number, such as 65536.0 or 1.0e-3; YAML takes 1e-3 for a text."
            yield _invalid(p, name, "a positive, finite number", remedy)
    if not isinstance(p.name, str):
        yield _invalid(p, "name", "a text", "Give a text, or leave it out.")
    if not isinstance(p.keep, tuple) or not all(isinstance(k, str) and k for k in p.keep):
        remedy = "Give globs such as '*.router', or regular expressions behind 're:'."
        yield _invalid(p, "keep", "a list of names", remedy)
        return
    yield from (problem for pattern in p.keep for problem in _bad_pattern("keep", pattern))
    yield from _bad_rules(p)


def _bad_rules(p: Precision) -> Iterator[Problem]:
    """Yield a problem for every rule of ``modules`` that is no pair, has a broken pattern or an unknown recipe."""
    recipes = (p.compute, *(scaling for scaling in SCALINGS if scaling != "delayed"))
    for rule in p.modules if isinstance(p.modules, tuple) else (p.modules,):
        if not (isinstance(rule, tuple) and len(rule) == 2 and all(isinstance(word, str) and word for word in rule)):
            yield Problem(
                f"modules holds {rule!r}, which is no rule.",
                "A rule is a pattern and a recipe.",
                "Give pairs such as ('*.linear_qkv', 'bf16') or ('*.linear_fc*', 'nvfp4').",
            )
            continue
        pattern, recipe = rule
        yield from _bad_pattern("modules", pattern)
        if recipe == "delayed":
            yield Problem(
                f"modules gives {pattern!r} delayed scaling.",
                "Megatron reduces the amaxes of delayed scaling for all layers at once, and TransformerEngine refuses "
                "it by module.",
                "Give it 'tensorwise', or the whole contract scaling='delayed'.",
            )
        elif recipe not in recipes:
            yield unknown(f"recipe for {pattern!r} in modules", recipe, recipes)


def _bad_pattern(field: str, pattern: str) -> Iterator[Problem]:
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        yield Problem(
            f"{field} holds {pattern!r}, which is no regular expression.",
            f"{error}.",
            "Correct it, or write a glob without 're:'.",
        )


def _invalid(p: Precision, name: str, expected: str, remedy: str) -> Problem:
    what = f"{name}={getattr(p, name)!r} is not {expected}."
    return Problem(what, "A contract only holds values that mean something.", remedy)


def _contradictions(p: Precision) -> Iterator[Problem]:
    """Yield a problem for settings that exclude each other. Each row: the finding, and whether it holds."""
    delayed, four_bits, fp8_rollout = p.scaling == "delayed", p.scaling == "nvfp4", p.rollout == "fp8"
    scales, attention = (p.weight_scale, p.activation_scale), p.attention or p.multi_head_attention
    own_backward = p.backward != "quantized" or p.backward_scaling is not None
    rows = {
        "contract-format-without-scaling": (p.format is None) != (p.scaling is None),
        "contract-e2m1": p.format is not None and p.scaling is not None and (p.format == "e2m1") != four_bits,
        "contract-nvfp4-compute": four_bits and p.compute != "bf16",
        "contract-nvfp4-param": four_bits and p.fp8_param,
        "contract-nvfp4-wgrad": four_bits and not p.wgrad,
        "contract-four-over-six": four_bits and p.four_over_six in ("activations", "all") and p.hadamard,
        "contract-backward-delayed": delayed and own_backward,
        "contract-backward-unquantized": not p.is_quantized and own_backward,
        "contract-backward-twice": p.backward != "quantized" and p.backward_scaling is not None,
        "contract-modules-unquantized": p.modules and not (p.is_quantized or p.rolls_out_quantized),
        "contract-modules-delayed": p.modules and delayed,
        "contract-rollout-block": (p.rollout == "nvfp4") != (p.rollout_block == "1x16"),
        "contract-static-nvfp4": p.rollout == "nvfp4" and p.activation_scheme == "static",
        "contract-activations-none": fp8_rollout and p.activation_scheme == "none",
        "contract-param-without-fp8": p.fp8_param and not p.is_quantized,
        "contract-param-fp32": p.fp8_param and p.compute == "fp32",
        "contract-attention-without-fp8": attention and not p.is_fp8,
        "contract-attention-blockwise": attention and p.scaling == "blockwise",
        "contract-layers-delayed": delayed and (p.first_layers > 0 or p.last_layers > 0),
        "contract-mxfp8-scales": p.scaling == "mxfp8" and "fp32" in scales,
        "contract-delayed-scales": delayed and not fp8_rollout and "pow2" in scales,
        "contract-mx-rollout-scales": fp8_rollout and p.rollout_block == "1x32" and "fp32" in scales,
        "contract-static-blocks": fp8_rollout and p.activation_scheme == "static" and p.rollout_block != "tensor",
        "contract-deep-gemm": p.deep_gemm and not (fp8_rollout and p.rollout_block == "128x128"),
        "contract-loss-scale": p.initial_loss_scale < p.min_loss_scale,
    }
    yield from (finding(code, **vars(p)) for code, wrong in rows.items() if wrong)
