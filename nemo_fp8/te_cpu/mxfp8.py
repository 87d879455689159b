"""One E8M0 scale for 32 values: TE's MXFP8 tensors.

by rows       codes [M, K], scales [M, K/32] in memory padded to [128 m, 4 n]
by columns    codes [M, K] of 32x1 blocks, not turned round, scales [M/32, K] padded to [4 m, 128 n]
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize_into
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.te_cpu import swizzle
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.tensors import as_matrix_shape

BLOCK = 32
E8M0 = torch.float8_e8m0fnu


def write(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Write codes and scales by rows, by columns, or both; with 2D quantization 32x32 blocks, whose scale is repeated
    along the block."""
    square = quantizer.with_2d_quantization
    dtype = torch_dtype(quantizer.dtype)
    operand = Operand(format_of(dtype).name, (BLOCK if square else 1, BLOCK), "e8m0")
    rows, columns = as_matrix_shape(x.shape)
    x = x.reshape(rows, columns)
    for side, usage, grid in (("row", "row", (rows, columns // BLOCK)), ("column", "col", (rows // BLOCK, columns))):
        data, padded = getattr(out, f"_{side}wise_data"), getattr(out, f"_{side}wise_scale_inv")
        if data is None:
            continue
        codes, scales = data.view(rows, columns).view(dtype), padded[: grid[0], : grid[1]]
        if square:
            along = 0 if side == "row" else 1
            found = quantize_into(x, operand, codes, torch.empty(rows // BLOCK, columns // BLOCK, dtype=E8M0))
            scales.copy_(found.scale_inv.view(torch.uint8).repeat_interleave(BLOCK, along))
        else:
            quantize_into(x, operand, codes, scales.view(E8M0), usage=usage)


def operand(tensor: Any, by_rows: bool) -> Quantized:
    """Return what a GEMM reads: ``by_rows`` contracts the columns of the tensor, otherwise its rows.

    Raises RuntimeError if the tensor holds no copy for it.
    """
    side = "row" if by_rows else "column"
    data = getattr(tensor, f"_{side}wise_data")
    if data is None:
        raise RuntimeError(
            f"A GEMM contracts the {'columns' if by_rows else 'rows'} of an MXFP8 tensor without {side}wise data."
        )
    data = data.reshape(-1, data.shape[-1]).view(torch_dtype(tensor._fp8_dtype))
    rows, columns = data.shape
    padded = swizzle.scales_of(tensor, side)
    scales = padded[:rows, : columns // BLOCK] if by_rows else padded[: rows // BLOCK, :columns]
    block = (1, BLOCK) if by_rows else (BLOCK, 1)
    return Quantized(data, scales.contiguous().view(E8M0), block, "row" if by_rows else "col")


def values(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor's values in ``dtype``, from its rows where it has them."""
    return operand(tensor, tensor._rowwise_data is not None).dequantize(dtype).reshape(tuple(tensor.size()))
