"""The FP8 linear: three GEMMs, each on the operands its contract says.

    fprop   y  = x  @ w.T + b     x by rows, w by rows
    dgrad   dx = dy @ w           dy by rows, w by columns
    wgrad   dw = dy.T @ x         dy by columns, x by columns; or both in the compute dtype (``wgrad=False``)

What backward needs is saved as FP8 codes (one byte an element), quantized together with what forward needs. A
weight that does not change between calls may be quantized once and passed in (:func:`quantize_weight`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from nemo_fp8.contract import ROLES, Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.bf16 import mm
from nemo_fp8.numerics.delayed import DelayedState
from nemo_fp8.numerics.gemm import gemm
from nemo_fp8.numerics.quantize import quantize, quantize_pair
from nemo_fp8.numerics.quantized import Quantized

Pair = tuple[Quantized, Quantized]


@lru_cache(maxsize=64)
def operands(precision: Precision) -> dict[str, Operand]:
    """The operand of each role; refuses a contract without FP8."""
    found = {role: operand for role in ROLES if (operand := precision.operand(role)) is not None}
    if not found:
        raise PrecisionError(
            f"{precision.name}: an FP8 linear under a contract without FP8.",
            "The contract names no FP8 format, so there is nothing to quantize to.",
            "Use the ordinary linear, or a contract with format= and scaling=.",
        )
    return found


def quantize_operand(
    x: torch.Tensor,
    role: str,
    precision: Precision,
    delayed: DelayedState | None = None,
    *,
    row: bool = True,
    col: bool = True,
) -> tuple[Quantized | None, Quantized | None]:
    """``x`` quantized for the usages asked for, row and col, as the contract says for its role."""
    operand = operands(precision)[role]
    if operand.delayed:
        if delayed is None:
            raise PrecisionError(
                "Delayed scaling without its state.",
                "Scales come from the amaxes of earlier steps, and somebody has to remember them.",
                "Pass delayed=DelayedState(precision), one for each linear.",
            )
        q = delayed.for_role(role).quantize(x, role, operand)
        return q if row else None, q.used_as("col") if col else None
    if row and col:
        return quantize_pair(x, operand)
    return quantize(x, operand) if row else None, quantize(x, operand, usage="col") if col else None


def quantize_weight(weight: torch.Tensor, precision: Precision, delayed: DelayedState | None = None) -> Pair:
    """A weight for fprop (row) and dgrad (col), to be used for as long as it does not change."""
    row, col = quantize_operand(weight.detach(), "weight", precision, delayed)
    assert row is not None
    assert col is not None
    return row, col


@dataclass
class _Job:
    """What one call carries to its backward besides tensors."""

    precision: Precision
    delayed: DelayedState | None
    weight: Pair | None
    after_backward: Callable[[], None] | None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    precision: Precision,
    delayed: DelayedState | None = None,
    weight_quantized: Pair | None = None,
    after_backward: Callable[[], None] | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias`` with all GEMMs in FP8 under ``precision``; the result has the type of ``x``.

    ``weight_quantized`` is used instead of quantizing ``weight`` again. ``after_backward`` is called when the
    backward of this linear has run (the first module's updates the gradients' delayed scales there).
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise PrecisionError(
            f"A linear of weight {tuple(weight.shape)} on an input of {tuple(x.shape)}.",
            "The input's last dimension must be the weight's second one.",
            "Check the layer's in_features.",
        )
    job = _Job(precision, delayed, weight_quantized, after_backward)
    return _Fp8Linear.apply(x, weight, bias, job, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, job: _Job, train: bool
    ) -> torch.Tensor:
        needs_x, needs_w = (train and needed for needed in ctx.needs_input_grad[:2])
        fp8_wgrad = needs_w and job.precision.wgrad
        x_row, x_col = quantize_operand(x.reshape(-1, x.shape[-1]), "input", job.precision, job.delayed, col=fp8_wgrad)
        w_row, w_col = job.weight or quantize_operand(weight, "weight", job.precision, job.delayed, col=needs_x)
        assert x_row is not None
        assert w_row is not None
        y = gemm(x_row, w_row, out_dtype=x.dtype, bias=bias)
        if train:
            ctx.job, ctx.shape, ctx.x_dtype, ctx.w_dtype = job, x.shape, x.dtype, weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
            kept = x_col if fp8_wgrad else None, w_col if needs_x else None
            ctx.layouts = [None if q is None else (q.block, q.usage) for q in kept]
            # Saved as tensors, not as attributes: hooks on saved tensors (offload, recompute) must see them.
            parts = [t for q in kept for t in ((None, None) if q is None else (q.data, q.scale_inv))]
            ctx.save_for_backward(*parts, x if needs_w and not fp8_wgrad else None)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *parts, x = ctx.saved_tensors
        x_col, w_col = (
            None if layout is None else Quantized(data, scale_inv, *layout)
            for layout, data, scale_inv in zip(ctx.layouts, parts[::2], parts[1::2], strict=True)
        )
        job: _Job = ctx.job
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if w_col is not None or x_col is not None:
            row, col = quantize_operand(
                dy, "grad", job.precision, job.delayed, row=w_col is not None, col=x_col is not None
            )
        if w_col is not None:
            assert row is not None
            dx = gemm(row, w_col, out_dtype=ctx.x_dtype).view(ctx.shape)
        if x_col is not None:
            assert col is not None
            dw = gemm(col, x_col, out_dtype=ctx.w_dtype)
        elif x is not None:
            dw = mm(dy.t(), x.reshape(-1, x.shape[-1]).to(dy.dtype)).to(ctx.w_dtype)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if job.after_backward is not None:
            job.after_backward()
        return dx, dw, db, None, None
