"""TE's NVFP4 tensors: two sides, each with codes, scales and an amax of its own.

    by rows       two codes a byte [M, K/2], scales [M, K/16] padded to [128 m, 4 n]
    by columns    turned round: [K, M/2] and [K, M/16]

:mod:`nemo_fp8.numerics.nvfp4` says which codes and scales those are. What is TE's own is here: which side is there,
whose amax it takes and which ranks share it, the padding, and the sum of a GEMM. With the random Hadamard transform the
columns are cast after it. Stochastic rounding draws from CUDA's generator.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.moved import renamed
from nemo_fp8.numerics.nvfp4 import amax_of, cast_rows
from nemo_fp8.numerics.nvfp4_tensor import BLOCK, QuantizedNVFP4, turn, turn_scales
from nemo_fp8.te_cpu import device, swizzle
from nemo_fp8.te_cpu.tensors import as_matrix_shape, reduced

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(
        __name__,
        {
            name: f"nemo_fp8.numerics.nvfp4.{name}"
            for name in ("LARGEST", "block_scale", "encode_scale", "factor", "nearest")
        }
        | {name: f"nemo_fp8.numerics.nvfp4_tensor.{name}" for name in ("pack", "unpack")},
    )


def write(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Write codes, scales and amaxes of ``x`` by rows, by columns, or both."""
    wanted = operand_of(quantizer)
    for side, matrix, signs in _sides(quantizer, x, out):
        if quantizer.row_scaled_nvfp4:
            found = amax_of(matrix, wanted, signs)
        else:
            given = amax if signs is None else None  # the transform's values have an amax of their own
            found = amax_of(matrix, wanted, signs) if given is None else given
            amax = found if signs is None else amax  # that of the rows is that of the columns
            found = reduced(quantizer, found.reshape(1).clone())
        _write_side(quantizer, matrix, signs, out, side, found)


def write_with_its_amaxes(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Write codes and scales alone, for the amaxes that ``out`` holds: what found them has looked at ``x`` already."""
    for side, matrix, signs in _sides(quantizer, x, out):
        _write_side(quantizer, matrix, signs, out, side, getattr(out, f"_amax_{side}wise"))


Signs = tuple[float, ...] | None


def _sides(quantizer: Any, x: torch.Tensor, out: Any) -> Iterator[tuple[str, torch.Tensor, Signs]]:
    """Yield the matrix whose rows each side of ``out`` holds, and the signs of its transform if it has one."""
    rows, columns = as_matrix_shape(x.shape)
    x = x.reshape(rows, columns)
    if out._rowwise_data is not None:
        yield "row", x, None
    if out._columnwise_data is not None:
        yield "column", x.t(), _signs(quantizer, x) if quantizer.with_rht else None


def swizzles(quantizer: Any, rows: int, columns: int) -> bool:
    """Return whether the kernel for this shape writes swizzled scales: one does with the Hadamard transform, one with
    square blocks."""
    return columns % 128 == 0 and (
        rows % 64 == 0 if quantizer.with_rht else quantizer.with_2d_quantization and rows % 128 == 0
    )


def _write_side(quantizer: Any, x: torch.Tensor, signs: Signs, out: Any, side: str, amax: torch.Tensor) -> None:
    fast_math = os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0") not in ("", "0")
    codes, scales = cast_rows(
        x, operand_of(quantizer), amax, signs=signs, generator=device.CHANCE, scaled_errors=fast_math
    )
    if (
        getattr(out, f"_amax_{side}wise").shape != amax.shape
    ):  # TE describes one amax for all columns where each row has its own
        setattr(out, f"_amax_{side}wise", torch.empty_like(amax))
    getattr(out, f"_amax_{side}wise").copy_(amax)
    getattr(out, f"_{side}wise_data").view(codes.shape).copy_(codes)
    padded = getattr(out, f"_{side}wise_scale_inv")
    padded[: scales.shape[0], : scales.shape[1]].copy_(scales.view(torch.uint8))


def operand_of(quantizer: Any) -> Operand:
    """Return what the contract calls a tensor of this quantizer; a side is transformed before it is cast."""
    return Operand(
        "e2m1",
        (BLOCK, BLOCK) if quantizer.with_2d_quantization else (1, BLOCK),
        "e4m3",
        stochastic=quantizer.stochastic_rounding,
        row_scaled=quantizer.row_scaled_nvfp4,
        four_over_six=quantizer.nvfp4_4over6_err_mode.lower() if quantizer.nvfp4_use_4over6 else None,
        largest_scale=quantizer.nvfp4_e4m3_max,
    )


def _signs(quantizer: Any, x: torch.Tensor) -> Signs:
    if x.dtype != torch.bfloat16:
        raise ValueError("RHT is only supported for bfloat16 input")
    return tuple(quantizer.rht_matrix[:, 0].float().sign().tolist())  # the first column of H is ones


def operand(tensor: Any, by_rows: bool) -> QuantizedNVFP4:
    """Return what a GEMM reads: ``by_rows`` contracts the columns of the tensor, otherwise its rows. The matrix is
    [outer, contracted] in both cases. Raises RuntimeError if the tensor holds no copy for it."""
    side = "row" if by_rows else "column"
    data = getattr(tensor, f"_{side}wise_data")
    if data is None:
        raise RuntimeError(
            f"A GEMM contracts the {'columns' if by_rows else 'rows'} of an NVFP4 tensor without {side}wise data."
        )
    packed = data.reshape(-1, data.shape[-1]) if by_rows else data.reshape(data.shape[0], -1)
    rows, columns = packed.shape[0], packed.shape[1] * 2
    scales = swizzle.scales_of(tensor, side)[:rows, : columns // BLOCK].view(torch.float8_e4m3fn)
    return QuantizedNVFP4(
        packed, scales, (1, BLOCK), amax=getattr(tensor, f"_amax_{side}wise"), source=torch.Size((rows, columns)),
        largest_scale=tensor._nvfp4_e4m3_max,
    )  # fmt: skip


def values(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor's values in ``dtype``, from its rows where it has them."""
    by_rows = tensor._rowwise_data is not None
    found = operand(tensor, by_rows).dequantize()
    return (found if by_rows else found.t()).to(dtype).reshape(tuple(tensor.size()))


# ---------------------------------------------------------------------- amaxes that are known


def check_amaxes(function: str, quantizer: Any, amaxes: Iterable[torch.Tensor], count: int) -> None:
    """Raise RuntimeError for what the extension refuses, in its words, and for one amax where there are as many as
    rows, which it does not look at."""
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
    """Return packed codes [M, K/2] as [K, M/2]."""
    turned = turn(input.reshape(-1, input.shape[-1]))
    return turned if out is None else out.copy_(turned)


def scales_2d_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """Write scales of 16x16 blocks, each repeated for its 16 rows, [M, K/16] as [K, M/16]."""
    output.zero_()
    output[: K_tiles * BLOCK, :M_tiles] = turn_scales(input[: M_tiles * BLOCK, :K_tiles])
