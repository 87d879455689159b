"""NeMo RL's configuration keys: those about precision, and the others of the same sections.

An unknown key in a section about precision is an error, since NeMo RL would ignore it without a word; so all other keys
of such a section are listed. They are from NeMo RL's ``vllm/config.py``, ``megatron/config.py`` and example recipes.
"""

from __future__ import annotations

from nemo_fp8.render.settings import Setting, same

# policy.megatron_cfg.fp8_cfg
FP8_CFG: dict[str, Setting] = {
    "fp8": Setting("format", None, same("hybrid", "e4m3")),
    "fp8_recipe": Setting("scaling", None, same("delayed", "tensorwise", "blockwise", "mxfp8")),
    "fp8_param": Setting("fp8_param", False),
}
FP8_CFG_OTHERS = ("enabled", "force_clear_fp8_caches")

# policy.generation.vllm_cfg, with NeMo RL's own defaults; the two older keys are the ones of its documentation.
VLLM_CFG: dict[str, Setting] = {
    "use_deep_gemm": Setting("deep_gemm", False),
    "kv_cache_dtype": Setting("kv_cache", "auto", {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}),
    "num_first_layers_in_bf16": Setting("first_layers", 0),
    "num_last_layers_in_bf16": Setting("last_layers", 0),
    "pow2_weight_scaling_factors": Setting("weight_scale", False, {True: "pow2", False: "fp32"}),
    "pow2_activation_scaling_factors": Setting("activation_scale", False, {True: "pow2", False: "fp32"}),
    "use_weight_pow2_scale": Setting("weight_scale", False, {True: "pow2", False: "fp32"}, alias=True),
    "use_activation_pow2_scale": Setting("activation_scale", False, {True: "pow2", False: "fp32"}, alias=True),
}
# Keys that code reads one by one.
VLLM_CFG_READ = ("precision", "is_mx", "quantization_ignored_layer_kws")
VLLM_CFG_OTHERS = (
    "async_engine",
    "cap_max_tokens_to_context",
    "enable_expert_parallel",
    "enable_return_routed_experts",
    "enable_vllm_metrics_logger",
    "enforce_eager",
    "env_vars",
    "expert_parallel_size",
    "expose_http_server",
    "fp32_lm_head",
    "gpu_memory_utilization",
    "http_refit_api_key_env_var",
    "http_refit_server_port",
    "http_server_serving_chat_kwargs",
    "load_format",
    "logprobs_mode",
    "max_model_len",
    "pipeline_parallel_size",
    "reasoning_parser_plugin",
    "refit_cache_loader_routes",
    "refit_prequantize",
    "refit_with_reload_api",
    "reset_encoder_cache_after_weight_update",
    "skip_tokenizer_init",
    "sleep_level",
    "tensor_parallel_size",
    "tool_parser_plugin",
    "use_tqdm",
    "video",
    "vllm_metrics_logger_interval",
    "zmq_refit_server_port",
)

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
        "env_vars",
        "distributed_data_parallel_config",
        "first_last_layers_bf16",
        *LAYERS,
    ),
    ("policy", "megatron_cfg", "distributed_data_parallel_config"): ("grad_reduce_in_fp32",),
    ("policy", "generation"): ("vllm_cfg",),
    ("loss_fn",): ("use_importance_sampling_correction",),
}
# Keys of NeMo RL that are spelt almost like one of ours.
NOT_SLIPS = (
    "fp4_cfg",
    "dtensor_cfg",
    "vllm_kwargs",
    "sglang_cfg",
    "mcore_generation_config",
    "use_importance_sampling",
)
