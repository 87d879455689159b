"""Store a linear layer in FP8: BF16 weights come in, codes and scales stay.

vLLM calls :meth:`process_weights_after_loading` for each layer when all of its weights have come, and keeps only what
is left on the layer, so no more than one layer of BF16 lies in memory. The shape of a worker's shard is known only
here. If no kernel takes it, the layer is handed over to vLLM's BF16 method with a warning, or refused if the contract
is strict.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.selection import misfit, share_misfit
from nemo_fp8.rollout.arguments import instead_of_codes
from nemo_fp8.rollout.engine import kernels, ops, released
from nemo_fp8.rollout.engine.grid import Span, fused_rows, other_blocks
from nemo_fp8.rollout.engine.quantizer import quantize_weight
from nemo_fp8.rollout.engine.selection import OTHER_BLOCKS, STAYS, in_every_layer

if TYPE_CHECKING:
    from nemo_fp8.rollout.engine.config import NemoFp8Config

logger = init_logger("vllm.nemo_fp8")


class NemoFp8LinearMethod(LinearMethodBase):
    """Quantizes a layer's weight once it is complete, and multiplies with the kernel for this machine."""

    uses_meta_device = True  # vLLM then allocates a weight only when it loads it, and processes it at once

    def __init__(self, config: NemoFp8Config, prefix: str) -> None:
        self.config, self.prefix, self.storage, self.operand = config, prefix, config.storage, config.storage.weight
        self.out_dtype = torch.get_default_dtype()
        self.other_blocks: str | None = None
        """Why this worker's blocks are not those of the unsharded weight; None if they are."""

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
        """Register this worker's weight on the meta device, and choose its kernel; vLLM's arguments.

        Hands the layer over to vLLM's BF16 method if its shape is not for FP8; raises PrecisionError if the contract is
        strict.
        """
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        spans = self._rows(layer, output_partition_sizes, output_size)
        # First the rule on the unsharded weight, which all sides share; then whether kernels take this worker's shard.
        precision = self.config.precision
        reason = misfit(precision, [span.whole for span in spans], input_size) or share_misfit(precision, rows, columns)
        if reason:
            layer.quant_method = self._unquantized(rows, columns, reason)
            layer.quant_method.create_weights(
                layer,
                input_size_per_partition,
                output_partition_sizes,
                input_size,
                output_size,
                params_dtype,
                **extra_weight_attrs,
            )
            return
        self.sharded = (rows, columns) != (output_size, input_size)
        self.other_blocks = other_blocks(spans, self._columns(layer, columns, input_size), self.storage.weight.block)
        if self.other_blocks:
            logger.info_once(
                OTHER_BLOCKS,
                in_every_layer(self.prefix),
                self.other_blocks,
            )
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = columns, rows
        layer.orig_dtype, layer.weight_block_size = params_dtype, list(self.storage.grid)
        weight = torch.empty((rows, columns), dtype=params_dtype, device="meta")
        loader = extra_weight_attrs["weight_loader"]
        loader = _refusing_codes(loader, self.prefix) if isinstance(loader, MethodType) else loader
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        initialize_online_processing(layer)
        self.fp8_linear = self._choose((rows, columns))

    def _choose(self, shape: tuple[int, int]) -> Any:
        """Return the kernel for a weight of this shape, and find out who quantizes activations."""
        kernel = kernels.choose(self.storage, self.config.options["kernel"], shape, self.out_dtype)
        self.fake_quantizes = self.config.options["activations"] == "emulated" and not kernels.quantizes_activations(
            kernel
        )
        return kernel

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Quantize the loaded weight. vLLM calls this a second time at the end of loading, which changes nothing."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            self.config.loaded(layer)
            return
        self._quantize(layer)
        layer._already_called_process_weights_after_loading = True

    def _quantize(self, layer: LinearBase) -> None:
        layer.input_scale = None
        codes, scale_inv = quantize_weight(
            layer.weight.data, self.storage, lambda amax: amax_for_tp_weight_quant(amax, self.sharded)
        )
        self.lay_out(layer, codes, scale_inv)

    def lay_out(self, layer: LinearBase, codes: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Set codes and scales as parameters of the layer, in the layout of the kernel."""
        replace_parameter(layer, "weight", codes)
        replace_parameter(layer, "weight_scale_inv", scale_inv)
        self.fp8_linear.process_weights_after_loading(layer)
        released.keep(layer)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias``; ``x`` is quantized by the kernel, or here if activations are emulated."""
        if self.fake_quantizes:
            # The decoding kernel computes in FP32, so activations stay exact; others take them in their own dtype.
            dtype = torch.float32 if isinstance(self.fp8_linear, kernels.DecodeKernel) else x.dtype
            assert self.storage.activation is not None
            x = ops.fake_quantize(x, self.storage.group, self.storage.activation.scale, dtype)
        out: torch.Tensor = self.fp8_linear.apply_weights(layer, x, bias)
        return out

    # ------------------------------------------------------------------ shapes

    def _unquantized(self, rows: int, columns: int, reason: str) -> UnquantizedLinearMethod:
        """Return vLLM's BF16 method with a warning; raise PrecisionError if the contract is strict."""
        if self.config.precision.strict:
            raise PrecisionError(
                f"{self.prefix}: a weight of {rows}x{columns} on this worker cannot be quantized.",
                f"{reason[0].upper()}{reason[1:]}, and the contract is strict.",
                f"Pad the layer, add {self.prefix!r} to keep, use fewer tensor-parallel workers, or set strict=False.",
            )
        logger.warning_once(STAYS, in_every_layer(self.prefix), reason)
        return self.config.unquantized(reason)

    def _rows(self, layer: LinearBase, sizes: list[int], output_size: int) -> list[Span]:
        """Return where each part of this worker's rows lies in its unsharded weight."""
        names = self.config.parts(self.prefix, len(sizes))
        if sum(sizes) == output_size:
            return fused_rows(names, sizes, [0] * len(sizes), sizes)
        rank, ranks = layer.tp_rank, layer.tp_size
        copies = [1] * len(sizes)  # workers with the same rows: of k and v, if there are fewer heads than workers
        if isinstance(layer, QKVParallelLinear):
            copies[1:] = [layer.num_kv_head_replicas] * (len(sizes) - 1)
        starts = [rank // n * size for n, size in zip(copies, sizes, strict=True)]
        return fused_rows(names, sizes, starts, [ranks // n * size for n, size in zip(copies, sizes, strict=True)])

    def _columns(self, layer: LinearBase, columns: int, input_size: int) -> Span:
        start = 0 if columns == input_size else layer.tp_rank * columns
        return Span("", start, start + columns, input_size)


def _refusing_codes(loader: MethodType, name: str) -> MethodType:
    """Return a weight loader that raises PrecisionError for FP8 codes: cast to BF16 they would lack their scales."""

    def load(layer: LinearBase, param: torch.Tensor, loaded_weight: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if loaded_weight.dtype in (torch.float8_e4m3fn, torch.uint8):
            raise PrecisionError(
                f"{name}: the checkpoint is quantized already.",
                f"It holds {loaded_weight.dtype} codes, and nemo_fp8 quantizes BF16 weights.",
                instead_of_codes(),
            )
        return loader.__func__(layer, param, loaded_weight, *rest, **more)

    # A method like the loader itself: vLLM finds the layer of a recorded weight by its loader's __self__.
    return MethodType(load, loader.__self__)
