"""A linear layer: BF16 weights come in, FP8 codes and scales of 128x128 blocks stay.

vLLM hands the weights of one layer to :meth:`process_weights_after_loading` when all of them are there, at load
and at every push, and keeps only what is left on the layer: no more than one layer of BF16 lies in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.quantize import quantize

if TYPE_CHECKING:
    from nemo_fp8.rollout.in_vllm.config import NemoFp8Config

BLOCK = (128, 128)


class NemoFp8LinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Quantizes a layer's weight when it is whole, and multiplies with vLLM's kernel for this machine."""

    uses_meta_device = True  # vLLM allocates a weight when it loads it, and processes it at once

    def __init__(self, config: NemoFp8Config, prefix: str) -> None:
        self.config, self.prefix = config, prefix
        self.operand = Operand("e4m3", BLOCK, config.precision.weight_scale)
        self.out_dtype = torch.get_default_dtype()
        self.input_dtype = get_current_vllm_config().model_config.dtype

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        if shape[0] % 32 or shape[1] % 128:
            layer.quant_method = UnquantizedLinearMethod()
            layer.quant_method.create_weights(
                layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **extra_weight_attrs
            )
            return
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = shape[1], shape[0]
        layer.orig_dtype, layer.weight_block_size = params_dtype, list(BLOCK)
        weight = torch.empty(shape, dtype=params_dtype, device="meta")
        loader = extra_weight_attrs["weight_loader"]
        layer.register_parameter("weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader))
        initialize_online_processing(layer)
        self.fp8_linear = init_fp8_linear_kernel(
            activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, 128)),
            weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(*BLOCK)),
            weight_shape=shape,
            input_dtype=self.input_dtype,
            out_dtype=self.out_dtype,
            module_name=type(self).__name__,
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        layer.input_scale = None
        quantized = quantize(layer.weight.data, self.operand)
        replace_parameter(layer, "weight", quantized.data)
        replace_parameter(layer, "weight_scale_inv", quantized.scale_inv)
        self.fp8_linear.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.fp8_linear.apply_weights(layer, x, bias)
