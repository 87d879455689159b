"""A table of all internals of vLLM that this package uses, checked against the installed vLLM before they are used.

vLLM promises little about its internals, and a silent error in a rollout is the worst kind. So the plugin checks first
that each name exists and takes the arguments that we give it. If not, vLLM works as without us, and an engine that asks
for ``nemo_fp8`` ends with one error that lists everything that does not fit. A test compares the table with the imports
of this folder.

Stable since long: plugins, ``register_quantization_config``, ``worker_extension_cls``, ``collective_rpc``. Since 0.20
``online.fp8``; since 0.24 ``RoutedExperts`` and ``linear_backend``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_fp8.errors import PrecisionError

TESTED = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")


@dataclass(frozen=True)
class Internal:
    """A name in one of vLLM's modules, and arguments that it must take."""

    module: str
    name: str
    takes: tuple[str, ...] = ()

    def misfit(self) -> str | None:
        """Return what is wrong with it in the installed vLLM; None if it fits."""
        try:
            found = importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.module} cannot be imported ({error})"
        for part in self.name.split("."):
            if not hasattr(found, part):
                return f"{self.module} has no {self.name}"
            found = getattr(found, part)
        missing = [name for name in self.takes if not _takes(found, name)]
        return f"{self.module}.{self.name} does not take {', '.join(missing)}" if missing else None


_LAYERS = "vllm.model_executor.layers"
_QUANTIZATION = f"{_LAYERS}.quantization"
_UTILS = f"{_QUANTIZATION}.utils.quant_utils"
_RELOAD = "vllm.model_executor.model_loader.reload"
_TRANSFER = "vllm.distributed.weight_transfer"
_CREATE_LINEAR = (
    "layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size", "params_dtype",
    "extra_weight_attrs",
)  # fmt: skip
_KERNEL = ("activation_quant_key", "weight_quant_key", "weight_shape", "input_dtype", "out_dtype", "module_name")
_APPLY_EXPERTS = ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")
_ENGINE = ("config", "vllm_config", "device", "model")
_SETUP = ("layer", "w13", "w2", "w13_scale", "w2_scale", "w13_input_scale", "w2_input_scale")

INTERNALS = (
    # the quantization method, and what it is asked about
    Internal(_QUANTIZATION, "register_quantization_config", ("quantization",)),
    Internal("vllm.config", "VllmConfig"),
    Internal("vllm.config", "get_current_vllm_config"),
    Internal("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    Internal("vllm.logger", "init_logger", ("name",)),
    Internal("vllm.v1.engine.core_client", "SyncMPClient._send_input", ("request_type", "request")),
    # how an engine waits for its workers, and they for it
    Internal("vllm.v1.executor.multiproc_executor", "MultiprocExecutor._init_executor"),
    Internal("vllm.v1.executor.multiproc_executor", "WorkerProc.worker_busy_loop"),
    Internal("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.__init__", ("busy_loop_s",)),
    Internal("vllm.platforms", "current_platform.is_cpu"),
    Internal(f"{_QUANTIZATION}.base_config", "QuantizationConfig"),
    Internal(f"{_QUANTIZATION}.base_config", "QuantizeMethodBase"),
    # linear layers
    Internal(f"{_LAYERS}.linear", "LinearBase"),
    Internal(f"{_LAYERS}.linear", "LinearMethodBase.create_weights", _CREATE_LINEAR),
    Internal(f"{_LAYERS}.linear", "QKVParallelLinear"),
    Internal(f"{_LAYERS}.linear", "UnquantizedLinearMethod.create_weights", ("layer", "extra_weight_attrs")),
    Internal(f"{_LAYERS}.linear", "UnquantizedLinearMethod.process_weights_after_loading", ("layer",)),
    Internal(f"{_LAYERS}.linear", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    Internal(f"{_LAYERS}.utils", "check_cpu_sgl_kernel", ("n", "k", "dtype")),
    Internal("vllm.model_executor.parameter", "ModelWeightParameter"),
    Internal("vllm.model_executor.utils", "replace_parameter", ("layer", "param_name")),
    Internal("vllm.model_executor.kernels.linear", "init_fp8_linear_kernel", _KERNEL),
    Internal(_UTILS, "GroupShape"),
    Internal(_UTILS, "create_fp8_quant_key", ("static", "group_shape")),
    Internal(_UTILS, "amax_for_tp_weight_quant", ("amax", "is_sharded")),
    Internal("vllm.utils.deep_gemm", "is_deep_gemm_e8m0_used"),
    # experts
    Internal(
        f"{_LAYERS}.fused_moe",
        "FusedMoEMethodBase.maybe_roundup_sizes",
        ("hidden_size", "intermediate_size_per_partition"),
    ),
    Internal(f"{_LAYERS}.fused_moe", "FusedMoEMethodBase.apply", _APPLY_EXPERTS),
    Internal(f"{_LAYERS}.fused_moe", "RoutedExperts"),
    Internal(f"{_LAYERS}.fused_moe", "UnquantizedFusedMoEMethod"),
    Internal(f"{_LAYERS}.fused_moe.activation", "MoEActivation.SILU"),
    Internal(f"{_QUANTIZATION}.online.fp8", "Fp8PerBlockOnlineMoEMethod._setup_kernel", _SETUP),
    Internal(f"{_QUANTIZATION}.online.moe_base", "OnlineMoEMethodBase._zero_padding", ("layer",)),
    Internal(_UTILS, "amax_for_moe_weight_quant", ("amax", "moe_tp_size")),
    # the KV cache
    Internal(f"{_LAYERS}.attention", "Attention"),
    Internal(f"{_LAYERS}.attention", "MLAAttention"),
    Internal(f"{_QUANTIZATION}.kv_cache", "BaseKVCacheMethod"),
    # loading
    Internal(f"{_RELOAD}.layerwise", "initialize_online_processing", ("layer",)),
    # pushing
    Internal(f"{_RELOAD}.layerwise", "get_layerwise_info", ("layer",)),
    Internal(f"{_RELOAD}.layerwise", "_get_original_loader", ("tensor",)),
    Internal(f"{_RELOAD}.layerwise", "LAYERWISE_INFO"),
    Internal(f"{_RELOAD}.meta", "SKIP_TENSORS"),
    Internal(f"{_RELOAD}.meta", "to_meta_tensor", ("tensor",)),
    Internal(f"{_RELOAD}.sanitize", "restore_layer_refs", ("tensor", "layer")),
    Internal(f"{_LAYERS}.attention", "is_deferred_attention_layer"),
    Internal("vllm.entrypoints.llm", "LLM.reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    Internal("vllm.v1.engine.llm_engine", "LLMEngine.reset_encoder_cache"),
    Internal("vllm.v1.engine.async_llm", "AsyncLLM.reset_encoder_cache"),
    Internal("vllm.config", "KVTransferConfig", ("kv_connector", "kv_connector_extra_config")),
    Internal("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory.get_connector_class"),
    Internal("vllm.distributed.kv_transfer.kv_connector.v1", "KVConnectorBase_V1.reset_cache"),
    Internal(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    Internal(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.apply", ("layer", "x", "bias")),
    Internal(f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding"),
    Internal(
        f"{_TRANSFER}.factory",
        "WeightTransferEngineFactory.register_engine",
        ("name", "module_path_or_cls", "class_name"),
    ),
    Internal(
        f"{_TRANSFER}.factory",
        "WeightTransferTrainerFactory.register_engine",
        ("name", "module_path_or_cls", "class_name"),
    ),
    Internal(f"{_TRANSFER}.base", "WeightTransferEngine", _ENGINE),
    Internal(f"{_TRANSFER}.base", "WeightTransferInitInfo"),
    Internal(f"{_TRANSFER}.base", "WeightTransferUpdateInfo"),
    Internal(f"{_TRANSFER}.base", "TrainerInitInfo", ("rank",)),
    Internal(f"{_TRANSFER}.base", "TrainerWeightTransferEngine", ("client", "source", "is_sender")),
)

# Checked only if weights are in NVFP4, or a checkpoint is ModelOpt's: older versions lack some.
_EMULATION = f"{_QUANTIZATION}.utils.nvfp4_emulation_utils"
_KERNELS = "vllm.model_executor.kernels.linear"
FOUR_BITS = (
    Internal(_KERNELS, "EmulationNvFp4LinearKernel.apply_weights", ("layer", "x", "bias")),
    Internal("vllm.model_executor.kernels", "linear"),
    Internal(_KERNELS, "Mxfp8LinearKernel"),
    Internal(_KERNELS, "NvFp4LinearLayerConfig"),
    Internal(_KERNELS, "init_nvfp4_linear_kernel", ("use_a16",)),
    Internal(_KERNELS, "register_linear_kernel", ("kernel_class", "platform", "kernel_type")),
    Internal(_KERNELS, "_POSSIBLE_NVFP4_KERNELS"),
    Internal(_KERNELS, "_POSSIBLE_MXFP8_KERNELS"),
    Internal(_EMULATION, "dequantize_to_dtype", ("tensor_fp4", "tensor_sf", "global_scale", "swizzle")),
    Internal(_EMULATION, "ref_nvfp4_quant_dequant", ("x", "global_scale", "block_size")),
)

# Checked only for experts in a checkpoint of ModelOpt's, on a CPU.
_MODELOPT = f"{_QUANTIZATION}.modelopt"
MODELOPT_EXPERTS = (
    Internal(_MODELOPT, "LINEAR_ALGOS"),
    Internal(_MODELOPT, "ModelOptMixedPrecisionConfig._resolve_quant_algo", ("prefix",)),
    Internal(_MODELOPT, "ModelOptMxFp8Config.get_quant_method", ("layer", "prefix")),
    Internal(_MODELOPT, "ModelOptMxFp8FusedMoE.create_weights"),
    Internal(_MODELOPT, "ModelOptNvFp4Config.is_layer_excluded", ("prefix",)),
    Internal(_MODELOPT, "ModelOptNvFp4FusedMoE.create_weights"),
)

# Checked only for linears in a checkpoint of ModelOpt's, on a CPU.
MODELOPT_LINEARS = (
    Internal(f"{_LAYERS}.linear", "register_weight_loader_v2_supported_method"),
    Internal(_MODELOPT, "FormatScheme.post_process", ("layer",)),
    Internal(_MODELOPT, "LINEAR_METHOD_BUILDERS"),
    Internal(_MODELOPT, "ModelOptLinearMethod.__init__", ("spec", "ctx", "format_scheme")),
    Internal(_MODELOPT, "Shapes", ("output_partition_sizes", "input_size_per_partition", "params_dtype")),
    Internal(_MODELOPT, "WEIGHT"),
    Internal(_MODELOPT, "resolve", ("algo", "subcfg", "prefix")),
)

# Checked only if one of these backends is used: their modules import what only GPUs have.
GPU_TRANSFER = (
    Internal(f"{_TRANSFER}.nccl_engine", "NCCLWeightTransferEngine"),
    Internal(f"{_TRANSFER}.ipc_engine", "IPCWeightTransferEngine"),
)

# What some versions have and others lack: the first version that has it, and where it is. Nothing here depends on it.
FEATURES = {
    "weight_version": ("0.28", Internal("vllm.v1.engine.llm_engine", "LLMEngine.set_weight_version")),
    "weight_versions": ("0.32", Internal("vllm.outputs", "CompletionOutput.weight_versions")),
    "weight_checker": ("0.32", Internal("vllm.v1.engine.async_llm", "AsyncLLM.compute_weight_checksums")),
    "CPU router": ("0.30", Internal(f"{_LAYERS}.fused_moe.router.cpu_router", "CPURouter")),
    "pause and resume": ("0.28", Internal("vllm.v1.engine.async_llm", "AsyncLLM.pause_generation", ("mode",))),
    "shutdown of a transfer": (
        "0.32",
        Internal("vllm.v1.engine.async_llm", "AsyncLLM.shutdown_weight_transfer_engine"),
    ),
}


def misfits(internals: Iterable[Internal] | None = None) -> list[str]:
    """Return a line for each internal (of INTERNALS, if none are given) that the installed vLLM does not fit."""
    return [wrong for internal in (INTERNALS if internals is None else internals) if (wrong := internal.misfit())]


def error_of(wrong: list[str]) -> PrecisionError:
    """Return one error for all misfits."""
    import vllm

    return PrecisionError(
        f"vLLM {vllm.__version__} does not fit nemo_fp8.",
        f"It is used through internals that are not as they were: {'; '.join(wrong)}.",
        f"Install a vLLM that was tested ({', '.join(TESTED)}), or a nemo_fp8 that knows this one.",
    )


def _takes(function: object, name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
