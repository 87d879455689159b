"""FP8 arithmetic as torch operators, which vLLM's compiled graphs can contain.

    fake_quantize    x -> code * scale_inv of x, in groups along the last dimension: the operand of an FP8 GEMM
    decoded_linear   x @ (code * scale_inv).T, rounded once: an FP8 GEMM for a machine that has none
    decoded_experts  the same for the experts of a MoE layer, one expert's tokens after the other
    rows_linear      x @ weight.T with a weight in BF16 as it lies in a checkpoint

For up to ``DIRECT`` tokens a product takes the codes themselves (:func:`nemo_fp8.numerics.kernels.cpu.multiply`), so
that a weight is read once, at one byte. For more tokens it decodes the weight first, on each call. Decoding it once for
all calls would keep five bytes a weight instead of one, and a copy that might stay old after a push. Decoded values are
FP32, or BF16 if they are exact in it (scales that are powers of two) and the processor multiplies BF16 in hardware.
Nothing is rounded between the codes and the product. Only the order of the FP32 operations differs: from codes, a scale
multiplies the sum of its block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.bf16 import fp32_matmul, linear, multiplies_bf16
from nemo_fp8.numerics.gemm import is_exact_in_bf16
from nemo_fp8.numerics.kernels import cpu
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.numerics.quantized import Quantized

DIRECT = 64
"""The most tokens with which a product from codes, or from rows, is faster than one that decodes or packs weights."""


@torch.library.custom_op("nemo_fp8::fake_quantize", mutates_args=())
def fake_quantize(x: torch.Tensor, group: int, scale: str, dtype: torch.dtype) -> torch.Tensor:
    """Quantize ``x`` to E4M3 in groups of 1 x ``group``, and decode it to ``dtype``."""
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
    direct: int = 0,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, rounded once to ``dtype``; up to ``direct`` tokens from the codes themselves."""
    out = _from_codes(x, codes, scale_inv, block, direct, bias, dtype)
    if out is not None:
        return out
    weight = Quantized(codes, scale_inv, (block[0], block[1]))
    on_units = x.dtype == dtype == torch.bfloat16 and multiplies_bf16() and is_exact_in_bf16(weight)
    wide = torch.bfloat16 if on_units else torch.float32
    with fp32_matmul("ieee"):
        product = torch.nn.functional.linear(
            x.to(wide), weight.dequantize(wide), None if bias is None else bias.to(wide)
        )
    return product.to(dtype)


@decoded_linear.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    block: list[int],
    dtype: torch.dtype,
    direct: int = 0,
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
    direct: int = 0,
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts' outputs; ``w13`` holds gate and up, with SiLU.

    ``experts`` are the numbers of each token's experts; ``local`` maps them to rows of the weights (-1: on another
    worker). With ``group`` 0 activations are not quantized; else both GEMMs take them in groups of 1 x ``group``.
    An expert with up to ``direct`` tokens multiplies with its codes.
    """

    def gate_up(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return _product(_activations(rows, group, scale), w13[expert], s13[expert], block, direct)

    def down(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return _product(_activations(rows, group, scale), w2[expert], s2[expert], block, direct)

    return weighted_experts(x, weights, experts, local, gate_up, down)


@decoded_experts.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("nemo_fp8::rows_linear", mutates_args=())
def rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``; up to ``DIRECT`` tokens from the rows of a BF16 weight themselves."""
    tokens = x.reshape(-1, x.shape[-1])
    out = cpu.multiply_rows(tokens, weight, bias) if 0 < tokens.shape[0] <= DIRECT else None
    return linear(x, weight, bias) if out is None else out.view(*x.shape[:-1], weight.shape[0])


@rows_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def weighted_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    local: torch.Tensor | None,
    gate_up: Callable[[int, torch.Tensor], torch.Tensor],
    down: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts' outputs, with SiLU, one expert after the other.

    ``experts`` are the numbers of each token's experts; ``local`` maps them to rows of the weights (-1: on another
    worker). ``gate_up`` and ``down`` multiply rows by the weights of one expert. The sum is in FP32, rounded once.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    chosen = experts if local is None else local[experts]
    for expert in torch.unique(chosen).tolist():
        if expert < 0:
            continue
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = gate_up(expert, x[token]).float().chunk(2, dim=-1)
        result = down(expert, (torch.nn.functional.silu(gate) * up).to(x.dtype)).float()
        out.index_add_(0, token, result * weights[token, place, None].float())
    return out.to(x.dtype)


def _product(
    x: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor, block: list[int], direct: int
) -> torch.Tensor:
    """Return the FP32 product of activations and a weight."""
    out = _from_codes(x, codes, scale_inv, block, direct)
    return x.float() @ Quantized(codes, scale_inv, (block[0], block[1])).dequantize().t() if out is None else out


def _from_codes(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    block: list[int],
    direct: int,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor | None:
    """Return the product that takes codes; None for more than ``direct`` tokens, or if there is no kernel."""
    tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if not 0 < tokens.shape[0] <= direct or x.device.type != "cpu":
        return None
    out = cpu.multiply(tokens, codes, scale_inv, (block[0], block[1]), bias, dtype)
    return out if out is None or x.dim() == 2 else out.view(*x.shape[:-1], codes.shape[0])


def _activations(x: torch.Tensor, group: int, scale: str) -> torch.Tensor:
    return quantize(x, activation_of(group, scale)).dequantize() if group else x


def activation_of(group: int, scale: str) -> Operand:
    """Return the operand of activations again: a torch operator takes only numbers and strings, no ``Storage``."""
    return Operand("e4m3", (1, group), scale)
