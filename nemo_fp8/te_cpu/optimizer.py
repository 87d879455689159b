"""The multi-tensor kernels of TE's FusedAdam and FusedSGD, and of gradient clipping.

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2        p = p - lr * (m / c1) / (sqrt(v / c2) + eps)

with weight decay added to the gradient (mode 0, Adam) or to the update (mode 1, AdamW). All in FP32 on parameters,
moments and masters of any type. ``noop_flag`` and ``chunk_size`` are a GPU's; a flag that is set skips the capturable
step, as there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from nemo_fp8.numerics.formats import cast, format_of
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.tensors import amax_of

Lists = list[list[torch.Tensor]]


def _together(tensor_lists: Lists) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*tensor_lists, strict=True)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, is_infinite: torch.Tensor | None, tensor_lists: Lists, scale: Any) -> None:
    """Compute ``out = in * scale``; set the flag where an input is not finite."""
    for source, target in _together(tensor_lists):
        if is_infinite is not None and not _is_finite(source):  # before a target that is its source is written
            is_infinite.fill_(1)
        torch.mul(source.float(), scale, out=target)


def _is_finite(x: torch.Tensor) -> bool:
    """Return whether no element is infinite or NaN, which would be the smallest or the largest: ten times as fast as to
    ask each."""
    return x.numel() == 0 or all(map(math.isfinite, torch.aminmax(x)))


multi_tensor_scale_tensor = multi_tensor_scale


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Any, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over all tensors, and of each where asked for."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Any, tensor_lists: Lists, inv_scale: torch.Tensor, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of tensors that a loss scale has multiplied, divided by it."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]]) * inv_scale.float()
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


def _adam(
    g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, lr: float, beta1: float, beta2: float,
    eps: float, corrections: tuple[float, float], mode: int, decay: float,
) -> torch.Tensor:  # fmt: skip
    """Write the moments and give the new parameter, in FP32."""
    if mode == 0:
        g = g + decay * p
    m_new, v_new = beta1 * m.float() + (1 - beta1) * g, beta2 * v.float() + (1 - beta2) * g * g
    m.copy_(m_new)
    v.copy_(v_new)
    update = (m_new / corrections[0]) / ((v_new / corrections[1]).sqrt() + eps)
    return p - lr * (update if mode == 0 else update + decay * p)


def _corrections(beta1: float, beta2: float, step: float, wanted: bool | int) -> tuple[float, float]:
    return (1 - beta1**step, 1 - beta2**step) if wanted else (1.0, 1.0)


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int, noop_flag: Any, tensor_lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Take a step of Adam: [gradients, parameters, m, v] and, where parameters are not FP32, their masters."""
    corrections = _corrections(beta1, beta2, int(step), bias_correction)
    for g, p, m, v, *master in _together(tensor_lists):
        if bias_correction and not master and all(t.dtype == torch.float32 for t in (g, p, m, v)):
            kernel = torch._fused_adam_ if mode == 0 else torch._fused_adamw_  # the same in one pass
            kernel(
                [p], [g], [m], [v], [], [torch.tensor(float(step))], lr=float(lr), beta1=beta1, beta2=beta2,
                weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            continue
        full = master[0] if master else p
        new = _adam(g.float(), full.float(), m, v, lr, beta1, beta2, eps, corrections, mode, weight_decay)
        full.copy_(new)
        if master:
            p.copy_(new)


@torch.no_grad()
def multi_tensor_adam_param_remainder(
    chunk_size: int, noop_flag: Any, tensor_lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Take a step of Adam: [gradients, BF16 parameters, m, v, remainders]. The FP32 master is the parameter's 16 bits
    and the remainder's 16.

    The parameter is the master rounded to nearest, so where the remainder is negative it lies one above the master's
    upper half.
    """
    corrections = _corrections(beta1, beta2, int(step), bias_correction)
    for g, p, m, v, rest in _together(tensor_lists):
        low = rest.view(torch.int16).int()
        high = p.view(torch.int16).int() - (low < 0).int()
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        bits = (
            _adam(g.float(), master, m, v, lr, beta1, beta2, eps, corrections, mode, weight_decay)
            .contiguous()
            .view(torch.int32)
        )
        low = (bits & 0xFFFF).to(torch.int16)
        p.view(torch.int16).copy_((bits >> 16) + (low < 0).int())
        rest.view(torch.int16).copy_(low)


@torch.no_grad()
def multi_tensor_adam_fp8(
    chunk_size: int, noop_flag: Any, tensor_lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, bias_correction: int, weight_decay: float, fp8_dtype: Any,
) -> None:  # fmt: skip
    """Take a step of Adam: [gradients, FP8 codes, m, v, masters, scales, amaxes, scale_invs]. The new codes have the
    scale of the steps before."""
    corrections = _corrections(beta1, beta2, int(step), bias_correction)
    format = format_of(torch_dtype(fp8_dtype))
    for g, codes, m, v, master, scale, amax, inverse in _together(tensor_lists):
        new = _adam(g.float(), master.float(), m, v, lr, beta1, beta2, eps, corrections, mode, weight_decay)
        master.copy_(new)
        amax.copy_(torch.fmax(amax, amax_of(new).reshape(amax.shape)))
        codes.copy_(cast(new * scale, format).view(torch.uint8).view(codes.shape))
        inverse.copy_(torch.reciprocal(scale).reshape(inverse.shape))


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, lr: torch.Tensor, beta1: float, beta2: float,
    eps: float, step: torch.Tensor, mode: int, bias_correction: int, weight_decay: float, inv_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Take a step of Adam whose step, rate and loss scale are tensors; gradients are unscaled in place."""
    if noop_flag.item():
        return
    corrections = _corrections(beta1, beta2, float(step), bias_correction)
    for g, p, m, v, *master in _together(tensor_lists):
        g.copy_(g.float() * inv_scale)
        full = master[0] if master else p
        new = _adam(g.float(), full.float(), m, v, float(lr), beta1, beta2, eps, corrections, mode, weight_decay)
        full.copy_(new)
        if master:
            p.copy_(new)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int, noop_flag: Any, tensor_lists: Lists, wd: float, momentum: float, dampening: float, lr: float,
    nesterov: bool, first_run: bool, wd_after_momentum: bool, scale: float,
) -> None:  # fmt: skip
    """Take a step of SGD: [gradients, parameters, momenta] and, where there are any, copies of the parameters in
    another type."""
    for g, p, running, *copies in _together(tensor_lists):
        d = g.float() * scale
        if wd and not wd_after_momentum:
            d = d + wd * p.float()
        if momentum:
            running.copy_(d if first_run else running * momentum + (1 - dampening) * d)
            d = d + momentum * running if nesterov else running
        if wd and wd_after_momentum:
            d = d + wd * p.float()
        p.copy_(p.float() - lr * d)
        for copy in copies:
            copy.copy_(p)
