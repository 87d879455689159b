"""Hyper-connections (mHC: n streams in the place of one residual), in place of TE's Triton kernels.

    projection       H = x (phi w)^T,  ms = mean(x^2)                  all streams of a token to 2n + n^2 numbers
    scale            H / sqrt(ms + eps) alpha + beta, then sigmoid for the first n (pre), 2 sigmoid for the next (post)
    sinkhorn         exp(f + x + g):  f = -logsumexp(x + g) of rows, g = -logsumexp(x + f) of columns, 20 times
    aggregate        out[c] = sum_i x[c, i] pre[i]                     streams to what the layer reads
    expand, combine  out[c, j] = (y[c] + bias[c]) post[j] + sum_i x[c, i] res[i, j]    and back

A formula says both ways: an operation computes it in FP32 and rounds what comes out once; backward computes it again
from the inputs, which are all that is kept, and takes its gradients, in FP32 and rounded once too. The trade-off is
time, a second forward pass. The GPU rounds what it multiplies to TF32 (``use_tf32``), and nothing is rounded here.

Three of them read x. With ``fused_grad_x_acc_buffer`` their gradients of x are summed there in FP32, in the order of
the backward pass: expand and combine begins the sum, aggregate joins it, and projection ends and returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

_WIDTH = 32
"""Columns of H, of which TE's kernels fill the first 2n + n^2."""

_Formula = Callable[..., tuple[torch.Tensor, ...]]
_Keep = Callable[[torch.Tensor], torch.Tensor | None]


def _into(buffer: torch.Tensor | None, *, begins: bool = False, ends: bool = False) -> _Keep | None:
    """Return where a gradient of x goes: into the buffer's sum, if there is one, which the last to come returns."""
    if buffer is None:
        return None

    def keep(grad: torch.Tensor) -> torch.Tensor | None:
        total = buffer.view_as(grad)
        total.copy_(grad if begins else total + grad)
        return total if ends else None

    return keep


class _Operation(torch.autograd.Function):
    """A formula in FP32, and its gradients; ``keep`` takes that of the first input, and says what autograd is given."""

    @staticmethod
    def forward(
        ctx: Any,
        formula: _Formula,
        dtype: torch.dtype,
        keep: _Keep | None,
        *inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.formula, ctx.keep = formula, keep
        ctx.save_for_backward(*inputs)
        with torch.autocast("cpu", enabled=False):
            return tuple(out.to(dtype) for out in formula(*(t if t is None else t.float() for t in inputs)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            copies = [
                t if t is None else t.detach().float().requires_grad_(need)
                for t, need in zip(inputs, needed, strict=True)
            ]
            outputs = ctx.formula(*copies)
            of = [copy for copy in copies if copy is not None and copy.requires_grad]
            found = iter(torch.autograd.grad(outputs, of, [grad.float() for grad in grads]))
        result = [next(found) if need else None for need in needed]
        if ctx.keep is not None and result[0] is not None:
            result[0] = ctx.keep(result[0])
        return (None, None, None, *(g if g is None else g.to(t.dtype) for g, t in zip(result, inputs, strict=True)))


def _run(
    formula: _Formula, dtype: torch.dtype, keep: _Keep | None, *inputs: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    return tuple(_Operation.apply(formula, dtype, keep, *inputs))  # type: ignore[no-untyped-call]


class mHCProjectionOp:
    """H, padded with zeros to 32 columns, and ms, in FP32."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        phi: torch.Tensor,
        norm_weight: torch.Tensor | None = None,
        use_tf32: bool = True,
        fused_grad_x_acc_buffer: torch.Tensor | None = None,
        use_split_k: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Return H ``[tokens, 32]`` and ms ``[tokens]`` of x ``[tokens, n C]``, phi, and maybe a norm's weight."""

        def formula(x: torch.Tensor, phi: torch.Tensor, w: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
            H = x @ (phi if w is None else phi * w).T
            return pad(H, (0, _WIDTH - len(phi))), x.square().mean(1)

        keep = _into(fused_grad_x_acc_buffer, ends=True)
        return _run(formula, torch.float32, keep, x, phi, norm_weight)


class mHCScaleFusedOp:
    """[pre, post, res] of H, side by side."""

    @staticmethod
    def apply(H: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, ms: torch.Tensor, n: int) -> torch.Tensor:
        """Return ``[tokens, 2n + n^2]`` in H's dtype, from H and ms of the projection; n is the number of streams."""

        def formula(
            H: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, ms: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            sizes = [n, n, n * n]
            rms = torch.sqrt(ms + torch.finfo(torch.float32).eps)[:, None]
            scaled = H[:, : sum(sizes)] * alpha.repeat_interleave(torch.tensor(sizes)) / rms + beta
            pre, post, res = torch.split(scaled, sizes, -1)
            return (torch.cat([pre.sigmoid(), 2 * post.sigmoid(), res], -1),)

        (out,) = _run(formula, H.dtype, None, H, alpha, beta, ms)
        return out


class mHCSinkhornOp:
    """The doubly stochastic matrix of each token's n x n logits."""

    @staticmethod
    def apply(H_res: torch.Tensor, n: int = 4, recompute_hist: bool = True, iters: int = 20) -> torch.Tensor:
        """Return the matrices of the logits ``H_res`` after ``iters`` rounds, each of which norms rows and columns."""

        def formula(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            g = x.new_zeros(())
            for _ in range(iters):
                f = -torch.logsumexp(x + g, -1, keepdim=True)
                g = -torch.logsumexp(x + f, -2, keepdim=True)
            return (torch.exp(f + x + g),)

        (out,) = _run(formula, H_res.dtype, None, H_res)
        return out


class mHCAggregateOp:
    """The streams of each token, weighed and summed."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        H_pre: torch.Tensor,
        n: int,
        use_tf32: bool = True,
        fused_grad_x_acc_buffer: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the layer reads, ``[..., C]``, from the streams x ``[..., C, n]`` and their weights ``H_pre``."""

        def formula(x: torch.Tensor, pre: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return ((x * pre[..., None, :]).sum(-1),)

        (out,) = _run(formula, x.dtype, _into(fused_grad_x_acc_buffer), x, H_pre)
        return out


class mHCExpandCombineOp:
    """What a layer made of a token, spread over the streams, and the streams among themselves."""

    @staticmethod
    def apply(
        f: torch.Tensor,
        bias: torch.Tensor | None,
        H_post: torch.Tensor,
        x: torch.Tensor,
        H_res: torch.Tensor,
        n: int,
        use_tf32: bool = True,
        fused_grad_x_acc_buffer: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the streams after the layer, ``[..., C, n]``: its output f and bias, and the streams x before it."""

        def formula(
            x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, post: torch.Tensor, res: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            y = y if bias is None else y + bias
            return (y[..., None] * post[..., None, :] + x @ res,)

        keep = _into(fused_grad_x_acc_buffer, begins=True)
        (out,) = _run(formula, x.dtype, keep, x, f, bias, H_post, H_res)
        return out
