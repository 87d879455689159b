"""Quantize, or copy and sum up, many matrices by one call, whose places were told once beforehand.

    jobs = Casts([cast_job(x, ...), ...], [1, ...])    or Sums([sums_job(x, ...), ...]); x may be on the meta device
    jobs.run(numbers, addresses)                       those jobs, whose values lie at these addresses now
    jobs.sums(number)                                  the sums of a matrix's rows (of its codes), and of its columns

To call a kernel from Python takes 40 microseconds, in which it casts 100,000 elements. Here all but an address stays
from call to call. All threads work at a large matrix, and go on to the next one without waiting for one another; the
small ones they share among them. The trade-off: all addresses are believed. Who prepares jobs keeps the memory that
they write to, and prepares others when it has moved.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.numerics.kernels import build
from nemo_fp8.numerics.kernels.cpu import BYTES_FOR_THREADS, CastJob, SumsJob, parallel
from nemo_fp8.numerics.statistics import TOTALS

Numbers = NDArray[np.int64]


class _SeveralJobs(ctypes.Structure):
    """`struct several` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("all", "which", "x", "parallel")),
        ("n", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("next", "failed")),
        ("large", ctypes.c_void_p),
        ("larges", ctypes.c_int64),
    )


class _Several:
    """Jobs of one kind, with memory for the sums of each, which lie one after the other: all rows, and all columns."""

    def __init__(self, jobs: Sequence[Any], bytes_of_rows: Sequence[int], function: str) -> None:
        self._function = function
        self._starts = [0, *itertools.accumulate(j.rows + -(-n // 8) for j, n in zip(jobs, bytes_of_rows, strict=True))]
        self._bytes = np.array([j.rows * n for j, n in zip(jobs, bytes_of_rows, strict=True)], np.int64)
        self._memory = np.empty(self._starts[-1], np.int64)
        for job, size, first in zip(jobs, self._bytes, self._starts, strict=False):
            job.threads = 1 if size <= BYTES_FOR_THREADS else 2  # two: all
            job.of_rows = self._memory.ctypes.data + 8 * first
            job.of_columns = job.of_rows + 8 * job.rows

    def sums(self, number: int) -> Numbers:
        """Return the sums of a matrix's rows and then those of its columns, as the last run left them."""
        return self._memory[self._starts[number] : self._starts[number + 1]]

    def _run(self, jobs: Any, numbers: Sequence[int], addresses: Sequence[int]) -> None:
        library = build.library()
        assert library is not None, "there are no jobs without a kernel"
        which, x = np.array(numbers, np.int64), np.array(addresses, np.uintp)
        shared = int(self._bytes[which].sum()) > BYTES_FOR_THREADS
        several = _SeveralJobs(
            ctypes.addressof(jobs), which.ctypes.data, x.ctypes.data, parallel(), len(which),
            torch.get_num_threads() if shared else 1,
        )  # fmt: skip
        function: Callable[[Any], int] = getattr(library, self._function)
        if not function(ctypes.byref(several)):
            raise MemoryError("no memory for the sums of matrices")


class Casts(_Several):
    """Casts of matrices, each of as many ``parts`` as are told of one by one, such as experts."""

    def __init__(self, jobs: Sequence[CastJob], parts: Sequence[int]) -> None:
        super().__init__(jobs, [job.cols for job in jobs], "nemo_fp8_quantize_several")
        self._totals = np.split(np.empty((sum(parts), len(TOTALS))), [*itertools.accumulate(parts)][:-1])
        for job, totals in zip(jobs, self._totals, strict=False):
            job.totals, job.rows_of_total = totals.ctypes.data, job.rows // len(totals)
        self._jobs = (CastJob * len(jobs))(*jobs)

    def totals(self, number: int) -> NDArray[np.float64]:
        """Return what the last run did to each part of a matrix, [parts, TOTALS], as ``quantize_summed`` does."""
        return self._totals[number]

    def run(self, numbers: Sequence[int], addresses: Sequence[int]) -> None:
        """Run some casts. Raises MemoryError if there is none for what they sum up."""
        self._run(self._jobs, numbers, addresses)


class Sums(_Several):
    """Sums of matrices, which are copied and whose largest magnitudes are found where a job asks for that.

    ``dtypes`` are those of the values of every matrix, if their largest magnitudes are.
    """

    def __init__(self, jobs: Sequence[SumsJob], dtypes: Sequence[torch.dtype] = ()) -> None:
        super().__init__(jobs, [job.bytes for job in jobs], "nemo_fp8_sums_several")
        self._dtypes, self._first_rows = dtypes, [*itertools.accumulate((job.rows for job in jobs), initial=0)]
        self._tops = np.zeros(self._first_rows[-1], np.uint32)
        for job, first in zip(jobs if dtypes else (), self._first_rows, strict=False):
            job.largest = self._tops.ctypes.data + 4 * first
        self._jobs = (SumsJob * len(jobs))(*jobs)

    def run(self, numbers: Sequence[int], addresses: Sequence[int]) -> None:
        """Sum up some matrices. Raises MemoryError if there is none for it."""
        self._run(self._jobs, numbers, addresses)

    def largest(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the largest magnitudes of some matrices in FP64, NaN if a value is, as the last runs left them."""
        rows = (slice(*self._first_rows[n : n + 2]) for n in numbers)
        tops = torch.from_numpy(np.array([self._tops[one].max() for one in rows], np.uint32).view(np.int32))
        found, dtypes = torch.empty(len(tops), dtype=torch.float64), [self._dtypes[n] for n in numbers]
        for dtype in {*dtypes}:  # the bits of a NaN are larger than those of any number
            mine = torch.tensor([one == dtype for one in dtypes])
            found[mine] = tops.view(dtype).view(len(tops), -1)[mine, 0].double()
        return found
