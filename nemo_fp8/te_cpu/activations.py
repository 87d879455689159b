"""Activations, gated ones, and their backwards, each with the cast that TE fuses into it.

    plain      y = f(x)                   dx = dy * f'(x)
    gated      y = f(a) * b, x = [a b]    dx = [dy * b * f'(a)   dy * f(a)]
    scaled     y = gated(x) * s, s a row's weight (the router's probability)

All in FP32; what becomes of the result is :func:`nemo_fp8.te_cpu.quantized.finish`'s. One row of a table each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from nemo_fp8.te_cpu import quantized
from nemo_fp8.te_cpu.quantized import finish

_Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Activation:
    """A function of one FP32 tensor, and its derivative."""

    value: _Function
    slope: _Function


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    # The constants to TE's digits: sqrt(2 / pi), and three times 0.044715 of it.
    t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    return 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)


def _swish(alpha: float) -> Activation:
    """``x * sigmoid(alpha * x)``: SiLU with 1, QuickGELU with 1.702."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(alpha * x)
        return alpha * x * s * (1 - s) + s

    return Activation(lambda x: x * torch.sigmoid(alpha * x), slope)


ACTIVATIONS = {
    "gelu": Activation(lambda x: F.gelu(x, approximate="tanh"), _gelu_slope),
    "qgelu": _swish(1.702),
    "silu": _swish(1.0),
    "relu": Activation(torch.relu, lambda x: (x > 0).float()),
    "srelu": Activation(lambda x: torch.relu(x) ** 2, lambda x: 2 * torch.relu(x)),
    "sigmoid": Activation(torch.sigmoid, lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x))),
}
PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
"""Those that TE has a kernel of their own for."""
GATED = {"glu": "sigmoid", "geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
"""The gated kernels, and the function of their gate."""


def plain(name: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The kernels ``name``, ``dname`` and ``dbias_dname``."""
    activation = ACTIVATIONS[name]

    @torch.no_grad()
    def forward(input: torch.Tensor, quantizer: Any) -> Any:
        return finish(activation.value(input.float()), quantizer, input.dtype)

    def gradient(grad: torch.Tensor, fwd_input: torch.Tensor) -> torch.Tensor:
        return grad.float() * activation.slope(fwd_input.float()).view(grad.shape)

    @torch.no_grad()
    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        return finish(gradient(grad, fwd_input), quantizer, grad.dtype)

    @torch.no_grad()
    def backward_with_bias(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
        y = gradient(grad, fwd_input)
        summed = y if _sums_wide(quantizer) else y.to(grad.dtype).float()
        return [summed.reshape(-1, y.shape[-1]).sum(0).to(grad.dtype), finish(y, quantizer, grad.dtype)]

    return forward, backward, backward_with_bias


def _sums_wide(quantizer: Any) -> bool:
    """Whether activation, bias and cast are one kernel, which sums FP32 values; otherwise the rounded result is read back."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    return quantizer is None or isinstance(quantizer, (Float8Quantizer, MXFP8Quantizer))


def gated(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernels ``name`` and ``dname``."""
    gate = ACTIVATIONS[GATED[name]]

    @torch.no_grad()
    def forward(input: torch.Tensor, quantizer: Any) -> Any:
        a, b = input.float().chunk(2, -1)
        return finish(gate.value(a) * b, quantizer, input.dtype)

    @torch.no_grad()
    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        a, b = fwd_input.float().chunk(2, -1)
        g = grad.float()
        return finish(torch.cat([g * b * gate.slope(a), g * gate.value(a)], -1), quantizer, grad.dtype)

    return forward, backward


def _clamped(input: torch.Tensor, limit: float, alpha: float, offset: float) -> tuple[torch.Tensor, ...]:
    """GPT-OSS's gate and its parts: f(min(a, limit)), the clamped b + offset, and where either was not clamped."""
    a, b = input.float().chunk(2, -1)
    return a.clamp(max=limit), b.clamp(-limit, limit) + offset, a <= limit, (b >= -limit) & (b <= limit)


@torch.no_grad()
def clamped_swiglu(input: torch.Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Any:
    """GPT-OSS's gated activation."""
    a, b, _, _ = _clamped(input, limit, alpha, glu_linear_offset)
    return finish(_swish(alpha).value(a) * b, quantizer, input.dtype)


@torch.no_grad()
def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Its backward: a value that was clamped has no gradient."""
    a, b, a_free, b_free = _clamped(fwd_input, limit, alpha, glu_linear_offset)
    g, gate = grad.float(), _swish(alpha)
    return finish(torch.cat([g * b * gate.slope(a) * a_free, g * gate.value(a) * b_free], -1), quantizer, grad.dtype)


@torch.no_grad()
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """A bias gradient and the quantized gradient that it is the sum of."""
    x = input.detach().contiguous()
    return [x.reshape(-1, x.shape[-1]).float().sum(0).to(x.dtype), quantized.quantize(x, quantizer)]
