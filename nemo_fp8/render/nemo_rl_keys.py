"""NeMo RL's configuration keys: those about precision, and the others of the same sections.

A key that is spelt almost like one of these is an error, since NeMo RL would ignore it without a word; other keys are
none of our business. They are from NeMo RL's ``vllm/config.py``, ``megatron/config.py`` and example recipes, as of
August 2026 (7ea279ab), and from the changes of 0.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_fp8.errors import PrecisionError
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

# policy.generation.vllm_cfg, with NeMo RL's own defaults; the two older keys are the ones of its documentation.
VLLM_CFG: dict[str, Setting] = {
    "use_deep_gemm": Setting("deep_gemm", False),
    "kv_cache_dtype": Setting(
        "kv_cache", "auto", {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8"}
    ),
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
    ("policy", "generation"): ("vllm_cfg", "nvfp4_pertoken_rollout", "quant_cfg"),
    ("policy", "generation", "vllm_cfg"): (*VLLM_CFG, *IGNORED.values(), "precision", "is_mx", PREQUANTIZE),
    ("loss_fn",): ("use_importance_sampling_correction",),
}
# Where ModelOpt is told what to quantize in training and in the rollout.
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


def section(document: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return a section; empty if it is missing or null."""
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
