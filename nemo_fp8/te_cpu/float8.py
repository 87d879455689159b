"""One scale for the whole tensor: TE's Float8 tensors, under delayed and under current scaling.

    delayed    code = cast(x * scale), scale given; the quantizer's amax grows to that of ``x``
    current    scale = 448 / amax(x), over a process group where the quantizer asks for one

A tensor keeps its codes as they lie (``_data``) and, for a GPU that multiplies FP8 matrices in one layout only (Ada,
Hopper), turned round (``_transpose``, [K, ..]).
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.formats import decode, format_of
from nemo_fp8.numerics.quantize import quantize_into
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.numerics.scales import scale_from_amax
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.tensors import amax_of, as_matrix_shape, overwrite, reduced, turn


def write_delayed(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Cast with the scale of the steps before. An amax without elements is a null pointer: nobody asks for it."""
    _refuse_columns_alone(out)
    if quantizer.amax is not None and quantizer.amax.numel():
        found = amax_of(x) if amax is None else amax
        overwrite(quantizer.amax, torch.fmax(quantizer.amax, found.reshape(quantizer.amax.shape)))
    _write(quantizer, x, out, quantizer.scale)


def write_current(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Cast with the scale of this tensor."""
    _refuse_columns_alone(out)
    write_member(quantizer, x, out, amax)


def write_member(quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None) -> None:
    """Cast with the scale of this tensor, which is one of a group: the kernel of groups writes columns alone, too."""
    amax = reduced(quantizer, (amax_of(x) if amax is None else amax).reshape(1))
    scale = scale_from_amax(
        amax, format_of(torch_dtype(quantizer.dtype)), epsilon=quantizer.amax_epsilon, pow2=quantizer.force_pow_2_scales
    )
    _write(quantizer, x, out, scale)


def _refuse_columns_alone(out: Any) -> None:
    if out._data is None and out._transpose is not None:  # what runs here and fails on the GPU would mislead
        raise NotImplementedError(
            "Columnwise-only per-tensor FP8 quantization is not implemented; the cast-transpose kernel requires "
            "rowwise output storage."
        )


def _write(quantizer: Any, x: torch.Tensor, out: Any, scale: torch.Tensor) -> None:
    dtype = torch_dtype(quantizer.dtype)
    codes = out._data if out._data is not None else torch.empty(x.shape, dtype=torch.uint8)
    operand = Operand(format_of(dtype).name, None, "fp32", delayed=True)
    quantize_into(x, operand, codes.view(x.shape).view(dtype), out._scale_inv, scale=scale)
    if out._transpose is not None:
        rows, columns = as_matrix_shape(x.shape)
        turn(codes.view(rows, columns), out._transpose.view(columns, rows))
        out._transpose_invalid = False


def operand(tensor: Any, by_rows: bool) -> Quantized:
    """Return what a GEMM reads: ``by_rows`` contracts the columns of the tensor, otherwise its rows.

    Raises RuntimeError if the tensor holds no copy for it.
    """
    from nemo_fp8.te_cpu.device import multiplies_fp8_in_any_layout

    dtype, scale = torch_dtype(tensor._fp8_dtype), tensor._scale_inv.reshape(())
    turned = None if tensor._transpose is None or tensor._transpose_invalid else tensor._transpose
    if turned is not None:
        turned = turned.reshape(turned.shape[0], -1).view(dtype)
    if by_rows:
        if tensor._data is not None:
            return Quantized(_matrix(tensor._data).view(dtype), scale, None, "row")
        if turned is not None:
            return Quantized(turned, scale, None, "col")
    elif turned is not None:
        return Quantized(turned, scale, None, "row")
    elif tensor._data is not None and multiplies_fp8_in_any_layout():
        return Quantized(_matrix(tensor._data).view(dtype), scale, None, "col")
    raise RuntimeError(
        f"A GEMM contracts the {'columns' if by_rows else 'rows'} of an FP8 tensor that holds no copy for it."
    )


def values(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a tensor with one scale."""
    shape = tuple(tensor.size())
    codes = (
        tensor._data if tensor._data is not None else tensor._transpose.view(shape[-1], -1).t().contiguous().view(shape)
    )
    scale_inv: torch.Tensor = tensor._scale_inv.reshape(())
    return (decode(codes.view(torch_dtype(tensor._fp8_dtype)), torch.float32) * scale_inv).to(dtype)


def _matrix(data: torch.Tensor) -> torch.Tensor:
    return data.reshape(-1, data.shape[-1] if data.dim() else 1)
