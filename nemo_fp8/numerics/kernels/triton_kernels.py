# mypy: ignore-errors
"""The same casts as one Triton kernel: a program loads its tiles into registers once, and writes codes and scales.

A program's rectangle is seen as [tile rows, rows, tile columns, columns]; amaxes are its maxima along two of these,
so tiles of every shape are one kernel. It moves 3 bytes an element for BF16, against 5 of an amax pass and a cast pass.

The rounding is the hardware's own (``cvt.rn.satfinite``, from compute capability 8.9 on), or the integer formula of
`fp8_quantize.c` where there is none. Scales, which are few, are divided in FP64: Triton's FP32 ``/`` is not correctly rounded,
and its ``div_rn`` flushes subnormal quotients.
"""

from __future__ import annotations

import triton
import triton.language as tl

GIVEN, TE, TE_POW2, DEEPGEMM, DEEPGEMM_POW2, E8M0 = (tl.constexpr(i) for i in range(6))
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _divide(a, b):
    """Correctly rounded: FP64 has more than twice as many bits as FP32, so that rounding twice is rounding once."""
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.float32)


@triton.jit
def _find_scales(amax, SCALING: tl.constexpr, format_max, reciprocal_max, scale_if_tiny):
    """Scale, scale_inv and, for E8M0, its byte. The formulas are those of scales.py."""
    byte = _bits(amax)
    if SCALING == E8M0:
        ratio = _bits(amax * reciprocal_max)
        exponent, mantissa = ratio >> 23, ratio & 0x7FFFFF
        up = (mantissa > 0) & (exponent != 254) & ((exponent != 0) | (mantissa > 0x400000))
        byte = tl.where(ratio == INFINITE, 254, exponent + up.to(tl.int32))
        scale = _float(tl.where(byte == 254, 0x400000, (254 - byte) << 23))
        scale_inv = _float(tl.where(byte == 0, 0x400000, byte << 23))
    elif (SCALING == DEEPGEMM) | (SCALING == DEEPGEMM_POW2):
        scale_inv = _divide(tl.maximum(amax, 1e-4), tl.full(amax.shape, format_max, tl.float32))
        if SCALING == DEEPGEMM_POW2:
            scale_inv = _float((_bits(scale_inv) + 0x7FFFFF) & INFINITE)
        scale_inv = tl.where(_bits(amax) == INFINITE, 1.0, scale_inv)
        scale = _divide(tl.full(amax.shape, 1.0, tl.float32), scale_inv)
    else:
        scale = _divide(tl.full(amax.shape, format_max, tl.float32), amax)
        scale = tl.where(_bits(scale) == INFINITE, scale_if_tiny, scale)
        if SCALING == TE_POW2:
            scale = _float(_bits(scale) & INFINITE)
        scale = tl.where((amax == 0) | (_bits(amax) == INFINITE), 1.0, scale)
        scale_inv = _divide(tl.full(amax.shape, 1.0, tl.float32), scale)
    return scale, scale_inv, byte


@triton.jit
def _encode(x, scale, MANTISSA: tl.constexpr, BIAS: tl.constexpr, format_max, HARDWARE: tl.constexpr):
    """The codes of ``x * scale`` as integers of 8 bits; every NaN is 0x7F."""
    y = x * scale
    if HARDWARE:
        if MANTISSA == 3:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    drop: tl.constexpr = 23 - MANTISSA
    least: tl.constexpr = (128 - BIAS) << 23
    magic: tl.constexpr = ((127 + drop) << 23) | (-((128 - BIAS) << MANTISSA) & 0xFF)
    magnitude = _bits(y) & 0x7FFFFFFF
    top = tl.full(x.shape, format_max, tl.float32)
    u = tl.minimum(magnitude, _bits(top))
    e = tl.maximum(u, least) & INFINITE
    # e * magic is exact, so whether this becomes one fused operation or two makes no difference
    total = _float(u) + _float(e) * _float(tl.full(x.shape, magic, tl.int32))
    code = (_bits(total) + (e >> drop)) & 0x7F
    code = tl.where(magnitude > INFINITE, 0x7F, code | ((_bits(y) >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def _decode(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr):
    """The FP32 values of codes, exactly."""
    drop: tl.constexpr = 23 - MANTISSA
    last: tl.constexpr = 0x7F >> MANTISSA
    small: tl.constexpr = (128 - BIAS - MANTISSA) << 23
    magnitude = code.to(tl.int32) & 0x7F
    normal = _float((magnitude << drop) + tl.where(magnitude < SPECIAL, (127 - BIAS) << 23, (255 - last) << 23))
    subnormal = magnitude.to(tl.float32) * _float(tl.full(magnitude.shape, small, tl.int32))
    value = tl.where(magnitude >> MANTISSA > 0, normal, subnormal)
    return tl.where(code.to(tl.int32) & 0x80 > 0, -value, value)


@triton.jit
def _per_tile_max(x):
    return tl.max(tl.max(x, 3), 1)


@triton.jit
def _per_tile_min(x):
    return tl.min(tl.min(x, 3), 1)


@triton.jit
def _per_tile_sum(x):
    return tl.sum(tl.sum(x, 3), 1)


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scale_inv_ptr, given_ptr, amax_ptr, signal_ptr, noise_ptr, counts_ptr,
    rows, cols, stride, codes_stride, scale_rows, scale_cols, grid_rows, grid_cols,
    format_max, reciprocal_max, scale_if_tiny, saturates_above,
    SCALING: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr,
    HIGH: tl.constexpr, TILE_ROWS: tl.constexpr, WIDE: tl.constexpr, TILE_COLS: tl.constexpr,
    BF16: tl.constexpr, CAST: tl.constexpr, STATISTICS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A rectangle of HIGH x WIDE tiles. ``counts`` are five planes: underflow, saturated, nonfinite, least, largest."""
    strips = tl.cdiv(cols, WIDE * TILE_COLS)
    down = (tl.program_id(0) // strips) * HIGH
    right = (tl.program_id(0) % strips) * WIDE
    row = down * TILE_ROWS + tl.arange(0, HIGH * TILE_ROWS)
    col = right * TILE_COLS + tl.arange(0, WIDE * TILE_COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    loaded = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + col[None, :], mask=inside, other=0)
    # BF16 comes as integers: it is the upper half of FP32, subnormals included, which Triton's interpreter flushes
    loaded = _float(loaded.to(tl.int32) << 16) if BF16 else loaded.to(tl.float32)
    x = tl.reshape(loaded, (HIGH, TILE_ROWS, WIDE, TILE_COLS))

    tile_row, tile_col = down + tl.arange(0, HIGH), right + tl.arange(0, WIDE)
    at = tile_row[:, None].to(tl.int64) * grid_cols + tile_col[None, :]
    real = (tile_row < grid_rows)[:, None] & (tile_col < grid_cols)[None, :]
    if (SCALING != GIVEN) | STATISTICS:
        amax = _per_tile_max(tl.where(x == x, tl.abs(x), 0.0))
    if STATISTICS | (not CAST):
        tl.store(amax_ptr + at, amax, mask=real)
    if CAST:
        if SCALING == GIVEN:
            scale = tl.load(given_ptr) + tl.zeros((HIGH, WIDE), tl.float32)
            scale_inv = _divide(tl.full((HIGH, WIDE), 1.0, tl.float32), scale)
        else:
            scale, scale_inv, byte = _find_scales(amax, SCALING, format_max, reciprocal_max, scale_if_tiny)
            scale_at = tile_row[:, None].to(tl.int64) * scale_rows + tile_col[None, :] * scale_cols
            if SCALING == E8M0:
                tl.store(scale_inv_ptr + scale_at, byte.to(tl.uint8), mask=real)
            else:
                tl.store(scale_inv_ptr + scale_at, scale_inv, mask=real)
        wide_scale = tl.expand_dims(tl.expand_dims(scale, 1), 3)
        codes = _encode(x, wide_scale, MANTISSA, BIAS, format_max, HARDWARE)
        flat = tl.reshape(codes, (HIGH * TILE_ROWS, WIDE * TILE_COLS))
        tl.store(codes_ptr + row[:, None].to(tl.int64) * codes_stride + col[None, :], flat, mask=inside)
        if STATISTICS:
            finite = tl.abs(x) < float("inf")
            value = _decode(codes, MANTISSA, BIAS, SPECIAL) * tl.expand_dims(tl.expand_dims(scale_inv, 1), 3)
            kept, lost = tl.where(finite, x, 0.0), tl.where(finite, x - value, 0.0)
            magnitude = codes.to(tl.int32) & 0x7F
            number = tl.where(magnitude == 0x7F, 0, magnitude)
            plane = grid_rows * grid_cols
            tl.store(signal_ptr + at, _per_tile_sum(kept * kept), mask=real)
            tl.store(noise_ptr + at, _per_tile_sum(lost * lost), mask=real)
            tl.store(counts_ptr + at, _per_tile_sum(((magnitude == 0) & (kept != 0)).to(tl.int32)), mask=real)
            tl.store(counts_ptr + plane + at, _per_tile_sum((tl.abs(x * wide_scale) > saturates_above).to(tl.int32)), mask=real)
            tl.store(counts_ptr + 2 * plane + at, _per_tile_sum((tl.abs(x) < float("inf")).to(tl.int32) ^ 1), mask=real)
            tl.store(counts_ptr + 3 * plane + at, (_per_tile_min((magnitude - 1) & 0xFF) + 1) & 0xFF, mask=real)
            tl.store(counts_ptr + 4 * plane + at, _per_tile_max(number), mask=real)


@triton.jit
def decode_kernel(
    codes_ptr, scale_inv_ptr, out_ptr, rows, cols, scale_rows, scale_cols, tile_rows, tile_cols,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A rectangle of codes times the scales of their tiles; ``scale_rows`` and ``scale_cols`` are the scales' strides."""
    strips = tl.cdiv(cols, COLS)
    row = (tl.program_id(0) // strips) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % strips) * COLS + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None].to(tl.int64) * cols + col[None, :]
    code = tl.load(codes_ptr + at, mask=inside, other=0)
    scale_at = (row // tile_rows)[:, None].to(tl.int64) * scale_rows + (col // tile_cols)[None, :] * scale_cols
    if BYTES:
        byte = tl.load(scale_inv_ptr + scale_at, mask=inside, other=127).to(tl.int32)
        scale = _float(tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23)))
    else:
        scale = tl.load(scale_inv_ptr + scale_at, mask=inside, other=1.0)
    tl.store(out_ptr + at, (_decode(code, MANTISSA, BIAS, SPECIAL) * scale).to(out_ptr.dtype.element_ty), mask=inside)
