"""Encode which elements of a tensor changed, and by how much: the format of a patch, for both sides.

A step of the optimizer at a learning rate of RL moves most weights by less than their last bit. So of a tensor's codes
few change, and nearly all of those by one: to the next code of larger or of smaller magnitude. A patch is a sparse
vector of differences of bit patterns (uint8 for FP8 codes, uint16 for BF16). It is added, modulo the width, to take the
receiver from the old bits to the new ones, and subtracted to take it back. For one strip of a tensor it is two lists:

    steps     positions of the elements that change by one, and one bit each: up or down
    others    positions of all others, and their differences in full

Positions are n increasing numbers below u, in the code of Elias and Fano. With l = floor(log2(u / n)), the l low bits
of each number lie side by side, and the rest h of each number as a one in a field of bits:

    low bits    n * l bits
    high bits   n + (u >> l) + 1 bits, of which bit h[i] + i is set for i = 0 .. n - 1

That is at most 2 + log2(u / n) bits an element, within a bit of what any code needs for positions without a pattern, at
every share of changes. Both directions are a few vectorized operations. Nothing is compressed: all sizes follow from u
and the two counts, so a receiver knows how much it reads and makes before it reads. Where so much changes that plain
differences of all elements are shorter, others are all elements, and need no positions. The trade-off: a pattern in the
positions, such as whole rows that change, is not made use of (benchmarks/delta.py measures what zstd would find).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.kernels.patches import Bytes

LONGEST = 1 << 24  # elements of a strip, at most: positions are decoded to eight bytes each
Positions = NDArray[np.int64]
Differences = NDArray[np.unsignedinteger[Any]]
PATTERNS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Bytes of an element -> the unsigned type of its bit pattern."""
Patch = tuple[int, int, int, int, int, int, int]
"""(number of the tensor, VALUES or SCALES, first row, rows, steps, others, offset in the buffer)"""
VALUES, SCALES = 0, 1
"""What a patch changes: the codes or values of a tensor, or the scales of its codes."""


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as rows and columns: all dimensions but the last count rows, and a vector has rows of one."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


def grid_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor."""
    return (*shape[:-2], *(-(-n // side) for n, side in zip(shape[-2:], block, strict=True)))


def blocks_of(box: tuple[tuple[int, int], ...], block: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the box of the scales of a box of codes."""
    ends = zip(box[-2:], block, strict=True)
    return (*box[:-2], *((start // side, -(-stop // side)) for (start, stop), side in ends))


def size_of(strip: int, steps: int, others: int, width: int) -> int:
    """Return the bytes of a patch for a strip of so many elements of ``width`` bytes, by the lengths of its lists."""
    return _size_of_positions(strip, steps) + -(-steps // 8) + _size_of_positions(strip, others) + others * width


def encode(strip: int, positions: Positions, differences: Differences) -> tuple[int, int, Bytes]:
    """Return the lengths of both lists, and the bytes of the patch.

    ``positions`` are increasing and below ``strip``; ``differences`` are new minus old bit patterns, none of them 0.
    """
    one = differences.dtype.type(1)
    up = differences == one
    step = up | (differences == np.negative(one, dtype=differences.dtype))
    steps, others = int(step.sum()), len(step) - int(step.sum())
    if size_of(strip, steps, others, differences.itemsize) >= strip * differences.itemsize:
        every = np.zeros(strip, differences.dtype)
        every[positions] = differences
        return 0, strip, every.view(np.uint8)
    rest = ~step
    parts = (
        _encode_positions(strip, positions[step]),
        np.packbits(up[step], bitorder="little"),
        _encode_positions(strip, positions[rest]),
        np.ascontiguousarray(differences[rest]).view(np.uint8),
    )
    return steps, others, np.concatenate(parts)


def decode(raw: Bytes, strip: int, steps: int, others: int, width: int) -> list[tuple[Positions, Differences]]:
    """Return both lists, as positions and differences: each has every position at most once.

    ``raw`` has :func:`size_of` bytes and may come from anywhere. Raises PrecisionError if it is no patch.
    """
    pattern = PATTERNS[width]
    first, second = _size_of_positions(strip, steps), _size_of_positions(strip, others)
    at = np.cumsum([0, first, -(-steps // 8), second, others * width])
    if len(raw) != at[-1]:
        raise no_patch(f"it has {len(raw)} bytes, and its counts ask for {at[-1]}")
    up = np.unpackbits(raw[at[1] : at[2]], bitorder="little", count=steps)
    moves = np.where(up == 1, pattern(1), np.negative(pattern(1), dtype=pattern))
    return [
        (_decode_positions(raw[at[0] : at[1]], strip, steps), moves),
        (_decode_positions(raw[at[2] : at[3]], strip, others), raw[at[3] : at[4]].copy().view(pattern)),
    ]


# ---------------------------------------------------------------------- positions


def _low_bits(strip: int, count: int) -> int:
    """Return the number of low bits of each position."""
    return max(0, (strip // count).bit_length() - 1)


def _size_of_positions(strip: int, count: int) -> int:
    """Return the bytes of ``count`` positions below ``strip``; none if there are none, or if all are there."""
    if count in (0, strip):
        return 0
    low = _low_bits(strip, count)
    return -(-count * low // 8) + -(-(count + (strip >> low) + 1) // 8)


def _encode_positions(strip: int, positions: Positions) -> Bytes:
    count = len(positions)
    if count in (0, strip):
        return np.empty(0, np.uint8)
    low = _low_bits(strip, count)
    each = np.unpackbits(positions.astype("<u4").view(np.uint8).reshape(count, 4), axis=1, count=low, bitorder="little")
    ones = np.zeros(count + (strip >> low) + 1, np.uint8)
    ones[(positions >> low) + np.arange(count)] = 1
    return np.concatenate([np.packbits(each, bitorder="little"), np.packbits(ones, bitorder="little")])


def _decode_positions(raw: Bytes, strip: int, count: int) -> Positions:
    if count == 0:
        return np.empty(0, np.int64)
    if count == strip:
        return np.arange(strip)
    low = _low_bits(strip, count)
    end = -(-count * low // 8)
    length = count + (strip >> low) + 1
    ones = np.flatnonzero(np.unpackbits(raw[end:], bitorder="little", count=length))
    if len(ones) != count:
        raise no_patch(f"it has {len(ones)} positions, and says {count}")
    each = np.zeros((count, 32), np.uint8)
    each[:, :low] = np.unpackbits(raw[:end], bitorder="little", count=count * low).reshape(count, low)
    lows = np.packbits(each, axis=1, bitorder="little").view("<u4")[:, 0].astype(np.int64)
    positions = (ones - np.arange(count)) << low | lows
    if positions[-1] >= strip or not bool((positions[1:] > positions[:-1]).all()):
        raise no_patch("its positions are not increasing, or beyond the strip")
    return positions


def no_patch(why: str) -> PrecisionError:
    """Return the error for bytes that are no patch."""
    return PrecisionError("A patch cannot be read.", f"{why[0].upper()}{why[1:]}.", "Push with nemo_fp8.rollout.Refit.")
