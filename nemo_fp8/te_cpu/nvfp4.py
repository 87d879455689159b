"""E2M1 codes, an E4M3 scale for 16 of them, an FP32 amax for the tensor: TE's NVFP4 tensors.

    encode = 448 * 6 / amax(tensor)               decode = 1 / encode
    scale  = e4m3(amax(block) * (encode / 6))     code = e2m1(x / (scale * decode))
    value  = code * scale * amax(tensor) / (448 * 6)

    by rows       two codes a byte [M, K/2], scales [M, K/16] padded to [128 m, 4 n]
    by columns    turned round: [K, M/2] and [K, M/16]

A block is 16 in a row, or 16x16 for weights, whose scale is repeated for each of its rows. With the random Hadamard
transform the columns are quantized after ``x @ (H * signs) / 4``, which spreads an outlier over its block. A code is
rounded to the nearest even, or, for gradients, to one of its two neighbours with the probability that keeps the mean
(stochastic rounding, from torch's generator). ``4over6`` blocks, which choose between two scales by their error, are
cast by TE's own Python reference.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nemo_fp8.numerics.bf16 import fp32_matmul, multiplies_bf16
from nemo_fp8.numerics.formats import FP32_MAX, cast, format_of
from nemo_fp8.te_cpu import swizzle
from nemo_fp8.te_cpu.tensors import amax_of, as_matrix_shape, reduced

BLOCK = 16
LARGEST = 6.0
_E4M3 = format_of("e4m3")
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_MAGNITUDES, -_MAGNITUDES])
# Halfway between two magnitudes. A tie goes to the even code: down to an even one, up to the next otherwise.
_HALFWAY = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_TIE_GOES_UP = torch.arange(7) % 2 == 1


def write(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Codes, scales and amaxes of ``x`` by rows, by columns, or both."""
    for side, matrix in _sides(quantizer, x, out):
        if quantizer.row_scaled_nvfp4:
            found = matrix.abs().amax(1).float()
        else:
            given = (
                None if side == "column" and quantizer.with_rht else amax
            )  # the transform's values have an amax of their own
            found = reduced(quantizer, (amax_of(matrix) if given is None else given).reshape(1).clone())
        _write_side(quantizer, matrix, out, side, found)


def write_with_its_amaxes(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Codes and scales alone, for the amaxes that ``out`` holds: what found them has looked at ``x`` already."""
    for side, matrix in _sides(quantizer, x, out):
        _write_side(quantizer, matrix, out, side, getattr(out, f"_amax_{side}wise"))


def _sides(quantizer: Any, x: torch.Tensor, out: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrix that each side of ``out`` holds, row by row."""
    rows, columns = as_matrix_shape(x.shape)
    x = x.reshape(rows, columns)
    if out._rowwise_data is not None:
        yield "row", x
    if out._columnwise_data is not None:
        turned = x.t().contiguous()
        yield "column", _hadamard(turned, quantizer.rht_matrix) if quantizer.with_rht else turned


def swizzles(quantizer: Any, rows: int, columns: int) -> bool:
    """Whether the kernel for this shape writes swizzled scales: one does with the Hadamard transform, one with square
    blocks."""
    return columns % 128 == 0 and (
        rows % 64 == 0 if quantizer.with_rht else quantizer.with_2d_quantization and rows % 128 == 0
    )


def _write_side(quantizer: Any, x: torch.Tensor, out: Any, side: str, amax: torch.Tensor) -> None:
    codes, scales = (_four_over_six if quantizer.nvfp4_use_4over6 else _blocks)(quantizer, x, amax)
    if (
        getattr(out, f"_amax_{side}wise").shape != amax.shape
    ):  # TE describes one amax for all columns where each row has its own
        setattr(out, f"_amax_{side}wise", torch.empty_like(amax))
    getattr(out, f"_amax_{side}wise").copy_(amax)
    getattr(out, f"_{side}wise_data").view(codes.shape).copy_(codes)
    padded = getattr(out, f"_{side}wise_scale_inv")
    padded[: scales.shape[0], : scales.shape[1]].copy_(scales.view(torch.uint8))


def _hadamard(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.bfloat16:
        raise ValueError("RHT is only supported for bfloat16 input")
    return (x.reshape(-1, BLOCK).float() @ matrix.float()).to(x.dtype).reshape(x.shape)


def _blocks(quantizer: Any, x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    blocks = x.float().view(rows, columns // BLOCK, BLOCK)
    most = blocks.abs().amax(-1)
    if quantizer.with_2d_quantization:
        most = most.view(rows // BLOCK, BLOCK, -1).amax(1).repeat_interleave(BLOCK, 0)
    encode = encode_scale(amax).reshape(-1, 1)
    scales = cast(block_scale(most, encode), _E4M3)
    scaled = (blocks * factor(scales.float(), encode)[:, :, None]).view(rows, columns)
    return _pack((_stochastic if quantizer.stochastic_rounding else nearest)(scaled)), scales


def encode_scale(amax: torch.Tensor) -> torch.Tensor:
    """A tensor's own scale, 1 where it holds nothing but zeros or an infinity."""
    encode = torch.div(_E4M3.max * LARGEST, amax).clamp_max(FP32_MAX)
    return torch.where((encode == 0) | (amax == 0), 1.0, encode)


def block_scale(amax: torch.Tensor, encode: torch.Tensor) -> torch.Tensor:
    """A block's scale in FP32, before it is rounded to E4M3."""
    return (amax * (encode * torch.reciprocal(torch.tensor(LARGEST)))).clamp_max(FP32_MAX)


def factor(scale: torch.Tensor, encode: torch.Tensor) -> torch.Tensor:
    """What the values of a block are multiplied with, from its scale as E4M3 holds it."""
    return torch.reciprocal(scale * torch.reciprocal(encode)).clamp_max(FP32_MAX)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The code of each value, one a byte, ties to even."""
    x = x.clamp(-LARGEST, LARGEST)
    magnitude = x.abs()
    code = torch.bucketize(magnitude, _HALFWAY)  # how many midpoints lie below
    tie = code.clamp_max(6)
    return _signed(x, code + ((magnitude == _HALFWAY[tie]) & _TIE_GOES_UP[tie]))


def _stochastic(x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(-LARGEST, LARGEST)
    magnitude = x.abs()
    below = torch.bucketize(magnitude, _MAGNITUDES, right=True).sub_(1).clamp_(0, 6)
    share = (magnitude - _MAGNITUDES[below]) / (_MAGNITUDES[below + 1] - _MAGNITUDES[below])
    return _signed(x, below + (torch.rand_like(share) < share))


def _signed(x: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    return (code + 8 * ((x < 0) & ((code > 0) | (x >= -0.25)))).to(torch.uint8)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes of two codes into one code a byte."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the low half."""
    return _pack(codes).contiguous()


def _four_over_six(quantizer: Any, x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    codes, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
        x,
        amax,
        BLOCK,
        BLOCK if quantizer.with_2d_quantization else 1,
        pow_2_scales=False,
        row_scaled_nvfp4=quantizer.row_scaled_nvfp4,
        nvfp4_use_4over6=True,
        nvfp4_e4m3_max=quantizer.nvfp4_e4m3_max,
        nvfp4_4over6_err_mode=quantizer.nvfp4_4over6_err_mode,
        nvfp4_4over6_err_use_fast_math=os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0") not in ("", "0"),
        eps=0.0,
    )
    return codes.view(torch.uint8), scales


@dataclass(frozen=True)
class Side:
    """One side of a tensor: FP32 ``codes`` [outer, contracted], a scale for 16 of them, and the amax that ``largest``
    encodes."""

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor
    largest: float

    def scaled(self) -> torch.Tensor:
        """``code * scale``: 6 bits, so that it is exact in FP32 and in BF16."""
        return self._times(self.scales)

    def dequantize(self) -> torch.Tensor:
        """The values in FP32. A GPU multiplies the scale with the amax first, and with the reciprocal of
        ``largest``."""
        return self._times(self.scales * self.amax.reshape(-1, 1) * _reciprocal(self.largest))

    def _times(self, scales: torch.Tensor) -> torch.Tensor:
        blocks: torch.Tensor = self.codes.view(*scales.shape, BLOCK) * scales[:, :, None]
        return blocks.view(self.codes.shape)


def _reciprocal(number: float) -> torch.Tensor:
    return torch.reciprocal(torch.tensor(number))


def operand(tensor: Any, by_rows: bool) -> Side:
    """What a GEMM reads: ``by_rows`` contracts the columns of the tensor, otherwise its rows."""
    side = "row" if by_rows else "column"
    data = getattr(tensor, f"_{side}wise_data")
    if data is None:
        raise RuntimeError(
            f"A GEMM contracts the {'columns' if by_rows else 'rows'} of an NVFP4 tensor without {side}wise data."
        )
    packed = data.reshape(-1, data.shape[-1]) if by_rows else data.reshape(data.shape[0], -1)
    codes = _VALUES[unpack(packed).long()]
    rows, columns = codes.shape
    scales = swizzle.scales_of(tensor, side)[:rows, : columns // BLOCK].view(torch.float8_e4m3fn).float()
    return Side(codes, scales, getattr(tensor, f"_amax_{side}wise"), LARGEST * tensor._nvfp4_e4m3_max)


def product(a: Side, b: Side) -> torch.Tensor:
    """``b @ a.T`` in FP32: sums of ``code * scale``, and both amaxes last. On numbers of like size the sums are exact,
    in any order."""
    with fp32_matmul("bf16" if multiplies_bf16() else "ieee"):
        out = torch.mm(b.scaled(), a.scaled().t())
    return out.mul_(b.amax.reshape(-1, 1) * a.amax.reshape(1, -1) * _reciprocal(a.largest * b.largest))


def values(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """The tensor's values, by rows where it has them."""
    by_rows = tensor._rowwise_data is not None
    found = operand(tensor, by_rows).dequantize()
    return (found if by_rows else found.t()).to(dtype).reshape(tuple(tensor.size()))


# ---------------------------------------------------------------------- amaxes that are known


def check_amaxes(function: str, quantizer: Any, amaxes: Iterable[torch.Tensor], count: int) -> None:
    """Refuse what the extension refuses, in its words, and one amax where there are as many as rows, which it does not
    look at."""
    reasons = {
        f"{function} only supports NVFP4 quantizers.": type(quantizer).__name__ != "NVFP4Quantizer",
        "Precomputed amax tensors must be float32.": any(amax.dtype != torch.float32 for amax in amaxes),
        f"{function} expects as many rowwise and columnwise amaxes as tensors ({count}).": any(
            amax.numel() != count for amax in amaxes
        ),
        "quantize_with_amax is not supported for row-scaled NVFP4 quantization.": getattr(
            quantizer, "row_scaled_nvfp4", False
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RuntimeError(reason)


# ---------------------------------------------------------------------- turned round


def data_transpose(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Packed codes [M, K/2] as [K, M/2]."""
    turned = pack(unpack(input.reshape(-1, input.shape[-1])).t())
    return turned if out is None else out.copy_(turned)


def scales_2d_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """Scales of 16x16 blocks, each repeated for its 16 rows, [M, K/16] as [K, M/16]."""
    tiles = input[: M_tiles * BLOCK : BLOCK, :K_tiles]
    output.zero_()
    output[: K_tiles * BLOCK, :M_tiles] = tiles.t().repeat_interleave(BLOCK, 0)
