"""Encode which elements of a tensor changed, and by how much: the format of a patch, for both sides.

A step of the optimizer at a learning rate of RL moves most weights by less than their last bit. So of a tensor's codes
few change, and nearly all of those by one: to the next code of larger or of smaller magnitude. A patch is a sparse
vector of differences of bit patterns (uint8 for FP8 codes, uint16 for BF16). It is added, modulo the width, to take the
receiver from the old bits to the new ones, and subtracted to take it back. For one strip of a tensor it is three lists:

    ups       positions of the elements that go up by one
    downs     positions of those that go down by one
    others    positions of all others, and their differences in full

Positions are n increasing numbers below u. SMALL is the code of Elias and Fano: with l = floor(log2(u / n)), the l low
bits of each number lie side by side, and the rest h of each number as a one in a field of bits:

    low bits    n * l bits
    high bits   n + (u >> l) + 1 bits, of which bit h[i] + i is set for i = 0 .. n - 1

That is at most 2 + log2(u / n) bits an element, within a bit of what any code needs for positions without a pattern, at
every share of changes. QUICK is a bitmap of u bits without those of its words that are 0, after a bit for each word
that says whether it is there: up to three times as many bytes, but a processor that packs the elements of vectors finds
and adds 512 elements with a few instructions, whatever changed among them. It is for patches that do not travel, and
of which enough changed (PAYS). The positions of others are always SMALL.

Nothing is compressed: all sizes follow from u and the lengths of the lists (of QUICK ones, in words), so a receiver
knows how much it reads and makes before it reads. Where so much changes that plain differences of all elements are
shorter, others are all elements, and need no positions. The trade-off: a pattern in the positions, such as whole rows
that change, is not made use of (benchmarks/delta.py measures what zstd would find).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.kernels.patches import Bytes, Coding

LONGEST = 1 << 24  # elements of a strip, at most: positions are decoded to eight bytes each
Positions = NDArray[np.int64]
Differences = NDArray[np.unsignedinteger[Any]]
PATTERNS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Bytes of an element -> the unsigned type of its bit pattern."""
WORD = 16  # bits of a word of a bitmap
PAYS = 256  # QUICK does where one element of so many changes, or more: fewer positions are soon written and read
Patch = tuple[int, int, int, int, int, int, int, int, int]
"""(number of the tensor, VALUES or SCALES, first row, rows, coding, ups, downs, others, offset in the buffer)"""
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


def size_of(strip: int, coding: int, ups: int, downs: int, others: int, width: int) -> int:
    """Return the bytes of a patch for a strip of so many elements of ``width`` bytes, by the lengths of its lists."""
    return sum(_sizes(strip, coding, ups, downs, others, width))


def _sizes(strip: int, coding: int, ups: int, downs: int, others: int, width: int) -> list[int]:
    """Return the bytes of the positions of all lists, and of the differences of the last one."""
    size = CODINGS[Coding(coding)].size
    return [size(strip, ups), size(strip, downs), CODINGS[Coding.SMALL].size(strip, others), others * width]


def encode(
    strip: int, positions: Positions, differences: Differences, quick: bool = False
) -> tuple[int, int, int, int, Bytes]:
    """Return the coding, the lengths of all lists, and the bytes of the patch.

    ``positions`` are increasing and below ``strip``; ``differences`` are new minus old bit patterns, none of them 0.
    ``quick`` asks for QUICK where that pays.
    """
    one, size = differences.dtype.type(1), differences.itemsize
    up, down = differences == one, differences == np.negative(one, dtype=differences.dtype)
    rest = ~(up | down)
    coding = Coding.QUICK if quick and int((~rest).sum()) * PAYS >= strip else Coding.SMALL
    write = CODINGS[coding].write
    (ups, of_ups), (downs, of_downs) = write(strip, positions[up]), write(strip, positions[down])
    others = int(rest.sum())
    if size_of(strip, coding, ups, downs, others, size) >= strip * size:
        every = np.zeros(strip, differences.dtype)
        every[positions] = differences
        return Coding.SMALL, 0, 0, strip, every.view(np.uint8)
    _, of_others = CODINGS[Coding.SMALL].write(strip, positions[rest])
    by = np.ascontiguousarray(differences[rest]).view(np.uint8)
    return coding, ups, downs, others, np.concatenate([of_ups, of_downs, of_others, by])


def decode(
    raw: Bytes, strip: int, coding: int, ups: int, downs: int, others: int, width: int
) -> list[tuple[Positions, Differences]]:
    """Return all lists, as positions and differences: each has every position at most once.

    ``raw`` has :func:`size_of` bytes and may come from anywhere. Raises PrecisionError if it is no patch.
    """
    pattern, read = PATTERNS[width], CODINGS[Coding(coding)].read
    at = np.cumsum([0, *_sizes(strip, coding, ups, downs, others, width)])
    if len(raw) != at[-1]:
        raise no_patch(f"it has {len(raw)} bytes, and its counts ask for {at[-1]}")
    of_ups, of_downs = read(raw[: at[1]], strip, ups), read(raw[at[1] : at[2]], strip, downs)
    return [
        (of_ups, np.full(len(of_ups), 1, pattern)),
        (of_downs, np.full(len(of_downs), -1).astype(pattern)),
        (CODINGS[Coding.SMALL].read(raw[at[2] : at[3]], strip, others), raw[at[3] :].copy().view(pattern)),
    ]


# ---------------------------------------------------------------------- positions


def _low_bits(strip: int, count: int) -> int:
    """Return the number of low bits of each position."""
    return max(0, (strip // count).bit_length() - 1)


def _size_of_small(strip: int, count: int) -> int:
    """Return the bytes of ``count`` positions below ``strip``; none if there are none, or if all are there."""
    if count in (0, strip):
        return 0
    low = _low_bits(strip, count)
    return -(-count * low // 8) + -(-(count + (strip >> low) + 1) // 8)


def _write_small(strip: int, positions: Positions) -> tuple[int, Bytes]:
    count = len(positions)
    if count in (0, strip):
        return count, np.empty(0, np.uint8)
    low = _low_bits(strip, count)
    each = np.unpackbits(positions.astype("<u4").view(np.uint8).reshape(count, 4), axis=1, count=low, bitorder="little")
    ones = np.zeros(count + (strip >> low) + 1, np.uint8)
    ones[(positions >> low) + np.arange(count)] = 1
    return count, np.concatenate([np.packbits(each, bitorder="little"), np.packbits(ones, bitorder="little")])


def _read_small(raw: Bytes, strip: int, count: int) -> Positions:
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


def _size_of_tops(strip: int) -> int:
    """Return the bytes of a bit for each word of a bitmap of ``strip`` bits."""
    return -(-strip // (8 * WORD))


def _size_of_quick(strip: int, words: int) -> int:
    return 0 if words == 0 else _size_of_tops(strip) + words * WORD // 8


def _write_quick(strip: int, positions: Positions) -> tuple[int, Bytes]:
    bits = np.zeros(-(-strip // WORD) * WORD, np.uint8)
    bits[positions] = 1
    words = np.packbits(bits, bitorder="little").view(f"<u{WORD // 8}")
    there = words != 0
    if not there.any():
        return 0, np.empty(0, np.uint8)
    return int(there.sum()), np.concatenate([np.packbits(there, bitorder="little"), words[there].view(np.uint8)])


def _read_quick(raw: Bytes, strip: int, words: int) -> Positions:
    if words == 0:
        return np.empty(0, np.int64)
    tops = np.unpackbits(raw[: _size_of_tops(strip)], bitorder="little")
    numbers = np.flatnonzero(tops)
    if len(numbers) != words:
        raise no_patch(f"it has {len(numbers)} words, and says {words}")
    if numbers[-1] * WORD >= strip:
        raise no_patch("its words are beyond the strip")
    bits = np.unpackbits(raw[_size_of_tops(strip) :].reshape(words, -1), axis=1, bitorder="little")
    each, at = np.nonzero(bits)
    positions = numbers[each] * WORD + at
    if len(positions) and positions[-1] >= strip:
        raise no_patch("its positions are beyond the strip")
    return positions


class _Positions(NamedTuple):
    """A way to write down positions below some number."""

    size: Callable[[int, int], int]
    """(the number, the length that ``write`` returns) -> bytes"""
    write: Callable[[int, Positions], tuple[int, Bytes]]
    read: Callable[[Bytes, int, int], Positions]


CODINGS = {
    Coding.SMALL: _Positions(_size_of_small, _write_small, _read_small),
    Coding.QUICK: _Positions(_size_of_quick, _write_quick, _read_quick),
}


def no_patch(why: str) -> PrecisionError:
    """Return the error for bytes that are no patch."""
    return PrecisionError("A patch cannot be read.", f"{why[0].upper()}{why[1:]}.", "Push with nemo_fp8.rollout.Refit.")
