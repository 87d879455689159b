# mypy: ignore-errors
"""The same casts as one Triton kernel: a program loads its tiles into registers once, and writes codes and scales.

A program works on a rectangle, seen as [tile rows, rows, tile columns, columns]. Amaxes are its maxima along two of
these dimensions, so one kernel serves tiles of every shape. It moves 3 bytes an element for BF16, where an amax pass
and a cast pass would move 5.

The rounding is the hardware's (``cvt.rn.satfinite``, from compute capability 8.9 on), or the integer formula of
`fp8_quantize.c`. Scales, of which there are few, are divided in FP64: Triton's FP32 ``/`` is not correctly rounded, and
its ``div_rn`` flushes subnormal quotients.
"""

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)
NONE = tl.constexpr(1 << 30)  # the least code where every code is zero: wide, so that no compiler counts in 16 bits
# Arguments that Triton must not specialize on, so that one compiled program serves every shape and every scale.
NUMBERS = [
    "rows",
    "cols",
    "stride",
    "codes_stride",
    "scale_rows",
    "scale_cols",
    "grid_rows",
    "grid_cols",
    "tile_rows",
    "tile_cols",
]
RULE = ["e8m0", "inverted", "carry", "mask"]
BYTES = tl.pointer_type(tl.uint8)  # a fixed type: scales are FP32 or bytes
POINTERS = [
    "x_ptr",
    "codes_ptr",
    "scale_inv_ptr",
    "given_ptr",
    "amax_ptr",
    "signal_ptr",
    "noise_ptr",
    "counts_ptr",
    "out_ptr",
]


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _divide(a, b):
    """Divide, correctly rounded: FP64 has over twice the bits of FP32, so rounding twice equals rounding once."""
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.float32)


@triton.jit
def _find_e8m0(amax, reciprocal_max):
    """Compute scale, scale_inv and its byte: ``amax / max`` rounded up to a power of two."""
    ratio = _bits(amax * reciprocal_max)
    exponent, mantissa = ratio >> 23, ratio & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ((exponent != 0) | (mantissa > 0x400000))
    byte = tl.where(ratio == INFINITE, 254, exponent + up.to(tl.int32))
    scale = _float(tl.where(byte == 254, 0x400000, (254 - byte) << 23))
    return scale, _float(tl.where(byte == 0, 0x400000, byte << 23)), byte


@triton.jit
def _find_fp32(amax, inverted, carry, mask, format_max, scale_if_tiny):
    """Compute scale and scale_inv by any of the four FP32 rules: one is a quotient, the other its reciprocal.

    TE divides ``max / amax`` and gets the scale; DeepGEMM divides ``amax / max`` (``inverted``) and gets scale_inv.
    ``carry`` and ``mask`` round the quotient to a power of two, down or up, or leave it as it is.
    """
    most = tl.full(amax.shape, format_max, tl.float32)
    quotient = _divide(tl.where(inverted != 0, tl.maximum(amax, 1e-4), most), tl.where(inverted != 0, most, amax))
    quotient = tl.where(_bits(quotient) == INFINITE, scale_if_tiny, quotient)
    quotient = _float((_bits(quotient) + carry) & mask)
    quotient = tl.where((_bits(amax) == INFINITE) | ((amax == 0) & (inverted == 0)), 1.0, quotient)
    other = _divide(tl.full(amax.shape, 1.0, tl.float32), quotient)
    return tl.where(inverted != 0, other, quotient), tl.where(inverted != 0, quotient, other)


@triton.jit
def _encode(x, scale, MANTISSA: tl.constexpr, BIAS: tl.constexpr, format_max, HARDWARE: tl.constexpr):
    """Compute the codes of ``x * scale`` as 8-bit integers; every NaN is 0x7F."""
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
def _decode(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, HARDWARE: tl.constexpr):
    """Compute the FP32 values of codes, exactly."""
    if HARDWARE:
        if MANTISSA == 3:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return code.to(tl.float8e5, bitcast=True).to(tl.float32)
    drop: tl.constexpr = 23 - MANTISSA
    last: tl.constexpr = 0x7F >> MANTISSA
    small: tl.constexpr = (128 - BIAS - MANTISSA) << 23
    magnitude = code.to(tl.int32) & 0x7F
    normal = _float((magnitude << drop) + tl.where(magnitude < SPECIAL, (127 - BIAS) << 23, (255 - last) << 23))
    subnormal = magnitude.to(tl.float32) * _float(tl.full(magnitude.shape, small, tl.int32))
    value = tl.where(magnitude >> MANTISSA > 0, normal, subnormal)
    return tl.where(code.to(tl.int32) & 0x80 > 0, -value, value)


@triton.jit
def _left(size, first, MOST: tl.constexpr, ALIGNED: tl.constexpr):
    """Return how many of the MOST rows or columns from ``first`` on lie inside of the tensor."""
    left = tl.minimum(size - first, MOST).to(tl.int32)
    return tl.multiple_of(left, 16) if ALIGNED else left


@triton.jit
def _pointers(ptr, first, row, col, stride, ALIGNED: tl.constexpr):
    """Return the addresses of a strip. With ``ALIGNED``, every 16 elements begin at a multiple of 16 bytes."""
    at = ptr + first + row[:, None].to(tl.int64) * stride + col[None, :]
    return tl.multiple_of(at, (1, 16)) if ALIGNED else at


@triton.jit
def _load_strip(
    x_ptr, first, row, col, stride, rows_left, cols_left,
    HIGH: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr, TILE_COLS: tl.constexpr, BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load a strip in FP32, as [tile rows, rows, tile columns, columns], with zeros outside of the tensor."""
    inside = (row < rows_left)[:, None] & (col < cols_left)[None, :]
    loaded = tl.load(_pointers(x_ptr, first, row, col, stride, ALIGNED), mask=inside, other=0)
    # BF16 is passed as integers: it is the upper half of FP32, also for subnormals, which Triton's interpreter flushes
    loaded = _float(loaded.to(tl.int32) << 16) if BF16 else loaded.to(tl.float32)
    return tl.reshape(loaded, (HIGH, LONG, WIDE, TILE_COLS))


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
def _spread(value):
    """Broadcast a value for each tile to the shape of the tiles' elements."""
    return tl.expand_dims(tl.expand_dims(value, 1), 3)


@triton.jit(do_not_specialize=NUMBERS + RULE, do_not_specialize_on_alignment=POINTERS)
def quantize_kernel(
    x_ptr, codes_ptr, scale_inv_ptr: BYTES, given_ptr, amax_ptr, signal_ptr, noise_ptr, counts_ptr,
    rows: tl.int64, cols: tl.int64, stride: tl.int64, codes_stride: tl.int64,
    scale_rows: tl.int64, scale_cols: tl.int64, grid_rows: tl.int64, grid_cols: tl.int64,
    e8m0: tl.int32, inverted: tl.int32, carry: tl.int32, mask: tl.int32,
    format_max, reciprocal_max, scale_if_tiny, saturates_above,
    GIVEN: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr,
    HIGH: tl.constexpr, TILE_ROWS: tl.constexpr, WIDE: tl.constexpr, TILE_COLS: tl.constexpr, STRIPS: tl.constexpr,
    BF16: tl.constexpr, CAST: tl.constexpr, STATISTICS: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantize a rectangle of HIGH x WIDE tiles, in STRIPS of LONG rows of every tile.

    A single strip stays in registers from its amax to its cast. Several strips, cut from one row of tiles, are loaded
    twice, the second time from the cache. ``counts`` are five planes: underflow, saturated, nonfinite, least, largest.
    """
    LONG: tl.constexpr = TILE_ROWS // STRIPS
    across = tl.cdiv(cols, WIDE * TILE_COLS).to(tl.int32)
    # Offsets in the tensor have 64 bits, those in the rectangle 32.
    down, right = (tl.program_id(0) // across).to(tl.int64) * HIGH, (tl.program_id(0) % across).to(tl.int64) * WIDE
    first_row, first_col = down * TILE_ROWS, right * TILE_COLS
    rows_left = _left(rows, first_row, HIGH * TILE_ROWS, False)
    cols_left = _left(cols, first_col, WIDE * TILE_COLS, ALIGNED)
    row, col = tl.arange(0, HIGH * LONG), tl.arange(0, WIDE * TILE_COLS)
    x_first, codes_first = first_row * stride + first_col, first_row * codes_stride + first_col
    shape: tl.constexpr = (HIGH, LONG, WIDE, TILE_COLS)

    tile_row, tile_col = tl.arange(0, HIGH), tl.arange(0, WIDE)
    at = (down + tile_row)[:, None] * grid_cols + (right + tile_col)[None, :]
    real = (down + tile_row < grid_rows)[:, None] & (right + tile_col < grid_cols)[None, :]

    if STRIPS == 1:
        x = _load_strip(
            x_ptr, x_first, row, col, stride, rows_left, cols_left, HIGH, LONG, WIDE, TILE_COLS, BF16, ALIGNED
        )
    if (not GIVEN) | STATISTICS:
        if STRIPS == 1:
            most = tl.where(x == x, tl.abs(x), 0.0)
        else:
            most = tl.zeros(shape, tl.float32)
            for strip in range(STRIPS):
                strip_row = row + strip * LONG
                y = _load_strip(
                    x_ptr,
                    x_first,
                    strip_row,
                    col,
                    stride,
                    rows_left,
                    cols_left,
                    HIGH,
                    LONG,
                    WIDE,
                    TILE_COLS,
                    BF16,
                    ALIGNED,
                )
                most = tl.maximum(most, tl.where(y == y, tl.abs(y), 0.0))
        amax = _per_tile_max(most)
    if STATISTICS | (not CAST):
        tl.store(amax_ptr + at, amax, mask=real)
    if CAST:
        if GIVEN:
            scale = tl.load(given_ptr) + tl.zeros((HIGH, WIDE), tl.float32)
            scale_inv = _divide(tl.full((HIGH, WIDE), 1.0, tl.float32), scale)
        else:
            scale_at = (down + tile_row)[:, None] * scale_rows + (right + tile_col)[None, :] * scale_cols
            if e8m0 != 0:
                scale, scale_inv, byte = _find_e8m0(amax, reciprocal_max)
                tl.store(scale_inv_ptr + scale_at, byte.to(tl.uint8), mask=real)
            else:
                scale, scale_inv = _find_fp32(amax, inverted, carry, mask, format_max, scale_if_tiny)
                tl.store(scale_inv_ptr.to(tl.pointer_type(tl.float32)) + scale_at, scale_inv, mask=real)
        if STATISTICS:
            signal, noise = tl.zeros(shape, tl.float32), tl.zeros(shape, tl.float32)
            underflow, saturated, nonfinite = (
                tl.zeros(shape, tl.int32),
                tl.zeros(shape, tl.int32),
                tl.zeros(shape, tl.int32),
            )
            least = tl.full(shape, NONE, tl.int32)
        for strip in range(STRIPS):
            strip_row = row + strip * LONG
            if STRIPS > 1:
                x = _load_strip(
                    x_ptr,
                    x_first,
                    strip_row,
                    col,
                    stride,
                    rows_left,
                    cols_left,
                    HIGH,
                    LONG,
                    WIDE,
                    TILE_COLS,
                    BF16,
                    ALIGNED,
                )
            codes = _encode(x, _spread(scale), MANTISSA, BIAS, format_max, HARDWARE)
            inside = (strip_row < rows_left)[:, None] & (col < cols_left)[None, :]
            flat = tl.reshape(codes, (HIGH * LONG, WIDE * TILE_COLS))
            tl.store(_pointers(codes_ptr, codes_first, strip_row, col, codes_stride, ALIGNED), flat, mask=inside)
            if STATISTICS:
                finite = tl.abs(x) < float("inf")
                value = _decode(codes, MANTISSA, BIAS, SPECIAL, HARDWARE) * _spread(scale_inv)
                kept, lost = tl.where(finite, x, 0.0), tl.where(finite, x - value, 0.0)
                magnitude = codes.to(tl.int32) & 0x7F
                signal += kept * kept
                noise += lost * lost
                underflow += ((magnitude == 0) & (kept != 0)).to(tl.int32)
                saturated += (tl.abs(x * _spread(scale)) > saturates_above).to(tl.int32)
                nonfinite += finite.to(tl.int32) ^ 1
                least = tl.minimum(least, tl.where(magnitude == 0, NONE, magnitude))
        if STATISTICS:
            # Codes grow with magnitudes, so the largest is the code of the amax. A NaN code does not count.
            largest = _encode(amax, scale, MANTISSA, BIAS, format_max, HARDWARE).to(tl.int32) & 0x7F
            plane = grid_rows * grid_cols
            tl.store(signal_ptr + at, _per_tile_sum(signal), mask=real)
            tl.store(noise_ptr + at, _per_tile_sum(noise), mask=real)
            tl.store(counts_ptr + at, _per_tile_sum(underflow), mask=real)
            tl.store(counts_ptr + plane + at, _per_tile_sum(saturated), mask=real)
            tl.store(counts_ptr + 2 * plane + at, _per_tile_sum(nonfinite), mask=real)
            least_of_tile = _per_tile_min(least)
            tl.store(counts_ptr + 3 * plane + at, tl.where(least_of_tile == NONE, 0, least_of_tile), mask=real)
            tl.store(counts_ptr + 4 * plane + at, tl.where(largest == 0x7F, 0, largest), mask=real)


@triton.jit(do_not_specialize=[*NUMBERS, *RULE], do_not_specialize_on_alignment=POINTERS)
def decode_kernel(
    codes_ptr, scale_inv_ptr: BYTES, out_ptr, rows: tl.int64, cols: tl.int64, scale_rows: tl.int64,
    scale_cols: tl.int64, tile_rows: tl.int32, tile_cols: tl.int32, e8m0: tl.int32,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SHARED: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Decode a rectangle of codes with the scales of their tiles, of which SHARED columns have the same.

    ``scale_rows`` and ``scale_cols`` are the strides of the scales.
    """
    across = tl.cdiv(cols, COLS).to(tl.int32)
    first_row, first_col = (
        (tl.program_id(0) // across).to(tl.int64) * ROWS,
        (tl.program_id(0) % across).to(tl.int64) * COLS,
    )
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    rows_left, cols_left = _left(rows, first_row, ROWS, False), _left(cols, first_col, COLS, ALIGNED)
    inside = (row < rows_left)[:, None] & (col < cols_left)[None, :]
    first = first_row * cols + first_col
    code = tl.load(_pointers(codes_ptr, first, row, col, cols, ALIGNED), mask=inside, other=0)
    # A tile's index is counted from the rectangle's first, in 32 bits: a division in 64 bits takes a hundred
    # instructions.
    tile_row, tile_col = first_row // tile_rows, first_col // tile_cols
    some = tl.arange(0, COLS // SHARED) * SHARED
    down = ((first_row - tile_row * tile_rows).to(tl.int32) + row) // tile_rows
    right = ((first_col - tile_col * tile_cols).to(tl.int32) + some) // tile_cols
    scale_at = (tile_row + down)[:, None] * scale_rows + (tile_col + right)[None, :] * scale_cols
    scaled = (row < rows_left)[:, None] & (some < cols_left)[None, :]
    if e8m0 != 0:
        byte = tl.load(scale_inv_ptr + scale_at, mask=scaled, other=127).to(tl.int32)
        scale = _float(tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23)))
    else:
        scale = tl.load(scale_inv_ptr.to(tl.pointer_type(tl.float32)) + scale_at, mask=scaled, other=1.0)
    value = tl.reshape(_decode(code, MANTISSA, BIAS, SPECIAL, HARDWARE), (ROWS, COLS // SHARED, SHARED))
    value = tl.reshape(value * tl.expand_dims(scale, 2), (ROWS, COLS))
    tl.store(_pointers(out_ptr, first, row, col, cols, ALIGNED), value.to(out_ptr.dtype.element_ty), mask=inside)
