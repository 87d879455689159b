"""Give vLLM's CPU build linears for checkpoints of ModelOpt's, where it has no kernel.

    W4A16_NVFP4   vLLM takes Marlin for it unasked, whose kernels are for GPUs
    FP8_PB_WO     128x128 blocks: vLLM's kernels for a CPU want AMX

vLLM's own method creates and loads the parameters, so every name of ModelOpt's is read as elsewhere. The kernel is the
one that the plugin chooses for a weight that was quantized at load, and finds its parameters under the same names: so a
checkpoint and the fly give the same bits, with AMX and without.

The methods are put into vLLM's table of builders, which is there for that. The trade-off is that of
:mod:`nemo_fp8.rollout.engine.modelopt_experts`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.modelopt import (
    LINEAR_METHOD_BUILDERS,
    WEIGHT,
    FormatScheme,
    ModelOptLinearMethod,
    Shapes,
    resolve,
)

from nemo_fp8.render.modelopt import ALGORITHMS
from nemo_fp8.render.vllm import options_of_plugin
from nemo_fp8.rollout.engine import four_bits, kernels
from nemo_fp8.rollout.engine.storage import storage_of


class _NamedAsOnTheFly(FormatScheme):
    """Scales of 128x128 blocks under the name that kernels have from layers which are quantized at load."""

    def post_process(self, layer: LinearBase) -> None:
        layer.weight_scale_inv, layer.input_scale = layer.weight_scale, None
        del layer.weight_scale


@register_weight_loader_v2_supported_method
class ModelOptLinearOnCpu(ModelOptLinearMethod):
    """vLLM's method for a format whose activations bring no parameters, with the plugin's kernel, not its own."""

    def __init__(self, config: Any, algorithm: str, prefix: str) -> None:
        spec, context, of_format = resolve(algorithm, config, prefix)
        self.storage = storage_of(ALGORITHMS[algorithm].contract)
        super().__init__(spec, context, _NamedAsOnTheFly() if self.storage.weight.format == "e4m3" else of_format)

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters of a checkpoint, and choose the kernel; vLLM's arguments."""
        loader, rows = extra_weight_attrs.get("weight_loader"), sum(output_partition_sizes)
        layer.logical_widths, layer.orig_dtype = output_partition_sizes, params_dtype
        layer.input_size_per_partition, layer.output_size_per_partition = input_size_per_partition, rows
        shapes = Shapes(output_partition_sizes, input_size_per_partition, params_dtype)
        self.wkey.create_weights(layer, WEIGHT, self.ctx, shapes, loader)
        self.fmt.extra_weights(layer, shapes, self.ctx, loader)
        self.kernel = self._choose((rows, input_size_per_partition))

    def _choose(self, shape: tuple[int, int]) -> Any:
        options = options_of_plugin({})
        if self.storage.weight.format == "e2m1":
            return four_bits.choose(self.storage, options)
        return kernels.choose(self.storage, options["kernel"], shape, self.out_dtype)


def register() -> None:
    """Name the method to vLLM for both formats. A second call does the same again."""
    for algorithm in ("W4A16_NVFP4", "FP8_PB_WO"):
        LINEAR_METHOD_BUILDERS[algorithm] = lambda config, prefix, algorithm=algorithm: ModelOptLinearOnCpu(
            config, algorithm, prefix
        )
