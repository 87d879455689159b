"""Megatron-Bridge: write and read the fields of ``MixedPrecisionConfig``.

Bridge's class is NeMo's plugin under other spellings: the compute dtype is one of three flags, and the loss-scaling
names carry no ``fp16_``. So this file only translates spellings, and ``nemo.py`` holds the settings and their checks.
Field names are those of megatron-bridge 0.3.1; a test compares them with the real class.

Names to keep and rules by module are no field of that class. Megatron-core 0.16 has ``quant_recipe`` for them, which
belongs to the provider, so it is rendered beside the call: ``provider.quant_recipe = quant_recipe``. It is Megatron's
file of recipes (:mod:`.te_precision`). ``bridge_config`` carries rules out by hooks of its own and not by it, since it

    counts layers from zero on each pipeline stage, and a contract over all of them
    leaves weights that were made in FP8 as they are, also those of a module in the compute dtype; refused here
    sees no shapes, so that a linear that does not fit ends in an error of a kernel
    makes recipes without arguments, and so without a backward or NVFP4 settings of the contract's own
    matches Megatron's names with globs, and nothing else; refused here

Where none of these matters both do the same, which a test holds to the bit.
"""

from __future__ import annotations

import pprint
import textwrap
from collections.abc import Mapping
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.render import nemo, nemo_script
from nemo_fp8.render.rendering import Rendering, leading_as_kept, lost_fields, names_and_rules, python_call
from nemo_fp8.render.te_precision import from_te_precision, to_te_precision

_FLAGS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32"}
_LOSS_SCALING = {name: name.removeprefix("fp16_") for name in nemo.NAMES if name.startswith("fp16_")}

# Bridge's field -> NeMo's argument, for every field but the three flags.
FIELDS: dict[str, str] = {
    _LOSS_SCALING.get(name, name): name for name in nemo.NAMES if name not in ("precision", "fp8_params")
}
# Bridge's defaults that differ from NeMo's.
DEFAULTS: dict[str, Any] = {"fp8_recipe": "tensorwise"}
# Fields of Bridge's main branch, refused unless they are off.
_FP4 = ("fp4_param", "fp4_param_gather")
RECIPE = "quant_recipe"  # the provider's, beside the class


def to_bridge(precision: Precision) -> dict[str, Any]:
    """Return keyword arguments for ``MixedPrecisionConfig``; dtypes by name, see ``nemo.resolve_dtypes``."""
    arguments = nemo.to_nemo(precision)
    compute = arguments.pop("precision")
    flag = next(flag for flag, name in _FLAGS.items() if name == compute)
    return {flag: True} | {_LOSS_SCALING.get(name, name): value for name, value in arguments.items()}


def to_quant_recipe(precision: Precision) -> dict[str, Any] | None:
    """Return the provider's ``quant_recipe``, as a dict for ``RecipeConfig.from_config_dict``; None if none is needed.

    Raises PrecisionError for what Megatron would do otherwise.
    """
    if not precision.is_quantized or not (precision.keep or precision.modules):
        return None
    if precision.fp8_param:
        raise PrecisionError(
            "keep or modules as a quant_recipe, with fp8_param=True.",
            "Megatron applies it after the weights were made, in FP8, and multiplies with these also where a rule says "
            "the compute dtype.",
            "Set fp8_param=False, or take bridge_config, which makes such weights anew.",
        )
    return to_te_precision(precision)


def from_bridge(values: Mapping[str, Any]) -> Precision:
    """Return the contract of a ``MixedPrecisionConfig`` with these fields; others have Bridge's defaults.

    ``quant_recipe``, as a dict, may be among them; its first rules for the compute dtype become names to keep. Raises
    PrecisionError for a field or value that the contract cannot express.
    """
    known = (*_FLAGS, *FIELDS, *_FP4, RECIPE)
    problems = [unknown("MixedPrecisionConfig field", name, known) for name in values if name not in known]
    if problems:
        raise PrecisionError(problems)
    flags = [flag for flag in _FLAGS if values.get(flag)]
    if len(flags) != 1:
        raise PrecisionError(
            f"{' and '.join(flags) or 'None'} of bf16, fp16 and fp32 is set.",
            "Layers compute in exactly one dtype.",
            "Set one of bf16=True, fp16=True, fp32=True.",
        )
    if any(values.get(name) for name in _FP4):
        raise PrecisionError(
            "FP4 parameters.",
            "A contract keeps the weights of NVFP4 in BF16, as Bridge 0.3.1 does, which has no setting for it.",
            "Leave them out.",
        )
    arguments = {FIELDS[name]: value for name, value in values.items() if name in FIELDS}
    # Without FP8 the recipe has no meaning; NeMo's reader accepts NeMo's default then, and no other.
    if arguments.get("fp8") is None and arguments.get("fp8_recipe") == DEFAULTS["fp8_recipe"]:
        del arguments["fp8_recipe"]
    elif arguments.get("fp8") is not None:
        arguments = DEFAULTS | arguments
    found = nemo.from_nemo({"precision": _FLAGS[flags[0]]} | arguments)
    every = from_te_precision(values.get(RECIPE) or {}, found.compute, found.format)
    kept, rules = names_and_rules(every, found.compute)
    return found.replace(keep=kept, modules=rules)


def render(precision: Precision) -> Rendering:
    """Render the config as a Python call, and beside it the provider's ``quant_recipe`` if modules have recipes."""
    values, notes = to_bridge(precision), list[str]()
    try:
        recipe = to_quant_recipe(precision)
    except PrecisionError as error:
        recipe = None
        notes = [f"No quant_recipe: {p.what} {p.why} {p.remedy}" for p in error.problems]
    imports = "import torch\nfrom megatron.bridge.training.mixed_precision import MixedPrecisionConfig\n\n"
    text = imports + "mixed_precision = " + python_call("MixedPrecisionConfig", values)
    if recipe is not None:
        text += "\n\nfrom megatron.core.quantization.quant_config import RecipeConfig\n\n"
        text += "# For the provider: provider.quant_recipe = quant_recipe\nquant_recipe = "
        text += (
            f"RecipeConfig.from_config_dict(\n{textwrap.indent(pprint.pformat(recipe, sort_dicts=False), '    ')}\n)"
        )
        values[RECIPE] = recipe
        notes.append(
            "quant_recipe counts layers from zero on each pipeline stage; bridge_config counts all of them, without it."
        )
    said = precision if recipe is None else leading_as_kept(precision)
    lost, unsaid = lost_fields(said, from_bridge(values), nemo_script.REASONS, "Megatron-Bridge")
    return Rendering("bridge", text, values, (*unsaid, *notes, *nemo_script.core_defects(precision)), lost)
