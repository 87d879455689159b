"""The FP8 linear: a forward and a backward of three GEMMs, each on two quantized operands.

    fprop   y  = x  @ w.T + b     contracts the columns of x and of w
    dgrad   dx = dy @ w           contracts the columns of dy and the rows of w
    wgrad   dw = dy.T @ x         contracts the rows of dy and of x

With x [tokens, in], w [out, in] and dy [tokens, out], every tensor is used twice, and is contracted along another
dimension each time. A scale must be constant along the contracted dimension of a tile, so a tensor is quantized once
for each use: usage ``row`` where its columns are contracted, ``col`` where its rows are. Square tiles and scales of the
whole tensor serve both uses with one set of codes.

Which type and which scale: x and w are E4M3. dy is E5M2 under format ``hybrid``: gradients need range more than
precision. :meth:`nemo_fp8.contract.Precision.operand` says so for each role; nothing here knows a recipe.

What backward needs is quantized in forward and saved as codes, one byte an element instead of the two of BF16. The
master weight stays in its own dtype: the optimizer updates it, and forward quantizes it again. While it does not
change (gradient accumulation), it may be quantized once and passed in (:func:`quantize_weight`). With ``wgrad=False``
the contract keeps wgrad in the compute dtype, and x is saved as it is.

A contract may say that the backward multiplies other values: those of the forward's own codes (``dequantized``), or
those that the codes were made from (``high_precision``); x and w are then saved in their own dtype. Or it quantizes
by another recipe (``backward_scaling``): from the forward's codes, so that it differentiates what the forward ran.

The trade-off: quantizing x for both usages in forward takes a second pass, and saves keeping x for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
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

Pair = tuple[Quantized, Quantized | None]
"""A weight for fprop, and for dgrad; None where the backward multiplies in the compute dtype."""


@lru_cache(maxsize=64)
def operands(precision: Precision) -> dict[str, Operand]:
    """Return the operand of each role in training. Raises PrecisionError if the contract has no FP8."""
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
    """Quantize ``x`` as the contract says for its role (``input``, ``weight``, ``grad``); return (row, col).

    ``row`` and ``col`` say which usages are needed; None stands for the other. Raises PrecisionError if the contract
    scales from earlier steps and ``delayed``, the state that remembers them, is missing.
    """
    operand = operands(precision)[role]
    if operand.delayed:
        if delayed is None:
            raise PrecisionError(
                "Delayed scaling without its state.",
                "Scales come from the amaxes of earlier steps, and somebody has to remember them.",
                "Pass delayed=DelayedState(precision), one for each linear.",
            )
        # Delayed scales are of the whole tensor, so one set of codes serves both usages.
        q = delayed.for_role(role).quantize(x, role, operand)
        return q if row else None, q.used_as("col") if col else None
    if row and col:
        return quantize_pair(x, operand)
    return quantize(x, operand) if row else None, quantize(x, operand, usage="col") if col else None


def quantize_weight(weight: torch.Tensor, precision: Precision, delayed: DelayedState | None = None) -> Pair:
    """Quantize a weight for fprop and dgrad; pass the pair to :func:`linear` for as long as the weight is the same.

    Raises PrecisionError as :func:`quantize_operand` does.
    """
    return _for_both(weight.detach(), "weight", precision, delayed, col=True)


def _for_both(x: torch.Tensor, role: str, p: Precision, delayed: DelayedState | None, *, col: bool) -> Pair:
    """Quantize an input or a weight for the forward and, with ``col``, for a backward that is quantized."""
    backward = p.in_backward
    col = col and p.backward == "quantized"
    by_rows, by_columns = quantize_operand(x, role, p, delayed, col=col and backward is p)
    assert by_rows is not None
    if col and backward is not p:
        _, by_columns = quantize_operand(by_rows.dequantize(x.dtype), role, backward, row=False)
    return by_rows, by_columns


@dataclass
class _Call:
    """The arguments of one call of :func:`linear` that are not tensors; its backward reads them, too."""

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
    """Compute ``x @ weight.T + bias`` with forward and backward GEMMs in FP8; the result has the dtype of ``x``.

    x                  [..., in], in BF16, FP16 or FP32; the leading dimensions are flattened for the GEMMs
    weight             [out, in], the master weight, which receives the gradient
    precision          the contract, with FP8
    delayed            the state of delayed scaling, one for each linear; needed if the contract asks for it
    weight_quantized   the pair from :func:`quantize_weight`; None quantizes ``weight``
    after_backward     called at the end of the backward; delayed scaling updates the scales of gradients there

    Raises PrecisionError if the shapes do not fit, the contract has no FP8, or ``delayed`` is missing.
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise PrecisionError(
            f"A linear of weight {tuple(weight.shape)} on an input of {tuple(x.shape)}.",
            "The input's last dimension must be the weight's second one.",
            "Check the layer's in_features.",
        )
    call = _Call(precision, delayed, weight_quantized, after_backward)
    # Inside of forward() grad mode is always off, so it is asked here: inference quantizes nothing for a backward.
    return _Fp8Linear.apply(x, weight, bias, call, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


class _Fp8Linear(torch.autograd.Function):
    """The three GEMMs. Each operand is quantized only for the GEMMs that will run."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call, train: bool
    ) -> torch.Tensor:
        # A frozen weight has no wgrad, the first layer's input no dgrad.
        needs_x, needs_w = (train and needed for needed in ctx.needs_input_grad[:2])
        p = call.precision
        x_row, x_col = _for_both(x.reshape(-1, x.shape[-1]), "input", p, call.delayed, col=needs_w and p.wgrad)
        w_row, w_col = call.weight or _for_both(weight, "weight", p, call.delayed, col=needs_x)
        y = gemm(x_row, w_row, out_dtype=x.dtype, bias=bias)
        if train:
            ctx.call, ctx.shape, ctx.x_dtype, ctx.w_dtype = call, x.shape, x.dtype, weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
            kept = x_col if needs_w else None, w_col if needs_x else None
            # A Quantized is taken apart: its tensors go through save_for_backward, which the hooks on saved tensors
            # (offload, recompute) see, and all else into an attribute.
            apart = [None if q is None else _taken_apart(q) for q in kept]
            ctx.layouts = [None if one is None else one[0] for one in apart]
            tensors = [tensor for one in apart if one is not None for tensor in one[1]]
            # For a backward in the compute dtype: the values, or what the forward's codes say that they are.
            decode = p.backward == "dequantized"
            x_plain = (x_row.dequantize(x.dtype) if decode else x) if needs_w and kept[0] is None else None
            w_plain = (w_row.dequantize(weight.dtype) if decode else weight) if needs_x and kept[1] is None else None
            ctx.save_for_backward(x_plain, w_plain, *tensors)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, *tensors = ctx.saved_tensors
        left = iter(tensors)
        x_col, w_col = (None if layout is None else layout(left) for layout in ctx.layouts)
        call: _Call = ctx.call
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        # dy is quantized once, in one call for both usages: delayed scaling records its amax once.
        if w_col is not None or x_col is not None:
            row, col = quantize_operand(
                dy, "grad", call.precision.in_backward, call.delayed, row=w_col is not None, col=x_col is not None
            )
        if w_col is not None:
            assert row is not None
            dx = gemm(row, w_col, out_dtype=ctx.x_dtype).view(ctx.shape)
        elif w is not None:
            dx = mm(dy, w.to(dy.dtype)).to(ctx.x_dtype).view(ctx.shape)
        if x_col is not None:
            assert col is not None
            dw = gemm(col, x_col, out_dtype=ctx.w_dtype)
        elif x is not None:
            dw = mm(dy.t(), x.reshape(-1, x.shape[-1]).to(dy.dtype)).to(ctx.w_dtype)
        if ctx.needs_input_grad[2]:
            # From dy before quantization: the sum over tokens is no GEMM, and needs no FP8.
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if call.after_backward is not None:
            call.after_backward()
        return dx, dw, db, None, None


def _taken_apart(q: Quantized) -> tuple[Callable[[Iterator[torch.Tensor]], Quantized], list[torch.Tensor]]:
    """Return the tensors of a quantized operand, and a function that puts it together from the next of them."""
    values: dict[str, Any] = {f.name: getattr(q, f.name) for f in fields(q) if f.name != "statistics"}
    names = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in values.items() if name not in names}

    def together(tensors: Iterator[torch.Tensor]) -> Quantized:
        parts: dict[str, Any] = {name: next(tensors) for name in names}
        return type(q)(**rest, **parts)

    return together, [values[name] for name in names]
