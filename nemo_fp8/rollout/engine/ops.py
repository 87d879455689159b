"""FP8 arithmetic as torch operators, so that vLLM's compiled graphs can hold it.

    fake_quantize    x -> code * scale_inv of x, in groups along the last dimension: what an FP8 GEMM would have seen
    decoded_linear   x @ (code * scale_inv).T, rounded once: an FP8 GEMM for a machine that has none
    decoded_experts  the same for the experts of a MoE layer, each expert's tokens at a time

Codes are decoded on every call. Decoding once would make batches of one several times as fast on such a machine, and
would keep five bytes a weight instead of one, and a copy that a push of new weights could leave behind. Values are
FP32, or BF16 where they are exact in it (scales that are powers of two) and the processor has units for BF16 products;
nothing is rounded between the codes and the product.
"""

from __future__ import annotations

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.bf16 import fp32_matmul, multiplies_bf16
from nemo_fp8.numerics.gemm import is_exact_in_bf16
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.numerics.quantized import Quantized


@torch.library.custom_op("nemo_fp8::fake_quantize", mutates_args=())
def fake_quantize(x: torch.Tensor, group: int, scale: str, dtype: torch.dtype) -> torch.Tensor:
    """``x`` quantized to E4M3 in groups of 1 x ``group`` and decoded again."""
    return quantize(x, activation_of(group, scale)).dequantize(dtype)


@fake_quantize.register_fake
def _(x: torch.Tensor, group: int, scale: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


@torch.library.custom_op("nemo_fp8::decoded_linear", mutates_args=())
def decoded_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    block: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x @ weight.T + bias`` with the weight decoded, rounded once to ``dtype``."""
    weight = Quantized(codes, scale_inv, (block[0], block[1]))
    on_units = x.dtype == dtype == torch.bfloat16 and multiplies_bf16() and is_exact_in_bf16(weight)
    wide = torch.bfloat16 if on_units else torch.float32
    with fp32_matmul("ieee"):
        out = torch.nn.functional.linear(x.to(wide), weight.dequantize(wide), None if bias is None else bias.to(wide))
    return out.to(dtype)


@decoded_linear.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    block: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=dtype)


@torch.library.custom_op("nemo_fp8::decoded_experts", mutates_args=())
def decoded_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    local: torch.Tensor | None,
    block: list[int],
    group: int,
    scale: str,
) -> torch.Tensor:
    """The weighted sum of each token's experts, gate and up in one matrix with SiLU between them.

    ``experts`` names each token's experts, ``local`` maps such a name to a row of the weights (-1: another worker has
    it). ``group`` 0 leaves activations as they are; else both GEMMs see them quantized in groups of 1 x ``group``.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    chosen = experts if local is None else local[experts]
    for expert in torch.unique(chosen).tolist():
        if expert < 0:
            continue
        token, place = (chosen == expert).nonzero(as_tuple=True)
        hidden = _activations(x[token], group, scale) @ decode(w13[expert], s13[expert], block).t()
        gate, up = hidden.chunk(2, dim=-1)
        inner = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        result = _activations(inner, group, scale) @ decode(w2[expert], s2[expert], block).t()
        out.index_add_(0, token, result * weights[token, place, None].float())
    return out.to(x.dtype)


@decoded_experts.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


def decode(codes: torch.Tensor, scale_inv: torch.Tensor, block: list[int]) -> torch.Tensor:
    """Codes as FP32 values."""
    return Quantized(codes, scale_inv, (block[0], block[1])).dequantize()


def _activations(x: torch.Tensor, group: int, scale: str) -> torch.Tensor:
    return quantize(x, activation_of(group, scale)).dequantize() if group else x.float()


def activation_of(group: int, scale: str) -> Operand:
    """The activations' operand of a ``Storage``, put together again: a torch operator takes numbers and texts only."""
    return Operand("e4m3", (1, group), scale)
