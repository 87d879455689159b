"""LayerNorm and RMSNorm for Megatron's local layers, sequence parallelism included.

    LayerNorm  y = (x - mean) / sqrt(var + eps) * g + b
    RMSNorm    y = x / sqrt(mean(x^2) + eps) * g          (g + 1 where gamma is centred on zero)

Without TransformerEngine or Apex, Megatron falls back to torch's norms and then refuses sequence parallelism,
zero-centred gammas and the kernel hints ``persist_layer_norm`` and ``memory_efficient_layer_norm``. All a norm
has to do for sequence parallelism is to mark its parameters: each rank sees its share of the sequence only, so
Megatron sums their gradients over the tensor-parallel ranks. The hints name CUDA kernels and change no value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nemo_fp8.errors import PrecisionError


class Norm(nn.Module):
    """The norm that ``config.normalization`` names, over the last dimension."""

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise PrecisionError(
                f"normalization={config.normalization!r} has no local layer.",
                "Without TransformerEngine there are LayerNorm and RMSNorm.",
                "Set normalization='LayerNorm' or 'RMSNorm'.",
            )
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        gain = torch.zeros if self.centred else torch.ones
        self.weight = self._parameter(gain(hidden_size, dtype=config.params_dtype), config)
        self.bias = (
            self._parameter(torch.zeros(hidden_size, dtype=config.params_dtype), config) if config.normalization == "LayerNorm" else None
        )

    @staticmethod
    def _parameter(value: torch.Tensor, config: Any) -> nn.Parameter:
        parameter = nn.Parameter(value)
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` normalized over its last dimension, in its own dtype."""
        gain = self.weight + 1 if self.centred else self.weight
        if self.bias is None:
            return F.rms_norm(x, gain.shape, gain.to(x.dtype), self.eps)
        return F.layer_norm(x, gain.shape, gain.to(x.dtype), self.bias.to(x.dtype), self.eps)
