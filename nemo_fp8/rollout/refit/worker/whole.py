"""Write all tensors that a message has whole by one call of a kernel: their ways are rows of a table that a plan keeps.

A norm, or a matrix of some blocks, takes a kernel a few microseconds, and Python takes two hundred to bring it there
through its sink and to tell of it. A model of many experts has little else. Of a trainer's shared memory large tensors
come whole, too: all threads are at them, and would wait for that Python. But a plan knows all of the way beforehand,
except where the values of the next push will lie:

    kept          where a tensor goes, as the job of a kernel (several.py), and its name in receipts
    filled in     the address of its values
    told          then, the facts that a sink would tell, made of what the kernel summed up

The table has tensors that a sink would copy or quantize by one call on a CPU. What comes in several pieces goes another
way (arrived.py, or its sink), and all of a push that compares its casts with the reference takes its sinks. The
trade-off: the sums of all tensors of a table have memory of their own, of which one that never comes whole touches
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nemo_fp8.numerics.kernels import build
from nemo_fp8.numerics.kernels.cpu import MAGNITUDES, CastJob, SumsJob, has_rows, sums_job
from nemo_fp8.numerics.kernels.several import Casts, Sums
from nemo_fp8.numerics.statistics import TOTALS
from nemo_fp8.rollout.refit.fingerprint import as_matrix, digest_of, together
from nemo_fp8.rollout.refit.manifest import Manifest
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.layouts import COUNTED, LARGEST, Facts, Tally
from nemo_fp8.rollout.refit.worker.routes import Route, Target
from nemo_fp8.rollout.refit.worker.sinks import InPlace, Sink, inside, name_of, rows_of, viewed, word

if TYPE_CHECKING:
    from nemo_fp8.rollout.refit.worker.plan import Plan

Place = tuple[int, int]
"""A tensor's number in the manifest, and the address of its values."""


Held = tuple[int, tuple[int, ...]]
"""The address and the strides of memory that a sink writes."""


class Way(NamedTuple):
    """How one tensor is written."""

    job: int
    """The number of its job, and of that which sums up its scales."""
    skipped: int
    """Bytes from the tensor's first value to the first that this worker holds."""
    name: str
    """The name of the part that this worker holds."""
    size: tuple[int, int]
    """Rows that are written, and bytes of each."""
    live: torch.Tensor
    """Where values are copied to, or the scales of the codes that they become."""
    scale: str = ""
    """The kind of these scales."""
    aligned: bool = True
    """Whether their blocks are those of the unsharded tensor."""
    experts: int = 1
    """How many experts a stack has."""


class Table:
    """The tensors of a plan that can be written whole, and what the last push brought of them. It is right as long as
    the sinks write where they do now (``places_of``)."""

    def __init__(self, plan: Plan, sinks: Mapping[Target, Sink]) -> None:
        self._copied, self._cast = dict[int, Way](), dict[int, Way]()
        copies, casts, scales, dtypes = list[SumsJob](), list[CastJob](), list[SumsJob](), list[torch.dtype]()
        for i, (route, *others) in plan.routes.by_entry.items() if build.library() is not None else ():
            sink, experts = sinks[route.target], plan.stacks.get(i, 1)
            if others or not _held(sink) or (x := values_of(route, plan.manifest)) is None:
                continue
            if experts > 1 and rows_of(route) < experts:
                continue  # facts of some experts alone are a sink's to tell
            start, name = int(x.storage_offset()) * x.itemsize, name_of(route)
            if isinstance(sink, InPlace) and experts == 1 and (into := place_of(sink, route, x)) is not None:
                self._copied[i] = Way(len(copies), start, name, _size(into), inside(sink.live, route.to))
                copies.append(sums_job(x, into, MAGNITUDES[x.dtype]))
                dtypes.append(x.dtype)
            elif isinstance(sink, Blocks) and (job := sink.job(route, x)) is not None:
                live, kind = as_matrix(sink.scales_of(route)), sink.operand.scale
                size = (x.shape[0], x.shape[1])
                self._cast[i] = Way(len(casts), start, name, size, live, kind, sink.same_grid(route), experts)
                casts.append(job)
                scales.append(sums_job(live, None, 0))
        self._copies, self._scales = Sums(copies, dtypes), Sums(scales)
        self._casts = Casts(casts, [way.experts for way in self._cast.values()])
        self._where_scales = [job.x for job in scales]
        self.entries = {*self._copied, *self._cast}
        """Numbers of the tensors that are written by this table."""

    def write(self, places: Iterable[Place]) -> None:
        """Write these tensors of the table, of each all values, which lie at its address."""
        for ways, jobs in ((self._copied, self._copies), (self._cast, self._casts)):
            mine = [(ways[i].job, at + ways[i].skipped) for i, at in places if i in ways]
            if mine:
                jobs.run(*zip(*mine, strict=True))

    def tell(self, entries: Sequence[int], tally: Tally) -> None:
        """Tell a push's facts of tensors that were written."""
        for ways, told in ((self._copied, self._of_copies), (self._cast, self._of_casts)):
            mine = [i for i in entries if i in ways]
            if mine:
                told([ways[i] for i in mine], [tally.facts[i] for i in mine])

    def _of_copies(self, ways: list[Way], all_: list[Facts]) -> None:
        counts = torch.zeros(len(ways), len(COUNTED), dtype=torch.float64)
        counts[:, LARGEST] = self._copies.largest([way.job for way in ways])
        finite = counts[:, LARGEST].isfinite().tolist()
        for way, facts, row, good in zip(ways, all_, torch.split(counts, 1), finite, strict=True):
            facts.kind, facts.counts = word(way.live.dtype), row
            facts.fingerprints[way.name] = digest_of(*way.size, self._copies.sums(way.job))
            if not good:
                facts.count_nonfinite(way.live)

    def _of_casts(self, ways: list[Way], all_: list[Facts]) -> None:
        jobs = [way.job for way in ways]
        self._scales.run(jobs, [self._where_scales[job] for job in jobs])
        counts = torch.zeros(sum(way.experts for way in ways), len(COUNTED), dtype=torch.float64)
        counts[:, : len(TOTALS)] = torch.from_numpy(np.concatenate([self._casts.totals(job) for job in jobs]))
        for way, facts, rows in zip(ways, all_, torch.split(counts, [way.experts for way in ways]), strict=True):
            facts.kind, facts.counts, facts.aligned = "fp8", rows, way.aligned
            scales = digest_of(*_size(way.live), self._scales.sums(way.job))
            facts.fingerprints[way.name] = together([digest_of(*way.size, self._casts.sums(way.job)), scales])
            facts.count_scales(way.live, way.scale, slice(0, way.experts))


def places_of(sinks: Mapping[Target, Sink]) -> list[Held]:
    """Return the addresses and strides of what sinks write at once."""
    return [(held.data_ptr(), held.stride()) for sink in sinks.values() for held in _held(sink)]


def _held(sink: Sink) -> tuple[torch.Tensor, ...]:
    """Return what a sink of a CPU writes as soon as values come."""
    held = (sink.codes, sink.scales) if isinstance(sink, Blocks) else (sink.live,) if isinstance(sink, InPlace) else ()
    return held if all(one.is_cpu for one in held) else ()


def _size(matrix: torch.Tensor) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1] * matrix.itemsize


def values_of(route: Route, manifest: Manifest) -> torch.Tensor | None:
    """Return the part of a tensor that a route takes, as a matrix without memory; None if it has no rows."""
    entry = manifest[route.entry]
    if not route.source or route.made is not None or entry.is_codes or entry.torch_dtype not in MAGNITUDES:
        return None
    part = inside(torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta"), route.source)
    if not part.nbytes or not (part.dim() < 3 or part.is_contiguous()):
        return None
    return as_matrix(part)


def place_of(sink: InPlace, route: Route, x: torch.Tensor) -> torch.Tensor | None:
    """Return the memory that a part is copied to, as a matrix; None if it is none, or of another type."""
    place = inside(sink.live, route.to)
    if place.dtype != x.dtype:
        return None
    into = viewed(place, x.shape)
    return into if into is not None and has_rows(into) else None
