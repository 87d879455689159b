"""Multiply quantized operands: exact FP8 values in, FP32 sums, one rounding to the output type.

    out = op(a) @ op(b).T        op(q) = q for usage row, q.T for usage col

Each operand is contracted along the dimension that it was quantized for, so the three GEMMs of a linear are
``gemm(x_row, w_row)``, ``gemm(dy_row, w_col)`` and ``gemm(dy_col, x_col)``.

FP8 values are exact in BF16, so BF16 multipliers will do, and only the sums need FP32. A CPU without BF16
units multiplies the same values in FP32 (``bf16.py``). There are three ways, all exact in their operands; the first
that is possible is taken:

    scales that are powers of two   folded into the BF16 values; a BF16 GEMM whose FP32 sums are rounded once
    one FP32 scale a tensor         a BF16 GEMM that multiplies its FP32 sums with both scales before it rounds them
                                    (``bf16.scales_sums``); elsewhere, and for another result than BF16: BF16
                                    multipliers, FP32 result, times both scales, rounded, two times slower
    FP32 scales of tiles            code * scale has more bits than BF16 holds: dequantized in FP32 (each value
                                    rounded to FP32 once) and multiplied in FP32, three times slower

Two operands in E2M1 are products of code times scale, six bits each, with both tensors' scales at the end: they go the
second way. If a GPU has an FP8 GEMM for the operands, that one runs instead (``scaled_mm.py``).

A real FP8 GEMM multiplies a tile's scale into partial sums, so results agree to FP32 rounding but never to the
bit: the hardware chooses the order of sums, and what becomes of products below FP32's normal numbers (AMX flushes
them to zero). That is why bit-exactness ends at the operands.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.bf16 import fp32_matmul, multiplies_bf16, scales_sums
from nemo_fp8.numerics.formats import decode
from nemo_fp8.numerics.nvfp4_tensor import QuantizedNVFP4
from nemo_fp8.numerics.quantized import Quantized, as_matrix, per_tile
from nemo_fp8.numerics.scaled_mm import scaled_mm
from nemo_fp8.numerics.scales import is_pow2

# Above this, a power of two times a code, or times a sum of products of codes, is a normal BF16 number.
_LEAST_EXACT_SCALE = 2.0**-90
_LEAST_EXACT_CODE = 127 - 90  # the same in E8M0


def gemm(
    a: Quantized, b: Quantized, *, out_dtype: torch.dtype = torch.bfloat16, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``op(a) @ op(b).T + bias`` as a matrix of ``out_dtype``; leading dimensions are flattened.

    Raises PrecisionError if an operand is not quantized, the contracted dimensions differ in length, only one operand
    is transformed, or ``bias`` has not one number for each column of the result.
    """
    _check(a, b, bias)
    with _as_written(a.device):
        return _gemm(a, b, out_dtype, bias)


def _gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(a, QuantizedNVFP4) and isinstance(b, QuantizedNVFP4):
        return product_of_four_bits(a, b, out_dtype=out_dtype, bias=bias)
    real = scaled_mm(a, b, out_dtype, bias)
    if real is not None:
        return real
    factor = _owed(a, b)
    exact = is_exact_in_bf16(a) and is_exact_in_bf16(b)
    if exact and out_dtype == torch.bfloat16:
        alpha = _alpha(factor, bias, a.device)
        if alpha is not None:
            return _matmul_bf16(*_fitting(a, b, _multiplied_in(a.device)), alpha, bias)
    return _finished(_matmul_fp32(a, b, exact), factor, bias, out_dtype)


def product_of_four_bits(
    a: QuantizedNVFP4, b: QuantizedNVFP4, *, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``a @ b.T + bias``: FP32 sums of ``code * scale``, both amaxes last, and one rounding to ``out_dtype``.

    Both lie along the dimension that is contracted, turned and transformed alike. On numbers of like size the sums are
    exact, in any order. Raises PrecisionError if one has more columns than the other, or one alone is transformed.
    """
    if a.scale_inv.shape[1] != b.scale_inv.shape[1]:
        raise _do_not_fit(a, b)
    if a.hadamard != b.hadamard:
        raise PrecisionError(
            "An NVFP4 operand after the Hadamard transform, times one without it.",
            "The transform of one undoes that of the other; alone it leaves the values of 16 columns mixed.",
            "Quantize both with hadamard=True for usage 'col', or both without.",
        )
    both = torch.reciprocal(torch.tensor(a.largest * b.largest))
    factor = a.amax.reshape(-1, 1) * b.amax.reshape(1, -1) * both
    alpha = _alpha(factor, bias, a.device) if out_dtype == torch.bfloat16 else None
    if alpha is not None:
        dtype = _multiplied_in(a.device)
        return _matmul_bf16(a.scaled(dtype), b.scaled(dtype).t(), alpha, bias)
    with fp32_matmul("bf16" if multiplies_bf16() else "ieee"):
        out = torch.mm(a.scaled(), b.scaled().t())
    return _finished(out, factor, bias, out_dtype)


def _alpha(factor: torch.Tensor | None, bias: torch.Tensor | None, device: torch.device) -> float | None:
    """Return what a GEMM with a BF16 result is to multiply its sums with; None if that would round them twice."""
    if factor is None:  # a bias in FP32 is not rounded before it is added
        return 1.0 if bias is None or bias.dtype == torch.bfloat16 else None
    if factor.numel() != 1:
        return None
    alpha = float(factor)
    if not _LEAST_EXACT_SCALE <= alpha < math.inf:  # below, results are no normal BF16 numbers, which units flush
        return None
    if device.type == "cpu" and multiplies_bf16() and scales_sums():
        return alpha if bias is None or bias.dtype == torch.bfloat16 else None
    return alpha if bias is None and is_pow2(factor) else None  # exact, whenever it is multiplied


def _matmul_bf16(left: torch.Tensor, right: torch.Tensor, alpha: float, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``alpha * (left @ right) + bias`` in BF16, on operands of the dtype in which the device multiplies."""
    left, right = _filled(left, right)
    with fp32_matmul("ieee"):
        if bias is None:
            out = torch.addmm(left.new_empty(()), left, right, beta=0, alpha=alpha)
        else:
            out = torch.addmm(bias.to(torch.bfloat16).to(left.dtype), left, right, alpha=alpha)
    return out.to(torch.bfloat16)


def _filled(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill up rows of BF16 that 32 does not divide with zeros: oneDNN's kernel for AMX reads on into the next row and
    multiplies that with zeros, so a NaN there, or an infinity, would reach this row, too."""
    lacking = -left.shape[1] % 32
    if left.dtype != torch.bfloat16 or left.device.type != "cpu" or lacking == 0:
        return left, right
    return F.pad(left, (0, lacking)), F.pad(right, (0, 0, 0, lacking))


def _finished(
    out: torch.Tensor, factor: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply FP32 sums with the scales that they lack, add the bias, and round once."""
    if factor is not None:
        out.mul_(factor)
    if bias is not None:
        out.add_(bias)
    return out.to(dtype)


def _matmul_fp32(a: Quantized, b: Quantized, exact: bool) -> torch.Tensor:
    """Compute the FP32 product, on BF16 multipliers if the values are exact in BF16 and the hardware has them."""
    if exact and a.device.type == "cuda":
        return torch.mm(*_fitting(a, b, torch.bfloat16), out_dtype=torch.float32)
    with fp32_matmul("bf16" if exact and multiplies_bf16() else "ieee"):
        return torch.mm(*_fitting(a, b, torch.float32))


def _multiplied_in(device: torch.device) -> torch.dtype:
    """Return the dtype in which this device multiplies values that are exact in BF16."""
    return torch.bfloat16 if device.type != "cpu" or multiplies_bf16() else torch.float32


def _fitting(a: Quantized, b: Quantized, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``op(a)`` and ``op(b).T`` as matrices."""
    left, right = _values(a, dtype), _values(b, dtype)
    left = left if a.usage == "row" else left.t()
    right = right.t() if b.usage == "row" else right
    if left.shape[1] != right.shape[0]:
        raise _do_not_fit(a, b)
    return left, right


def _as_written(device: torch.device) -> AbstractContextManager[None]:
    """Keep ``torch.autocast`` out: it would round the FP32 values of operands, and the sums, to BF16."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def _check(a: Quantized, b: Quantized, bias: torch.Tensor | None) -> None:
    for q in (a, b):
        if not isinstance(q, Quantized):
            raise PrecisionError(
                f"A GEMM of {type(q).__name__}.",
                "It multiplies codes with their scales, which a plain tensor does not have.",
                "Give what quantize() returns, or multiply with torch.",
            )
    columns = b.shape[:-1].numel() if b.usage == "row" else b.shape[-1]
    if bias is not None and (not isinstance(bias, torch.Tensor) or tuple(bias.shape) != (columns,)):
        raise PrecisionError(
            f"A bias of {f'shape {tuple(bias.shape)}' if isinstance(bias, torch.Tensor) else type(bias).__name__} for "
            f"{columns} columns.",
            "A GEMM adds one number to each column of its result.",
            f"Give a tensor of shape ({columns},).",
        )


def _do_not_fit(a: Quantized, b: Quantized) -> PrecisionError:
    return PrecisionError(
        f"Operands of shapes {tuple(a.shape)} ({a.usage}) and {tuple(b.shape)} ({b.usage}) do not fit.",
        "A GEMM contracts the columns of usage 'row' and the rows of usage 'col', and both must be of one length.",
        "Quantize each operand for the dimension that this GEMM contracts.",
    )


def _values(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Decode an operand and apply the scales of its tiles; the scale of a whole tensor is applied to the result."""
    if q.block is not None:
        return as_matrix(q.dequantize(dtype))
    fast = kernels.decode(q.data, torch.ones((), device=q.device), None, dtype)
    return as_matrix(decode(q.data, dtype) if fast is None else fast)


def _owed(a: Quantized, b: Quantized) -> torch.Tensor | None:
    """Return the product of the whole-tensor scales, which the GEMM's result is still to be multiplied with."""
    scales = [q.scale_inv for q in (a, b) if q.block is None]
    return torch.stack(scales).prod() if scales else None


def is_exact_in_bf16(q: Quantized) -> bool:
    """Return whether the values that enter a product are exact in BF16."""
    if q.block is None or q.scale_inv.numel() == 0:
        return True
    if isinstance(q, QuantizedNVFP4):  # beside an operand of FP8: a code times its scale and the tensor's
        return False
    if q.scale_inv.dtype != torch.float32:  # E8M0: all powers of two but for NaN, and the codes say how small
        low, high = torch.aminmax(q.scale_inv.view(torch.uint8))
        return bool(high < 255) and (bool(low >= _LEAST_EXACT_CODE) or _only_zeros_below(q))
    scale_inv = q.scale_inv
    return _exact_in_bf16(scale_inv) or (is_pow2(scale_inv.clamp_min(_LEAST_EXACT_SCALE)) and _only_zeros_below(q))


def _exact_in_bf16(scale: torch.Tensor) -> bool:
    """Return whether these scales, and their products with any code, are exact in BF16."""
    return scale.amin().item() >= _LEAST_EXACT_SCALE and is_pow2(scale)


def _only_zeros_below(q: Quantized) -> bool:
    """Return whether tiles with very small scales hold nothing: MX gives a tile of zeros the scale 2**-127."""
    assert q.block is not None
    small = (q.scale_inv_fp32 < _LEAST_EXACT_SCALE).to(torch.uint8)
    codes = q.data.view(torch.uint8) & 0x7F
    return not bool(per_tile(codes, small, q.block).any())
