"""The environment variables with which TransformerEngine chooses a recipe's settings: one row each.

Megatron, NeMo and Bridge make TE's recipes without arguments, so that these variables are the only way to say which
scales, blocks and casts a recipe has. TE reads them once, when its recipes are imported, as the defaults of a recipe's
fields. A row says which contract fields a variable carries, and the word for each value; the first value is what TE
takes if the variable is not set. A contract with rules by module needs the variables of every recipe that its modules
have. Renderers write the rows and read them (``render/env.py``), lint compares the environment with them, and
``late_variables`` and ``unread_variables`` with what an imported TransformerEngine has read. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.findings import finding

if TYPE_CHECKING:
    from nemo_fp8.contract.precision import Precision

TE_RECIPES = "transformer_engine.common.recipe"
"""The module of TransformerEngine that holds its recipes, and reads the variables when it is imported."""


@dataclass(frozen=True)
class Variable:
    """One variable of TransformerEngine: the contract fields that it sets, and how."""

    scalings: tuple[str, ...]
    """The recipes that read it."""
    recipe: str
    """A class of ``transformer_engine.common.recipe`` that has it as the default of ``field``."""
    field: str
    contract: tuple[str, ...]
    """The contract fields that it sets, all to one value."""
    says: str
    """What the variable does, in words."""
    words: Mapping[Any, str | None]
    """Contract value -> the variable's value; the first is TE's default. None: it must not be set."""

    def wanted(self, p: Precision) -> str | None:
        """Return the variable's value for a contract. Raises PrecisionError if its fields differ."""
        values = {getattr(p, name) for name in self.contract}
        if len(values) > 1:
            raise PrecisionError(
                f"{self.in_words(p, ' with ')} in TransformerEngine's environment.",
                "Its variable sets the scales of weights and of activations together.",
                "Give both the same scale, or hand TE the recipe object of te_recipe(), which sets each operand.",
            )
        return self.words[values.pop()]

    def in_words(self, p: Precision, between: str = " and ") -> str:
        """Return the fields that the variable sets, with a contract's values, for a sentence."""
        return between.join(f"{name}={getattr(p, name)!r}" for name in self.contract)

    @property
    def default(self) -> str | None:
        """The value that means the same as no value."""
        return next(iter(self.words.values()))


def _switch(off: Any, on: Any) -> dict[Any, str | None]:
    return {off: "0", on: "1"}


SCALE_FIELDS = ("weight_scale", "activation_scale")
FP32_BLOCK_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
_SCOPES: dict[Any, str | None] = {scope: scope for scope in ("none", "weights", "activations", "all")}


def _four_bits(field: str, contract: str, says: str, words: Mapping[Any, str | None]) -> Variable:
    return Variable(("nvfp4",), "NVFP4BlockScaling", field, (contract,), says, words)


VARIABLES: dict[str, Variable] = {
    FP32_BLOCK_SCALES: Variable(
        ("blockwise",),
        "Float8BlockScaling",
        "use_f32_scales",
        SCALE_FIELDS,
        "gives blockwise FP32 scales in place of powers of two (NeMo RL sets it)",
        _switch("pow2", "fp32"),
    ),
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": Variable(
        ("tensorwise",),
        "Float8CurrentScaling",
        "use_power_2_scales",
        SCALE_FIELDS,
        "gives tensorwise power-of-2 scales in place of FP32",
        _switch("fp32", "pow2"),
    ),
    "NVTE_NVFP4_DISABLE_RHT": _four_bits(
        "disable_rht", "hadamard", "leaves out the Hadamard transform", _switch(True, False)
    ),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": _four_bits(
        "disable_stochastic_rounding", "stochastic_rounding", "rounds gradients to the nearest", _switch(True, False)
    ),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": _four_bits(
        "disable_2d_quantization",
        "weight_block",
        "quantizes weights in 1x16 blocks in place of 16x16",
        _switch("16x16", "1x16"),
    ),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": _four_bits(
        "row_scaled_activation", "row_scaled", "gives each row of an input a scale of its own", _switch(False, True)
    ),
    "NVTE_NVFP4_4OVER6": _four_bits("nvfp4_4over6", "four_over_six", "chooses between two scales for a block", _SCOPES),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": _four_bits(
        "nvfp4_4over6_e4m3_use_256",
        "four_over_six_bound_256",
        "bounds the scales of such blocks by 256",
        {"all": "all"} | _SCOPES,
    ),
    "NVTE_NVFP4_4OVER6_ERR_MODE": _four_bits(
        "nvfp4_4over6_err_mode",
        "four_over_six_error",
        "chooses between two scales by this error",
        {"mae": "MAE", "mse": "MSE"},
    ),
    "NVTE_BACKWARD_OVERRIDE": Variable(
        ("tensorwise", "blockwise", "mxfp8", "nvfp4"),
        "NVFP4BlockScaling",
        "backward_override",
        ("backward",),
        "runs backward in the compute dtype, on the forward's codes (dequantized) or on what they were made from "
        "(high_precision)",
        {"quantized": None, "dequantized": "dequantized", "high_precision": "high_precision"},
    ),
}


def variables_of(scaling: str | None) -> dict[str, Variable]:
    """Return the variables that a recipe reads."""
    return {name: variable for name, variable in VARIABLES.items() if scaling in variable.scalings}


def variables_for(p: Precision) -> dict[str, tuple[Variable, Precision]]:
    """Return the variables that the recipes of a contract's modules read, each with the contract of such modules.

    Raises PrecisionError if two recipes want different values of one variable.
    """
    found: dict[str, tuple[Variable, Precision]] = {}
    for own in p.variants() if p.is_quantized else ():  # rules of a rollout alone do not concern TE
        for name, variable in variables_of(own.scaling).items():
            first = found.setdefault(name, (variable, own))[1]
            if any(getattr(first, field) != getattr(own, field) for field in variable.contract):
                raise PrecisionError(
                    f"{name} for modules in {first.scaling} with {variable.in_words(first)} "
                    f"and modules in {own.scaling} with {variable.in_words(own)}.",
                    "TransformerEngine reads one value of it, for every module of the process.",
                    "Give both recipes the same setting, or leave one of them out of modules=.",
                )
    return found


def te_environment(p: Precision) -> dict[str, str]:
    """Return the variables that give TransformerEngine a contract's recipes everywhere; set them before it is imported.

    A variable is returned also if its value is TE's own, since the shell may have another one. Raises PrecisionError
    if the variables cannot say what the contract says.
    """
    wanted = {name: variable.wanted(own) for name, (variable, own) in variables_for(p).items() if _matters(variable, p)}
    return {name: value for name, value in wanted.items() if value is not None}


def _matters(variable: Variable, p: Precision) -> bool:
    """Return whether a variable has an effect: those of 4 over 6 have none where no tensor has two scales to choose."""
    return p.four_over_six != "none" or not variable.field.startswith("nvfp4_4over6_")


# ---------------------------------------------------------------------- what an imported TransformerEngine has read


def late_variables(environment: Mapping[str, str], modules: Mapping[str, ModuleType]) -> list[Problem]:
    """Return findings for variables whose value differs from the one that the imported TransformerEngine read."""
    found = []
    for name, variable in VARIABLES.items() if TE_RECIPES in modules else ():
        fields = _fields(variable, modules)
        if variable.field not in fields:
            continue  # an older TransformerEngine, which does not read it: see unread_variables
        frozen = fields[variable.field].default
        word = str(int(frozen)) if isinstance(frozen, bool) else frozen
        if word != environment.get(name, variable.default):
            value = environment.get(name, "(unset)")
            found.append(finding("environment-late", name, name=name, value=value, frozen=word or "(unset)"))
    return found


def unread_variables(environment: Mapping[str, str], modules: Mapping[str, ModuleType]) -> list[str]:
    """Return the variables that ask for more than TransformerEngine does by itself, and that the imported one is too
    old to read."""
    return [
        name
        for name, variable in VARIABLES.items()
        if TE_RECIPES in modules
        and environment.get(name, variable.default) != variable.default
        and variable.field not in _fields(variable, modules)
    ]


def _fields(variable: Variable, modules: Mapping[str, ModuleType]) -> Mapping[str, Any]:
    """Return the fields of a variable's recipe in the imported TransformerEngine; none if it has no such recipe."""
    recipe = getattr(modules[TE_RECIPES], variable.recipe, None)
    found: Mapping[str, Any] = getattr(recipe, "__dataclass_fields__", {})
    return found
