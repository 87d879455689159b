"""Scales: from the largest magnitude of a tensor or block to the factor its values are multiplied with.

    te         scale = max_of_format / amax,  scale_inv = 1 / scale      TransformerEngine's kernels, NeMo RL
    deepgemm   scale_inv = max(amax, 1e-4) / max_of_format,  scale = 1 / scale_inv    DeepGEMM's casts
    e8m0       scale_inv = amax * (1 / max_of_format), rounded up to a power of two   MX formats

The two FP32 conventions differ by one ulp in about half of the scales; rounded to powers of two they agree.
TE's edges are kept to the bit: amax 0 or infinity gives scale 1; an amax so small that the scale overflows
gives the largest finite value; NaN elements do not enter an amax at all, because ``fmaxf`` skips them.

``max / amax`` must be one correctly rounded division: written as ``448.0 / amax`` torch multiplies with a
reciprocal and misses by an ulp in a quarter of all cases, so ``torch.div`` it is.
"""

from __future__ import annotations

import torch

from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.numerics.formats import FP32_MAX, Format

CONVENTIONS = ("te", "deepgemm")
SCALE_KINDS = ("fp32", "pow2", "e8m0")
DEEPGEMM_LEAST_AMAX = 1e-4


def amax_of(x: torch.Tensor, dim: tuple[int, ...] | None = None) -> torch.Tensor:
    """The largest magnitude of all elements, or over some dimensions, in FP32. NaNs are passed over, as ``fmaxf``
    does."""
    if x.numel() == 0:
        return x.new_zeros(
            () if dim is None else [n for i, n in enumerate(x.shape) if i not in dim], dtype=torch.float32
        )
    if x.device.type == "cpu":
        if dim is None:
            low, high = torch.aminmax(x)  # no copy of x, where x.abs() makes one
            amax = torch.maximum(-low, high)
        else:
            amax = x.abs().amax(dim)
        if not amax.isnan().any():
            return amax.float().abs()  # -low of a tensor of zeros is -0.0
    # A device is not asked whether there is a NaN: it would have to be waited for.
    without = x.abs().nan_to_num_(nan=0.0, posinf=float("inf"))
    return (without.amax() if dim is None else without.amax(dim)).float()


def scale_from_amax(
    amax: torch.Tensor, format: Format, *, epsilon: float = 0.0, pow2: bool = False, value_for_inf: float = FP32_MAX
) -> torch.Tensor:
    """TE's scale of FP32 amaxes: ``max / amax``, 1 where amax is 0, infinite or NaN. ``pow2`` rounds it down."""
    if epsilon:
        amax = torch.where(amax < epsilon, epsilon, amax)  # NaN compares false, and is handled below
    scale = torch.div(format.max, amax)
    scale = torch.where(scale.isinf(), value_for_inf, scale)
    if pow2:
        scale = floor_pow2(scale)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)


def delayed_scale(amax: torch.Tensor, previous: torch.Tensor, format: Format, margin: int = 0) -> torch.Tensor:
    """TE's update of a delayed scale: an amax of 0, infinity or NaN says nothing and keeps the previous scale."""
    scale = torch.div(format.max * 2.0**-margin, amax)
    scale = torch.where(amax.isfinite() & (amax > 0), scale, previous)
    return torch.where(scale.isinf(), FP32_MAX, scale)


def e8m0_from_amax(amax: torch.Tensor, format: Format) -> torch.Tensor:
    """The E8M0 code (uint8) of ``amax / max`` rounded up, saturating at 254; NaN gives 255."""
    # As the kernels do, multiply with the FP32 reciprocal of the format's largest value.
    ratio = amax * torch.tensor(1.0 / format.max, dtype=torch.float32, device=amax.device)
    bits = ratio.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Up to the next power of two, except from the largest, and except 0 < ratio <= 2**-127, which code 0 still holds.
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = torch.where(ratio.isinf(), 254, exponent + up.int())
    return torch.where(ratio.isnan(), 255, exponent).to(torch.uint8)


def deepgemm_scale_inv(amax: torch.Tensor, format: Format, *, pow2: bool = False) -> torch.Tensor:
    """DeepGEMM's ``scale_inv = amax / max`` with its floor for amax; ``pow2`` rounds it up. Infinity has TE's scale,
    1."""
    scale_inv = torch.div(amax.clamp_min(DEEPGEMM_LEAST_AMAX), torch.tensor(format.max, device=amax.device))
    scale_inv = ceil_pow2(scale_inv) if pow2 else scale_inv
    return torch.where(amax.isinf(), 1.0, scale_inv)


def floor_pow2(x: torch.Tensor) -> torch.Tensor:
    """Positive FP32 values rounded down to powers of two, by clearing the mantissa."""
    return (x.view(torch.int32) & -0x800000).view(torch.float32)


def ceil_pow2(x: torch.Tensor) -> torch.Tensor:
    """Positive normal FP32 values rounded up to powers of two."""
    return ((x.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def is_pow2(x: torch.Tensor) -> bool:
    """Whether every value is a normal power of two."""
    bits = x.view(torch.int32)
    return not bool((((bits & 0x7FFFFF) != 0) | (bits <= 0)).any())


def check_convention(convention: str) -> None:
    """Refuse a name that is no convention."""
    if convention not in CONVENTIONS:
        raise PrecisionError([unknown("scale convention", convention, CONVENTIONS)])
