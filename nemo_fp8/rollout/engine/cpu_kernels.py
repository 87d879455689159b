"""Give vLLM's CPU build kernels for checkpoints of ModelOpt's: it has the classes, and names none for a CPU.

    NVFP4   vLLM's own emulation, which decodes a weight to BF16 on each call
    MXFP8   the FP32 product from codes that nemo_fp8 uses when it quantizes by itself
    experts in either, and in W4A16: nemo_fp8.rollout.engine.modelopt_experts
    linears in W4A16 and in 128x128 blocks: nemo_fp8.rollout.engine.modelopt_linears

vLLM has a function to register kernels, so nothing is patched. With NVFP4 a checkpoint and a weight that was quantized
at load go through the same kernel; vLLM's emulation of MXFP8 would decode a weight once for all calls, and keep two
bytes for each value. The trade-off: an engine on a CPU with this package installed runs checkpoints that vLLM alone
refuses there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, Mxfp8LinearKernel, register_linear_kernel
from vllm.platforms import current_platform

from nemo_fp8.rollout.engine import compatibility, ops


class CodesMxfp8LinearKernel(Mxfp8LinearKernel):
    """Multiplies with MXFP8 codes in FP32; activations stay as they are."""

    supports_pre_processed_weights = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave codes as they are, and see exponents as what they are."""
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data.view(torch.float8_e8m0fnu), requires_grad=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` in the dtype of ``x``."""
        out: torch.Tensor = ops.decoded_linear(x, layer.weight, layer.weight_scale, bias, [1, 32], x.dtype, ops.DIRECT)
        return out


def register() -> None:
    """Name kernels for NVFP4 and MXFP8 to vLLM, and methods for what these do not serve, on a CPU. A second call
    changes nothing."""
    if not current_platform.is_cpu():
        return
    platform = current_platform._enum
    for kind, kernel, known in (
        ("nvfp4", EmulationNvFp4LinearKernel, linear._POSSIBLE_NVFP4_KERNELS),
        ("mxfp8", CodesMxfp8LinearKernel, linear._POSSIBLE_MXFP8_KERNELS),
    ):
        if not known.get(platform):
            register_linear_kernel(kernel, platform, kind)
    if not compatibility.misfits(compatibility.MODELOPT_EXPERTS):
        from nemo_fp8.rollout.engine import modelopt_experts

        modelopt_experts.register()
    if not compatibility.misfits(compatibility.MODELOPT_LINEARS):
        from nemo_fp8.rollout.engine import modelopt_linears

        modelopt_linears.register()
