"""Take part in a push of patches as a worker: add differences to the codes that the kernels read, or take them back.

    stored    how this worker keeps each tensor of an open push: what a trainer needs to know what it may patch
    delta     open a push of patches to the version of the weights that is here; nothing changes
    write     add patches (patch.py), and write whole tensors as any push does
    finish    compare the fingerprint of every part, read from memory after its last patch, with those that the trainer
              computed; a layer that a kernel packed and that was not sent must be the one that the last push left

A patch finds its elements in memory by the routes of the plan, so any sharding and every known layout of codes works.
It is its own way back: until the end the worker keeps the bytes of all patches, and subtracts them if the push dies.
The weights are then bit for bit those of before, and are served. There is no way back once a whole tensor was written,
once the patches are more than MOST_KEPT, or once a fingerprint was another: the model stays mixed until a full push.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.kernels import GROUP, Order
from nemo_fp8.numerics.kernels import patches as kernel
from nemo_fp8.numerics.kernels.patches import Bytes
from nemo_fp8.rollout.refit.fingerprint import Fingerprint
from nemo_fp8.rollout.refit.manifest import Box
from nemo_fp8.rollout.refit.memory import Opened
from nemo_fp8.rollout.refit.patch import (
    CODINGS,
    LONGEST,
    SCALES,
    VALUES,
    Positions,
    blocks_of,
    decode,
    grid_of,
    matrix_of,
    no_patch,
    size_of,
)
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.keeping import has_one_scale
from nemo_fp8.rollout.refit.worker.layouts import ONE
from nemo_fp8.rollout.refit.worker.packing import pack, packed
from nemo_fp8.rollout.refit.worker.plan import Plan
from nemo_fp8.rollout.refit.worker.routes import Route
from nemo_fp8.rollout.refit.worker.session import (
    Answer,
    NemoFp8Refit,
    Session,
    answering,
    bad_piece,
    number_of,
    refuse_replicas,
)
from nemo_fp8.rollout.refit.worker.sinks import InPlace, Sink, name_of, stacked, word
from nemo_fp8.rollout.refit.worker.staged import Staged

MOST_KEPT = 1 << 28  # bytes of patches that are kept for the way back
PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> torch's type with that pattern, whose sums wrap."""


class KeptPatch(NamedTuple):
    """A patch that came, and a copy of its bytes."""

    i: int
    what: int
    row: int
    rows: int
    coding: int
    ups: int
    downs: int
    others: int
    raw: Bytes
    address: int
    """Where the bytes lie."""


@dataclass(eq=False)
class Passing:
    """A part of a matrix in blocks that is being patched: the fingerprint of its first rows, and how many these are. No
    later patch changes them, so they are read while a cache has them."""

    route: Route
    sink: Blocks
    span: tuple[int, int]
    """The rows of the tensor that this part has, from the first to before the last."""
    codes: Fingerprint = field(default_factory=Fingerprint)
    rows: int = 0
    taken: int = 0
    """The rows whose sums ``codes`` has. Of those up to ``rows`` the kernel has put them into ``sums``."""

    @functools.cached_property
    def sums(self) -> kernel.Sums:
        """Memory for the sums of all rows, and zeros for those of the columns."""
        (start, stop), (left, right) = self.span, self.route.to[-1]
        words = -(-(right - left) // 8)
        return torch.empty(stop - start, dtype=torch.int64), torch.zeros(words, dtype=torch.int64)

    def note(self, row: int, rows: int, summed: bool) -> None:
        """Note that rows [row, row+rows) of the tensor were patched, and read what lies before them; the kernel has
        ``summed`` them up, or they are read, too."""
        start, stop = self.span
        first, last = min(row, stop) - start, min(row + rows, stop) - start
        if first > self.rows:
            self._read(first)
        if last > self.rows:
            if summed:
                self.rows = last
            else:
                self._read(last)

    def read(self) -> str | None:
        """Return the fingerprint of the part: the rows that no patch has passed are read now."""
        self._take()
        return self.sink.read(self.route, self.codes, self.rows)

    def _read(self, end: int) -> None:
        """Read all rows of the part before ``end`` that were not read yet."""
        self._take()
        self.sink.read_rows(self.route, self.rows, end, self.codes)
        self.rows = self.taken = end

    def _take(self) -> None:
        """Take the sums that the kernel has made since."""
        if self.rows > self.taken:
            (left, right), (of_rows, of_columns) = self.route.to[-1], self.sums
            self.codes.add_sums(of_rows[self.taken : self.rows], of_columns.clone(), right - left)
            of_columns.zero_()
            self.taken = self.rows


class Patching(Session):
    """A push of patches that is under way in this worker."""

    tabled = False  # what comes whole is read from memory in the end, as all is

    def __init__(self, plan: Plan, number: str, base: str, sealed: Mapping[str, Any]) -> None:
        super().__init__(plan, number, verify=False)
        self.castable = {}  # a tensor that is not patched comes as values
        self.base, self.sealed, self.sealing = base, sealed, True
        self.untouched: dict[Sink, bool] = {}
        """Whether a layer that cannot be read is as the push ``base`` left it."""
        self.kept, _ = plan.kept(self.sinks)
        self.next: dict[tuple[int, int], int] = {}
        """The first row of each tensor's values, or scales, that no patch has passed."""
        self.planes: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
        self.places: dict[tuple[int, int], kernel.Matrices | None] = {}
        self.patched: list[int] = []
        """Tensors that were patched, and not read since; nearly always the sender has passed all but the last."""
        self.read: dict[Route, str | None] = {}
        """The fingerprints of parts as they were read from memory after their last patch."""
        self.passing: dict[int, list[Passing | None]] = {}
        """What the patches of a tensor have passed, by its routes; None for a part that is read as a whole."""
        self.applied: list[KeptPatch] = []
        self.size = 0
        """The bytes of the patches so far; beyond MOST_KEPT they are not kept."""
        self.lost = False
        """Whether there is no way back."""

    def write(self, memory: Opened, pieces: Any, stays: bool = False) -> None:
        """Write pieces of whole tensors (four numbers), and add patches (nine, see ``patch.Patch``).

        Raises PrecisionError for a piece that cannot be.
        """
        if not isinstance(pieces, list):
            raise bad_piece(pieces, "It is no list of pieces")
        patches: list[Any] = []
        whole: list[Any] = []
        for piece in pieces:
            (patches if isinstance(piece, list) and len(piece) == 9 else whole).append(piece)
        super().write(memory, whole, stays)
        if patches:
            self._apply(self._taken(memory, patches))
        while len(self.patched) > 1:  # while the sender quantizes what follows
            i = self.patched.pop(0)
            self.read |= self._read(i)
            for name in (name for name, numbers in self.plan.packed_from.items() if numbers == {i}):
                self.pack(name)

    def _taken(self, memory: Opened, pieces: Sequence[Any]) -> list[KeptPatch]:
        """Return checked copies of patches, which the sender cannot change while they are read; they are also the way
        back."""
        sizes = [self._checked_patch(piece) for piece in pieces]
        addresses = [memory.address(piece[-1], size, 1) for piece, size in zip(pieces, sizes, strict=True)]
        ends, some = [*itertools.accumulate(sizes)], list[KeptPatch]()
        if ends[-1] > memory.size:
            raise bad_piece(pieces[-1], f"{ends[-1]} bytes of patches cannot lie side by side in {memory.size}")
        room = np.empty(ends[-1], np.uint8)
        first = room.ctypes.data
        for piece, address, size, end in zip(pieces, addresses, sizes, ends, strict=True):
            ctypes.memmove(first + end - size, address, size)
            i, what, row, rows, coding, ups, downs, others, _ = piece
            bytes_, at = room[end - size : end], first + end - size
            some.append(KeptPatch(i, what, row, rows, coding, ups, downs, others, bytes_, at))
        return some

    def _apply(self, some: Sequence[KeptPatch]) -> None:
        """Add patches, each of them whole or not at all, and keep them for the way back.

        Raises PrecisionError if one of them is none.
        """
        written, lost = self.written, self.lost
        self.written, self.lost = True, True  # until all are added
        outcomes = self._add(some)
        good = [(one, summed) for one, summed in zip(some, outcomes, strict=True) if isinstance(summed, bool)]
        self.written, self.lost = written or bool(good), lost
        for one, summed in good:
            self._keep(one, summed)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _keep(self, one: KeptPatch, summed: bool) -> None:
        """Keep a patch that was added, and note what its tensor's rows are now; the kernel may have ``summed`` them
        up."""
        if one.i not in self.patched:
            self.patched.append(one.i)
            for route in self._routes(one.i):
                self.read.pop(route, None)  # it was not the tensor's last patch
            self.packed -= {name for name, numbers in self.plan.packed_from.items() if one.i in numbers}
        for passing in self._passing(one.i) if one.what == VALUES else ():
            if passing is not None:
                passing.note(one.row, one.rows, summed)
        self.size += len(one.raw)
        self.lost = self.lost or self.size > MOST_KEPT
        if self.lost:
            self.applied.clear()
        else:
            self.applied.append(one)

    def _passing(self, i: int) -> list[Passing | None]:
        if i not in self.passing:
            sinks = ((route, self.sinks[route.target]) for route in self._routes(i))
            self.passing[i] = [
                Passing(route, sink, span) if isinstance(sink, Blocks) and (span := _rows_of_one(route)) else None
                for route, sink in sinks
            ]
        return self.passing[i]

    def _read(self, i: int) -> dict[Route, str | None]:
        """Return the fingerprints of a tensor's parts: of the rows that were passed already, and of the others as they
        are now."""
        passed = self.passing.pop(i, None) or [None] * len(self._routes(i))
        self.places.pop((i, VALUES), None)  # with the memory of their sums
        return {
            route: self.sinks[route.target].read(route) if one is None else one.read()
            for route, one in zip(self._routes(i), passed, strict=True)
        }

    def _checked(self, piece: Any) -> Sequence[int]:
        found = super()._checked(piece)
        if (found[0], VALUES) in self.next or (found[0], SCALES) in self.next:
            raise bad_piece(piece, f"{self.plan.manifest[found[0]].name} was patched already")
        self.lost = True  # the old bits of what is overwritten are kept nowhere
        return found

    def _checked_patch(self, piece: Any) -> int:
        """Return how many bytes a patch has; raise PrecisionError if it cannot be."""
        if [*map(type, piece)] != [int] * 9:
            raise bad_piece(piece, "It is no nine whole numbers")
        i, what, row, rows, coding, ups, downs, others, _ = piece
        if not 0 <= i < len(self.rows) or what not in (VALUES, SCALES):
            raise bad_piece(piece, f"The manifest has {len(self.rows)} tensors, with values and scales")
        name, (shape, width) = self.plan.manifest[i].name, self._plane(i, what)
        count, columns = shape
        if self.rows[i]:
            raise bad_piece(piece, f"{name} came whole already")
        if row < self.next.get((i, what), 0) or not 0 < rows <= count - row:
            raise bad_piece(piece, f"{name} has {count} rows, of which {self.next.get((i, what), 0)} are done")
        if rows > 1 and rows * columns > LONGEST:
            raise bad_piece(piece, f"It is of more than {LONGEST} elements")
        if coding not in CODINGS:
            raise bad_piece(piece, f"No patch is coded as {coding}")
        if min(ups, downs, others) < 0 or not 0 < ups + downs + others <= rows * columns:
            raise bad_piece(piece, f"It has {rows * columns} elements")
        self.next[i, what] = row + rows
        return size_of(rows * columns, coding, ups, downs, others, width)

    def _plane(self, i: int, what: int) -> tuple[tuple[int, int], int]:
        """Return the rows and columns of what a patch changes, and the bytes of an element."""
        if (i, what) not in self.planes:
            self.planes[i, what] = self._plane_of(i, what)
        return self.planes[i, what]

    def _plane_of(self, i: int, what: int) -> tuple[tuple[int, int], int]:
        entry, kept = self.plan.manifest[i], self.kept.get(i)
        if i in self.plan.scales or (kept is not None and kept.why):
            raise bad_piece([i, what], f"{entry.name} is not patched")
        if what == VALUES and (kept is None or kept.operand is None):
            return matrix_of(entry.shape), entry.torch_dtype.itemsize
        block = None if kept is None or kept.operand is None else kept.operand.block
        if block is None:
            raise bad_piece([i, what], f"{entry.name} has no scales here")
        if what == VALUES:
            return matrix_of(entry.shape), 1
        sink = self.sinks[self.plan.routes.by_entry[i][0].target]
        assert isinstance(sink, Blocks)
        return matrix_of(grid_of(entry.shape, block)), sink.scales.itemsize

    @torch.no_grad()
    def _add(self, some: Sequence[KeptPatch], back: bool = False) -> list[bool | PrecisionError]:
        """Add patches of different rows where the elements of their tensors lie in this worker's memory, or subtract
        them.

        Return of each whether a kernel has also summed up its rows, as they lie in memory then, where they pass; or an
        error if it is no patch. Then nothing of it was added.
        """
        outcomes: list[bool | PrecisionError] = [False] * len(some)
        known = {n: to for n, one in enumerate(some) if (to := self._places(one.i, one.what)) is not None}
        additions = list[kernel.Addition]()
        for n, to in known.items():
            _, _, row, rows, coding, ups, downs, others, _, address = some[n]
            columns = to.shape[1]
            additions.append(kernel.Addition(address, rows * columns, coding, ups, downs, others, row * columns, to))
        done = kernel.add(additions, back, summed=not back)
        for n, good in zip(known, done or (), strict=False):
            outcomes[n] = good or no_patch("its positions are not increasing, or not as many as it says")
        for n, one in enumerate(some):
            if done is None or n not in known:
                try:
                    self._add_slowly(one, back)
                except PrecisionError as error:
                    outcomes[n] = error
        return outcomes

    def _places(self, i: int, what: int) -> kernel.Matrices | None:
        """Return where a tensor's parts lie, for the kernel, and the sums of those that pass; None if one of them is on
        a device, or in no order that the kernel knows."""
        if (i, what) not in self.places:
            (count, columns), width = self._plane(i, what)
            orders = [self._order(route, what) for route in self._routes(i)]
            found = [
                place_of(shape, source, to, live, order)
                for (live, shape, source, to), order in zip(self._parts(i, what), orders, strict=True)
                if live.is_cpu
            ]
            places, known = [one for one in found if one is not None], None
            if len(places) == len(orders):
                passing = self._passing(i) if what == VALUES else ()
                sums = {n: one.sums for n, one in enumerate(passing) if one is not None}
                matrix = (count // math.prod(self.plan.manifest[i].shape[:-2]), columns)
                known = kernel.Matrices(matrix, width, places, sums)
            self.places[i, what] = known
        return self.places[i, what]

    def _order(self, route: Route, what: int) -> Order:
        sink = self.sinks[route.target]
        return sink.layout.order if what == VALUES and isinstance(sink, Blocks) else Order.ROWS

    def _parts(self, i: int, what: int) -> Iterator[tuple[torch.Tensor, tuple[int, ...], Box, Box]]:
        """Yield for each route of a tensor: live memory, the shape of the tensor, a box of it, and a box there."""
        for route in self._routes(i):
            sink = self.sinks[route.target]
            shape, source, to = route.shape, route.source, route.to
            assert source is not None
            if what == SCALES:
                assert isinstance(sink, Blocks)
                block = (sink.high, sink.wide)
                shape, source, to = grid_of(shape, block), blocks_of(source, block), blocks_of(to, block)
            if isinstance(sink, InPlace):
                yield sink.live, shape, source, to
            else:
                assert isinstance(sink, Blocks)
                yield sink.scales if what == SCALES else sink.codes, shape, source, stacked(to)

    def _add_slowly(self, one: KeptPatch, back: bool) -> None:
        """Add a patch in numpy and torch. Raises PrecisionError if it is none; then nothing was added."""
        i, what, row, rows, coding, ups, downs, others, raw, _ = one
        (_, columns), width = self._plane(i, what)
        for positions, differences in decode(raw, rows * columns, coding, ups, downs, others, width):
            by = np.negative(differences) if back else differences
            for route, (live, shape, source, to) in zip(self._routes(i), self._parts(i, what), strict=True):
                here, places = moved(positions + row * columns, shape, source, to)
                sink = self.sinks[route.target]
                if what == VALUES and isinstance(sink, Blocks):
                    places = (places[0], *sink.layout.where(places[1], places[2], sink.matrix[1]))
                pattern = live.view(PATTERNS[live.itemsize])
                index = tuple(torch.from_numpy(place).to(live.device) for place in places)
                change = torch.from_numpy(by[here].view(f"i{live.itemsize}")).view(pattern.dtype)
                pattern[index] = pattern[index] + change.to(live.device)

    @property
    def way_back(self) -> str:
        return "" if self.lost else self.base

    def take_back(self) -> str | None:
        if self.lost:
            return None
        self.lost = True  # until all of it is done
        self._add(self.applied, back=True)
        self.packed.clear()
        self._pack(set())  # the push may have died after it packed
        return self.base

    def give_up_way_back(self) -> None:
        self.lost = True

    @torch.no_grad()
    def finish(self, expected: Any = None) -> None:
        """Confirm every part from memory, and pack what lies beside it.

        Raises PrecisionError, and gives up the way back, if a part is not what the trainer expects.
        """
        sent = {i for i, rows in enumerate(self.rows) if rows}
        half = [self.plan.manifest[i].name for i in sorted(sent) if self.rows[i] < self.plan.manifest[i].rows]
        waiting = [s for s in self.staged if s.values] + [
            s for s in self.sinks.values() if getattr(s, "gathered", None)
        ]
        if half or waiting:
            raise PrecisionError(
                f"Whole tensors of push {self.number} did not come: {', '.join(half[:5]) or 'others of their layers'}.",
                "A layer that its kernel packs, and blocks of two tensors, need all of their tensors.",
                "Push again.",
            )
        for sink in dict.fromkeys(self.sinks[route.target] for i in sent for route in self._routes(i)):
            if not isinstance(sink, Blocks):
                sink.finish()
        others = [self.plan.manifest[i].name for i in self._confirm(expected, sent)]
        if others:
            self.written, self.lost = True, True  # also if no patch was: these weights are nobody's
            raise PrecisionError(
                f"After the patches {others[0]}{f' and {len(others) - 1} more are' if len(others) > 1 else ' is'} not "
                "what the trainer has.",
                "The fingerprint of the engine's memory is another: it is not as the last push left it, or a patch was "
                "damaged.",
                "Push everything.",
            )
        self._pack(sent | {i for i, _ in self.next})
        self.tally.settle()

    def _confirm(self, expected: Any, sent: set[int]) -> Iterator[int]:
        """Fingerprint every part from memory, and yield the numbers of tensors that are not as expected."""
        told = expected if isinstance(expected, dict) else {}
        for i, routes in self.plan.routes.by_entry.items():
            wanted, good = told.get(str(i)), True
            if not all(route in self.read for route in routes):
                self.read |= self._read(i)
            for route in routes:
                sink, part, there = self.sinks[route.target], name_of(route), self.read[route]
                if i in sent:  # what a kernel packed cannot be read, and is known by what came
                    noted = there or self.tally.facts[i].fingerprints.get(part)
                    good = good and (not isinstance(wanted, dict) or wanted.get(part, noted) == noted)
                if there is None:
                    good = good and (i in sent or self._is_untouched(sink, route.target.layer))
                    continue
                facts = self.tally.facts[i]
                if isinstance(sink, Blocks):
                    facts.kind, facts.aligned = "fp8", facts.aligned and sink.same_grid(route)
                    box = stacked(blocks_of(route.to, (sink.high, sink.wide)))
                    at = slice(*route.source[0]) if facts.experts and route.source else ONE
                    facts.count_scales(sink.scales[tuple(slice(*one) for one in box)], sink.operand.scale, at)
                else:
                    facts.kind = (
                        "nvfp4" if isinstance(sink, Staged) and has_one_scale(sink) else word(route.target.dtype)
                    )
                facts.fingerprints[part] = there
                if i not in sent:
                    good = good and isinstance(wanted, dict) and wanted.get(part) == there
                    facts.verified = good
            if not good:
                yield i

    def _is_untouched(self, sink: Sink, layer: str) -> bool:
        if sink not in self.untouched:
            seal = sink.seal()
            self.untouched[sink] = seal is not None and seal == self.sealed.get(layer)
        return self.untouched[sink]

    def _pack(self, changed: set[int]) -> None:
        """Pack again the copies that kernels keep beside weights that changed, and those that others packed."""
        beside = self.plan.packed_beside({route.target for i in changed for route in self._routes(i)})
        for name, layer in self.plan.all_packed_beside.items():
            if name not in self.packed and (name in beside or packed(layer) != self.sealed.get(name)):
                pack(layer)


class NemoFp8Patches(NemoFp8Refit):
    """Adds the methods of a push of patches to those of any push."""

    @answering
    def nemo_fp8_refit_stored(self, message: Answer) -> Answer:
        """Answer how this worker keeps each tensor of the open push."""
        session = self._refit_open(message)
        session.sealing = True
        kept, together = session.plan.kept(session.sinks)
        return {"kept": {str(i): one.to_plain() for i, one in kept.items()}, "together": together}

    @answering
    def nemo_fp8_refit_delta(self, message: Answer) -> Answer:
        """Open a push of patches. Raises PrecisionError if the weights here are not those that it begins from."""
        refuse_replicas(self.vllm_config.parallel_config)
        plan, base, here = self._refit_plan, message.get("base"), self._refit_version
        if self._refit_session is not None and self._refit_session.written:
            here = self._refit_session.way_back  # a push that is under way ends only if this one fits
        if not base or base != here or plan is None or plan.manifest.digest != message.get("manifest"):
            held = self._refit_mixed or f"It holds {here or 'no push, or was started again'}"
            if base and base == here:
                held = "That push brought other tensors, by their names, types or shapes"
            raise PrecisionError(
                f"A patch of push {str(base)[:40]} is not for this engine.", f"{held}.", "Push everything."
            )
        number = number_of(message)
        self._refit_give_up()
        self._refit_session = Patching(plan, number, self._refit_version, self._refit_seals)
        return {"accepted": True, "interrupted": self._refit_held}


# ---------------------------------------------------------------------- places


def _rows_of_one(route: Route) -> tuple[int, int] | None:
    """Return the rows of a matrix that a route takes, from the first to before the last; None if it takes from no one
    matrix."""
    return route.source[0] if route.source is not None and len(route.source) == 2 else None


def moved(
    positions: Positions, shape: tuple[int, ...], source: Box, to: Box
) -> tuple[NDArray[np.bool_], tuple[Positions, ...]]:
    """Return which elements of a tensor a route takes along, and where it takes those, as an index for each dimension.

    A route copies elements in the same order, so the n-th element of the source box is the n-th of the other: of a
    tensor [4, 6] whose rows 2:4 go to ((1, 2), (0, 2), (0, 6)), position 13 (row 2, column 1) goes to (1, 0, 1).
    """
    at = np.unravel_index(positions, shape) if shape else ()
    here = np.ones(len(positions), bool)
    for place, (start, stop) in zip(at, source, strict=True):
        here &= (place >= start) & (place < stop)
    inside = tuple(place[here] - start for place, (start, _) in zip(at, source, strict=True))
    sizes = tuple(stop - start for start, stop in source)
    order = np.ravel_multi_index(inside, sizes) if inside else positions[here]
    places = np.unravel_index(order, tuple(stop - start for start, stop in to)) if to else ()
    return here, tuple(place + start for place, (start, _) in zip(places, to, strict=True))


def place_of(
    shape: tuple[int, ...], source: Box, to: Box, live: torch.Tensor, order: Order = Order.ROWS
) -> kernel.Place | None:
    """Return where a route's elements lie, for the kernel: it counts a tensor of up to three dimensions as matrices,
    rows and columns (a vector has rows of one). None if the tensor has more, or the boxes have other sides, or if for
    AMX the box begins within a group or a pair.

    Of a tensor [4, 6] whose rows 2:4 go to ((1, 2), (0, 2), (0, 6)) of a contiguous [3, 2, 6], the box is
    ((0, 1), (2, 4), (0, 6)), its first element is number 12 there, and a row is 6 elements from the next.
    """
    if len(shape) > 3:
        return None
    sides = ((0, 1),) * (3 - max(2, len(shape))) + source + ((0, 1),) * (2 - min(2, len(shape)))
    steps = [(b - a, stride * live.itemsize) for (a, b), stride in zip(to, live.stride(), strict=True) if b - a != 1]
    if [b - a for a, b in sides if b - a != 1] != [n for n, _ in steps]:
        return None
    steps.reverse()
    strides = [0 if b - a == 1 else steps.pop()[1] for a, b in sides]
    starts = [a for a, _ in to]
    if order == Order.AMX:
        if [b - a for a, b in sides] != [b - a for a, b in to] or not _begins_a_line(live, *to[-2:]):
            return None
        starts[-1] *= GROUP  # a line for each pair of columns
    first = sum(start * stride for start, stride in zip(starts, live.stride(), strict=True))
    three = ctypes.c_int64 * 3
    return kernel.Place(
        live.data_ptr() + first * live.itemsize, three(*(a for a, _ in sides)), three(*(b for _, b in sides)),
        three(*strides), order=order,
    )  # fmt: skip


def _begins_a_line(live: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> bool:
    """Return whether a box of codes for AMX is made of whole lines, but for the rows of its last group."""
    return live.stride()[-2:] == (live.shape[-1], 1) and not (rows[0] % GROUP or columns[0] % 2 or columns[1] % 2)
