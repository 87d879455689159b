"""Store a linear layer in NVFP4, in ModelOpt's layout, and multiply it with vLLM's own kernels.

    weight               two E2M1 codes a byte           uint8  [N, K / 2]
    weight_scale         one E4M3 scale for 16 values    e4m3   [N, K / 16]
    weight_global_scale  one scale for all fused parts, and for all shards: amax / 2688

These are what vLLM itself makes of a checkpoint of ModelOpt's, so its kernels take them. On a CPU that is vLLM's
emulation, which decodes codes to BF16 and multiplies these. What it does with activations is said by the contract and
by the plugin's option ``activations``:

    activation_scheme  activations   what is multiplied
    dynamic            kernel        as in an exported checkpoint: block scales beneath one fixed scale of 1
    dynamic            emulated      block scales beneath one scale for each token, from its amax
    none               (either)      BF16: only weights are quantized (W4A16)

The trade-off: a fixed scale needs no calibration and suits a kernel with one scale a layer, but a block whose amax is
below 0.1 loses precision, as its E4M3 scale is then subnormal. One scale for each token does not; vLLM has no kernel
for it on a GPU but for experts.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import (
    EmulationNvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    init_nvfp4_linear_kernel,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
    ref_nvfp4_quant_dequant,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.modelopt import BLOCK, INPUT_SCALE, LARGEST, FourBits, amax_of, four_bits
from nemo_fp8.rollout.engine import released
from nemo_fp8.rollout.engine.linear import NemoFp8LinearMethod
from nemo_fp8.rollout.engine.storage import Storage

FIXED, TOKEN, NONE = "fixed", "token", "none"
"""Scales of activations: one of 1 for all, one for each token, or activations that stay as they are."""


class PerTokenNvFp4Kernel(EmulationNvFp4LinearKernel):
    """vLLM's emulation, with one scale for each token instead of one for the layer."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` of quantized activations and weights."""
        return multiply(rounded(x, TOKEN), layer, bias)


class WeightOnlyNvFp4Kernel(EmulationNvFp4LinearKernel):
    """vLLM's emulation, with activations as they are. vLLM has kernels for that on GPUs only."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` of quantized weights."""
        return multiply(x, layer, bias)


_EMULATED = {FIXED: EmulationNvFp4LinearKernel, TOKEN: PerTokenNvFp4Kernel, NONE: WeightOnlyNvFp4Kernel}


class Nvfp4LinearMethod(NemoFp8LinearMethod):
    """Quantizes a layer's weight to NVFP4 once it is complete, and multiplies with vLLM's kernel for this machine."""

    def _choose(self, shape: tuple[int, int]) -> Any:
        return choose(self.storage, self.config.options)

    def _quantize(self, layer: LinearBase) -> None:
        weight = layer.weight.data
        self.lay_out_four_bits(layer, four_bits(weight, self.operand, self.amax(amax_of(weight))))

    def amax(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of all parts of a weight, on all workers, from that on this one."""
        found: torch.Tensor = amax_for_tp_weight_quant(largest, self.sharded)
        return found

    def live(self, layer: LinearBase, name: str) -> tuple[torch.Tensor, ...]:
        """Return codes, block scales and the scale beneath, as the kernel reads them."""
        weight = released.live(layer, "weight")
        assert weight is not None
        return weight, layer.weight_scale, layer.weight_global_scale

    def lay_out_four_bits(self, layer: LinearBase, found: FourBits) -> None:
        """Set codes and scales as parameters of the layer, under the names and in the layout of vLLM's kernels."""
        replace_parameter(layer, "weight", found.weight)
        replace_parameter(layer, "weight_scale", found.weight_scale)
        replace_parameter(layer, "weight_global_scale", found.weight_scale_2)
        if self.storage.activation is not None:
            one = torch.full_like(found.weight_scale_2, INPUT_SCALE)
            replace_parameter(layer, "input_global_scale", one)
            replace_parameter(layer, "input_global_scale_inv", 1 / one)
            replace_parameter(layer, "alpha", one * found.weight_scale_2)
        self.fp8_linear.process_weights_after_loading(layer)
        released.keep(layer)

    def follow(self, layer: LinearBase) -> None:
        """Make what depends on the scale beneath, after it was written in place."""
        if self.storage.activation is not None:
            layer.alpha.data.copy_(layer.input_global_scale.data * layer.weight_global_scale.data)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias``; the kernel quantizes ``x`` if the contract wants it."""
        out: torch.Tensor = self.fp8_linear.apply_weights(layer, x, bias)
        return out


def choose(storage: Storage, options: dict[str, str]) -> Any:
    """Return vLLM's kernel for NVFP4 on this machine.

    Raises PrecisionError if an option asks for what there is not.
    """
    scales = scales_of_activations(storage, options)
    if current_platform.is_cpu():
        return _EMULATED[scales](NvFp4LinearLayerConfig())
    if scales == TOKEN:
        raise PrecisionError(
            "activations='emulated' with rollout='nvfp4' on a GPU.",
            "vLLM's kernels for linears quantize activations themselves, beneath one scale for a layer.",
            "Set activations='kernel'.",
        )
    return init_nvfp4_linear_kernel(use_a16=scales == NONE)


def scales_of_activations(storage: Storage, options: dict[str, str]) -> str:
    """Return which scales activations have; raise PrecisionError for a kernel that NVFP4 has not."""
    if options["kernel"] != "auto":
        raise PrecisionError(
            f"kernel={options['kernel']!r} with rollout='nvfp4'.",
            "NVFP4 weights are multiplied by vLLM's own kernels, which decode them on a CPU.",
            "Set kernel='auto'.",
        )
    if storage.activation is None:
        return NONE
    return TOKEN if options["activations"] == "emulated" else FIXED


def rounded(x: torch.Tensor, scales: str, fixed: torch.Tensor | None = None) -> torch.Tensor:
    """Return activations as NVFP4 holds them, [tokens, K], by vLLM's emulation of its quantizing kernels.

    ``fixed`` is the fixed scale where a checkpoint has one.
    """
    if scales == NONE or x.numel() == 0:
        return x
    if scales == FIXED:
        scale = 1 / (x.new_full((), INPUT_SCALE, dtype=torch.float32) if fixed is None else fixed)
    else:
        amax = x.abs().amax(-1).float()
        scale = torch.where(amax == 0, 1.0, torch.div(LARGEST, amax)).view(-1, 1, 1)
    out: torch.Tensor = ref_nvfp4_quant_dequant(x, scale, BLOCK)
    return out


def multiply(x: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product with a layer's decoded weight."""
    weight = decoded(layer.weight, layer.weight_scale, layer.weight_global_scale, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def decoded(weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight, by vLLM's emulation."""
    out: torch.Tensor = dequantize_to_dtype(weight, scale, scale_2, dtype, BLOCK, swizzle=False)
    return out
