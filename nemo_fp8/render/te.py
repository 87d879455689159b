"""TransformerEngine: the recipe object of a contract, and the environment variables that choose the same.

A recipe decides formats and scales of GEMM operands. Which layers stay out of FP8 is decided by the code that opens
TE's autocast, so a recipe has no lists of layers or modules. This file avoids two traps. ``use_f32_scales=True`` (and
``use_power_2_scales=True``) alone have no effect, since TE computes the operand settings from the environment at
import; so the operands' ``QParams`` are set on the instance. And TE drops unknown arguments without a word; so an
argument that the class does not have raises PrecisionError here.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from nemo_fp8.contract import ROLLOUT_FIELDS, Precision
from nemo_fp8.contract.te_variables import VARIABLES, te_environment, variables_of
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.rendering import Rendering, lost_fields

CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
_FORMATS = {"hybrid": "HYBRID", "e4m3": "E4M3", "e2m1": "E2M1"}
_QPARAMS = {
    "fp8_quant_fwd_inp": "activation_scale",
    "fp8_quant_fwd_weight": "weight_scale",
    "fp8_quant_bwd_grad": "activation_scale",
}
# The fields that variables set, too, but for the kind of scales, which operands say.
_SAID = tuple(v.field for v in VARIABLES.values() if not {"weight_scale", "activation_scale"} & {*v.contract})
_SCALED = ("tensorwise", "blockwise")  # the recipes whose operands have a kind of scale to choose

_OUTSIDE = "The layers' own business in TE, and no part of a recipe."
_REASONS = {
    **dict.fromkeys(ROLLOUT_FIELDS, "A TE recipe speaks of training only; render to nemo-rl or vllm for the rollout."),
    **dict.fromkeys(("compute", "grad_reduce"), _OUTSIDE),
    **dict.fromkeys(
        ("first_layers", "last_layers", "keep", "strict"),
        "Kept by opening TE's autocast(enabled=False) around those layers.",
    ),
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "The optimizer's business, not TE's.",
    ),
    **dict.fromkeys(
        ("margin", "amax_history_len", "amax_compute_algo"),
        "A setting of delayed scaling, which other recipes do not have.",
    ),
    **dict.fromkeys(
        ("weight_scale", "activation_scale"), "Delayed scaling has FP32 scales only: this is said of the rollout."
    ),
    "fp8_param": "Given to the layers, by opening TE's quantized_model_init around their construction.",
    "wgrad": "TE 2 has no recipe whose wgrad alone stays in the compute dtype; te_recipe refuses it.",
}


def te_arguments(precision: Precision) -> tuple[str, dict[str, Any], dict[str, bool]]:
    """Return the recipe's class, its arguments (the format by name), and each operand's ``power_2_scale``.

    Raises PrecisionError if no single recipe says the contract: without FP8, with rules by module, or with a backward
    of its own.
    """
    p = precision
    if p.scaling is None or p.format is None:
        raise PrecisionError(
            f"The contract {p.name!r} has no FP8, so TransformerEngine needs no recipe for it.",
            "A recipe describes FP8 GEMMs.",
            "Open TE's autocast with enabled=False, or choose an FP8 contract.",
        )
    if p.modules or p.backward_scaling:
        raise PrecisionError(
            f"modules={p.modules!r}, backward_scaling={p.backward_scaling!r} as one recipe of TransformerEngine.",
            "A recipe of TE's own is one for all modules and for both directions.",
            "Leave them out; or train with nemo_fp8's plugin or bridge_config, which give each linear its own.",
        )
    arguments: dict[str, Any] = {"fp4_format" if p.scaling == "nvfp4" else "fp8_format": _FORMATS[p.format]}
    if p.scaling == "delayed":
        arguments |= {
            "margin": p.margin,
            "amax_history_len": p.amax_history_len,
            "amax_compute_algo": p.amax_compute_algo,
        }
    if p.attention or p.multi_head_attention:
        arguments |= {"fp8_dpa": p.attention, "fp8_mha": p.multi_head_attention}
    arguments |= _beyond_scales(p)
    operands = {name: getattr(p, scale) == "pow2" for name, scale in _QPARAMS.items()} if p.scaling in _SCALED else {}
    return CLASSES[p.scaling], arguments, operands


def _variable_fields(p: Precision) -> dict[str, tuple[Any, Any]]:
    """Return the recipe's fields that a variable can say, too: the contract's value of each, and TE's default."""

    def plain(word: str | None) -> Any:
        return word == "1" if word in ("0", "1") else word

    return {
        variable.field: (plain(variable.wanted(p)), plain(variable.default))
        for variable in variables_of(p.scaling).values()
        if variable.field in _SAID
    }


def _beyond_scales(p: Precision) -> dict[str, Any]:
    """Return the fields that a variable can say whose value is not TE's default."""
    return {field: value for field, (value, usual) in _variable_fields(p).items() if value != usual}


def te_recipe(precision: Precision, recipe_module: ModuleType | None = None) -> Any:
    """Construct TE's recipe. ``recipe_module`` is ``transformer_engine.common.recipe``, or a module from ``te_loader``.

    Raises PrecisionError if this version of TE cannot carry the contract out.
    """
    if recipe_module is None:
        from nemo_fp8.render.te_loader import load_recipe_module

        recipe_module = load_recipe_module()
    name, arguments, operands = te_arguments(precision)
    recipe_class = getattr(recipe_module, name, None)
    if recipe_class is None:
        raise PrecisionError(
            f"This TransformerEngine has no {name}.",
            f"It is too old for {precision.scaling} scaling.",
            "Install TransformerEngine 2.3 or newer.",
        )
    if not precision.wgrad:
        raise PrecisionError(
            f"wgrad=False with TransformerEngine's {name}.",
            "TE 2 always runs the weight gradient in FP8: the argument for it is gone, and unknown ones are dropped.",
            "Set wgrad=True.",
        )
    known = {f.name for f in dataclasses.fields(recipe_class)}
    missing = [a for a in arguments if a not in known]
    if missing:
        raise PrecisionError(
            f"{name} of this TransformerEngine does not know {', '.join(missing)}.",
            "TE drops arguments that it does not know, so the recipe would not do what the contract says.",
            "Use another version of TransformerEngine, or leave these settings out of the contract.",
        )
    arguments |= {name: recipe_module.Format[arguments[name]] for name in _FORMAT_ARGUMENTS if name in arguments}
    # Given even where the value is TE's default, since the environment may have changed the default.
    arguments = {
        field: value for field, (value, _) in _variable_fields(precision).items() if field in known
    } | arguments
    recipe = recipe_class(**arguments)
    for operand, power_2 in operands.items():
        setattr(recipe, operand, dataclasses.replace(getattr(recipe, operand), power_2_scale=power_2))
    return recipe


def from_te(recipe: Any) -> Precision:
    """Return the contract of a TE recipe object: its formats and scales for training, and defaults for the rest.

    A CustomRecipe that was made of a contract has it as ``qfactory.precision``. Raises PrecisionError for any other.
    """
    of_ours = getattr(getattr(recipe, "qfactory", None), "precision", None)
    if isinstance(of_ours, Precision):
        return of_ours
    scaling = next((s for s, name in CLASSES.items() if any(c.__name__ == name for c in type(recipe).__mro__)), None)
    if scaling is None:
        raise PrecisionError(
            f"{type(recipe).__name__} is no recipe that a contract describes.",
            "A contract describes delayed, tensorwise, blockwise and mxfp8 scaling, and nvfp4.",
            f"Use one of {', '.join(CLASSES.values())}.",
        )
    return _read(
        scaling,
        {name: getattr(recipe, name) for name in _READ if hasattr(recipe, name)}
        | {"fp4_format" if scaling == "nvfp4" else "fp8_format": getattr(recipe, "fp4_format", recipe.fp8_format).name},
    )


_FORMAT_ARGUMENTS = ("fp8_format", "fp4_format")
_READ = (
    *("margin", "amax_history_len", "amax_compute_algo", "fp8_dpa", "fp8_mha", *_QPARAMS),
    *_SAID,
)


def _read(scaling: str, values: dict[str, Any]) -> Precision:
    named = next(values[name] for name in _FORMAT_ARGUMENTS if name in values)
    fields: dict[str, Any] = {"scaling": scaling, "format": {v: k for k, v in _FORMATS.items()}[named]}
    for variable in variables_of(scaling).values():
        value = values.get(variable.field)
        meanings = {word: meaning for meaning, word in variable.words.items()}
        word = str(int(value)) if isinstance(value, bool) else value
        if variable.field in values and word in meanings and variable.field in _SAID:
            fields |= dict.fromkeys(variable.contract, meanings[word])
    if scaling == "delayed":
        fields |= {name: values[name] for name in ("margin", "amax_history_len", "amax_compute_algo")}
    fields |= {"attention": values.get("fp8_dpa", False), "multi_head_attention": values.get("fp8_mha", False)}
    if scaling in _SCALED:
        for operand, field in _QPARAMS.items():
            power_2 = values[operand] if isinstance(values[operand], bool) else values[operand].power_2_scale
            scale = "pow2" if power_2 else "fp32"
            if fields.setdefault(field, scale) != scale:
                raise PrecisionError(
                    "A TE recipe whose inputs and gradients have different scales.",
                    "A contract has one setting for both, activation_scale.",
                    "Give fp8_quant_fwd_inp and fp8_quant_bwd_grad the same power_2_scale.",
                )
    return Precision(**fields)


def render(precision: Precision) -> Rendering:
    """Render the recipe as Python, with the environment that it needs."""
    if not precision.is_quantized:
        note = "No FP8: TransformerEngine needs no recipe, only autocast(enabled=False)."
        lost, notes = lost_fields(precision, Precision(), _REASONS, "A TE recipe")
        nothing: dict[str, Any] = {"recipe": None, "arguments": {}, "power_2_scale": {}, "environment": {}}
        return Rendering("te", "recipe = None", nothing, (note, *notes), lost)
    name, arguments, operands = te_arguments(precision)
    read_back = _read(str(precision.scaling), arguments | operands)
    lost, notes = lost_fields(precision, read_back, _REASONS, "A TE recipe")
    environment = {} if precision.weight_scale != precision.activation_scale else te_environment(precision)
    shown = [
        f"    {key}={'Format.' + value if key in _FORMAT_ARGUMENTS else repr(value)},\n"
        for key, value in arguments.items()
    ]
    imports = ", ".join(["Format", name, *(["QParams"] if operands else [])])
    text = f"from transformer_engine.common.recipe import {imports}\n\nrecipe = {name}(\n{''.join(shown)})\n"
    text += "".join(f"recipe.{operand} = QParams(power_2_scale={power_2})\n" for operand, power_2 in operands.items())
    data = {"recipe": name, "arguments": arguments, "power_2_scale": operands, "environment": environment}
    return Rendering("te", text.rstrip("\n"), data, tuple(notes), lost)
