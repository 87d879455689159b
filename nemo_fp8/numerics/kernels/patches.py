"""Find what changed in rows of bit patterns, and add it elsewhere, at memory speed: `fp8_patch.c` from Python.

    find(finds, out)   ->  patches of the rows of each, in the format of nemo_fp8.rollout.refit.patch
    add(additions)     ->  of each whether it was a patch; then it is added where its places say

Both work on a CPU's memory, and return None without a C compiler; the caller computes in numpy then, to the same bits.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.numerics.kernels import build
from nemo_fp8.numerics.kernels.cpu import ELEMENTS_FOR_THREADS, CastJob, parallel

Bytes = NDArray[np.uint8]
Found = tuple[int, int, int, int, Bytes, int, int]
"""(coding, ups, downs, others, bytes of the patch, elements that changed, largest new pattern without its sign)"""
Sums = tuple[torch.Tensor, torch.Tensor]
"""The wrapping sums of 64-bit words, by row and by column."""


class Coding(enum.IntEnum):
    """How a patch has the positions of its ups and downs."""

    SMALL = 0
    """In few bits each, for patches that travel."""
    QUICK = 1
    """As words of a bitmap: quicker to write and to read on processors that pack elements of vectors."""


def packs() -> bool:
    """Return whether a kernel packs elements of vectors on this processor, so that QUICK is quicker."""
    library = build.library()
    return library is not None and bool(library.nemo_fp8_packs())


class Part(ctypes.Structure):
    """Rows of a tensor, and 64-bit words of each, whose sums are carried: `struct part` of the C source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first_row", "last_row", "first_word", "last_word")),
        *((name, ctypes.c_void_p) for name in ("of_rows", "of_columns")),
    )


class Place(ctypes.Structure):
    """Where a box of a tensor [matrices, rows, columns] lies in memory: `struct place` of the C source."""

    _fields_ = (
        ("to", ctypes.c_void_p),
        *((name, ctypes.c_int64 * 3) for name in ("first", "last", "strides")),
        *((name, ctypes.c_void_p) for name in ("of_rows", "of_columns")),
        ("order", ctypes.c_int64),
    )


class _FindJob(ctypes.Structure):
    """`struct find_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("old", "now", "cast", "out", "patches", "parts")),
        *((name, ctypes.c_int64) for name in ("rows", "row_bytes", "first_row", "patch_rows")),
        ("sign", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("width", "quick", "parts_count")),
    )


class _FindsJob(ctypes.Structure):
    """`struct finds_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("all", "parallel")),
        ("n", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("next", "failed")),
    )


class _AddJob(ctypes.Structure):
    """`struct add_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("raw", "places")),
        *((name, ctypes.c_int64) for name in ("strip", "ups", "downs", "others", "first", "rows", "columns")),
        *((name, ctypes.c_int32) for name in ("width", "coding", "places_count", "back", "summed", "done")),
    )


class _AddsJob(ctypes.Structure):
    """`struct adds_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("all", "parallel")),
        ("n", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("next", ctypes.c_int64),
    )


class Matrices:
    """Where the parts of a tensor of matrices lie, and the sums of their rows, as patches leave them there."""

    def __init__(
        self, shape: tuple[int, int], width: int, places: Sequence[Place], sums: Mapping[int, Sums] | None = None
    ) -> None:
        """Note where places lie, of matrices of ``shape`` and elements of ``width`` bytes.

        ``sums`` are memory for the sums of all rows of a place, by its number, and zeros to which those of its columns
        are added. Such a place is of a single matrix, whose rows lie in one piece each.
        """
        self.shape, self.width, self.sums = shape, width, sums or {}
        self.places = (Place * len(places))(*places)
        for n, (of_rows, of_columns) in self.sums.items():
            self.places[n].of_rows, self.places[n].of_columns = of_rows.data_ptr(), of_columns.data_ptr()
        self.address = ctypes.addressof(self.places)


class Addition(NamedTuple):
    """A patch, and where to add it."""

    address: int
    """Where its bytes lie: as many as the counts ask for."""
    strip: int
    coding: int
    ups: int
    downs: int
    others: int
    first: int
    """The number of the strip's first element in the tensor."""
    to: Matrices


class Find(NamedTuple):
    """Rows of a tensor as they were, the same rows as they are now, and how to tell what changed."""

    old: torch.Tensor
    """A contiguous matrix, which has the new rows afterwards."""
    new: torch.Tensor | CastJob
    """Another one of its shape and dtype; or the cast that makes these codes, which is run a few rows at a time. Then
    patches end where its tiles end, and its scales are there afterwards."""
    row: int
    """The number that the first row has in the tensor."""
    patch_rows: int
    """A patch is of so many rows, but for the last."""
    sign: int
    """The bit of the sign in a pattern."""
    parts: Sequence[Part]
    """Parts of the tensor whose sums are carried; rows must be whole words if there are any."""
    quick: bool = False
    """Whether patches are QUICK where that pays."""


def find(finds: Sequence[Find], out: Bytes) -> list[list[Found]] | None:
    """Take new rows over into old ones, and return the patches of each; None without a kernel.

    ``out`` is memory for the patches, as large as all old rows; what is returned lies there. Raises MemoryError if
    there is none for the lists of what changed.
    """
    library = build.library()
    if library is None:
        return None
    counts = [-(-len(one.old) // one.patch_rows) for one in finds]
    made, jobs, parts = np.empty((sum(counts), 7), np.int64), (_FindJob * len(finds))(), []
    patches, room, elements = made.ctypes.data, out.ctypes.data, 0
    for n, ((old, new, row, patch_rows, sign, carried, quick), count) in enumerate(zip(finds, counts, strict=True)):
        now = cast = None
        if isinstance(new, torch.Tensor):
            assert old.shape == new.shape
            assert new.is_contiguous()
            now = new.data_ptr()
        else:
            assert old.shape == (new.rows, new.cols)
            assert patch_rows % new.tile_rows == 0
            cast = ctypes.addressof(new)
        assert old.is_contiguous()
        parts.append((Part * len(carried))(*carried))
        jobs[n] = _FindJob(
            old.data_ptr(), now, cast, room, patches, ctypes.addressof(parts[-1]), len(old),
            old.shape[1] * old.itemsize, row, patch_rows, sign, old.itemsize, quick, len(carried),
        )  # fmt: skip
        patches, room, elements = patches + made.strides[0] * count, room + old.nbytes, elements + old.numel()
    assert room <= out.ctypes.data + len(out)
    alone = len(made) < 2 or elements < ELEMENTS_FOR_THREADS
    job = _FindsJob(ctypes.addressof(jobs), parallel(), len(jobs), 1 if alone else torch.get_num_threads())
    if not library.nemo_fp8_find(ctypes.byref(job)):
        raise MemoryError("no memory for the lists of what changed")
    found, told, first = list[list[Found]](), iter(made.tolist()), 0
    for one, count in zip(finds, counts, strict=True):
        size = one.patch_rows * one.old.shape[1] * one.old.itemsize
        some = itertools.islice(told, count)
        found.append([
            (*counts, out[at : at + length], changed, largest)
            for at, (*counts, length, changed, largest) in zip(itertools.count(first, size), some)
        ])  # fmt: skip
        first += one.old.nbytes
    return found


def add(additions: Sequence[Addition], back: bool = False, summed: bool = False) -> list[bool] | None:
    """Add patches of different rows, or with ``back`` subtract them; return of each whether it was one, and None
    without a kernel. ``summed`` asks for the sums of their rows as they are then, where there is memory for them.

    What is no patch changes nothing. Raises MemoryError if there was none for the positions of one.
    """
    library = build.library()
    if library is None:
        return None
    jobs = (_AddJob * len(additions))()
    for n, (address, strip, coding, ups, downs, others, first, to) in enumerate(additions):
        jobs[n] = _AddJob(
            address, to.address, strip, ups, downs, others, first, *to.shape, to.width, coding, len(to.places), back,
            summed,
        )  # fmt: skip
    few = sum(one.strip for one in additions) < 2 * ELEMENTS_FOR_THREADS
    adds = _AddsJob(
        ctypes.addressof(jobs), parallel(), len(jobs), 1 if few or len(jobs) < 2 else torch.get_num_threads()
    )
    library.nemo_fp8_add(ctypes.byref(adds))
    if any(job.done < 0 for job in jobs):
        raise MemoryError("no memory for the positions of a patch")
    return [job.done == 1 for job in jobs]
