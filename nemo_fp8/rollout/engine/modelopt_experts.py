"""Give vLLM's CPU build experts for checkpoints of ModelOpt's, where it has none.

    NVFP4, W4A16    vLLM's emulation is written in Triton, which the CPU build does not have: no engine starts
    MXFP8           the same, but the engine starts, and ends at its first token

vLLM's own methods create and load the parameters, so every name of ModelOpt's is read as elsewhere (its loader asks
for "ModelOpt" in the name of the method's class). What they multiply is multiplied here one expert after the other, by
the operators that serve experts which were quantized at load: so a checkpoint and the fly give the same bits.
Activations in NVFP4 have the checkpoint's scales, of which vLLM takes the largest of a layer; in MXFP8 and W4A16 they
stay as they are.

The configurations are registered under vLLM's own names, by its function for that. The trade-off: an engine on a CPU
with this package installed runs checkpoints that vLLM alone refuses there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.modelopt import (
    LINEAR_ALGOS,
    ModelOptMixedPrecisionConfig,
    ModelOptMxFp8Config,
    ModelOptMxFp8FusedMoE,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)
from vllm.model_executor.utils import replace_parameter

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.engine import ops
from nemo_fp8.rollout.engine.experts import ByExpert, not_decoded
from nemo_fp8.rollout.engine.four_bit_experts import four_bit_experts
from nemo_fp8.rollout.engine.four_bits import FIXED, NONE


class _OfACheckpoint(ByExpert):
    """The part that both methods share: vLLM's, without its choice of a kernel, which finds none."""

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)
        self.quant_config = quant_config


class ModelOptNvfp4Decoded(_OfACheckpoint, ModelOptNvFp4FusedMoE):
    """Experts of a checkpoint in NVFP4, decoded for each product."""

    use_global_sf = False
    supports_eplb = False

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Keep one scale beneath gate and up, and one for the input of each product.

        Raises PrecisionError if gate and up of an expert have two.
        """
        gate, *up = layer.w13_weight_scale_2.data.unbind(1)
        if any(not torch.equal(gate, other) for other in up):
            raise PrecisionError(
                "Experts whose gate and up have two weight_scale_2.",
                "They are multiplied as one matrix beneath one scale; vLLM takes the first for both.",
                "Export the checkpoint with one scale for both, as nemo-fp8 export and ModelOpt's exporter do.",
            )
        replace_parameter(layer, "w13_weight_scale_2", gate.contiguous())
        for name in ("w13_input_scale", "w2_input_scale"):
            replace_parameter(layer, name, getattr(layer, name).data.max())

    def weighted_sum(
        self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        names = ("weight", "weight_scale", "weight_scale_2")
        w13, w2 = ([getattr(layer, f"{which}_{name}") for name in names] for which in ("w13", "w2"))
        scales = NONE if self.quant_config.quant_method == "W4A16_NVFP4" else FIXED
        out: torch.Tensor = four_bit_experts(
            x, *w13, *w2, weights, experts, layer.expert_map, scales, layer.w13_input_scale, layer.w2_input_scale,
        )  # fmt: skip
        return out


class ModelOptMxfp8Decoded(_OfACheckpoint, ModelOptMxFp8FusedMoE):
    """Experts of a checkpoint in MXFP8, multiplied in FP32; activations stay as they are."""

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Leave codes and exponents as they were loaded."""

    def weighted_sum(
        self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        s13, s2 = (getattr(layer, f"{which}_weight_scale").view(torch.float8_e8m0fnu) for which in ("w13", "w2"))
        held, routed = (layer.w13_weight, s13, layer.w2_weight, s2), (weights, experts, layer.expert_map)
        out: torch.Tensor = ops.decoded_experts(x, *held, *routed, [1, 32], 0, "e8m0", ops.DIRECT)
        return out


METHODS = {"NVFP4": ModelOptNvfp4Decoded, "W4A16_NVFP4": ModelOptNvfp4Decoded, "MXFP8": ModelOptMxfp8Decoded}
"""ModelOpt's ``quant_algo`` -> the method of experts in it."""


class _OnCpu:
    """The part that configurations share: the methods above for experts, vLLM's own for everything else."""

    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer. Raises PrecisionError for experts that cannot be decoded."""
        mixed = isinstance(self, ModelOptMixedPrecisionConfig)
        experts = isinstance(layer, RoutedExperts) and not self.is_layer_excluded(prefix)
        algorithm = (self._resolve_quant_algo(prefix) if mixed else self.quant_method) if experts else None
        if algorithm not in METHODS:
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if unknown := " and ".join(not_decoded(layer)):
            raise PrecisionError(
                f"{prefix}: experts in {algorithm} with {unknown}, on a CPU.",
                "vLLM's kernels for them are for GPUs, and ours have SiLU, no biases, and weights on the output.",
                "Serve this checkpoint on a GPU, or decode it first: nemo-fp8 export SRC DST --precision bf16_mixed.",
            )
        config = getattr(self, LINEAR_ALGOS[algorithm][1]) if mixed else self
        return METHODS[algorithm](config, layer.moe_config)


# Classes with names of their own: vLLM pickles an engine's configuration to the processes that it starts.
class Nvfp4OnCpu(_OnCpu, ModelOptNvFp4Config):
    """ModelOpt's configuration of NVFP4 and W4A16 checkpoints, on a CPU."""


class Mxfp8OnCpu(_OnCpu, ModelOptMxFp8Config):
    """ModelOpt's configuration of MXFP8 checkpoints, on a CPU."""


class MixedOnCpu(_OnCpu, ModelOptMixedPrecisionConfig):
    """ModelOpt's configuration of checkpoints in several formats, on a CPU."""


def register() -> None:
    """Register the configurations under vLLM's names. A second call does the same again."""
    for name, config in (("modelopt_fp4", Nvfp4OnCpu), ("modelopt_mxfp8", Mxfp8OnCpu), ("modelopt_mixed", MixedOnCpu)):
        register_quantization_config(name)(config)
