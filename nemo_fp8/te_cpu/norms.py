"""LayerNorm and RMSNorm, their statistics and backwards, with the cast that TE fuses into them.

    LayerNorm    h = (x - mean) * rsigma      RMSNorm    h = x * rsigma       y = h * gain (+ bias)
    g = dy * gain        dx = rsigma * (g - mean(g) - h * mean(g * h))        (without mean(g) for RMSNorm)

All in FP32; ``zero_centered_gamma`` means that the weight holds ``gain - 1``.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.quantized import finish


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1]).float()


@torch.no_grad()
def layernorm_fwd(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, ln_out: Any, quantizer: Any,
    otype: Any, sm_margin: int, zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """Return [output, mean, rsigma] of layer norm."""
    x = _rows(input)
    mean = x.mean(-1)
    centred = x - mean[:, None]
    rsigma = torch.rsqrt((centred * centred).mean(-1) + eps)
    y = centred.mul_(rsigma[:, None]).mul_(_gain(weight, zero_centered_gamma))
    if bias is not None:
        y.add_(bias.float())
    return [finish(y.view(input.shape), quantizer, torch_dtype(otype), ln_out, amax_of_rounded=True), mean, rsigma]


@torch.no_grad()
def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return [dx, dweight, dbias] of layer norm."""
    d, h = _rows(dz), (_rows(x) - mu[:, None]).mul_(rsigma[:, None])
    g = d * _gain(gamma, zero_centered_gamma)
    along = h * (g * h).mean(-1, keepdim=True)
    dx = g.sub_(g.mean(-1, keepdim=True)).sub_(along).mul_(rsigma[:, None])
    return [dx.to(x.dtype).view(x.shape), (d * h).sum(0).to(gamma.dtype), d.sum(0).to(gamma.dtype)]


@torch.no_grad()
def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return [output, None, rsigma] of RMS norm."""
    x = _rows(input)
    rsigma = torch.rsqrt((x * x).mean(-1) + eps)
    y = (x * rsigma[:, None]).mul_(_gain(weight, zero_centered_gamma))
    return [finish(y.view(input.shape), quantizer, torch_dtype(otype), ln_out, amax_of_rounded=True), None, rsigma]


@torch.no_grad()
def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return [dx, dweight] of RMS norm."""
    return _rmsnorm_bwd(dz, x, None, rsigma, gamma, zero_centered_gamma)


@torch.no_grad()
def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return [dx + add, dweight] of RMS norm, rounded once: the residual's gradient joins in FP32."""
    return _rmsnorm_bwd(dz, x, add, rsigma, gamma, zero_centered_gamma)


def _rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor | None,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
) -> list[torch.Tensor]:
    d, h = _rows(dz), _rows(x) * rsigma[:, None]
    g = d * _gain(gamma, zero_centered)
    dx = g.sub_(h * (g * h).mean(-1, keepdim=True)).mul_(rsigma[:, None])
    if add is not None:
        dx.add_(_rows(add))
    return [dx.to(x.dtype).view(x.shape), (d * h).sum(0).to(gamma.dtype)]
