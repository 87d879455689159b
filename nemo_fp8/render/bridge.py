"""Megatron-Bridge: write and read the fields of ``MixedPrecisionConfig``.

Bridge's class is NeMo's plugin under other spellings: the compute dtype is one of three flags, and the loss-scaling
names carry no ``fp16_``. So this file only translates spellings, and ``nemo.py`` holds the settings and their checks.
Field names are those of megatron-bridge 0.3.1; a test compares them with the real class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.render import nemo
from nemo_fp8.render.rendering import Rendering, lost_fields, python_call

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


def to_bridge(precision: Precision) -> dict[str, Any]:
    """Return keyword arguments for ``MixedPrecisionConfig``; dtypes by name, see ``nemo.resolve_dtypes``."""
    arguments = nemo.to_nemo(precision)
    compute = arguments.pop("precision")
    flag = next(flag for flag, name in _FLAGS.items() if name == compute)
    return {flag: True} | {_LOSS_SCALING.get(name, name): value for name, value in arguments.items()}


def from_bridge(values: Mapping[str, Any]) -> Precision:
    """Return the contract of a ``MixedPrecisionConfig`` with these fields; others have Bridge's defaults.

    Raises PrecisionError for a field or value that the contract cannot express.
    """
    known = (*_FLAGS, *FIELDS, *_FP4)
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
    return nemo.from_nemo({"precision": _FLAGS[flags[0]]} | arguments)


def render(precision: Precision) -> Rendering:
    """Render the config as a Python call."""
    values = to_bridge(precision)
    lost, notes = lost_fields(precision, from_bridge(values), nemo.REASONS, "Megatron-Bridge")
    imports = "import torch\nfrom megatron.bridge.training.mixed_precision import MixedPrecisionConfig\n\n"
    text = imports + "mixed_precision = " + python_call("MixedPrecisionConfig", values)
    return Rendering("bridge", text, values, (*notes, *nemo.core_defects(precision)), lost)
