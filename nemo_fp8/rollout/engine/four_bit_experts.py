"""Store the experts of a MoE layer in NVFP4, in ModelOpt's layout, and multiply them decoded.

    w13_weight, w2_weight                   uint8  [experts, N, K / 2]
    w13_weight_scale, w2_weight_scale       e4m3   [experts, N, K / 16]
    w13_weight_scale_2, w2_weight_scale_2   FP32   [experts]: gate and up of an expert share one

vLLM's own emulation of NVFP4 experts is written in Triton, which its CPU build does not have. Here the same operands
are multiplied one expert after the other: activations as in :mod:`nemo_fp8.rollout.engine.four_bits`, weights decoded
to the dtype of the activations. The trade-off: a decoded expert is made anew on each call, so that memory holds four
bits a weight and no copy can be older than a push.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_moe_weight_quant
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.modelopt import FourBits, amax_of, four_bits
from nemo_fp8.rollout.engine.experts import Decoding, not_decoded, unquantized
from nemo_fp8.rollout.engine.four_bits import decoded, rounded, scales_of_activations
from nemo_fp8.rollout.engine.ops import weighted_experts
from nemo_fp8.rollout.engine.selection import STAYS, in_every_layer

if TYPE_CHECKING:
    from nemo_fp8.rollout.engine.config import NemoFp8Config

logger = init_logger("vllm.nemo_fp8")


def method_for(config: NemoFp8Config, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase:
    """Return the method for experts in NVFP4, which are decoded on a CPU; elsewhere they stay in the compute dtype.

    Raises PrecisionError if they cannot be decoded and the contract is strict.
    """
    unknown = " and ".join(not_decoded(layer))
    if current_platform.is_cpu() and not unknown:
        return Nvfp4MoEMethod(config, layer, prefix)
    what, name = f"experts with {unknown}" if unknown else "experts on a GPU", in_every_layer(prefix)
    why = f"{what} have no NVFP4 kernel of ours"
    if config.precision.strict:
        raise PrecisionError(
            f"{prefix}: {what} cannot be in NVFP4 here, and the contract is strict.",
            "NVFP4 experts run on decoded weights, on a CPU: with SiLU, no biases, and weights on their output.",
            f"Add {name!r} to keep, set strict=False, or export the checkpoint for vLLM's own kernels.",
        )
    logger.warning_once(STAYS, name, why)
    return unquantized(layer, why)


class Nvfp4MoEMethod(Decoding):
    """Routed experts of a layer in NVFP4, decoded for each product."""

    def __init__(self, config: NemoFp8Config, layer: RoutedExperts, prefix: str) -> None:
        super().__init__(layer.moe_config)
        self._remember(config, prefix)
        self.scales = scales_of_activations(self.storage, config.options)

    def quantize_layer(self, layer: RoutedExperts) -> None:
        """Replace the weights of a layer by codes and scales."""
        for name in ("w13", "w2"):
            weight = getattr(layer, f"{name}_weight").data
            self.lay_out_four_bits(layer, name, four_bits(weight, self.operand, self.amax(amax_of(weight))))

    def amax(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each expert, on all workers, from those on this one."""
        found: torch.Tensor = amax_for_moe_weight_quant(largest, self.moe.tp_size)
        return found

    def live(self, layer: RoutedExperts, name: str) -> tuple[torch.Tensor, ...]:
        """Return codes, block scales and the scales beneath of ``w13_weight`` or ``w2_weight``."""
        return tuple(getattr(layer, f"{name}{end}") for end in ("", "_scale", "_scale_2"))

    def follow(self, layer: RoutedExperts) -> None:
        """Make what depends on the scales beneath, after they were written in place: nothing does."""

    def lay_out_four_bits(self, layer: RoutedExperts, name: str, found: FourBits) -> None:
        """Set codes and scales of ``w13`` or ``w2`` as parameters of the layer."""
        replace_parameter(layer, f"{name}_weight", found.weight)
        replace_parameter(layer, f"{name}_weight_scale", found.weight_scale)
        replace_parameter(layer, f"{name}_weight_scale_2", found.weight_scale_2)

    def weighted_sum(
        self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return that sum, from weights that are decoded one expert after the other."""
        names = ("weight", "weight_scale", "weight_scale_2")
        w13, w2 = ([getattr(layer, f"{which}_{name}") for name in names] for which in ("w13", "w2"))
        out: torch.Tensor = four_bit_experts(x, *w13, *w2, weights, experts, layer.expert_map, self.scales)
        return out


@torch.library.custom_op("nemo_fp8::four_bit_experts", mutates_args=())
def four_bit_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    g13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    g2: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    local: torch.Tensor | None,
    scales: str,
    fixed13: torch.Tensor | None = None,
    fixed2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts' outputs; ``w13`` holds gate and up, with SiLU.

    ``experts`` are the numbers of each token's experts; ``local`` maps them to rows of the weights (-1: on another
    worker). ``scales`` says how activations are quantized, ``fixed13`` and ``fixed2`` are a checkpoint's fixed scales.
    """

    def gate_up(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return rounded(rows, scales, fixed13) @ decoded(w13[expert], s13[expert], g13[expert], x.dtype).t()

    def down(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return rounded(rows, scales, fixed2) @ decoded(w2[expert], s2[expert], g2[expert], x.dtype).t()

    return weighted_experts(x, weights, experts, local, gate_up, down)


@four_bit_experts.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)
