"""Find what changed in rows of bit patterns, and add it elsewhere, at memory speed: `fp8_patch.c` from Python.

    find(old, new, out, ...)   ->  patches of the rows, in the format of nemo_fp8.rollout.refit.patch
    add(additions)             ->  of each whether it was a patch; then it is added where its places say

Both work on a CPU's memory, and return None without a C compiler; the caller computes in numpy then, to the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.numerics.kernels import build
from nemo_fp8.numerics.kernels.cpu import ELEMENTS_FOR_THREADS, CastJob, parallel, threads

Bytes = NDArray[np.uint8]
Found = tuple[int, int, Bytes, int, int]
"""(steps, others, bytes of the patch, elements that changed, largest pattern that is new, without its sign)"""
Sums = tuple[torch.Tensor, torch.Tensor]
"""The wrapping sums of 64-bit words, by row and by column."""


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
        *((name, ctypes.c_void_p) for name in ("old", "now", "cast", "out", "patches", "parts", "parallel")),
        *((name, ctypes.c_int64) for name in ("rows", "row_bytes", "first_row", "patch_rows")),
        ("sign", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("width", "parts_count", "threads")),
        *((name, ctypes.c_int64) for name in ("next", "failed")),
    )


class _AddJob(ctypes.Structure):
    """`struct add_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("raw", "places")),
        *((name, ctypes.c_int64) for name in ("strip", "steps", "others", "first", "rows", "columns")),
        *((name, ctypes.c_int32) for name in ("width", "places_count", "back", "done")),
    )


class _AddsJob(ctypes.Structure):
    """`struct adds_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("all", "parallel")),
        ("n", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("next", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Addition:
    """A patch, and where to add it."""

    raw: Bytes
    """As many bytes as the counts ask for."""
    strip: int
    steps: int
    others: int
    width: int
    first: int
    """The number of the strip's first element in a tensor of matrices of ``shape``."""
    shape: tuple[int, int]
    places: Sequence[Place]
    sums: Mapping[int, Sums] = field(default_factory=dict)
    """Memory for the sums of those rows of the patch that lie at a place, as they are there afterwards, by the place's
    number: one of a single matrix, whose rows lie in one piece each."""


def find(
    old: torch.Tensor, new: torch.Tensor | CastJob, out: Bytes, *, row: int, patch_rows: int, sign: int,
    parts: Sequence[Part],
) -> list[Found] | None:  # fmt: skip
    """Take new rows over into old ones, and return a patch for every ``patch_rows`` of them; None without a kernel.

    ``old`` and ``new`` are contiguous matrices of one shape and dtype, of which the first row is number ``row`` of the
    tensor. Instead of new codes the cast that makes them may be given: it is run a few rows at a time, and its scales
    are there afterwards; patches end where its tiles end. ``out`` is memory for the patches, as large as they are; what
    is returned lies there. ``sign`` is the bit of the sign in a pattern. The sums of ``parts`` are carried; rows must
    be whole words if there are any. Raises MemoryError if there is none for the lists of what changed.
    """
    library = build.library()
    if library is None:
        return None
    assert old.is_contiguous()
    assert len(out) >= old.nbytes
    if isinstance(new, torch.Tensor):
        assert old.shape == new.shape
        assert new.is_contiguous()
        now = {"now": new.data_ptr()}
    else:
        assert old.shape == (new.rows, new.cols)
        assert patch_rows % new.tile_rows == 0
        now = {"cast": ctypes.addressof(new)}
    made = np.empty((-(-len(old) // patch_rows), 5), np.int64)
    carried = (Part * len(parts))(*parts)
    row_bytes = old.shape[1] * old.itemsize
    job = _FindJob(
        **now, old=old.data_ptr(), out=out.ctypes.data, patches=made.ctypes.data,
        parts=ctypes.addressof(carried), parts_count=len(parts), parallel=parallel(),
        rows=len(old), row_bytes=row_bytes, first_row=row, patch_rows=patch_rows, sign=sign, width=old.itemsize,
        threads=threads(old) if len(made) > 1 else 1,
    )  # fmt: skip
    if not library.nemo_fp8_find(ctypes.byref(job)):
        raise MemoryError("no memory for the lists of what changed")
    size = patch_rows * row_bytes
    return [
        (steps, others, out[i * size : i * size + length], changed, largest)
        for i, (steps, others, length, changed, largest) in enumerate(made.tolist())
    ]


def add(additions: Sequence[Addition], back: bool = False) -> list[bool] | None:
    """Add patches of different rows, or with ``back`` subtract them; return of each whether it was one, and None
    without a kernel.

    What is no patch changes nothing. Raises MemoryError if there was none for the positions of one.
    """
    library = build.library()
    if library is None:
        return None
    jobs = (_AddJob * len(additions))()
    kept = []
    for job, one in zip(jobs, additions, strict=True):
        targets = (Place * len(one.places))(*one.places)
        for n, (of_rows, of_columns) in one.sums.items():
            targets[n].of_rows, targets[n].of_columns = of_rows.data_ptr(), of_columns.data_ptr()
        kept.append(targets)
        job.raw, job.places, job.places_count = one.raw.ctypes.data, ctypes.addressof(targets), len(targets)
        job.strip, job.steps, job.others, job.width = one.strip, one.steps, one.others, one.width
        job.first, job.rows, job.columns, job.back = one.first, *one.shape, back
    few = sum(one.strip for one in additions) < 2 * ELEMENTS_FOR_THREADS
    adds = _AddsJob(
        ctypes.addressof(jobs), parallel(), len(jobs), 1 if few or len(jobs) < 2 else torch.get_num_threads()
    )
    library.nemo_fp8_add(ctypes.byref(adds))
    if any(job.done < 0 for job in jobs):
        raise MemoryError("no memory for the positions of a patch")
    return [job.done == 1 for job in jobs]
