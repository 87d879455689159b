"""Store and multiply the experts of a MoE layer in FP8: gate and up stacked in ``w13``, down in ``w2``.

vLLM's fused kernel multiplies them where the machine has one. Elsewhere each expert's tokens are multiplied in FP32,
one expert after the other. So they are for emulated activations, too: what lies between the two GEMMs of the fused
CPU kernel cannot be quantized from outside.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_moe_weight_quant
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.engine import kernels, ops
from nemo_fp8.rollout.engine.compatibility import FEATURES
from nemo_fp8.rollout.engine.grid import Span, fused_rows, other_blocks
from nemo_fp8.rollout.engine.quantizer import quantize_weight
from nemo_fp8.rollout.engine.selection import OTHER_BLOCKS, STAYS, in_every_layer

if TYPE_CHECKING:
    from nemo_fp8.rollout.engine.config import NemoFp8Config


def method_for(config: NemoFp8Config, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase:
    """Return the method for the experts of a layer: on the fused kernel, on decoded weights, or in the compute dtype.

    Raises PrecisionError if experts cannot be decoded and the contract is strict.
    """
    emulated = config.options["activations"] == "emulated" and current_platform.is_cpu()
    if kernels.has_experts_kernel(config.storage, config.options["kernel"]) and not emulated:
        fused = NemoFp8MoEMethod(config, layer, prefix)
        if fused.multiplies(layer):
            return fused
    unknown = " and ".join(not_decoded(layer))
    if not unknown:
        return DecodedMoEMethod(config, layer, prefix, emulated)
    name, why = in_every_layer(prefix), f"experts with {unknown} run on vLLM's fused FP8 kernel only"
    if config.precision.strict:
        raise PrecisionError(
            f"{prefix}: experts with {unknown} cannot be in FP8 here, and the contract is strict.",
            "Without vLLM's fused FP8 kernel, experts run on decoded weights: with SiLU, no biases, and weights "
            "on their output.",
            f"Add {name!r} to keep, or set strict=False; or use a GPU (vLLM's kernel for AMX has no such experts "
            "either) and activations='kernel'."
            if any(beyond_cpus(layer))
            else f"Add {name!r} to keep, or set strict=False; or use a machine with vLLM's kernel (AMX, or a GPU) and "
            "activations='kernel'.",
        )
    kernels.logger.warning_once(STAYS, name, why)
    return unquantized(layer, why)


def unquantized(layer: RoutedExperts, reason: str) -> UnquantizedFusedMoEMethod:
    """Return vLLM's method for the compute dtype, with the reason why the experts are not in FP8."""
    method = UnquantizedFusedMoEMethod(layer.moe_config)
    method.nemo_fp8_reason = reason
    return method


def not_decoded(layer: RoutedExperts) -> Iterator[str]:
    """Yield the features of a layer that the decoded method does not have."""
    if current_platform.is_cpu() and FEATURES["CPU router"][1].misfit():
        yield "a router that runs on CPUs in vLLM's fused kernels alone (vLLM before 0.30)"
    yield from beyond_cpus(layer)


def beyond_cpus(layer: RoutedExperts) -> Iterator[str]:
    """Yield the features of a layer that no method for CPUs has, neither vLLM's fused kernel nor the decoded one."""
    if layer.apply_router_weight_on_input:
        yield "the router's weight on their input (as Llama 4 has it)"
    if layer.moe_config.has_bias:
        yield "biases (as GPT-OSS has them)"
    if layer.moe_config.activation != MoEActivation.SILU:
        yield f"{layer.moe_config.activation.value} activations"


class Quantizing:
    """The part that all methods share: quantize weights once they are loaded, and find where the blocks lie."""

    moe: Any
    _zero_padding: Any

    def _remember(self, config: NemoFp8Config, prefix: str) -> None:
        self.config, self.prefix, self.storage, self.operand = config, prefix, config.storage, config.storage.weight
        self.other_blocks: str | None = None

    def create_weights(self, layer: RoutedExperts, *arguments: Any, **named: Any) -> None:
        """Create vLLM's parameters, and find out whether this worker's blocks are those of the unsharded weights."""
        super().create_weights(layer, *arguments, **named)  # type: ignore[misc]
        moe, block = self.moe, self.storage.weight.block
        size, ranks = moe.intermediate_size_per_partition_unpadded, moe.tp_size
        start, whole = moe.tp_rank * size, ranks * size
        gated = fused_rows(["gate_proj", "up_proj"], [layer.w13_weight.shape[1] // 2] * 2, [start] * 2, [whole] * 2)
        gated = [Span(span.name, start, start + size, whole, span.at) for span in gated]
        down = Span("down_proj", start, start + size, whole)
        none = Span("", 0, moe.hidden_dim_unpadded, moe.hidden_dim_unpadded)
        self.other_blocks = other_blocks(gated, none, block) or other_blocks([none], down, block)
        if self.other_blocks:
            name = in_every_layer(self.prefix)
            kernels.logger.info_once(OTHER_BLOCKS, name, self.other_blocks)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Quantize the weights of a layer, once."""
        if not getattr(layer, "_already_called_process_weights_after_loading", False):
            self._zero_padding(layer)
            self.quantize_layer(layer)
            layer._already_called_process_weights_after_loading = True

    def quantize_layer(self, layer: RoutedExperts) -> None:
        """Replace the weights of a layer by codes and scales."""
        self.lay_out(layer, *self._quantized(layer))

    def lay_out(
        self, layer: RoutedExperts, w13: torch.Tensor, w2: torch.Tensor, s13: torch.Tensor, s2: torch.Tensor
    ) -> None:
        """Set codes and scales in FP8 as parameters of the layer, in the layout of the method's kernel."""
        raise NotImplementedError

    def _quantized(self, layer: RoutedExperts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantize both weights; return the codes of both, then the scales of both."""
        layer.weight_block_size = list(self.storage.grid)
        both = (layer.w13_weight.data, layer.w2_weight.data)
        (w13, s13), (w2, s2) = (
            quantize_weight(weight, self.storage, lambda amax: amax_for_moe_weight_quant(amax, self.moe.tp_size))
            for weight in both
        )
        return w13, w2, s13, s2


class NemoFp8MoEMethod(Quantizing, Fp8PerBlockOnlineMoEMethod):
    """Routed experts of a layer in FP8, multiplied by vLLM's fused kernel."""

    def __init__(self, config: NemoFp8Config, layer: RoutedExperts, prefix: str) -> None:
        # vLLM 0.28 takes the layer, later ones its configuration.
        takes = inspect.signature(Fp8PerBlockOnlineMoEMethod.__init__).parameters
        super().__init__(**({"moe": layer.moe_config} if "moe" in takes else {"layer": layer}))
        self._remember(config, prefix)

    def multiplies(self, layer: RoutedExperts) -> bool:
        """Return whether vLLM has found a fused kernel for these experts. That for CPUs does not know all routers, and
        where there is none vLLM says so only once weights are laid out; it passes over biases, and ends an engine with
        an error at the first token if the router's weight is on the input."""
        known = self.fp8_backend.value != "NONE"
        return known and not (current_platform.is_cpu() and any(beyond_cpus(layer)))

    def lay_out(
        self, layer: RoutedExperts, w13: torch.Tensor, w2: torch.Tensor, s13: torch.Tensor, s2: torch.Tensor
    ) -> None:
        """Set codes and scales as parameters of the layer, in the layout of the kernel."""
        self._setup_kernel(layer, w13, w2, s13, s2, layer.w13_input_scale, layer.w2_input_scale)


class ByExpert(FusedMoEMethodBase):
    """The part that methods share which multiply one expert after the other, without a kernel of vLLM's."""

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return None: only vLLM's own kernels read a description of weights and scales."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return for each token the weighted sum of its routed experts' outputs, without shared experts."""
        return self.weighted_sum(layer, x, topk_weights, topk_ids.long())

    def weighted_sum(
        self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return that sum; ``weights`` and ``experts`` are those of each token."""
        raise NotImplementedError


class Decoding(Quantizing, ByExpert, OnlineMoEMethodBase):
    """The part that methods share which decode: sizes padded as for vLLM's fused kernel, so that the codes are those
    of every other method."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Pad sizes to whole blocks of the kernel's grid."""
        sizes = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        side = self.storage.grid[1]
        hidden, inner = (-(-size // side) * side for size in sizes)
        return hidden, inner


class DecodedMoEMethod(Decoding):
    """Routed experts of a layer in FP8, multiplied in FP32: from an expert's codes for few tokens, or decoded."""

    def __init__(self, config: NemoFp8Config, layer: RoutedExperts, prefix: str, fake_quantizes: bool) -> None:
        super().__init__(layer.moe_config)
        self._remember(config, prefix)
        self.group = self.storage.group if fake_quantizes else 0
        self.direct = kernels.direct(config.options["kernel"])

    def lay_out(
        self, layer: RoutedExperts, w13: torch.Tensor, w2: torch.Tensor, s13: torch.Tensor, s2: torch.Tensor
    ) -> None:
        """Set codes and scales as parameters of the layer."""
        named = {"w13_weight": w13, "w2_weight": w2, "w13_weight_scale_inv": s13, "w2_weight_scale_inv": s2}
        for name, tensor in named.items():
            replace_parameter(layer, name, tensor)

    def weighted_sum(
        self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return that sum, from the codes or from decoded weights."""
        codes = (layer.w13_weight, layer.w13_weight_scale_inv, layer.w2_weight, layer.w2_weight_scale_inv)
        assert self.storage.activation is not None
        how = (list(self.storage.grid), self.group, self.storage.activation.scale, self.direct)
        out: torch.Tensor = ops.decoded_experts(x, *codes, weights, experts, layer.expert_map, *how)
        return out
