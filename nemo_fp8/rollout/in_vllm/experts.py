"""The experts of a MoE layer: each expert's two weights in 128x128 blocks, on vLLM's fused kernel for this machine."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.quantize import quantize

if TYPE_CHECKING:
    from nemo_fp8.rollout.in_vllm.config import NemoFp8Config

BLOCK = (128, 128)


class NemoFp8MoEMethod(Fp8PerBlockOnlineMoEMethod):  # type: ignore[misc]
    """Quantizes the stacked weights of all experts of a layer."""

    def __init__(self, config: NemoFp8Config, layer: RoutedExperts) -> None:
        # vLLM 0.28 takes the layer, later ones its configuration.
        takes = inspect.signature(Fp8PerBlockOnlineMoEMethod.__init__).parameters
        super().__init__(**({"moe": layer.moe_config} if "moe" in takes else {"layer": layer}))
        self.operand = Operand("e4m3", BLOCK, config.precision.weight_scale)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        self._zero_padding(layer)
        layer.weight_block_size = list(BLOCK)
        (w13, s13), (w2, s2) = (self._quantize(weight.data) for weight in (layer.w13_weight, layer.w2_weight))
        self._setup_kernel(layer, w13, w2, s13, s2, layer.w13_input_scale, layer.w2_input_scale)
        layer._already_called_process_weights_after_loading = True

    def _quantize(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All experts as one tall matrix: their rows are multiples of 128, so no block lies in two of them."""
        quantized = quantize(experts, self.operand)
        return quantized.data, quantized.scale_inv.view(experts.shape[0], -1, quantized.scale_inv.shape[-1])
