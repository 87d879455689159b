"""Multiply with weights in the compute dtype as they lie in a checkpoint, on a CPU, so that a push writes all there is.

On a CPU vLLM packs every BF16 weight into an object of oneDNN's that nobody can write into. A push then gathers each
layer, and has it packed anew: that is most of its time. With ``unquantized="rows"`` there is no packed copy:

    up to ``ops.DIRECT`` tokens    multiplied with the rows themselves (``bf16_multiply.c``)
    more                           multiplied by torch, whose oneDNN packs on the way

So pushes copy, embeddings and output heads are there once, and one request at a time generates faster. The trade-off:
eight at once are about as fast, or a little slower, and prompts take longer by what packing on the way takes
(docs/rollout.md has how much). The experts of a BF16 model stay packed: vLLM has one kernel for them, which takes
nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from nemo_fp8.rollout.engine import ops


class RowsLinearMethod(UnquantizedLinearMethod):
    """vLLM's method for linears in the compute dtype, without the packing."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weight of a product as it is. A convolution (of Mamba's) is packed as ever: no product takes it."""
        if layer.weight.dim() != 2:
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias``."""
        out: torch.Tensor = ops.rows_linear(x, layer.weight, bias)
        return out


class RowsEmbeddingMethod(UnquantizedEmbeddingMethod):
    """vLLM's method for embeddings and output heads, without a packed copy beside them."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weight as it is."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits ``x @ weight.T + bias`` of a head."""
        out: torch.Tensor = ops.rows_linear(x, layer.weight, bias)
        return out
