"""vLLM: engine arguments, the flags of ``vllm serve``, and Hugging Face's ``quantization_config``.

There are two ways to a quantized rollout. Stock vLLM quantizes a BF16 checkpoint itself (:mod:`.vllm_online`), in two
formats and with no choice of layers by number; it is rendered if the contract asks for no more than that. All else, and
all of NVFP4, needs our plugin (``quantization="nemo_fp8"``), whose options are passed in ``hf_overrides`` under the
contract's own names. A checkpoint that is already quantized says so in its ``quantization_config``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_fp8.contract import ROLLOUT_BLOCKS, Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.models.governed import scales_tokens
from nemo_fp8.moved import renamed
from nemo_fp8.render.rendering import Rendering, lost_fields
from nemo_fp8.render.vllm_online import ONLINE, STOCK, as_read, from_online, to_online, why_plugin

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(
        __name__,
        {
            name: f"nemo_fp8.render.vllm_online.{name}"
            for name in ("STOCK_SCALES", "pattern_to_regex", "regex_to_pattern")
        },
    )

PLUGIN = "nemo_fp8"
SMALL_ENGINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""The environment of an engine for a small model: quiet, offline, and on a CPU a GiB of cache and no processors of its
own. vLLM reads it when it is imported."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# The plugin's settings, under the contract's names.
PLUGIN_FIELDS = (
    "rollout",
    "weight_scale",
    "activation_scale",
    "rollout_block",
    "activation_scheme",
    "first_layers",
    "last_layers",
    "keep",
    "modules",
    "strict",
)
# What a rule for the contract's own recipe means: the contract's own blocks and scales, and not those that another
# contract's rule for this recipe would give.
_OF_RULES = ("format", "scaling")
# Fields that are said only where they differ from these, which every version of the plugin takes.
_UNSAID = {"rollout": "fp8", "modules": []}
# The plugin's options beyond the contract: option -> its values, the default first.
PLUGIN_OPTIONS = {
    # Activations as the kernel takes them, or quantized in 1x128 groups before a kernel for BF16 (CPUs).
    "activations": ("kernel", "emulated"),
    # vLLM's FP8 kernel if it has one for this machine, else "codes": FP32 products that take the codes themselves for a
    # few tokens, and decode a weight for more. "decode" decodes it for any number of tokens.
    "kernel": ("auto", "codes", "decode"),
    # Weights in the compute dtype: packed by vLLM for a CPU's kernels, or multiplied as they lie in a checkpoint.
    "unquantized": ("packed", "rows"),
    # vLLM's cache, of the type that its own argument says; or keys and values rounded to FP8 in one of BF16 (CPUs).
    "cache": ("auto", "rounded"),
}
_TRAINING = "Said of training; a rollout has no use for it."
REASONS = {
    **dict.fromkeys(
        (
            "format",
            "scaling",
            "margin",
            "amax_history_len",
            "amax_compute_algo",
            "wgrad",
            "attention",
            "multi_head_attention",
            "fp8_param",
        ),
        _TRAINING,
    ),
    **dict.fromkeys(
        ("grad_reduce", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        _TRAINING,
    ),
    "importance_sampling": "A setting of the policy loss, not of the engine.",
}


_FIXED_SCALE = (
    "vLLM's kernels for NVFP4 linears take one scale of inputs for a layer, here 1, where the contract has one for "
    "each token; on a CPU `engine_args(..., activations='emulated')` gives each token its own."
)


# ---------------------------------------------------------------------- engine arguments


def to_vllm(precision: Precision | str, plugin: bool | None = None) -> dict[str, Any]:
    """Return keyword arguments for ``vllm.LLM`` on an unquantized checkpoint.

    ``plugin`` says whether ours quantizes, or vLLM itself; None takes vLLM itself where it can do what the contract
    asks. Raises PrecisionError if it has to and cannot.
    """
    p = given(precision)
    arguments: dict[str, Any] = {"dtype": _DTYPES[p.compute], "kv_cache_dtype": p.kv_cache}
    if not p.rolls_out_quantized:
        return arguments
    if plugin or (plugin is None and why_plugin(p)):
        arguments |= {"quantization": PLUGIN, "hf_overrides": {"quantization_config": to_plugin(p)}}
    else:
        arguments |= to_online(p)
    if p.deep_gemm:
        arguments["linear_backend"] = "deep_gemm"
    return arguments


def from_vllm(arguments: Mapping[str, Any]) -> Precision:
    """Return the contract of a rollout with these engine arguments; fields that they do not set have defaults.

    Raises PrecisionError for a dtype or a quantization that no contract says.
    """
    dtype = str(arguments.get("dtype", "bfloat16")).removeprefix("torch.")
    compute = {v: k for k, v in _DTYPES.items()}.get(dtype)
    kv_cache = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}.get(arguments.get("kv_cache_dtype", "auto"))
    quantization = arguments.get("quantization")
    known = (None, PLUGIN, ONLINE, *STOCK.values())
    if compute is None:
        raise PrecisionError([unknown("dtype", dtype, _DTYPES.values())])
    if kv_cache is None:
        raise PrecisionError([unknown("kv_cache_dtype", arguments["kv_cache_dtype"], ("auto", "fp8"))])
    if quantization not in known:
        raise PrecisionError([unknown("quantization", quantization, [name for name in known if name])])
    fields: dict[str, Any] = {"compute": compute, "kv_cache": kv_cache}
    if quantization is not None:
        fields |= {"rollout": "fp8", "deep_gemm": arguments.get("linear_backend") == "deep_gemm"}
    if quantization == PLUGIN:
        config = arguments.get("hf_overrides", {}).get("quantization_config", {"quant_method": PLUGIN})
        fields |= from_plugin(config) | ({"kv_cache": "fp8"} if config.get("cache") == "rounded" else {})
    elif quantization is not None:
        fields |= from_online(quantization, arguments.get("quantization_config") or {}, compute)
    return Precision(**fields)


def to_plugin(precision: Precision) -> dict[str, Any]:
    """Return the ``quantization_config`` that our vLLM plugin reads; it means FP8 where it names no ``rollout``."""
    values = precision.to_dict()
    said = {name: values[name] for name in PLUGIN_FIELDS if name not in _UNSAID or values[name] != _UNSAID[name]}
    if any(recipe == precision.scaling for _, recipe in precision.modules):
        said |= {name: values[name] for name in _OF_RULES}
    return {"quant_method": PLUGIN} | said


def from_plugin(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contract fields of a plugin's ``quantization_config``. Raises PrecisionError for unknown keys."""
    fields = (*PLUGIN_FIELDS, *_OF_RULES)
    known = ("quant_method", *fields, *PLUGIN_OPTIONS)
    problems = [
        unknown(f"key in the {PLUGIN} quantization_config:", name, known) for name in config if name not in known
    ]
    if config.get("quant_method", PLUGIN) != PLUGIN:
        problems.append(unknown("quant_method", config["quant_method"], (PLUGIN,)))
    if problems:
        raise PrecisionError(problems)
    return {name: value for name, value in config.items() if name in fields}


def options_of_plugin(config: Mapping[str, Any]) -> dict[str, str]:
    """Return every option of a plugin's ``quantization_config``, with the default of those that it does not set.

    Raises PrecisionError for a value that an option does not have.
    """
    chosen = {name: config.get(name, values[0]) for name, values in PLUGIN_OPTIONS.items()}
    problems = [
        unknown(f"{name} for {PLUGIN}:", chosen[name], values)
        for name, values in PLUGIN_OPTIONS.items()
        if chosen[name] not in values
    ]
    if problems:
        raise PrecisionError(problems)
    return chosen


# ---------------------------------------------------------------------- Hugging Face


def to_hugging_face(precision: Precision, kept: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint written with this contract's rollout.

    ``kept`` names the modules that stayed in the compute dtype. The format has names, but no patterns and no layer
    counts, so only a caller that has the model can give them. Raises PrecisionError, with every problem, for a contract
    that the format cannot say.
    """
    p = precision
    named = [pattern for pattern in p.keep if not re.search(r"[*?\[]|^re:", pattern)]
    rows = (
        (
            p.rollout == "nvfp4",
            "NVFP4 as a Hugging Face FP8 checkpoint.",
            "ModelOpt's format holds it, which names what is in it and what is not.",
            "`nemo-fp8 export --layout modelopt` writes it.",
        ),
        (
            p.rollout == "compute",
            f"{p.compute.upper()} generation as an FP8 checkpoint.",
            "Nothing to quantize.",
            "Set rollout='fp8'.",
        ),
        (
            p.rollout_block == "1x32",
            "rollout_block='1x32' as a Hugging Face FP8 checkpoint.",
            "quant_method 'fp8' knows 128x128 blocks and whole tensors; MX checkpoints have a format of their own.",
            "Set rollout_block='128x128' for the export.",
        ),
        (
            p.weight_scale != p.activation_scale,
            f"weight_scale={p.weight_scale!r} with activation_scale={p.activation_scale!r} in a quantization_config.",
            "It has one scale_fmt for both.",
            "Give both the same scale.",
        ),
        (
            kept is None and (len(named) < len(p.keep) or p.first_layers > 0 or p.last_layers > 0),
            "A quantization_config names the modules that are kept, and the contract gives patterns or counts of "
            "layers.",
            "Which names those are depends on the model.",
            "Pass kept=[...], the names of the kept modules, as the exporter does.",
        ),
        (
            kept is None and bool(p.modules),
            f"modules={p.modules!r} in a quantization_config.",
            "It has one format for every module that is not kept, and names in place of patterns.",
            "`nemo-fp8 export` writes rules as names: for the compute dtype, or in several formats of ModelOpt's.",
        ),
    )
    problems = [Problem(*words) for wrong, *words in rows if wrong]
    if problems:
        raise PrecisionError(problems)
    block = ROLLOUT_BLOCKS[p.rollout_block]
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": p.activation_scheme}
    if block is not None:
        config["weight_block_size"] = list(block)
    if p.weight_scale == "pow2":
        config["scale_fmt"] = "ue8m0"
    names = named if kept is None else [*kept]
    return config | ({"modules_to_not_convert": names} if names else {})


_HF_KEYS = (
    "quant_method",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    "scale_fmt",
    "modules_to_not_convert",
    "ignored_layers",
)


def from_hugging_face(config: Mapping[str, Any]) -> Precision:
    """Return the contract of a rollout from a checkpoint with this ``quantization_config``.

    Raises PrecisionError, with every problem, for keys and values that no contract says.
    """
    problems = [unknown("key in quantization_config:", name, _HF_KEYS) for name in config if name not in _HF_KEYS]
    for name, allowed in (("quant_method", ("fp8",)), ("fmt", ("e4m3",)), ("scale_fmt", ("ue8m0",))):
        value = config.get(name, allowed[0])
        if value is not None and value not in allowed:
            problems.append(unknown(f"{name} in quantization_config:", value, allowed))
    size = config.get("weight_block_size")
    block = "tensor" if size is None else "128x128"
    if size is not None and list(size) != [128, 128]:
        problems.append(
            Problem(
                f"weight_block_size={size}.",
                "A contract knows DeepSeek's 128x128 blocks.",
                "Quantize again, with blocks of [128, 128].",
            )
        )
    if problems:
        raise PrecisionError(problems)
    scale = "pow2" if config.get("scale_fmt") == "ue8m0" else "fp32"
    kept = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return Precision(
        rollout="fp8",
        rollout_block=block,
        activation_scheme=config.get("activation_scheme", "dynamic"),
        weight_scale=scale,
        activation_scale=scale,
        keep=tuple(kept),
    )


# ---------------------------------------------------------------------- rendering


def render(precision: Precision) -> Rendering:
    """Render the flags for ``vllm serve``; engine arguments and a quantized checkpoint's config are in the data."""
    arguments = to_vllm(precision)
    back = from_vllm(arguments)
    stock = arguments.get("quantization") in (ONLINE, *STOCK.values())
    lost, notes = lost_fields(as_read(precision) if stock else precision, back, REASONS, "vLLM")
    data: dict[str, Any] = {"engine": arguments}
    if precision.rolls_out_quantized:
        if arguments["quantization"] == PLUGIN:
            notes.append("Needs nemo_fp8 installed beside vLLM, whose plugin vLLM loads in every worker.")
            notes += [_FIXED_SCALE] if scales_tokens(precision) else []
            notes += [f"Stock vLLM does not do it: {problem.what} {problem.why}" for problem in why_plugin(precision)]
        elif arguments["quantization"] == ONLINE:
            notes.append("targets is a key of vLLM's quantization_config in 0.31, which this was tested with.")
        else:
            notes.append("vLLM's own quantization casts a MoE model's router too; keep it by name (keep=('*.gate',)).")
        try:
            data["quantization_config"] = to_hugging_face(precision)
        except PrecisionError as error:
            notes += [f"No quantization_config for a checkpoint: {p.what} {p.why} {p.remedy}" for p in error.problems]
    pairs = flags(arguments)
    text = " \\\n".join(f"{name} {shlex.quote(value)}" for name, value in zip(pairs[::2], pairs[1::2], strict=True))
    return Rendering("vllm", text, data, tuple(notes), lost)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as words of a command line."""
    words = []
    for name, value in arguments.items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
