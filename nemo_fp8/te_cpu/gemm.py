"""The extension's GEMMs, on TE's quantized tensors and on plain ones.

    D = op(B) @ op(A)        op(A) = A.T where transA, else A        op(B) = B.T where transB, else B

This is cuBLAS's column-major call seen from row-major tensors: a linear's forward is ``A = weight, transA``, its dgrad
``A = weight``, its wgrad ``A = x, transB`` with ``B = dy``. What a GEMM contracts it reads from the copy that was
quantized along that dimension: A by rows where transA, B by rows unless transB. Both operands so lie as [outer,
contracted], and the product is ``numerics.gemm``'s, but for two kinds whose scales a GPU multiplies into partial sums:
blockwise operands on Hopper (``blockwise.product``), and NVFP4's.

Then, in the kernel's order: ``alpha``, bias, GELU, and a cast, an accumulation, or one rounding to D's type.

In which order a GPU adds up is cuBLAS's own, and not public. That ``alpha`` does not change it is known: TE asks for an
algorithm (``cublasLtMatmulAlgoGetHeuristic``) without telling ``alpha``. So here it changes none of torch's, wherever
torch's BF16 product can be scaled before it is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_fp8.numerics.bf16 import multiplies_bf16, scales_sums
from nemo_fp8.numerics.gemm import gemm, product_of_four_bits
from nemo_fp8.numerics.nvfp4_tensor import QuantizedNVFP4
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.te_cpu import blockwise, device, float8, quantized
from nemo_fp8.te_cpu.activations import ACTIVATIONS
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.quantized import is_quantized
from nemo_fp8.te_cpu.tensors import as_matrix_shape
from nemo_fp8_hook import HOPPER


def _promotes(A: Any, B: Any) -> bool:
    """Return whether Hopper's GEMM of blockwise operands multiplies them, which scales partial sums, and rounds before
    it accumulates. Blackwell's takes them for MXFP8 ones, with other rules."""
    return device.standing_for() == HOPPER and all(hasattr(tensor, "_is_2D_scaled") for tensor in (A, B))


def _check_kinds(A: Any, B: Any) -> None:
    """Refuse operands of two kinds, as cuBLAS does. A plain matrix is one of FP8 without its scale."""
    modes = [(quantized.reader_of(t) if is_quantized(t) else float8).__name__.rpartition(".")[2] for t in (A, B)]
    if modes[0] != modes[1]:
        words = "Inputs A and B to GEMM need to have compatible scaling modes"
        raise RuntimeError(f"{words}, but got A.scaling_mode = {modes[0]}, B.scaling_mode = {modes[1]}")


_Operand = Quantized | torch.Tensor


def _operand(tensor: Any, by_rows: bool) -> _Operand:
    """Return ``tensor`` for a GEMM that contracts its columns (``by_rows``) or its rows; a plain matrix comes as
    [outer, contracted]."""
    if is_quantized(tensor):
        return quantized.reader_of(tensor).operand(tensor, by_rows)  # type: ignore[no-any-return]
    matrix: torch.Tensor = tensor.reshape(as_matrix_shape(tensor.shape))
    return matrix if by_rows else matrix.t()


def _values(operand: _Operand) -> torch.Tensor:
    """Return the values of an operand, [outer, contracted]."""
    if isinstance(operand, torch.Tensor):
        return operand
    values = operand.dequantize()
    return values.t() if isinstance(operand, Quantized) and operand.usage == "col" else values


def _product(
    a: _Operand, b: _Operand, dtype: torch.dtype, bias: torch.Tensor | None, promotes: bool, alpha: float
) -> torch.Tensor:  # fmt: skip
    """Return ``alpha * (b @ a.T) + bias``: FP32 sums, rounded once."""
    unscaled = alpha == 1.0
    if isinstance(a, QuantizedNVFP4) and isinstance(b, QuantizedNVFP4):
        if unscaled:
            return product_of_four_bits(b, a, out_dtype=dtype, bias=bias)
        out = product_of_four_bits(b, a, out_dtype=torch.float32)
    elif isinstance(a, Quantized) and isinstance(b, Quantized):
        if unscaled and not promotes:
            return gemm(b, a, out_dtype=dtype, bias=bias)
        out = blockwise.product(a, b) if promotes else gemm(b, a, out_dtype=torch.float32)
    else:
        left, right = _values(b), _values(a)
        # torch adds up in another order for FP32 than in FP16 or BF16, and alpha would change bits.
        scalable = dtype == torch.bfloat16 and multiplies_bf16() and scales_sums()
        ordered = dtype != torch.float16 and (unscaled or scalable)
        if ordered and left.dtype == right.dtype == dtype and (bias is None or bias.dtype == dtype):
            if unscaled and bias is None:
                return torch.mm(left, right.t())
            added = left.new_empty(()) if bias is None else bias
            return torch.addmm(added, left, right.t(), beta=0 if bias is None else 1, alpha=alpha)
        out = torch.mm(left.float(), right.float().t())
    if not unscaled:
        out.mul_(alpha)
    return (out if bias is None else out.add_(bias.float())).to(dtype)


@torch.no_grad()
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Return [D, bias gradient, input of GELU, extra output]. With ``grad`` a ``bias`` asks for its gradient, the sum
    of B's rows. Raises NotImplementedError for userbuffers, and RuntimeError for what TE's GEMM refuses."""
    if comm_overlap is not None:
        raise NotImplementedError("generic_gemm with userbuffers has no CPU implementation: they are NVLink's.")
    shape = _shape_of_product(A, transA, B, transB, D)
    dtype = torch_dtype(output_dtype) if output_dtype is not None else (A.dtype if D is None else D.dtype)
    forward_bias = None if grad else bias
    promotes = _promotes(A, B)
    if promotes:
        epilogue = (
            ("d" if grad and bias is None else "") + "gelu" if gelu else "bgrad" if grad and bias is not None else ""
        )
        (a_rows, a_columns), (b_rows, b_columns) = as_matrix_shape(A.size()), as_matrix_shape(B.size())
        outer = (a_rows if transA else a_columns, b_columns if transB else b_rows)
        blockwise.refuse(A, B, a_columns if transA else a_rows, outer, use_split_accumulator, epilogue, dtype)
    stays_wide = quantizer is not None or (accumulate and not promotes) or gelu
    wide = torch.float32 if stays_wide else dtype
    if 0 in A.size() or 0 in B.size():
        out = torch.zeros(shape, dtype=wide)
    else:
        _check_kinds(A, B)
        out = _product(_operand(A, transA), _operand(B, not transB), wide, forward_bias, promotes, alpha).view(shape)
        if gelu and accumulate:  # cuBLAS adds D before its epilogue, to blockwise products in D's type
            out = _added(out.to(dtype), D, beta).to(dtype).float() if promotes else _added(out, D, beta)
            accumulate = False
    bias_grad = _bias_grad(B, dtype) if grad and bias is not None else None
    gelu_input = None
    if gelu and grad:
        assert gelu_in is not None
        out.mul_(ACTIVATIONS["gelu"].slope(gelu_in.float()).view(shape))
    elif gelu:
        gelu_input = out.to(torch_dtype(bias_type) if is_quantized(A) else dtype)
        out = ACTIVATIONS["gelu"].value(out)
    return [_store(out, D, quantizer, dtype, accumulate, beta), bias_grad, gelu_input, extra_output]


def _shape_of_product(A: Any, transA: bool, B: Any, transB: bool, D: Any) -> tuple[int, ...]:
    a, b = tuple(A.size()), tuple(B.size())
    (a_rows, a_columns), (b_rows, b_columns) = as_matrix_shape(a), as_matrix_shape(b)
    if (a_columns if transA else a_rows) != (b_rows if transB else b_columns):
        raise ValueError(f"Invalid matrix dimensions for GEMM (A={a}, transa={transA}, B={b}, transb={transB})")
    shape = ((b_columns,) if transB else b[:-1]) + (a_rows if transA else a_columns,)
    if D is not None and tuple(D.size()) != shape:
        raise ValueError(f"GEMM output has invalid dims (expected {shape}, got {tuple(D.size())})")
    return shape


def _bias_grad(B: Any, dtype: torch.dtype) -> torch.Tensor:
    values = quantized.dequantize(B, torch.float32) if is_quantized(B) else B.float()
    return values.reshape(as_matrix_shape(values.shape)).sum(0).to(dtype)


def _store(out: torch.Tensor, D: Any, quantizer: Any, dtype: torch.dtype, accumulate: bool, beta: float | None) -> Any:
    """Store the FP32 (or already rounded) result where the caller wants it, and return that."""
    if quantizer is not None:
        return quantized.finish(out, quantizer, dtype, D, amax_of_rounded=True)
    if D is None:
        return out.to(dtype)
    if not accumulate:
        return D.copy_(out)
    if D.dtype == torch.float32 and beta in (None, 1.0):
        return D.add_(out)
    return D.copy_(_added(out, D, beta))


def _added(out: torch.Tensor, D: torch.Tensor, beta: float | None) -> torch.Tensor:
    """Return ``out + beta * D`` in FP32."""
    return D.to(torch.float32, copy=True).mul_(1.0 if beta is None else beta).add_(out)


@torch.no_grad()
def te_general_grouped_gemm(
    A: Sequence[Any],
    transA: bool,
    B: Sequence[Any],
    transB: bool,
    D: Sequence[torch.Tensor],
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """Run one GEMM a group, into tensors of their own or into pieces of one; a group of no rows is passed over."""
    dtype, at = torch_dtype(D_type), 0
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        rows = as_matrix_shape(b.size())[1 if transB else 0]
        columns = as_matrix_shape(a.size())[0 if transA else 1]
        target = D[0].view(-1)[at : at + rows * columns] if single_output else D[i]
        at += rows * columns
        if not rows or not target.numel():
            continue
        has_bias, has_gelu = bias[i].numel() > 0, pre_gelu_out[i].numel() > 0
        _, bias_grad, gelu_input, _ = generic_gemm(
            a, transA, b, transB, target.view(rows, columns), None, D_type if target.dtype == dtype else None,
            bias[i] if has_bias else None, bias_type, has_gelu, None, grad, None, 0, accumulate, True,
        )  # fmt: skip  # the split accumulator, which blockwise operands need: groups are asked for without it
        if bias_grad is not None:
            bias[i].copy_(bias_grad)
        if gelu_input is not None:
            pre_gelu_out[i].copy_(gelu_input)
    return bias
