"""NeMo RL's configuration keys: those about precision, and the others of the same sections.

A key that is spelt almost like one of these is an error, since NeMo RL would ignore it without a word; other keys are
left alone. The tables are from NeMo RL's ``vllm/config.py``, ``megatron/config.py`` and example recipes, as of August
2026 (7ea279ab), and from the changes of 0.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.render.settings import Setting, same

# policy.megatron_cfg.fp8_cfg
FP8_CFG: dict[str, Setting] = {
    "fp8": Setting("format", None, same("hybrid", "e4m3")),
    "fp8_recipe": Setting("scaling", None, same("delayed", "tensorwise", "blockwise", "mxfp8")),
    "fp8_param": Setting("fp8_param", False),
}
FP8_CFG_OTHERS = ("enabled", "force_clear_fp8_caches")

# policy.megatron_cfg.fp4_cfg, and how the five places are called in which NeMo RL's NVFP4 is said.
FP4_CFG = {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": False}
FP4_TRAINING, FP4_ROLLOUT = "policy.megatron_cfg.fp4_cfg", "policy.generation.nvfp4_pertoken_rollout"
FP4_ROLLOUT_KEYS = ("enabled", "additional_ignore")
TE_PRECISION, TE_PRECISION_FILE = "te_precision_config_file", "te_precision.yaml"
# The pattern of one layer's routed experts. NeMo RL's NVFP4 rollout holds routed experts in FP4 and nothing else.
EXPERTS_OF = "*.layers.{}.mlp.experts*"
EXPERTS_OF_READ = re.compile(r"\*?\.?layers\.(\d+)\.mlp\.experts\*?")
EXPERTS_ALONE = (("*.linear_qkv", "bf16"), ("*.linear_proj", "bf16"))
NO_EXPERTS = ("*.self_attention.*", "*.mlp.linear_fc*", "*.shared_expert*")

# vLLM's own layout of an FP8 KV cache, for latent attention. A contract has no word for the layout.
KV_LAYOUT = "fp8_ds_mla"

# policy.generation.vllm_cfg, with NeMo RL's own defaults; the two older keys are the ones of its documentation.
VLLM_CFG: dict[str, Setting] = {
    "use_deep_gemm": Setting("deep_gemm", False),
    "kv_cache_dtype": Setting("kv_cache", "auto", {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", KV_LAYOUT: "fp8"}),
    "num_first_layers_in_bf16": Setting("first_layers", 0),
    "num_last_layers_in_bf16": Setting("last_layers", 0),
    "pow2_weight_scaling_factors": Setting("weight_scale", False, {True: "pow2", False: "fp32"}),
    "pow2_activation_scaling_factors": Setting("activation_scale", False, {True: "pow2", False: "fp32"}),
    "use_weight_pow2_scale": Setting("weight_scale", False, {True: "pow2", False: "fp32"}, alias=True),
    "use_activation_pow2_scale": Setting("activation_scale", False, {True: "pow2", False: "fp32"}, alias=True),
}
# Modules that stay out of FP8 in the rollout, by whether it has MX blocks. The second came with NeMo RL 0.8, which
# deprecates the first, and refuses the second for other blocks.
IGNORED = {False: "quantization_ignored_layer_kws", True: "quantization_ignore_patterns"}

# Where an MX rollout is quantized: in the trainer before weights are sent (true), or in vLLM's workers. The codes are
# the same, so a contract has no field for it; NeMo RL refuses it for every other rollout.
PREQUANTIZE = "refit_prequantize"

# policy.megatron_cfg: how many whole layers train in the compute dtype.
LAYERS: dict[str, Setting] = {
    "num_layers_at_start_in_bf16": Setting("first_layers", 1),
    "num_layers_at_end_in_bf16": Setting("last_layers", 1),
}

# policy.generation.backend -> the section of its settings. The first is the one of NeMo RL's base files.
BACKENDS = {
    "vllm": "vllm_cfg",
    "megatron": "mcore_generation_config",
    "sglang": "sglang_cfg",
    "trtllm": "trtllm_cfg",
    "dynamo": "dynamo_cfg",
}
# Megatron generates with megatron_cfg, over which this section is laid: keys of a precision that it may say again.
MEGATRON_GENERATION = ("policy", "generation", BACKENDS["megatron"])
SAID_AGAIN = ("fp8_cfg", "fp4_cfg", "env_vars", TE_PRECISION, "first_last_layers_bf16", *LAYERS)
# Keys that change numbers, and about which a contract says nothing.
CHANGE_NUMBERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("policy", "megatron_cfg"): ("fp32_lm_head", "moe_router_dtype"),
    ("policy", "generation"): ("real_quant",),
    ("policy", "generation", "vllm_cfg"): ("fp32_lm_head", "logprobs_mode"),
    MEGATRON_GENERATION: ("fp32_lm_head", "logprobs_mode", "moe_router_dtype", "transformer_impl"),
}

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

# Sections with many other keys: only a key that is spelt almost like one of ours is refused there.
OPEN_SECTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("policy",): ("precision", "megatron_cfg", "generation"),
    ("policy", "megatron_cfg"): (
        "fp8_cfg",
        "fp4_cfg",
        "env_vars",
        "distributed_data_parallel_config",
        "first_last_layers_bf16",
        "te_precision_config_file",
        "zero_train_gen_mismatch",
        *LAYERS,
    ),
    ("policy", "megatron_cfg", "distributed_data_parallel_config"): ("grad_reduce_in_fp32",),
    ("policy", "generation"): ("backend", "vllm_cfg", "nvfp4_pertoken_rollout", "quant_cfg"),
    ("policy", "generation", "vllm_cfg"): (*VLLM_CFG, *IGNORED.values(), "precision", "is_mx", PREQUANTIZE),
    ("loss_fn",): ("use_importance_sampling_correction",),
}
# The keys that tell ModelOpt what to quantize in training and in the rollout.
MODELOPT = (("policy",), ("policy", "generation"))
# Keys of NeMo RL that are spelt almost like one of ours.
NOT_SLIPS = (
    "fp4_cfg",
    "dtensor_cfg",
    "vllm_kwargs",
    "sglang_cfg",
    "mcore_generation_config",
    "use_importance_sampling",
)


@dataclass(frozen=True)
class Values:
    """What a key holds. NeMo RL takes most values as they come, so another kind means something else there."""

    words: str
    holds: Callable[[Any], bool]
    otherwise: str
    """What NeMo RL makes of anything else, in a sentence."""


def _is_words(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


SWITCH = Values(
    "a switch (true or false)",
    lambda value: isinstance(value, bool),
    "NeMo RL asks only whether it is empty: 'no' and 'false' in quotes switch it on.",
)
COUNT = Values(
    "a whole number",
    lambda value: isinstance(value, int) and not isinstance(value, bool),
    "NeMo RL counts layers by it, and stops at anything else.",
)
WORD = Values("a word", lambda value: isinstance(value, str), "NeMo RL looks for a name there, and stops without one.")
WORDS = Values("a list of words", _is_words, "NeMo RL goes through it one by one, and through a text letter by letter.")
FILES = Values(
    "a file's name or a list of them",
    lambda value: WORD.holds(value) or WORDS.holds(value),
    "NeMo RL reads the files that are named there.",
)

_OF_A_KIND: dict[Values, tuple[str, ...]] = {
    SWITCH: (
        "enabled",
        "fp8_param",
        "fp4_param",
        "force_clear_fp8_caches",
        "grad_reduce_in_fp32",
        "first_last_layers_bf16",
        "zero_train_gen_mismatch",
        "use_importance_sampling_correction",
        "is_mx",
        "use_deep_gemm",
        PREQUANTIZE,
        *(name for name, setting in VLLM_CFG.items() if setting.field in ("weight_scale", "activation_scale")),
    ),
    COUNT: ("num_first_layers_in_bf16", "num_last_layers_in_bf16", *LAYERS),
    WORD: ("precision", "backend", "kv_cache_dtype", "fp8", "fp8_recipe", "fp4", "fp4_recipe", TE_PRECISION),
    WORDS: (*IGNORED.values(), "additional_ignore"),
}
# A name means the same in every section that is read.
KINDS = {name: kind for kind, names in _OF_A_KIND.items() for name in names}
_READ = (
    *OPEN_SECTIONS,
    tuple(FP4_TRAINING.split(".")),
    tuple(FP4_ROLLOUT.split(".")),
    ("policy", "megatron_cfg", "fp8_cfg"),
    MEGATRON_GENERATION,
    (*MEGATRON_GENERATION, "fp8_cfg"),
)


def mistyped(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for every key of ours that holds something else than its kind."""
    for path in _READ:
        here = section(document, *path)
        for name in here:
            if name in KINDS:
                yield from of_another_kind(".".join((*path, name)), here.get(name), KINDS[name])


def of_another_kind(key: str, value: Any, kind: Values) -> Iterator[Problem]:
    """Yield the problem of a value that is not of a key's kind; null counts as not written."""
    if value is not None and not kind.holds(value):
        yield Problem(f"{key}={value!r} is not {kind.words}.", kind.otherwise, f"Write {kind.words}, or leave it out.")


def section(document: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return a section of a configuration by its path; empty if it is missing or null.

    Raises PrecisionError if it, or a section above it, is no mapping.
    """
    here = document
    for name in path:
        inner = here.get(name) or {}
        if not isinstance(inner, Mapping):
            raise PrecisionError(
                f"{'.'.join(path)} is no mapping.",
                f"{name} holds {inner!r}.",
                "Write its settings as 'key: value' lines.",
            )
        here = inner
    return here
