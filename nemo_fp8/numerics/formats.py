"""Number formats as data: what the bits of E4M3FN, E5M2, E2M1 and E8M0 mean, the cast into FP8 and the way back.

A code of a small float is ``sign | exponent | mantissa``; its value is

    (-1)**sign * 2**(exponent - bias) * (1 + mantissa / 2**m)        exponent > 0
    (-1)**sign * 2**(1 - bias) * (mantissa / 2**m)                   exponent = 0

E8M0 has neither sign nor mantissa: it is the exponent byte of a power of two, with 255 for NaN. E2M1 has neither
infinity nor NaN, and lies two to a byte: ``nvfp4.py`` casts it.

The cast rounds to nearest, ties to even, and saturates as the GPU's ``cvt.rn.satfinite`` does: anything too
large, infinity included, becomes the largest finite value, and NaN stays NaN. Every FP8 value is exact in BF16,
so decoding is a matter of moving bits. The trade-off: a shift is three times as fast on a CPU as torch's own
conversion, and NaN codes (whose pattern would read as a number) have to be corrected by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nemo_fp8.errors import PrecisionError, unknown

FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Format:
    """One number format. ``max`` and the smallest values are exact; ``dtype`` is torch's name for it."""

    name: str
    dtype: torch.dtype
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    infinity: int | None
    """The code of +infinity, where there is one."""
    first_nan: int
    """The lowest positive code that is NaN; all codes above it are NaN as well. Beyond the last code if none is."""

    @property
    def smallest(self) -> float:
        """The smallest positive value; without a mantissa there are no subnormals below the exponents."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits) if self.mantissa_bits else 2.0**-self.bias

    @property
    def saturates_above(self) -> float:
        """Half a step above ``max``: beyond it the cast loses more than rounding."""
        step = 2.0 ** ((1 << self.exponent_bits) - 1 - self.bias - self.mantissa_bits)
        return self.max + (step if self.infinity is None else step / 2) / 2

    @property
    def magnitudes(self) -> torch.Tensor:
        """The values of all codes without a sign, in FP64: element ``code`` is its value."""
        codes = torch.arange(1 << (self.exponent_bits + self.mantissa_bits))
        exponent, mantissa = codes >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        hidden = (exponent > 0).long() << self.mantissa_bits if self.mantissa_bits else 1
        power = (exponent.clamp_min(1) if self.mantissa_bits else exponent) - self.bias - self.mantissa_bits
        values = torch.ldexp((hidden + mantissa).double(), power)
        if self.infinity is not None:
            values[self.infinity] = float("inf")
        values[self.first_nan :] = float("nan")
        return values

    @property
    def binades(self) -> float:
        """log2 of the largest over the smallest positive value: the dynamic range."""
        return math.log2(self.max / self.smallest)


FORMATS = {
    f.name: f
    for f in (
        Format("e4m3", torch.float8_e4m3fn, 8, 4, 3, 7, 448.0, None, 0x7F),
        Format("e5m2", torch.float8_e5m2, 8, 5, 2, 15, 57344.0, 0x7C, 0x7D),
        Format("e2m1", torch.float4_e2m1fn_x2, 4, 2, 1, 1, 6.0, None, 0x8),
        Format("e8m0", torch.float8_e8m0fnu, 8, 8, 0, 127, 2.0**127, None, 0xFF),
    )
}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}


def format_of(what: str | torch.dtype) -> Format:
    """Return the format of a name or torch dtype. Raises PrecisionError if there is none."""
    found = _BY_DTYPE.get(what) if isinstance(what, torch.dtype) else FORMATS.get(what)
    if found is None:
        raise PrecisionError([unknown("number format", what, FORMATS)])
    return found


def cast(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Round FP32 values to the nearest code, saturating; every NaN becomes 0x7F, as on a GPU, whatever its sign."""
    data = x.clamp(-format.max, format.max).to(format.dtype)  # clamped first: torch's E5M2 cast overflows to infinity
    codes = data.view(torch.uint8)
    codes.masked_fill_(codes == 0xFF, 0x7F)
    return data


def decode(data: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode FP8 codes exactly to BF16 or a wider dtype. NaN codes give NaN of either sign.

    Raises PrecisionError if ``data`` is of no FP8 dtype.
    """
    if data.dtype == torch.float8_e4m3fn:
        return _decode_e4m3(data).to(dtype)
    if data.dtype == torch.float8_e5m2:
        # E5M2 is the upper half of FP16, its infinities and NaNs included.
        return (data.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).to(dtype)
    raise PrecisionError(
        f"Cannot decode {data.dtype}.",
        "It is none of the FP8 element types.",
        "Give float8_e4m3fn or float8_e5m2 data.",
    )


def _decode_e4m3(data: torch.Tensor) -> torch.Tensor:
    # Shifted by 4, exponent and mantissa lie where BF16 has them, and only the bias (127 against 7) is left to correct.
    spread = (
        data.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)
    )  # the sign, and seven bits
    out = spread.view(torch.bfloat16) * 2.0**120
    # The NaN codes read as +-480, which nothing else does.
    if out.numel() and bool(torch.stack(torch.aminmax(out)).abs().max() == 480):
        out.masked_fill_(out.abs() == 480, float("nan"))
    return out


def decode_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Compute ``2 ** (exponent - 127)`` in FP32 from E8M0 codes (uint8 or float8_e8m0fnu); code 255 is NaN."""
    codes = exponents.view(torch.uint8)
    # FP32 shares the exponent byte; its two ends, 2**-127 (a subnormal) and NaN, have patterns of their own.
    bits = codes.to(torch.int32).bitwise_left_shift_(23).clamp_min_(0x400000)
    return bits.masked_fill_(codes == 255, 0x7FC00000).view(torch.float32)
