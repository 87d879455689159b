"""NeMo 2.7.3: write and read the keyword arguments of ``MegatronMixedPrecision``. ``nemo_script.py`` shows them.

``SETTINGS`` maps NeMo's names to contract fields. ``changes_from_nemo`` turns keyword arguments under NeMo's names
into changes of a contract, which is how our factories take every FP8 argument of the NeMo documentation. NeMo checks
almost none of them, so most of this file refuses what NeMo would accept and not do: one setting with two values under
its several names, a flag without its counts, a recipe that does not exist.

dtypes are names here (``"torch.bfloat16"``), so that reading and writing needs no torch; ``resolve_dtypes`` replaces
them by torch's objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.moved import renamed
from nemo_fp8.render.settings import Setting, read, same, write

if not TYPE_CHECKING:  # see nemo_fp8.moved
    _TO_SCRIPT = ("REASONS", "core_defects", "render")
    __getattr__ = renamed(__name__, {name: f"nemo_fp8.render.nemo_script.{name}" for name in _TO_SCRIPT})

# NeMo's name -> contract field, with NeMo's own default.
SETTINGS: dict[str, Setting] = {
    "precision": Setting(
        "compute",
        values={"bf16-mixed": "bf16", "16-mixed": "fp16", "32": "fp32"}
        | {"bf16": "bf16", "fp16": "fp16", "fp16-mixed": "fp16", "16": "fp16", 16: "fp16", "fp32": "fp32", 32: "fp32"},
    ),
    "grad_reduce_in_fp32": Setting("grad_reduce", True, {True: "fp32", False: "compute"}),
    "fp8": Setting("format", None, same(None, "hybrid", "e4m3")),
    "fp8_recipe": Setting("scaling", "delayed", same("delayed", "tensorwise", "blockwise", "mxfp8")),
    "fp8_margin": Setting("margin", 0),
    "fp8_amax_history_len": Setting("amax_history_len", 1),
    "fp8_amax_compute_algo": Setting("amax_compute_algo", "most_recent", same("max", "most_recent")),
    "fp8_wgrad": Setting("wgrad", True),
    "fp8_dot_product_attention": Setting("attention", False),
    "fp8_multi_head_attention": Setting("multi_head_attention", False),
    "fp8_param_gather": Setting("fp8_param", False),
    "fp8_params": Setting("fp8_param", False, alias=True),
    "fp8_param": Setting("fp8_param", False, alias=True),
    "num_layers_at_start_in_bf16": Setting("first_layers", 0),
    "num_layers_at_end_in_bf16": Setting("last_layers", 0),
    "fp16_loss_scale": Setting("loss_scale", None),
    "fp16_initial_loss_scale": Setting("initial_loss_scale", 4294967296),
    "fp16_min_loss_scale": Setting("min_loss_scale", 1.0),
    "fp16_loss_scale_window": Setting("loss_scale_window", 1000),
    "fp16_hysteresis": Setting("hysteresis", 2),
}

# NeMo's arguments that repeat others or must not be given, with NeMo's default.
IMPLIED: dict[str, Any] = {
    "params_dtype": None,
    "pipeline_dtype": None,
    "autocast_dtype": None,
    "autocast_enabled": False,
    "first_last_layers_bf16": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "fp4": None,
    "fp4_recipe": "nvfp4",
}

NAMES = (*SETTINGS, *IMPLIED)
"""Every keyword argument of NeMo's plugin, and ``fp8_param``, the name that its configs use."""

_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
_CONTRACT = tuple(f.name for f in fields(Precision) if f.name != "name")
_ONE_SETTING = tuple(name for name, s in SETTINGS.items() if s.field == "fp8_param")

# Values that people try, with a better answer than "unknown": name, values -> why, remedy.
_TRIED: dict[tuple[str, str], tuple[str, str]] = {
    ("fp8", "e5m2"): (
        "E5M2 holds two mantissa bits; Megatron has it for gradients only, and NeMo would pass the name on unchecked.",
        "Set fp8='hybrid' (E4M3 forward, E5M2 gradients) or fp8='e4m3'.",
    ),
    ("fp8_recipe", "current current_scaling per_tensor tensor"): (
        "Megatron calls current scaling 'tensorwise'; NeMo would pass the name on unchecked.",
        "Did you mean fp8_recipe='tensorwise'?",
    ),
    ("fp8_recipe", "subchannel subchannel_scaling block deepseek"): (
        "Megatron calls sub-channel scaling 'blockwise'; NeMo would pass the name on unchecked.",
        "Did you mean fp8_recipe='blockwise'?",
    ),
    ("precision", "fp8"): (
        "NeMo turns fp32, fp16 and bf16 all off for this value: FP8 stands beside a compute dtype, never alone.",
        "Set precision='bf16-mixed' and fp8='hybrid'.",
    ),
}
_TEMPTING = {(name, value): told for (name, values), told in _TRIED.items() for value in values.split()}

# A switch that only repeats other settings -> what is wrong if it is on without them, and off with them.
_SWITCHES = {
    "first_last_layers_bf16": (
        Problem(
            "first_last_layers_bf16=True without counts keeps no layer.",
            "NeMo sets num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 to 0 unless they are given.",
            "Give both counts, such as num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1.",
        ),
        Problem(
            "num_layers_at_start_in_bf16 or num_layers_at_end_in_bf16 with first_last_layers_bf16=False.",
            "NeMo reads the counts only when the switch is on, so every layer would run in FP8.",
            "Set first_last_layers_bf16=True, or leave the counts out.",
        ),
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        Problem(
            "reuse_grad_buf_for_mxfp8_param_ag=True without MXFP8 primary weights.",
            "The gradient buffer is lent to the gather of MXFP8 weights, and there is none.",
            "Leave it out, or set fp8_recipe='mxfp8' and fp8_param_gather=True.",
        ),
        Problem(
            "MXFP8 primary weights with reuse_grad_buf_for_mxfp8_param_ag=False.",
            "Megatron gathers MXFP8 weights through the gradient buffer and through nothing else.",
            "Set reuse_grad_buf_for_mxfp8_param_ag=True, or fp8_param_gather=False.",
        ),
    ),
}


# ---------------------------------------------------------------------- contract -> NeMo


def to_nemo(precision: Precision) -> dict[str, Any]:
    """Return keyword arguments for ``MegatronMixedPrecision`` that define the precision or differ from a default."""
    p = precision
    dtype = _DTYPES[p.compute]
    head = {"precision", "grad_reduce_in_fp32"} | ({"fp8", "fp8_recipe", "fp8_param_gather"} if p.is_fp8 else set())
    head |= {"fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"} if p.scaling == "delayed" else set()
    values = write({n: s for n, s in SETTINGS.items() if p.is_fp8 or n != "fp8_recipe"}, p)
    said = {name: value for name, value in values.items() if name in head or value != SETTINGS[name].default}
    implied = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_enabled": False,
        "first_last_layers_bf16": p.first_layers > 0 or p.last_layers > 0,
        "reuse_grad_buf_for_mxfp8_param_ag": p.scaling == "mxfp8" and p.fp8_param,
    }
    always = ["params_dtype", "pipeline_dtype", "autocast_enabled"]
    if p.scaling == "nvfp4":
        implied |= {"fp4": p.format, "fp4_recipe": p.scaling}
        always += ["fp4", "fp4_recipe"]
    said |= {name: value for name, value in implied.items() if name in always or value != IMPLIED[name]}
    order = [*always, *(n for n in NAMES if n not in always)]
    return {"precision": said["precision"]} | {name: said[name] for name in order if name in said}


def beyond_nemo(precision: Precision) -> dict[str, Any]:
    """Return the fields that define a contract and have no name in NeMo's plugin and in Bridge's config."""
    named = {setting.field for setting in SETTINGS.values()}
    return {name: value for name, value in precision.definition().items() if name in _CONTRACT and name not in named}


def resolve_dtypes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same arguments with torch's dtypes in place of their names."""
    import torch

    names = {name: getattr(torch, name.removeprefix("torch.")) for name in _DTYPES.values()}
    return {key: names.get(value, value) if isinstance(value, str) else value for key, value in arguments.items()}


# ---------------------------------------------------------------------- NeMo -> contract


def from_nemo(arguments: Mapping[str, Any]) -> Precision:
    """Return the contract of NeMo's keyword arguments; those that are not given have NeMo's defaults.

    Raises PrecisionError for arguments that NeMo would accept and not obey.
    """
    defaults = {name: s.default for name, s in SETTINGS.items() if not s.alias and name != "precision"} | IMPLIED
    # A default must not contradict a value that is given under one of the other two names.
    given = {name for name in _ONE_SETTING if arguments.get(name) is not None}
    for name in _ONE_SETTING if given else ():
        defaults.pop(name, None)
    if "precision" not in arguments:
        raise PrecisionError(
            "precision is missing.",
            "NeMo's plugin has no default for it.",
            "Give precision='bf16-mixed', '16-mixed' or '32'.",
        )
    return Precision(**changes_from_nemo({**defaults, **arguments}))


def changes_from_nemo(arguments: Mapping[str, Any], base: Precision | None = None) -> dict[str, Any]:
    """Translate keyword arguments under NeMo's names (or the contract's own) to changes of ``base``.

    The result is for ``base.replace(**changes)``. Raises PrecisionError, with every problem, for settings that NeMo
    would accept and not do.
    """
    base = base or Precision()
    known = (*NAMES, *(n for n in _CONTRACT if n not in NAMES))
    settings = SETTINGS | {name: Setting(name) for name in _CONTRACT if name not in SETTINGS}
    problems = [unknown("argument", name, known) for name in arguments if name not in known]
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        tempting = _TEMPTING.get((name, value)) if isinstance(value, str) else None
        if tempting:
            problems.append(Problem(f"{name}={value!r} is no setting of Megatron.", *tempting))
        elif name in settings and not (name in _ONE_SETTING and value is None):
            given[name] = value
    changes, wrong = read(settings, given)
    changes = _followed(changes, arguments, base)
    changes, bad = _four_bits(changes, arguments, base)
    problems += [*wrong, *bad, *_repeated(changes, arguments, base)]
    if problems:
        raise PrecisionError(problems)
    return changes


def _followed(changes: dict[str, Any], arguments: Mapping[str, Any], base: Precision) -> dict[str, Any]:
    """Add the changes that follow from NeMo's two switches: ``fp8`` and ``first_last_layers_bf16``."""
    followed: dict[str, Any] = {}
    if "format" in changes and changes["format"] is None:
        followed = {"fp8_param": False, "attention": False, "multi_head_attention": False}
        # NeMo's recipe has a value also if FP8 is off.
        if changes.get("scaling", "delayed") == "delayed":
            changes = changes | {"scaling": None}
    elif "format" in changes and base.scaling in (None, "nvfp4"):
        followed = {"scaling": SETTINGS["fp8_recipe"].default}
    if arguments.get("first_last_layers_bf16") is False:
        followed |= {"first_layers": 0, "last_layers": 0}
    return followed | changes


def _four_bits(
    changes: dict[str, Any], arguments: Mapping[str, Any], base: Precision
) -> tuple[dict[str, Any], list[Problem]]:
    """Add the changes of NeMo's two settings for FP4, ``fp4`` and ``fp4_recipe``, which stand beside those for FP8."""
    fp4, recipe = arguments.get("fp4"), arguments.get("fp4_recipe") or IMPLIED["fp4_recipe"]
    if fp4 is None:
        off = "fp4" in arguments and base.scaling == "nvfp4" and changes.get("format") is None
        return changes | ({"format": None, "scaling": None} if off else {}), []
    problems = [
        unknown(f"value for {name}:", value, (known,))
        for name, value, known in (("fp4", fp4, "e2m1"), ("fp4_recipe", recipe, "nvfp4"))
        if value != known
    ]
    fp8 = changes.get("format", base.format)
    if fp8 not in (None, "e2m1"):
        problems.append(
            Problem(
                f"fp4={fp4!r} together with fp8={fp8!r}.",
                "Megatron runs one or the other for a model.",
                "Leave one of them out (fp8=None); single modules get another recipe by modules=.",
            )
        )
    return (changes if problems else changes | {"format": fp4, "scaling": recipe}), problems


def _repeated(changes: Mapping[str, Any], arguments: Mapping[str, Any], base: Precision) -> Iterable[Problem]:
    """Check that arguments that repeat others have the same value."""
    names = ("compute", "scaling", "fp8_param", "first_layers", "last_layers")
    compute, scaling, gathered, first, last = (changes.get(name, getattr(base, name)) for name in names)
    repeats = {
        "first_last_layers_bf16": bool(first or last),
        "reuse_grad_buf_for_mxfp8_param_ag": scaling == "mxfp8" and bool(gathered),
    }
    for name, (alone, against) in _SWITCHES.items():
        switch = arguments.get(name)
        if not isinstance(switch, bool | None):
            yield Problem(f"{name}={switch!r} is not true or false.", "It is a switch.", "Write True or False.")
        elif switch is not None and switch != repeats[name]:
            yield alone if switch else against
    for name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        value = arguments.get(name)
        if value is not None and _dtype_name(value) != _DTYPES.get(compute):
            yield Problem(
                f"{name}={value} does not fit {compute} precision.",
                "Parameters, pipeline messages and layers have one dtype in a contract.",
                f"Leave {name} out, or set precision to match it.",
            )
    if arguments.get("autocast_enabled", False) is not False:
        yield Problem(
            "autocast_enabled=True.",
            "No Megatron config has a field of that name, so NeMo drops it without a word.",
            "Leave it out: Megatron's layers cast for themselves.",
        )


def _dtype_name(dtype: Any) -> str:
    """Return ``"torch.bfloat16"`` for a torch dtype or any usual name of it."""
    name = str(dtype).removeprefix("torch.")
    usual = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}
    return f"torch.{usual.get(name, name)}"
