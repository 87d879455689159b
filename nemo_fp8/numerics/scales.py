"""Compute scales: from the amax of a tensor or tile to the factor that its values are multiplied with.

    te         scale = max_of_format / amax,  scale_inv = 1 / scale      TransformerEngine's kernels, NeMo RL
    deepgemm   scale_inv = max(amax, 1e-4) / max_of_format,  scale = 1 / scale_inv    DeepGEMM's casts
    e8m0       scale_inv = amax * (1 / max_of_format), rounded up to a power of two   MX formats

The two FP32 conventions differ by one ulp in about half of the scales; rounded to powers of two they agree.
TE's edges are kept to the bit: amax 0 or infinity gives scale 1; an amax so small that the scale overflows
gives the largest finite value; NaN elements do not enter an amax, because ``fmaxf`` skips them.

``max / amax`` must be one correctly rounded division. torch computes ``448.0 / amax`` as a product with a
reciprocal, which is off by an ulp in a quarter of all cases, so the code calls ``torch.div``.
"""

from __future__ import annotations

import torch

from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.numerics.formats import FP32_MAX, Format

CONVENTIONS = ("te", "deepgemm")
SCALE_KINDS = ("fp32", "pow2", "e8m0")
DEEPGEMM_LEAST_AMAX = 1e-4


def amax_of(x: torch.Tensor, dim: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the largest magnitude in FP32, over all elements or some dimensions. NaN is skipped, as by ``fmaxf``."""
    if x.numel() == 0:
        return x.new_zeros(
            () if dim is None else [n for i, n in enumerate(x.shape) if i not in dim], dtype=torch.float32
        )
    if x.device.type == "cpu":
        if dim is None:
            low, high = torch.aminmax(x)  # x.abs() would make a copy of x
            amax = torch.maximum(-low, high)
        else:
            amax = x.abs().amax(dim)
        if not amax.isnan().any():
            return amax.float().abs()  # -low of a tensor of zeros is -0.0
    # On a GPU, asking whether there is a NaN would wait for the device.
    without = x.abs().nan_to_num_(nan=0.0, posinf=float("inf"))
    return (without.amax() if dim is None else without.amax(dim)).float()


def scale_from_amax(
    amax: torch.Tensor, format: Format, *, epsilon: float = 0.0, pow2: bool = False, value_for_inf: float = FP32_MAX
) -> torch.Tensor:
    """Compute TE's scale ``max / amax`` of FP32 amaxes; 1 if amax is 0, infinite or NaN. ``pow2`` rounds it down."""
    if epsilon:
        amax = torch.where(amax < epsilon, epsilon, amax)  # NaN compares false, and is handled below
    scale = torch.div(format.max, amax)
    scale = torch.where(scale.isinf(), value_for_inf, scale)
    if pow2:
        scale = floor_pow2(scale)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)


def delayed_scale(amax: torch.Tensor, previous: torch.Tensor, format: Format, margin: int = 0) -> torch.Tensor:
    """Compute TE's next delayed scale. An amax of 0, infinity or NaN keeps the previous scale."""
    scale = torch.div(format.max * 2.0**-margin, amax)
    scale = torch.where(amax.isfinite() & (amax > 0), scale, previous)
    return torch.where(scale.isinf(), FP32_MAX, scale)


def e8m0_from_amax(amax: torch.Tensor, format: Format) -> torch.Tensor:
    """Compute the E8M0 code (uint8) of ``amax / max`` rounded up, saturating at 254; NaN gives 255."""
    # TE's kernels multiply with the FP32 reciprocal of the format's largest value; so does this.
    ratio = amax * amax.new_full((), 1.0 / format.max, dtype=torch.float32)
    bits = ratio.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Round up to the next power of two, except at the largest code, and for 0 < ratio <= 2**-127, which is code 0.
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = torch.where(ratio.isinf(), 254, exponent + up.int())
    return torch.where(ratio.isnan(), 255, exponent).to(torch.uint8)


def deepgemm_scale_inv(amax: torch.Tensor, format: Format, *, pow2: bool = False) -> torch.Tensor:
    """Compute DeepGEMM's ``amax / max`` with its floor for amax; ``pow2`` rounds it up. Infinity gives 1, as in TE."""
    scale_inv = torch.div(amax.clamp_min(DEEPGEMM_LEAST_AMAX), amax.new_full((), format.max, dtype=torch.float32))
    scale_inv = ceil_pow2(scale_inv) if pow2 else scale_inv
    return torch.where(amax.isinf(), 1.0, scale_inv)


def floor_pow2(x: torch.Tensor) -> torch.Tensor:
    """Round positive FP32 values down to powers of two, by clearing the mantissa."""
    return (x.view(torch.int32) & -0x800000).view(torch.float32)


def ceil_pow2(x: torch.Tensor) -> torch.Tensor:
    """Round positive normal FP32 values up to powers of two."""
    return ((x.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def is_pow2(x: torch.Tensor) -> bool:
    """Return whether every value is a normal power of two."""
    return x.numel() == 0 or (x.amin().item() > 0 and torch.equal(floor_pow2(x), x))


def check_convention(convention: str) -> None:
    """Raise PrecisionError for an unknown convention."""
    if convention not in CONVENTIONS:
        raise PrecisionError([unknown("scale convention", convention, CONVENTIONS)])
