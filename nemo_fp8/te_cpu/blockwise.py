"""One scale for 128x128 values or for 128 in a row: TE's blockwise FP8 tensors.

    2D (weights)        codes [M, K], scales [M/128, K/128]                 columns: both turned round
    1D (activations)    codes [M, K], scales [K/128, M], turned round       columns: codes [K, M] of 128x1 blocks,
                        scales [M/128, K]

What a GEMM contracts lies in one piece, so columns are held transposed; the last dimension of scales is padded to a
multiple of 4.

    product     y = 0;   y = fma(sum over 128 of (code b * code a) * scale b, scale a, y), block after block

is Hopper's: partial sums are scaled in FP32, and no value is rounded before it is multiplied. So its FP32 scales cost
nothing in accuracy. Blackwell takes these operands for MXFP8 ones, whose scales are powers of two, and refuses others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.bf16 import fp32_matmul
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.kernels import cpu
from nemo_fp8.numerics.quantize import quantize, quantize_into
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.numerics.scales import is_pow2
from nemo_fp8.te_cpu import device
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.tensors import as_matrix_shape, turn
from nemo_fp8_hook import HOPPER

BLOCK = 128


def write(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Write codes and scales of ``x`` by rows, by columns, or both; a square block serves both. Raise RuntimeError
    where TE's kernels do: on Blackwell, for FP32 scales."""
    if not quantizer.force_pow_2_scales and device.standing_for() != HOPPER:
        raise RuntimeError(
            "FP32 scales of blocks on Blackwell, which the CPU stands for. TransformerEngine emulates blockwise "
            "scaling by MXFP8 there, whose scales are powers of two, and its casts refuse others. Set "
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 or NEMO_FP8_TE_CPU=90 before TransformerEngine is imported, and the "
            "CPU stands for Hopper; or take power-of-2 scales."
        )
    square = quantizer.block_scaling_dim == 2
    scale_kind = "pow2" if quantizer.force_pow_2_scales else "fp32"
    dtype, high = torch_dtype(quantizer.dtype), BLOCK if square else 1
    operand = Operand(format_of(dtype).name, (high, BLOCK), scale_kind)
    rows, columns = as_matrix_shape(x.shape)
    x = x.reshape(rows, columns)
    by_rows = None
    if out._rowwise_data is not None:
        codes, padded = out._rowwise_data.view(rows, columns).view(dtype), out._rowwise_scale_inv
        scales = (padded if square else padded.t())[: -(-rows // high), : -(-columns // BLOCK)]
        by_rows = quantize_into(x, operand, codes, scales, epsilon=quantizer.amax_epsilon)
    if out._columnwise_data is not None:
        by_columns = by_rows if square else None
        if by_columns is None:
            by_columns = quantize(x, operand, usage="col", epsilon=quantizer.amax_epsilon)
        turn(by_columns.data.view(torch.uint8), out._columnwise_data.view(columns, rows))
        scales = by_columns.scale_inv.t() if square else by_columns.scale_inv
        out._columnwise_scale_inv[: scales.shape[0], : scales.shape[1]].copy_(scales)


def operand(tensor: Any, by_rows: bool) -> Quantized:
    """Return what a GEMM reads: ``by_rows`` contracts the columns of the tensor, otherwise its rows.

    Raises RuntimeError if the tensor holds no copy for it.
    """
    side = "row" if by_rows else "column"
    data, scales = getattr(tensor, f"_{side}wise_data"), getattr(tensor, f"_{side}wise_scale_inv")
    if data is None:
        raise RuntimeError(
            f"A GEMM contracts the {'columns' if by_rows else 'rows'} of a blockwise tensor without {side}wise data."
        )
    data = data.reshape(-1, data.shape[-1]) if by_rows else data.reshape(data.shape[0], -1)
    data = data.view(torch_dtype(tensor._fp8_dtype))
    if tensor._is_2D_scaled:
        return Quantized(data, scales[:, : -(-data.shape[1] // BLOCK)].contiguous(), (BLOCK, BLOCK), "row")
    return Quantized(data, scales[:, : data.shape[0]].t().contiguous(), (1, BLOCK), "row")


def refuse(
    a: Any, b: Any, inner: int, outer: tuple[int, int], split_accumulator: bool, epilogue: str, dtype: torch.dtype
) -> None:
    """Raise where Hopper's GEMM of blockwise operands does, in its words: what runs here and fails on the GPU would
    help nobody.

    ``outer`` are the dimensions that A and B do not contract, and ``epilogue`` what follows the product ("bgrad",
    "gelu", "dgelu").
    """
    reasons = {
        "Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling GEMM is supported": a._is_2D_scaled and b._is_2D_scaled,
        "Inner dimension requirement on NVTE_BLOCK_SCALING GEMM. Caller must pad.": inner % 16,
        "Outer dimension requirement on A for NVTE_BLOCK_SCALING GEMM. Caller must pad.": outer[0] % 8,
        "Outer dimension requirement on B for NVTE_BLOCK_SCALING GEMM. Caller must pad.": outer[1] % 8
        and not b._is_2D_scaled,
        "CUBLAS_STATUS_NOT_SUPPORTED: one of the operands must be E4M3.": all(
            torch_dtype(t._fp8_dtype) == torch.float8_e5m2 for t in (a, b)
        ),
        "CUBLAS_STATUS_NOT_SUPPORTED: blockwise operands need the split accumulator.": not split_accumulator,
        "Epilogue requested outside of the available ones for blockwise operands.": epilogue not in ("", "dgelu"),
        (
            "CUBLAS_STATUS_NOT_SUPPORTED: an unsupported value or parameter was passed (GELU's gradient needs BF16)."
        ): epilogue == "dgelu" and dtype != torch.bfloat16,
    }
    for reason, holds in reasons.items():
        if holds:
            raise RuntimeError(reason)


def product(a: Quantized, b: Quantized) -> torch.Tensor:
    """Return ``b @ a.T`` in FP32, as Hopper's GEMM adds it up. The scales of rows are multiplied first, B's where both
    are scaled by rows."""
    columns_first = a.block == (1, BLOCK) != b.block
    out = torch.zeros(len(b.data), len(a.data))
    partial = torch.empty_like(out)
    with fp32_matmul("ieee"):
        for x, w, of_rows, of_columns in zip(_slices(b), _slices(a), _of_rows(b), _of_rows(a), strict=True):
            torch.mm(x, w.t(), out=partial)
            accumulate(out, partial, of_rows, of_columns, columns_first)
    return out


def accumulate(
    out: torch.Tensor, partial: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor, columns_first: bool
) -> None:
    """Add a partial sum, times the scales of one side, in FP32, and those of the other, with one rounding for these and
    the addition."""
    last = of_rows if columns_first else of_columns
    exact = is_pow2(last)
    if cpu.accumulate(out, partial, of_rows, of_columns, columns_first=columns_first, exact=exact):
        return
    accumulate_reference(out, partial, of_rows, of_columns, columns_first, exact)


def accumulate_reference(
    out: torch.Tensor,
    partial: torch.Tensor,
    of_rows: torch.Tensor,
    of_columns: torch.Tensor,
    columns_first: bool,
    exact: bool,
) -> None:
    """Add ``partial``, scaled as ``accumulate`` does it, to ``out`` in plain torch."""
    first, last = (of_columns, of_rows[:, None]) if columns_first else (of_rows[:, None], of_columns)
    scaled = partial * first
    if exact:  # the product is, so that adding it is one rounding
        out.addcmul_(scaled, last)
    else:  # FP64 holds the product of two FP32 numbers
        out.copy_(torch.addcmul(out.double(), scaled.double(), last.double()))


def _slices(q: Quantized) -> tuple[torch.Tensor, ...]:
    """Return the codes as numbers, 128 columns at a time."""
    codes = replace(q, scale_inv=torch.ones(()), block=None).dequantize(torch.float32)
    return torch.split(codes, BLOCK, 1)


def _of_rows(q: Quantized) -> torch.Tensor:
    """Return the scales of every row, block after block: those of a square block are its 128 rows'."""
    scales = q.scale_inv if q.block == (1, BLOCK) else q.scale_inv.repeat_interleave(BLOCK, 0)[: len(q.data)]
    return scales.t().contiguous()


def values(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor's values in ``dtype``, from its rows where it has them."""
    by_rows = tensor._rowwise_data is not None
    found = operand(tensor, by_rows).dequantize(dtype)
    return (found if by_rows else found.t()).reshape(tuple(tensor.size()))
