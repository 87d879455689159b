"""``transformer_engine_torch`` as a module made of the functions of this package, under TE's names.

TE's ``cpp_extensions`` imports ``*`` from it, so every name has to be there when TE is imported, whether anybody calls
it or not. A function that has no CPU implementation is there too, and raises under its own name when it is called: the
list :data:`MISSING`. A test holds names and list to what TE's sources ask for, and to what nobody asks for.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from nemo_fp8.te_cpu import (
    activations,
    attention,
    context_parallel,
    gemm,
    grouped,
    norms,
    optimizer,
    permutation,
    quantized,
    router,
    rows,
    scaling,
    sequences,
    shards,
    swizzle,
)
from nemo_fp8.te_cpu.enumerations import ENUMERATIONS
from nemo_fp8.te_cpu.memory import COUNT

NAME = "transformer_engine_torch"

_MODULES: dict[types.ModuleType, str] = {
    quantized: "quantize dequantize",
    grouped: "group_quantize nvfp4_quantize_with_amax nvfp4_group_quantize_with_amax bgrad_group_quantize "
    "group_dequantize "
    "group_requantize_inplace "
    "grouped_swizzle_for_gemm te_general_grouped_gemm_for_grouped_tensor te_general_grouped_gemm_for_discrete_in "
    "te_general_grouped_gemm_for_discrete_out copy_data_ptrs_to_device",
    swizzle: "swizzle_scales_for_gemm_ multi_tensor_swizzle_scales_for_gemm_ "
    "multi_tensor_swizzle_scales_for_gemm_unchecked_",
    gemm: "generic_gemm te_general_grouped_gemm",
    activations: "bgrad_quantize",
    norms: "layernorm_fwd layernorm_bwd rmsnorm_fwd rmsnorm_bwd rmsnorm_bwd_add",
    attention: "scaled_softmax_forward scaled_softmax_backward scaled_masked_softmax_forward "
    "scaled_masked_softmax_backward "
    "scaled_upper_triang_masked_softmax_forward scaled_upper_triang_masked_softmax_backward "
    "scaled_aligned_causal_masked_softmax_forward scaled_aligned_causal_masked_softmax_backward fused_rope_forward "
    "fused_rope_backward "
    "fused_qkv_rope_forward fused_qkv_rope_backward",
    rows: "split_quantize multi_tensor_quantize create_empty_quantized_tensor bulk_allocate fp8_transpose "
    "nvfp4_data_transpose "
    "nvfp4_2d_scale_transpose swap_first_dims fused_multi_row_padding fused_multi_row_unpadding dropout_fwd "
    "dropout_bwd splits_to_offsets "
    "splits_to_offsets_multi",
    permutation: "moe_permute_fwd moe_permute_bwd moe_unpermute_fwd moe_unpermute_bwd",
    router: "fused_topk_with_score_function_fwd fused_topk_with_score_function_bwd "
    "fused_topk_with_score_function_qb_fwd "
    "fused_score_for_moe_aux_loss_fwd fused_score_for_moe_aux_loss_bwd fused_moe_aux_loss_fwd "
    "fused_moe_aux_loss_fwd_graph_safe "
    "fused_moe_aux_loss_bwd",
    sequences: "convert_thd_to_bshd convert_bshd_to_thd copy_to_kv_cache fa_prepare_fwd fa_prepare_bwd "
    "multi_tensor_transpose_to_bhsd "
    "multi_tensor_pad_last_dim",
    context_parallel: "thd_get_partitioned_indices thd_sequence_order_to_cp_rank_order "
    "thd_cp_rank_order_to_sequence_order "
    "thd_copy_valid_tokens_from_per_split_to_rank_local thd_read_half_tensor thd_grad_correction "
    "thd_read_second_half_lse "
    "thd_second_half_lse_correction thd_out_correction",
    scaling: "fused_amax_and_scale_update_after_reduction compute_amax multi_tensor_compute_scale_and_scale_inv "
    "multi_tensor_compute_scale_inv_e8m0",
    shards: "fp8_block_scaling_compute_partial_amax fp8_block_scaling_partial_cast mxfp8_scaling_compute_partial_amax "
    "mxfp8_scaling_partial_cast nvfp4_multi_tensor_compute_partial_amax nvfp4_compute_global_scale "
    "nvfp4_multi_tensor_fused_scale "
    "nvfp4_multi_tensor_2d_partial_cast nvfp4_2d_multi_tensor_transpose",
    optimizer: "multi_tensor_scale multi_tensor_scale_tensor multi_tensor_l2norm multi_tensor_unscale_l2norm "
    "multi_tensor_adam "
    "multi_tensor_adam_param_remainder multi_tensor_adam_fp8 multi_tensor_adam_capturable "
    "multi_tensor_adam_capturable_master "
    "multi_tensor_sgd",
}
"""Where each function is, under TE's name for it."""

_SUBMODULES: dict[str, dict[types.ModuleType, str]] = {
    "grouped_mlp_experimental": {grouped: "swizzle_scales_and_pack_ptrs_for_discrete_weights"}
}
"""The same of the extension's submodules."""

_CLASSES = """FP8TensorMeta CommOverlapCore CommOverlapHelper CommOverlapBase CommOverlapP2PBase CommOverlap
CommOverlapP2P""".split()
"""Named in annotations and ``isinstance``. TE makes none but userbuffers, which have no CPU implementation and say so;
``FP8TensorMeta`` it fills in by itself."""

_FACTS: dict[str, Any] = {
    # decides which GEMMs TE asks for: one that has MXFP8's and NVFP4's, and no grouped tensors
    "get_cublasLt_version": 120900,
    "get_cudnn_version": 91200,
    "get_num_cublas_streams": 4,
    "get_fused_attn_backend": (
        ENUMERATIONS["NVTE_Fused_Attn_Backend"]["NVTE_No_Backend"],
        "there is no fused attention on a CPU",
    ),
    "device_supports_multicast": False,
    "get_stream_priority_range": (0, 0),
    "ubuf_built_with_mpi": False,
    "get_grouped_gemm_setup_workspace_size": 1024,
    "ep_zero_copy_supported": False,
}
"""What the extension says of the GPU and its libraries, whatever it is asked with."""

_FACTS_BEFORE: dict[tuple[int, int], dict[str, Any]] = {
    (2, 20): {
        "get_fused_attn_backend": ENUMERATIONS["NVTE_Fused_Attn_Backend"]["NVTE_No_Backend"]
    },  # without the reason
}
"""What it said otherwise before a version of TE."""

MISSING = """
bulk_overlap_ag_with_external_gemm cusolvermp_ctx_create cusolvermp_ctx_destroy ep_combine ep_combine_bwd
ep_dispatch ep_dispatch_bwd ep_finalize ep_get_zero_copy ep_handle_mem_size ep_initialize ep_prepare
ep_prepare_and_dispatch
fused_attn_bwd fused_attn_fwd newton_schulz
create_nvshmem_tensor init_nvshmem_backend nvshmem_finalize nvshmem_send_on_current_stream
nvshmem_wait_on_current_stream
nvfp4_2d_compute_partial_amax nvfp4_2d_partial_cast nvfp4_compute_per_block_scale nvfp4_expand_scale_to_fp8
nvfp4_fused_scale
""".split()
"""Functions of the extension that have no CPU implementation; the last ten are such as TE's own Python never calls."""


def build(version: str) -> types.ModuleType:
    """Return the extension, as that version of TE knows it."""
    module = types.ModuleType(NAME, __doc__)
    names: dict[str, Any] = dict(ENUMERATIONS)
    names |= _functions(_MODULES)
    names |= {name: _as_written(kernel) for name, kernel in activations.kernels().items()}
    facts = dict(_FACTS)
    for since, earlier in _FACTS_BEFORE.items():
        facts |= earlier if tuple(map(int, version.split(".")[:2])) < since else {}
    names |= {name: _constant(name, value) for name, value in facts.items()}
    names |= {name: type(name, (), {} if name == "FP8TensorMeta" else {"__init__": missing(name)}) for name in _CLASSES}
    names |= {name: missing(name) for name in MISSING}
    for name, homes in _SUBMODULES.items():
        nested = names[name] = types.ModuleType(f"{NAME}.{name}")
        vars(nested).update(_functions(homes))
    vars(module).update(names)
    return module


def _functions(homes: dict[types.ModuleType, str]) -> dict[str, Callable[..., Any]]:
    return {name: _as_written(getattr(home, name)) for home, names in homes.items() for name in names.split()}


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without ``torch.autocast``, which casts what torch's operators multiply and knows nothing of
    a compiled extension; it looks at the memory in use while its arguments and its results are there."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            result = function(*args, **kwargs)
        else:
            with torch.autocast("cpu", enabled=False):
                result = function(*args, **kwargs)
        COUNT.look()
        return result

    return wrapper


def _constant(name: str, value: Any) -> Callable[..., Any]:
    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    constant.__name__ = constant.__qualname__ = name
    return constant


def missing(name: str) -> Callable[..., Any]:
    """Return what stands for a function that has no CPU implementation: it says so, under that function's name."""

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{NAME}.{name} has no CPU implementation. Choose what TransformerEngine runs without it, or run on a "
            "GPU; "
            "docs/te_cpu.md lists every such function."
        )

    missing.__name__ = missing.__qualname__ = name
    return missing
