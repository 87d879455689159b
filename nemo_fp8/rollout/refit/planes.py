"""Keep the bits of a tensor that an engine holds, and find what changed in them: the planes of a ledger.

    put(row, rows)         note rows, whatever was there
    changes([look, ...])   note rows of several planes that may have changed, and return a patch (patch.py) wherever
                           they have: all threads look, and go on from one plane to the next without waiting
    digest(part)           the fingerprint of what a worker holds of a plane

A compiled kernel (fp8_patch.c) compares, notes and writes a patch in one pass over rows that it casts itself, a few at
a time, in its cache. Where there is no compiler numpy does it; tests hold both to the same bits. A fingerprint is made
of sums of words, so those of every part are carried through each change. The trade-off: what carries no sums (a part
that is no rectangle of words) is read anew after a change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.kernels import build, patches
from nemo_fp8.numerics.kernels.cpu import CastJob, cast_job
from nemo_fp8.numerics.kernels.patches import Bytes
from nemo_fp8.numerics.quantize import find_scales, quantize_into
from nemo_fp8.rollout.refit.fingerprint import Fingerprint
from nemo_fp8.rollout.refit.manifest import Box
from nemo_fp8.rollout.refit.patch import PATTERNS, encode, matrix_of

Change = tuple[int, int, int, int, int, int, Bytes]
"""(first row, rows, coding, ups, downs, others, bytes of the patch)"""
Sums = tuple[torch.Tensor, torch.Tensor]
Words = tuple[int, int, int, int]
"""(first row, last row, first word, last word)"""


@dataclass
class Cast:
    """Rows of codes that need not be there yet: the kernel that compares makes a few at a time, in its cache."""

    values: torch.Tensor
    operand: Operand
    scales: torch.Tensor
    """Memory for the scales, which are there once the codes were made."""
    room: Room
    """Where the codes will lie if all are made at once."""
    by_kernel: CastJob | None = None
    """The job that a kernel was given."""

    def made(self) -> torch.Tensor:
        """Quantize all rows, and return their codes on the CPU."""
        codes = self.room.of("codes", tuple(self.values.shape), torch.float8_e4m3fn, self.values.device)
        quantize_into(self.values, self.operand, codes, self.scales)
        self.by_kernel = None
        return codes.cpu()

    def job(self, rows: int) -> CastJob | None:
        """Return the cast for a kernel that makes patches of so many rows; None if there is none for that."""
        block, format, kind = self.operand.block, self.operand.format, self.operand.scale
        assert block is not None
        known = build.library() is not None and rows % block[0] == 0
        self.by_kernel = cast_job(self.values, block, format, kind, self.scales) if known else None
        return self.by_kernel

    def infinities(self) -> int:
        """Return how many of the values are infinite, once the codes were made. They are looked for only if the kernel
        met what is no number, or a block has the scale that an infinity makes."""
        met = (
            bool(self.by_kernel.wild)
            if self.by_kernel is not None
            else bool((self.scales == _scale_of_infinity(self.operand.format, self.operand.scale)).any())
        )
        return int(self.values.isinf().sum()) if met else 0


class Look(NamedTuple):
    """Rows of a plane that may have changed."""

    plane: Plane
    row: int
    """The number of the first one."""
    new: torch.Tensor | CastJob
    """The rows as they are now, or the cast that makes them."""
    patch_rows: int
    """A patch is of so many rows, but for the last."""
    quick: bool = False
    """Whether patches are QUICK where that pays."""

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.new.rows if isinstance(self.new, CastJob) else len(self.new)

    @property
    def patches(self) -> int:
        """How many patches they have, if all of them change."""
        return -(-self.rows // self.patch_rows)

    @property
    def bytes(self) -> int:
        """The bytes of all rows."""
        return self.rows * self.plane.columns * self.plane.values.itemsize


class Plane:
    """A tensor of bit patterns that an engine holds, and the fingerprints of the parts that its workers hold."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, parts: Mapping[str, Box]) -> None:
        self.values, self.parts = torch.empty(shape, dtype=dtype), parts
        self.rows, self.columns = matrix_of(shape)
        self.matrix = self.values.view(self.rows, self.columns)
        self.pattern = PATTERNS[dtype.itemsize]
        self.sign, self.infinite = _SPECIAL[dtype]
        self.prints: dict[str, Fingerprint] = {}
        self.words = {part: words for part, box in parts.items() if (words := _words_of(box, shape, dtype.itemsize))}
        """The parts made of whole 64-bit words, whose fingerprints can be carried: rows, and words of each."""
        self.changed = 0
        """Elements that differ from those of the push before."""
        self.top: int | None = None
        """The largest pattern without its sign, or an upper bound of it; None if it has to be looked for."""

    def put(self, row: int, new: torch.Tensor) -> None:
        """Note rows from ``row`` on, whatever was there."""
        self.matrix[row : row + len(new)].copy_(new)
        self.prints.clear()
        self.top = None

    def _carried(self) -> dict[str, Sums]:
        """Return the sums of the parts whose fingerprints are carried through a change."""
        return {part: print_.sums() for part, print_ in self.prints.items() if part in self.words}

    def _asked(self, look: Look) -> patches.Find:
        """Return what a kernel is asked for."""
        parts = [
            patches.Part(*self.words[part], of_rows.data_ptr(), of_columns.data_ptr())
            for part, (of_rows, of_columns) in self._carried().items()
        ]
        old = self.matrix[look.row : look.row + look.rows]
        return patches.Find(old, look.new, look.row, look.patch_rows, self.sign, parts, look.quick)

    def _changes(self, asked: patches.Find, found: Sequence[patches.Found]) -> list[Change]:
        """Note what was found, and return the patches in which anything has changed."""
        if any(changed for *_, changed, _ in found):
            self.prints = {part: print_ for part, print_ in self.prints.items() if part in self.words}
        changes = list[Change]()
        for first, (coding, ups, downs, others, raw, changed, largest) in zip(
            range(0, len(asked.old), asked.patch_rows), found, strict=True
        ):
            if changed:
                self.changed += changed
                self.top = None if self.top is None else max(self.top, largest)
                rows = min(asked.patch_rows, len(asked.old) - first)
                changes.append((asked.row + first, rows, coding, ups, downs, others, raw))
        return changes

    def _find(self, asked: patches.Find) -> list[patches.Found]:
        """Do what the kernel does, in numpy: the reference."""
        old, new, row, patch_rows, *_ = asked
        assert isinstance(new, torch.Tensor), "a cast is a kernel's"
        found = list[patches.Found]()
        for part, (of_rows, of_columns) in self._carried().items():
            first, last, left, right = self.words[part]
            first, last = max(first, row), min(last, row + len(new))
            now, was = (rows[max(0, first - row) : max(0, last - row)].clone().view(torch.int64) for rows in (new, old))
            by = (now - was)[:, left:right]
            of_rows[first - self.words[part][0] :][: len(by)] += by.sum(1)
            of_columns += by.sum(0)
        for first in range(0, len(new), patch_rows):
            was, now = (
                matrix[first : first + patch_rows].view(torch.uint8).view(-1).numpy().view(self.pattern)
                for matrix in (old, new)
            )
            at = np.flatnonzero(was != now)
            largest = int(np.max(now[at] & ~self.pattern(self.sign), initial=0))
            found.append((*encode(len(now), at, now[at] - was[at], asked.quick), len(at), largest))
        old.copy_(new)
        return found

    def digest(self, part: str) -> str:
        """Return the fingerprint of a part."""
        if part not in self.prints:
            self.prints[part] = Fingerprint()
            self.prints[part].add(self.values[slices(self.parts[part])])
        return self.prints[part].digest()

    def largest(self) -> float:
        """Return the largest magnitude. It is an upper bound if only a part has changed since it was looked for."""
        if self.top is None or 2 * self.changed > self.values.numel() or self.top >= self.infinite:
            self.top = int((self._patterns() & ~self.pattern(self.sign)).max())
        return float(torch.from_numpy(np.array(self.top, self.pattern).reshape(1)).view(self.values.dtype).float())

    def nonfinite(self) -> int:
        """Return how many elements are infinite or NaN; they are looked for only if ``largest`` found one."""
        found = self.top is not None and self.top >= self.infinite
        return int(((self._patterns() & ~self.pattern(self.sign)) >= self.infinite).sum()) if found else 0

    def _patterns(self) -> Any:
        return self.matrix.view(torch.uint8).view(-1).numpy().view(self.pattern)


def changes(looks: Sequence[Look], out: Bytes) -> list[list[Change]]:
    """Note rows that may have changed, and return for each of these looks the patches in which anything has.

    They lie in ``out``, which is as large as all rows.
    """
    if not looks:
        return []
    asked = [look.plane._asked(look) for look in looks]
    found = patches.find(asked, out)
    if found is None:
        found = [look.plane._find(one) for look, one in zip(looks, asked, strict=True)]
    return [look.plane._changes(one, some) for look, one, some in zip(looks, asked, found, strict=True)]


# dtype -> the bit of the sign, and the smallest pattern without it that is no finite number
_SPECIAL = {
    torch.float8_e4m3fn: (0x80, 0x7F),
    torch.float8_e8m0fnu: (0, 0xFF),
    torch.bfloat16: (0x8000, 0x7F80),
    torch.float16: (0x8000, 0x7C00),
    torch.float32: (1 << 31, 0x7F800000),
}


class Room:
    """Memory that is used again for every strip."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._bytes = np.empty(0, np.uint8)

    def bytes(self, size: int) -> Bytes:
        """Return so many bytes on the CPU, or more; what was there is gone."""
        if len(self._bytes) < size:
            # Not in numpy, which asks for huge pages: of each a few bytes would be used, and all of it cleared.
            self._bytes = torch.empty(size, dtype=torch.uint8).numpy()
        return self._bytes

    def of(
        self, what: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return memory of this shape and type; what was there under this name is gone."""
        device, size = device or torch.device("cpu"), math.prod(shape) * dtype.itemsize
        held = self.held.get((what, device))
        if held is None or len(held) < size:
            held = self.held[what, device] = torch.empty(size, dtype=torch.uint8, device=device)
        return held[:size].view(dtype).view(shape)


@functools.cache
def _scale_of_infinity(format: str, kind: str) -> torch.Tensor:
    return find_scales(torch.tensor(math.inf), format_of(format), kind)[1]


def _words_of(box: Box, shape: tuple[int, ...], size: int) -> Words | None:
    """Return the rows of a part, and the 64-bit words of each, in the matrix of a tensor whose elements have ``size``
    bytes; None if they are no such rectangle."""
    if len(shape) < 2 or shape[-1] * size % 8 or any(end * size % 8 for end in box[-1]):
        return None
    if any(one != (0, n) for one, n in zip(box[1:-1], shape[1:-1], strict=True)):
        return None
    each = math.prod(shape[1:-1])
    return box[0][0] * each, box[0][1] * each, box[-1][0] * size // 8, box[-1][1] * size // 8


def slices(box: Box) -> tuple[slice, ...]:
    """Return a box as an index."""
    return tuple(slice(*one) for one in box)


def box_of(part: str) -> Box:
    """Return the box that a receipt calls ``0:128,0:512``; none for a scalar (``whole``)."""
    return tuple((int(a), int(b)) for a, _, b in (one.partition(":") for one in part.split(","))) if ":" in part else ()
