"""Choose the kernel that multiplies: vLLM's own for this machine, or ours in FP32 if vLLM has none.

A kernel has vLLM's interface: ``process_weights_after_loading`` arranges codes and scales as the kernel wants them, and
``apply_weights`` multiplies. On a CPU with AMX vLLM's kernel takes FP8 weights and BF16 activations; on GPUs kernels
quantize the activations, too. For a CPU without AMX vLLM has no kernel. :class:`DecodeKernel` takes its place, with a
warning in the log.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from nemo_fp8.contract import Operand
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.engine import ops
from nemo_fp8.rollout.engine.storage import Storage

logger = init_logger("vllm.nemo_fp8")
BLOCKS = (BLOCK, BLOCK)


class DecodeKernel:
    """Multiplies in FP32, on any machine, with the codes and scales that other kernels have.

    With up to ``direct`` tokens it multiplies with the codes themselves; with more it decodes the weight, on each call.
    """

    apply_input_quant = False

    def __init__(self, storage: Storage, direct: int) -> None:
        self.grid, self.direct = list(storage.grid), direct

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave codes and scales as they are."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` in the layer's dtype."""
        out: torch.Tensor = ops.decoded_linear(
            x, layer.weight, layer.weight_scale_inv, bias, self.grid, layer.orig_dtype, self.direct
        )
        return out


def choose(storage: Storage, wanted: str, shape: tuple[int, int], out_dtype: torch.dtype) -> Any:
    """Return the kernel for a weight of this shape. ``wanted`` is the plugin's option ``kernel``.

    Raises PrecisionError if a GPU has no kernel for the contract's blocks, or its kernel would quantize codes again.
    """
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        # Linux allows AMX only to a process that asks for it, and vLLM 0.31.0 does not ask: a server's first prompt of
        # four tokens would end its worker with an illegal instruction in attention.
        torch.cpu._init_amx()
    if wanted != "auto":
        return DecodeKernel(storage, direct(wanted))
    if storage.grid != BLOCKS:
        return _without_kernel(storage, f"no kernel with weight blocks of {storage.grid[0]}x{storage.grid[1]}")
    try:
        kernel = init_fp8_linear_kernel(
            activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, BLOCKS[1])),
            weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(*BLOCKS)),
            weight_shape=shape,
            input_dtype=get_current_vllm_config().model_config.dtype,
            out_dtype=out_dtype,
            module_name="NemoFp8LinearMethod",
        )
    except ValueError as error:
        return _without_kernel(storage, str(error).splitlines()[-1])
    refuse_second_quantization(type(kernel).__name__, storage.weight, e8m0=is_deep_gemm_e8m0_used())
    if storage.activation is not None and storage.activation.scale == "pow2" and hasattr(kernel, "quant_fp8"):
        kernel.quant_fp8.use_ue8m0 = True  # the quantizer of this one kernel
    return kernel


def direct(wanted: str) -> int:
    """Return up to how many tokens are multiplied with codes; ``wanted`` is the plugin's option ``kernel``."""
    return 0 if wanted == "decode" else ops.DIRECT


def refuse_second_quantization(kernel: str, weight: Operand, e8m0: bool) -> None:
    """Raise PrecisionError if DeepGEMM with E8M0 scales would quantize codes with FP32 scales a second time."""
    if "DeepGemm" in kernel.replace("DeepGEMM", "DeepGemm") and e8m0 and weight.scale == "fp32":
        raise PrecisionError(
            f"{kernel} with E8M0 scales, under a contract of FP32 weight scales.",
            "vLLM would decode the codes and quantize them again for it.",
            "os.environ.update(nemo_fp8.rollout.environment(precision)) before the engine starts "
            "(VLLM_USE_DEEP_GEMM_E8M0=0), or set weight_scale='pow2' and activation_scale='pow2'.",
        )


def quantizes_activations(kernel: Any) -> bool:
    """Return whether a kernel quantizes activations (W8A8); the others are weight-only (W8A16)."""
    return bool(getattr(kernel, "apply_input_quant", False))


def has_experts_kernel(storage: Storage, wanted: str) -> bool:
    """Return whether vLLM has a fused kernel for FP8 experts on this machine; logs a warning or raises if it has
    none."""
    if wanted != "auto":
        return False
    if storage.grid != BLOCKS:
        _without_kernel(storage, f"no kernel with weight blocks of {storage.grid[0]}x{storage.grid[1]}")
        return False
    if current_platform.is_cpu() and not torch.cpu._is_amx_tile_supported():
        _without_kernel(storage, "the FP8 kernel for experts requires AMX")
        return False
    return True


def _without_kernel(storage: Storage, why: str) -> DecodeKernel:
    """Return the kernel of our own with a warning, on a CPU; raise PrecisionError on a GPU."""
    if not current_platform.is_cpu():
        rows, columns = storage.grid
        remedy = (
            "Use vLLM's own quantization='mxfp8'."
            if (rows, columns) == (1, 32)
            else "Set rollout='compute' on this machine."
        )
        raise PrecisionError(f"vLLM has no FP8 kernel for weight blocks of {rows}x{columns} here.", f"{why}.", remedy)
    logger.warning_once(
        "nemo_fp8: products with FP8 weights are summed in FP32 on this CPU: from the codes for up to %d tokens, of "
        "weights that each call decodes for more (%s)",
        ops.DIRECT,
        why,
    )
    return DecodeKernel(storage, ops.DIRECT)
