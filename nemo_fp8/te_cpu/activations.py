"""Activations, gated ones, and their backwards, each with the cast that TE fuses into it.

    plain      y = f(x)                      dx = dy * f'(x)
    gated      y = f(a) * h(b), x = [a b]    dx = [dy * h(b) * f'(a)   dy * f(a) * h'(b)], h mostly the identity
    scaled     y = gated(x) * s              ds = sum(dy * gated(x)) of a row, s its weight (the router's probability)

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
    """Return ``x * sigmoid(alpha * x)`` and its derivative: SiLU with 1, QuickGELU with 1.702."""

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
_GATES = {"glu": "sigmoid", "geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def plain(name: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the kernels ``name``, ``dname`` and ``dbias_dname``."""
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
    """Return whether activation, bias and cast are one kernel, which sums FP32 values; otherwise the rounded result is
    read back."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    return quantizer is None or isinstance(quantizer, (Float8Quantizer, MXFP8Quantizer))


_LINEAR = Activation(lambda x: x, torch.ones_like)


def _situ(beta1: float, beta2: float) -> tuple[Activation, Activation]:
    """Return both sides of SiTU-GLU: each is bent to a bound by a tanh, ``beta tanh(x / beta)``, the gate's times a
    sigmoid."""

    def gate_slope(x: torch.Tensor) -> torch.Tensor:
        t, s = torch.tanh(x / beta1), torch.sigmoid(x)
        return (1 - t * t) * s + beta1 * t * s * (1 - s)

    gate = Activation(lambda x: beta1 * torch.tanh(x / beta1) * torch.sigmoid(x), gate_slope)
    return gate, Activation(lambda x: beta2 * torch.tanh(x / beta2), lambda x: 1 - torch.tanh(x / beta2) ** 2)


def _clamped(limit: float, alpha: float, glu_linear_offset: float) -> tuple[Activation, Activation]:
    """Return both sides of GPT-OSS's SwiGLU: the gate is clamped from above, the other side from both and moved by an
    offset. What was clamped has no gradient."""
    gate = Activation(
        lambda x: _swish(alpha).value(x.clamp(max=limit)),
        lambda x: _swish(alpha).slope(x.clamp(max=limit)) * (x <= limit),
    )
    return gate, Activation(
        lambda x: x.clamp(-limit, limit) + glu_linear_offset, lambda x: ((x >= -limit) & (x <= limit)).float()
    )


_Sides = Callable[..., tuple[Activation, Activation]]


def _sides_of(function: str) -> _Sides:
    return lambda: (ACTIVATIONS[function], _LINEAR)


GATED: dict[str, tuple[_Sides, dict[str, float]]] = {
    **{name: (_sides_of(function), {}) for name, function in _GATES.items()},
    "situglu": (_situ, {"beta1": 4.0, "beta2": 25.0}),
    "clamped_swiglu": (_clamped, {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}),
}
"""The gated kernels: what becomes of either half of a row, and the parameters that they take, with TE's defaults."""
SCALED = ("swiglu", "situglu", "clamped_swiglu", "srelu")
"""The kernels that multiply each row with a weight too, the router's probability."""


def _bound(defaults: dict[str, Any], given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a call, in the order of their defaults."""
    if len(given) > len(defaults) or set(named) - set(defaults):
        raise TypeError(f"takes {', '.join(defaults) or 'no parameters'}, and was given {given} and {named}")
    return defaults | dict(zip(defaults, given, strict=False)) | named


def _halves(x: torch.Tensor, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate's side and the other, in FP32: halves of a row, or pieces of ``interleave`` columns in turn."""
    pieces = x.float().reshape(*x.shape[:-1], -1, 2, interleave or x.shape[-1] // 2)
    return pieces[..., 0, :].flatten(-2), pieces[..., 1, :].flatten(-2)


def _join(a: torch.Tensor, b: torch.Tensor, interleave: int) -> torch.Tensor:
    shape = (*a.shape[:-1], -1, interleave or a.shape[-1])
    return torch.stack([a.reshape(shape), b.reshape(shape)], -2).flatten(-3)


def gated(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the kernels ``name`` and ``dname``."""
    sides, defaults = GATED[name]

    @torch.no_grad()
    def forward(input: torch.Tensor, quantizer: Any, *given: float, **named: float) -> Any:
        gate, other = sides(**_bound(defaults, given, named))
        a, b = _halves(input, 0)
        return finish(gate.value(a) * other.value(b), quantizer, input.dtype)

    @torch.no_grad()
    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *given: float, **named: float) -> Any:
        gate, other = sides(**_bound(defaults, given, named))
        a, b = _halves(fwd_input, 0)
        g = grad.float()
        return finish(
            _join(g * other.value(b) * gate.slope(a), g * gate.value(a) * other.slope(b), 0), quantizer, grad.dtype
        )

    return forward, backward


def scaled(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the kernels ``scaled_name`` and ``scaled_dname``. They round their result, and the cast reads the rounded
    one."""
    sides, parameters = GATED.get(name, (None, {}))
    defaults: dict[str, Any] = parameters if sides is None else parameters | {"glu_interleave_size": 0}

    @torch.no_grad()
    def forward(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, *given: Any, **named: Any) -> Any:
        chosen = _bound(defaults, given, named)
        y = _unscaled(input, chosen)
        return quantized.quantize((y * act_scales.float().reshape(y.shape[:-1])[..., None]).to(input.dtype), quantizer)

    def _unscaled(input: torch.Tensor, chosen: dict[str, Any]) -> torch.Tensor:
        if sides is None:
            return ACTIVATIONS[name].value(input.float())
        gate, other = sides(**{key: chosen[key] for key in parameters})
        a, b = _halves(input, chosen["glu_interleave_size"])
        return gate.value(a) * other.value(b)

    def _slopes(g: torch.Tensor, input: torch.Tensor, chosen: dict[str, Any]) -> torch.Tensor:
        if sides is None:
            return g * ACTIVATIONS[name].slope(input.float())
        gate, other = sides(**{key: chosen[key] for key in parameters})
        a, b = _halves(input, chosen["glu_interleave_size"])
        return _join(
            g * (gate.slope(a) * other.value(b)), g * (gate.value(a) * other.slope(b)), chosen["glu_interleave_size"]
        )

    @torch.no_grad()
    def backward(
        grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, *given: Any, **named: Any
    ) -> tuple[Any, torch.Tensor | None]:
        chosen = _bound(defaults | {"compute_scale_grad": True}, given, named)
        g = grad.float().view(*fwd_input.shape[:-1], -1)
        found = _slopes(g * act_scales.float().reshape(g.shape[:-1])[..., None], fwd_input, chosen)
        scales_grad = None
        if chosen["compute_scale_grad"]:
            scales_grad = (g * _unscaled(fwd_input, chosen)).sum(-1).to(act_scales.dtype).view(act_scales.shape)
        return quantized.quantize(found.to(fwd_input.dtype), quantizer), scales_grad

    return forward, backward


def kernels() -> dict[str, Callable[..., Any]]:
    """Return every kernel of the tables, under TE's name: ``d`` before the function's own name, whatever else stands
    before it."""
    found: dict[str, Callable[..., Any]] = {}
    for name in PLAIN:
        found[name], found[f"d{name}"], found[f"dbias_d{name}"] = plain(name)
    for name in GATED:
        found[name], found[_derivative(name)] = gated(name)
    for name in SCALED:
        found[f"scaled_{name}"], found[f"scaled_{_derivative(name)}"] = scaled(name)
    return found


def _derivative(name: str) -> str:
    *before, function = name.split("_")
    return "_".join([*before, f"d{function}"])


@torch.no_grad()
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return a bias gradient and the quantized gradient that it is the sum of."""
    x = input.detach().contiguous()
    return [x.reshape(-1, x.shape[-1]).float().sum(0).to(x.dtype), quantized.quantize(x, quantizer)]
