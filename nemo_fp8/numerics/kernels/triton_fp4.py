# mypy: ignore-errors
"""NVFP4 as two Triton kernels: the cast, which loads its blocks into registers once, and the way back.

The formulas are those of `fp4_quantize.c` and `fp4_decode.c`, and so are the bits. The nearest code is found in one of
two ways, which are chosen at compile time and equal to the bit:

    HARDWARE    Blackwell's own instructions, two values at once: ``cvt.rn.satfinite.e2m1x2`` and ``rcp.rn``
    otherwise   integer arithmetic, and quotients in FP64: Hopper, and Triton's interpreter

The first is a third of the instructions. It has been compiled and emulated, and has never run: nobody here has such a
GPU.
"""

import triton
import triton.language as tl

from nemo_fp8.numerics.kernels.triton_kernels import (
    BYTES,
    INFINITE,
    _bits,
    _decode,
    _divide,
    _float,
    _left,
    _load_strip,
    _per_tile_max,
    _pointers,
    _spread,
)

NUMBERS = ["rows", "cols", "stride", "encode_stride", "amax_stride"]
POINTERS = ["x_ptr", "codes_ptr", "scales_ptr", "encode_ptr", "amax_ptr", "out_ptr"]
LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)
ONE = tl.constexpr(8388608.0)  # the magnitude whose last place is 1


def _convert_in_hardware():
    """Write PTX that makes four bytes of codes of eight values and four factors: $1-$4 even, $5-$8 odd, $9-$12 factors.

    PTX defines the conversion as the specification does ours: the nearest, ties to even; 6 of anything larger; +6 of
    NaN. But it keeps the sign of -0, which TE's Python drops, so 0 is added to the product: -0 + 0 is +0, and nothing
    else changes. The product has to be rounded before: one fused operation would round a negative number that is too
    small to -0 after the addition. ``.rn`` forbids that fusion.
    """
    lines = ["{ .reg .b64 pair, factors, zeros; .reg .f32 low, high; .reg .b8 byte<4>", "mov.b64 zeros, 0"]
    for i in range(4):
        lines += [
            f"mov.b64 pair, {{${1 + i}, ${5 + i}}}",
            f"mov.b64 factors, {{${9 + i}, ${9 + i}}}",
            "mul.rn.f32x2 pair, pair, factors",
            "add.rn.f32x2 pair, pair, zeros",
            "mov.b64 {low, high}, pair",
            f"cvt.rn.satfinite.e2m1x2.f32 byte{i}, high, low",
        ]
    return "; ".join([*lines, "mov.b32 $0, {byte0, byte1, byte2, byte3}", "}"])


CONVERT = tl.constexpr(_convert_in_hardware())


@triton.jit
def _reciprocal(x, HARDWARE: tl.constexpr):
    """Compute ``1 / x``, correctly rounded, subnormals included."""
    if HARDWARE:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return _divide(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _round_to_e4m3(raw):
    """Round positive floats to E4M3, saturating: the value, and its code."""
    u = tl.minimum(_bits(raw), 0x43E00000)  # 448
    e = tl.maximum(u, 121 << 23) & INFINITE
    step = _float(e) * 1048576.0
    rounded = (_float(u) + step) - step
    c = _bits(rounded)
    return rounded, tl.where(c < (121 << 23), (rounded * 512.0).to(tl.int32), (c - (120 << 23)) >> 20)


@triton.jit
def _e2m1(y):
    """Return the nearest code of each value: what the coarser grids count is larger, where they do not apply."""
    m = _float(_bits(y) & 0x7FFFFFFF)
    halves, ones, twos = m * 2.0 + ONE, m + (ONE + 2.0), m * 0.5 + (ONE + 4.0)
    least = tl.where(halves < ones, halves, ones)
    least = tl.where(least < twos, least, twos)
    least = tl.where(least < ONE + 7.0, least, ONE + 7.0)  # so is NaN, which is not less
    return (_bits(least) & 7) | tl.where(y < 0, 8, 0)


@triton.jit
def _e2m1_pairs(even, odd, factor, HARDWARE: tl.constexpr):
    """Return the codes of two neighbours times their factor, as a byte."""
    if HARDWARE:
        registers: tl.constexpr = "=r,r,r,r,r,r,r,r,r,r,r,r,r"
        return tl.inline_asm_elementwise(CONVERT, registers, [even, odd, factor], tl.uint8, is_pure=True, pack=4)
    return (_e2m1(even * factor) | (_e2m1(odd * factor) << 4)).to(tl.uint8)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def quantize_fp4_kernel(
    x_ptr, codes_ptr: BYTES, scales_ptr: BYTES, encode_ptr,
    rows: tl.int64, cols: tl.int64, stride: tl.int64, encode_stride: tl.int64, sixth, if_zero,
    VLLM: tl.constexpr, HIGH: tl.constexpr, TILE_ROWS: tl.constexpr, WIDE: tl.constexpr, TILE_COLS: tl.constexpr,
    BF16: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast a rectangle of HIGH x WIDE blocks of TILE_ROWS x 16 values."""
    across = tl.cdiv(cols, WIDE * TILE_COLS).to(tl.int32)
    first_row = (tl.program_id(0) // across).to(tl.int64) * HIGH * TILE_ROWS
    first_col = (tl.program_id(0) % across).to(tl.int64) * WIDE * TILE_COLS
    rows_left = _left(rows, first_row, HIGH * TILE_ROWS, False)
    cols_left = _left(cols, first_col, WIDE * TILE_COLS, ALIGNED)
    row, col = tl.arange(0, HIGH * TILE_ROWS), tl.arange(0, WIDE * TILE_COLS)
    x = _load_strip(
        x_ptr, first_row * stride + first_col, row, col, stride, rows_left, cols_left, HIGH, TILE_ROWS, WIDE, TILE_COLS,
        BF16, ALIGNED,
    )  # fmt: skip
    # PTX's max skips every NaN, and is one where there is nothing else; that of the interpreter meets signaling ones.
    amax = _per_tile_max(tl.abs(x) if HARDWARE else tl.where(x == x, tl.abs(x), 0.0))
    amax = tl.where(amax == amax, amax, 0.0) if HARDWARE else amax

    tile_row = tl.arange(0, HIGH) * TILE_ROWS
    encode = tl.load(encode_ptr + (first_row + tile_row) * encode_stride, mask=tile_row < rows_left, other=1.0)
    decode = _reciprocal(encode, HARDWARE)
    raw = encode[:, None] * (amax * sixth) if VLLM else amax * (encode * sixth)[:, None]
    scale, code = _round_to_e4m3(raw)
    d = scale * decode[:, None]
    d = tl.where(d == 0, tl.zeros((HIGH, WIDE), tl.float32) + if_zero, d)
    factor = _reciprocal(d, HARDWARE)
    factor = tl.where(factor < LARGEST_FP32, factor, LARGEST_FP32)

    # Two neighbours lie in one thread, so that splitting moves nothing.
    even, odd = tl.split(tl.reshape(x, (HIGH * TILE_ROWS, WIDE * TILE_COLS // 2, 2)))
    each = tl.reshape(tl.broadcast_to(_spread(factor), x.shape), (HIGH * TILE_ROWS, WIDE * TILE_COLS // 2, 2))
    each, _ = tl.split(each)
    pair, block = tl.arange(0, WIDE * TILE_COLS // 2), tl.arange(0, WIDE)
    inside = (row < rows_left)[:, None] & (pair < cols_left // 2)[None, :]
    at = _pointers(codes_ptr, first_row * (cols // 2) + first_col // 2, row, pair, cols // 2, ALIGNED)
    tl.store(at, _e2m1_pairs(even, odd, each, HARDWARE), mask=inside)
    # The scale of a square is stored for each of its rows.
    each = tl.broadcast_to(tl.expand_dims(code, 1), (HIGH, TILE_ROWS, WIDE))
    each = tl.reshape(each, (HIGH * TILE_ROWS, WIDE)).to(tl.uint8)
    inside = (row < rows_left)[:, None] & (block < cols_left // TILE_COLS)[None, :]
    at = scales_ptr + (first_row + row.to(tl.int64))[:, None] * (cols // TILE_COLS)
    tl.store(at + (first_col // TILE_COLS + block)[None, :], each, mask=inside)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def decode_fp4_kernel(
    codes_ptr: BYTES, scales_ptr: BYTES, amax_ptr, out_ptr, rows: tl.int64, cols: tl.int64, amax_stride: tl.int64,
    reciprocal, ROWS: tl.constexpr, COLS: tl.constexpr, TILE_COLS: tl.constexpr, AMAX: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Decode a rectangle of codes with the scales of their blocks and, with AMAX, the amax beneath."""
    across = tl.cdiv(cols, COLS).to(tl.int32)
    first_row = (tl.program_id(0) // across).to(tl.int64) * ROWS
    first_col = (tl.program_id(0) % across).to(tl.int64) * COLS
    row, col, pair, block = (
        tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, COLS // 2), tl.arange(0, COLS // TILE_COLS)
    )  # fmt: skip
    rows_left, cols_left = _left(rows, first_row, ROWS, False), _left(cols, first_col, COLS, ALIGNED)
    inside = (row < rows_left)[:, None] & (pair < cols_left // 2)[None, :]
    at = _pointers(codes_ptr, first_row * (cols // 2) + first_col // 2, row, pair, cols // 2, ALIGNED)
    byte = tl.load(at, mask=inside, other=0).to(tl.int32)
    code = tl.reshape(tl.join(byte & 15, byte >> 4), (ROWS, COLS // TILE_COLS, TILE_COLS))
    magnitude = code & 7
    twice = tl.maximum(tl.maximum(magnitude, 2 * magnitude - 4), 4 * magnitude - 16)

    inside = (row < rows_left)[:, None] & (block < cols_left // TILE_COLS)[None, :]
    at = scales_ptr + (first_row + row.to(tl.int64))[:, None] * (cols // TILE_COLS)
    scale = _decode(tl.load(at + (first_col // TILE_COLS + block)[None, :], mask=inside, other=0), 3, 7, 0x7F, False)
    if AMAX:
        amax = tl.load(amax_ptr + (first_row + row) * amax_stride, mask=row < rows_left, other=0.0)
        scale = scale * amax[:, None] * reciprocal
    value = twice.to(tl.float32) * 0.5 * tl.expand_dims(scale, 2)
    value = tl.reshape(_float(_bits(value) ^ ((code & 8) << 28)), (ROWS, COLS))
    inside = (row < rows_left)[:, None] & (col < cols_left)[None, :]
    at = _pointers(out_ptr, first_row * cols + first_col, row, col, cols, ALIGNED)
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)
