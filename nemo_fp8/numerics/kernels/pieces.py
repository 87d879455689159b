"""Cast, or copy and sum up, matrices that come again and again in the same pieces, by jobs that are kept.

    matrix = CastPieces(cast_job(x, ...))              the job of a matrix on the meta device, whose pieces are cast
    matrix.put(row, rows, ..., values, codes, scales)  rows [row, row + rows), with the addresses of all three now
    matrix = SummedPieces(into, order)                 a matrix whose rows are copied to memory, in an order
    matrix.put(row, rows, address)                     rows [row, row + rows), which lie at this address now
    matrix.largest()                                   the largest magnitude of all values, after the last
    matrix.taken()                                     the sums of all rows and then of all columns, likewise

A kernel leaves little else in the caches than what it has read and written, so that each call of Python after it takes
many times as long as in a loop of its own, and to describe a matrix to a kernel takes dozens. Here all but addresses
stays from time to time. The trade-off: addresses are believed, and what is made for a piece is kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.numerics.kernels import GROUP, Order, build
from nemo_fp8.numerics.kernels.cpu import (
    BYTES_FOR_THREADS,
    ELEMENTS_FOR_THREADS,
    MAGNITUDES,
    CastJob,
    SumsJob,
    parallel,
    sums_job,
)
from nemo_fp8.numerics.statistics import TOTALS

T = TypeVar("T")
Piece = tuple[int, int]
"""The first row, and how many there are."""
MOST = 1024  # pieces of a matrix that are kept: who cuts it otherwise each time shall not fill the memory


def _kept(all_: dict[Piece, T], piece: Piece, make: Callable[[], T]) -> T:
    """Return what is kept for a piece, made where there is nothing yet."""
    found = all_.get(piece)
    if found is None:
        if len(all_) >= MOST:
            all_.clear()
        all_[piece] = found = make()
    return found


class CastPieces:
    """Casts rows of a matrix as they come, and counts what that does to them."""

    def __init__(self, job: CastJob) -> None:
        self._job = job
        self._kept = dict[Piece, tuple[CastJob, NDArray[np.float64]]]()

    def put(
        self, row: int, rows: int, parts: int, threads: int | None, values: int, codes: int, scales: int
    ) -> NDArray[np.float64]:
        """Cast rows, from one address to two others; return what that did to each of as many parts of them, [parts,
        TOTALS], which is right until the same piece comes again.

        ``threads`` is how many work, None for as many as torch has. Raises MemoryError if there is none for the sums.
        """
        kept, totals = _kept(self._kept, (row, rows), lambda: self._made(rows, parts))
        job = CastJob.from_buffer_copy(kept)
        job.x, job.codes, job.scale_inv = values, codes, scales
        job.threads = 1 if rows * job.cols < ELEMENTS_FOR_THREADS else threads or torch.get_num_threads()
        job.parallel = parallel()  # a forked process has no threads
        library = build.library()
        assert library is not None, "there are no jobs without a kernel"
        if not library.nemo_fp8_quantize(ctypes.byref(job)):
            raise MemoryError("no memory for the sums of a cast")
        return totals

    def _made(self, rows: int, parts: int) -> tuple[CastJob, NDArray[np.float64]]:
        totals, job = np.empty((parts, len(TOTALS))), CastJob.from_buffer_copy(self._job)
        job.rows, job.rows_of_total, job.totals = rows, rows // parts, totals.ctypes.data
        return job, totals


class SummedPieces:
    """Copies rows into a matrix as they come, and sums them up as :func:`nemo_fp8.numerics.kernels.sums` does; of
    values wider than a byte it finds the largest magnitude, too."""

    def __init__(self, into: torch.Tensor, order: Order) -> None:
        self._into, self._order = into, order
        self.size = into.shape[0], into.shape[1] * into.itemsize
        """Its rows, and the bytes of each."""
        self._sums = np.empty(0, np.int64)
        self._tops = np.empty(0, np.int32)
        self._kept = dict[Piece, SumsJob]()

    @staticmethod
    def takes(into: torch.Tensor, order: Order, step: int) -> bool:
        """Return whether there is a kernel that leaves rows in this memory in an order, if every piece begins at a
        multiple of ``step`` rows."""
        known = into.itemsize == 1 or (into.dtype in MAGNITUDES and order == Order.ROWS)
        if build.library() is None or not into.is_cpu or not known or into.numel() == 0:
            return False
        rows, columns = into.shape
        in_groups = not (rows % GROUP or columns % 2) and (step % GROUP == 0 or step >= rows)
        return into.is_contiguous() and (order == Order.ROWS or in_groups)

    def put(self, row: int, rows: int, address: int) -> None:
        """Copy rows from an address, and add them to the sums, which row 0 begins anew: the others follow in order.
        Raises MemoryError if there is none for it."""
        if row == 0:
            self._sums = np.empty(self.size[0] + -(-self.size[1] // 8), np.int64)
            self._sums[self.size[0] :] = 0
            self._tops = np.empty(self.size[0] if self._into.itemsize > 1 else 0, np.int32)
        job = SumsJob.from_buffer_copy(_kept(self._kept, (row, rows), lambda: self._made(row, rows)))
        job.x, memory = address, self._sums.ctypes.data
        job.of_rows, job.of_columns = memory + 8 * row, memory + 8 * self.size[0]
        job.largest = self._tops.ctypes.data + 4 * row if len(self._tops) else None
        job.threads = 1 if rows * self.size[1] <= BYTES_FOR_THREADS else torch.get_num_threads()
        job.parallel = parallel()
        library = build.library()
        assert library is not None, "there are no jobs without a kernel"
        if not library.nemo_fp8_sums(ctypes.byref(job)):
            raise MemoryError("no memory for the sums of a matrix's columns")

    def largest(self) -> float:
        """Return the largest magnitude of values wider than a byte, NaN if one is, once the last rows were put."""
        top = self._tops.max(keepdims=True)  # the bits of a NaN are larger than those of any number
        if self._into.dtype == torch.bfloat16:
            return float((top << 16).view(np.float32)[0])
        return float(top.view(np.float16 if self._into.dtype == torch.float16 else np.float32)[0])

    def taken(self) -> NDArray[np.int64]:
        """Return the sums of all rows and then of all columns, once the last rows were put, and keep no more of them
        and of magnitudes."""
        sums, self._sums, self._tops = self._sums, np.empty(0, np.int64), np.empty(0, np.int32)
        return sums

    def _made(self, row: int, rows: int) -> SumsJob:
        into = self._into[row : row + rows]
        magnitudes = MAGNITUDES[into.dtype] if into.itemsize > 1 else 0
        return sums_job(into, into, magnitudes, order=self._order)
