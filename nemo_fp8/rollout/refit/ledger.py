"""Keep, on the trainer's side, the bits that an engine holds, and find what a push has to change: the ledger.

    first push     everything is sent, and the ledger quantizes it too: codes and scales as the engine makes them
    further ones   some strips at a time: quantize, compare with the ledger, send the differences (patch.py), note them

The engine says how it keeps each tensor. One in FP8 whose blocks are those of the unsharded tensor is two planes here,
its codes and its scales. One that is kept as it is pushed is one plane of values. Any other (packed by a kernel as a
whole, quantized in other blocks) has a copy here, and is sent whole if a bit of it changed, with all that the engine
gathers with it.

The ledger carries the fingerprint of every part that a worker holds through each change (planes.py). The engine has to
come to the same from the memory that it reads. The trade-off: the ledger takes a byte for each FP8 weight and two for
each BF16 one, and every push quantizes in the trainer, on its processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.formats import decode_e8m0, format_of
from nemo_fp8.numerics.kernels import build
from nemo_fp8.numerics.quantize import STRIP, quantize_reference
from nemo_fp8.rollout.refit.casting import operand_of, scales_type
from nemo_fp8.rollout.refit.fingerprint import fingerprint, together
from nemo_fp8.rollout.refit.manifest import SCALES as SUFFIX
from nemo_fp8.rollout.refit.manifest import Entry, Manifest
from nemo_fp8.rollout.refit.memory import aligned
from nemo_fp8.rollout.refit.patch import SCALES, VALUES, Patch, blocks_of, grid_of, matrix_of
from nemo_fp8.rollout.refit.planes import Cast, Change, Look, Plane, Room, box_of, changes, slices
from nemo_fp8.rollout.refit.receipt import CODED, Delta, Written
from nemo_fp8.rollout.refit.wire import AT_ONCE, Piece, cut, same_as_announced

PATCH = 1 << 21  # elements of a patch, at most: a patch is one thread's work
FIRST = 4  # patches of the first buffer, at most, so that workers begin early; each further one may have twice as many
LOOKED_AT = 4 * STRIP  # elements of a strip that a kernel casts and compares
TOGETHER = 1 << 26  # bytes of strips that are looked at together, at most: their patches may need as many
Filled = tuple[Sequence[Sequence[int]], int]
"""What lies in a full buffer, and the bytes used."""


class Strip(NamedTuple):
    """Rows of a tensor as the engine makes them."""

    what: int
    """The plane that they are of."""
    row: int
    rows: torch.Tensor | Cast
    cast: Cast | None = None
    """Where they are codes, the cast that makes them, or has made them in memory that the next strip uses again."""
    scales_row: int = 0
    """The first row of its scales."""


class Patchable:
    """A tensor that can be patched: its values, or its codes and their scales."""

    def __init__(self, entry: Entry, operand: Operand | None, parts: Collection[str]) -> None:
        self.entry, self.operand = entry, operand
        boxes = {part: box_of(part) for part in parts}
        self.planes = {VALUES: Plane(entry.shape, torch.float8_e4m3fn if operand else entry.torch_dtype, boxes)}
        if operand is not None:
            assert operand.block is not None
            boxes = {part: blocks_of(box, operand.block) for part, box in boxes.items()}
            self.planes[SCALES] = Plane(grid_of(entry.shape, operand.block), scales_type(operand), boxes)
        self.as_reference = True
        """Whether all codes and scales of the last push that were held against the reference cast were its."""
        self.infinite = 0
        """Infinities among what was quantized last. No code tells of them: each became the format's largest value."""

    def strips(self, tensor: torch.Tensor, verify: bool, room: Room) -> Iterator[Strip]:
        """Yield what the engine makes of a tensor, strip by strip."""
        rows, columns = matrix_of(self.entry.shape)
        if self.operand is None or self.entry.is_codes:
            matrix, step = tensor.detach().cpu().resolve_neg().reshape(rows, columns), max(1, STRIP // columns)
            yield from (Strip(VALUES, row, matrix[row : row + step].contiguous()) for row in range(0, rows, step))
            return
        assert self.operand.block is not None
        high, kind = self.operand.block[0], self.planes[SCALES].values.dtype
        self.infinite, self.as_reference = 0, True
        # A stack whose blocks do not run into one another is quantized as one matrix.
        each = rows if self.entry.shape[-2] % high == 0 else self.entry.shape[-2]
        most = STRIP if verify or build.library() is None else LOOKED_AT
        step = max(BLOCK, most // columns // BLOCK * BLOCK)  # rows, of whole blocks
        for m, matrix in enumerate(tensor.detach().reshape(-1, each, columns)):
            for row in range(0, each, step):
                values = matrix[row : row + step]
                grid = grid_of(tuple(values.shape), self.operand.block)
                cast = Cast(values, self.operand, torch.empty(grid, dtype=kind, device=values.device), room)
                rows_of_cast: torch.Tensor | Cast = cast
                if verify:
                    rows_of_cast = cast.made()
                    self._compare(values, rows_of_cast.to(values.device), cast.scales)
                yield Strip(VALUES, m * each + row, rows_of_cast, cast, m * -(-each // high) + row // high)

    def put(self, strip: Strip) -> None:
        """Note a strip, whatever was there."""
        self.planes[strip.what].put(strip.row, strip.rows.made() if isinstance(strip.rows, Cast) else strip.rows)
        if strip.cast is not None:
            self.planes[SCALES].put(strip.scales_row, self.scales_of(strip.cast))

    def scales_of(self, cast: Cast) -> torch.Tensor:
        """Return the scales of a cast on the CPU, once its codes were made, and note the infinities among its
        values."""
        self.infinite += cast.infinities()
        return cast.scales.cpu()

    def _compare(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        assert self.operand is not None
        expected, inverse, _ = quantize_reference(
            values, self.operand.block, format_of(self.operand.format), self.operand.scale
        )
        same = (
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in ((codes, expected), (scales, inverse))
        )
        self.as_reference = self.as_reference and all(same)

    def patch_rows(self, what: int, elements: int, size: int) -> int:
        """Return the rows of a patch of about so many elements and at most ``size`` bytes: whole blocks of codes, if as
        many fit."""
        plane = self.planes[what]
        rows = max(1, elements // plane.columns)
        high = self.operand.block[0] if self.operand is not None and self.operand.block and what == VALUES else 1
        return max(rows // high, 1) * high if high * plane.columns <= size else rows

    def digest(self, part: str) -> str:
        """Return the fingerprint of a part, as receipts have it."""
        return together([plane.digest(part) for plane in self.planes.values()])

    @property
    def bytes(self) -> int:
        """The bytes of all planes."""
        return sum(plane.values.nbytes for plane in self.planes.values())

    def told(self, written: Written) -> Written:
        """Return the row of a receipt, completed by what the ledger knows of the values."""
        values, scales = self.planes[VALUES], self.planes.get(SCALES)
        largest = values.largest()
        if scales is not None:
            inverse = scales.values if scales.values.dtype == torch.float32 else decode_e8m0(scales.values)
            largest = math.inf if self.infinite else largest * float(inverse.amax())
        verified = None if written.verified is None else written.verified and self.as_reference
        # A stack of experts is one tensor here.
        nonfinite = values.nonfinite() + self.infinite
        return replace(written, largest=largest, nonfinite=nonfinite, verified=verified, experts={})


@dataclass
class Whole:
    """A tensor that cannot be patched."""

    entry: Entry
    why: str
    values: torch.Tensor | None = None
    """What was sent last; None if that is unknown."""
    changed: bool = False

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a copy of new values, note whether any bit differs from the last ones, and return the copy."""
        new = tensor.detach().cpu().contiguous()
        old, self.values = self.values, None
        self.changed = old is None or not torch.equal(*(one.view(-1).view(torch.uint8) for one in (old, new)))
        self.values = new.clone() if old is None or self.changed else old
        return self.values


@dataclass
class Ledger:
    """What one engine holds after the last push of one :class:`~nemo_fp8.rollout.refit.push.Refit`."""

    manifest: Manifest
    passed_over: set[int]
    """Numbers of tensors that are not sent."""
    verify: bool = False
    """Whether codes and scales are held against the reference cast."""
    version: str = ""
    """The number of the push that the engine must hold for a patch to fit."""
    kept: dict[int, Patchable] = field(default_factory=dict)
    whole: dict[int, Whole] = field(default_factory=dict)
    together: list[list[int]] = field(default_factory=list)
    """Tensors that must all come whole if one of them does."""
    written: dict[str, Written] = field(default_factory=dict)
    """What the last receipt told of each tensor."""
    expected: dict[str, dict[str, str]] = field(default_factory=dict)
    """The fingerprints of all parts that the engine must find in its memory, by tensor and part, once ``changes`` has
    given all."""
    room: Room = field(default_factory=Room)

    @classmethod
    def of(cls, manifest: Manifest, passed_over: set[int], answers: Sequence[Mapping[str, Any]]) -> Ledger:
        """Return an empty ledger, made of what all workers say of how they keep the tensors."""
        ledger, told = cls(manifest, passed_over), dict[int, list[Any]]()
        for answer in answers:
            ledger.together += answer["together"]
            for i, row in answer["kept"].items():
                told.setdefault(int(i), []).append(row)
        for i, rows in told.items():
            why = next((why for *_, why in rows if why), "")
            if why or any(row[0] != rows[0][0] for row in rows):
                ledger._send_whole(i, why or "Workers keep it in different ways")
            else:
                operand = None if rows[0][0] is None else operand_of(rows[0][0])
                ledger.kept[i] = Patchable(manifest[i], operand, {part for _, parts, _ in rows for part in parts})
        return ledger

    def _send_whole(self, i: int, why: str) -> None:
        """Keep a tensor as one that is not patched, and its scales with it, if they are another tensor."""
        self.kept.pop(i, None)
        both = [i, *([self.manifest.places[self.manifest[i].name + SUFFIX]] if self.manifest[i].is_codes else [])]
        self.whole |= {one: Whole(self.manifest[one], why) for one in both}
        self.together.append(both)

    # ------------------------------------------------------------------ a push of everything

    def noting(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, and note the bits that the engine will hold of each.

        A trainer may write its tensors meanwhile. For what can be patched ``settle`` finds that out. Of the others
        nobody could, so the ledger's own copy is what goes.
        """
        for name, tensor in tensors:
            whole = self.whole.get(self.manifest.places.get(name, -1))
            if whole is not None:
                same_as_announced(name, tensor, whole.entry)
                yield name, whole.see(tensor)
                continue
            yield name, tensor  # first: who takes it checks whether it is as announced
            for i, strip in self._strips(self.manifest.places[name], tensor):
                self.kept[i].put(strip)

    def settle(self, push: str, written: Iterable[Written]) -> None:
        """End a push of everything. A tensor whose fingerprints are not the engine's will not be patched."""
        self.version, self.written = push, {one.name: one for one in written}
        for i, kept in [*self.kept.items()]:
            kept.told(one := self.written[kept.entry.name])
            if any(kept.digest(part) != print_ for part, print_ in one.fingerprints.items()):
                self._send_whole(i, "The trainer's quantization has other bits than the engine's")

    def _strips(self, i: int, tensor: torch.Tensor) -> Iterator[tuple[int, Strip]]:
        """Yield the strips of what can be patched, with its number. Note a tensor that goes whole."""
        entry = self.manifest[i]
        codes = self.manifest.places[entry.name.removesuffix(SUFFIX)] if self.manifest.is_scales(entry) else None
        if i in self.whole:
            self.whole[i].see(tensor)
        elif codes is not None:
            yield codes, Strip(SCALES, 0, tensor.detach().cpu().reshape(matrix_of(entry.shape)).contiguous())
        elif i in self.kept:
            yield from ((i, strip) for strip in self.kept[i].strips(tensor, self.verify, self.room))

    # ------------------------------------------------------------------ a push of changes

    def changes(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        buffer: Callable[[], torch.Tensor],
        size: int,
        most: int = AT_ONCE,
        stay: bool = False,
        quick: bool = False,
    ) -> Iterator[Filled]:
        """Copy what changed into buffers; yield for each full buffer what lies in it and the bytes used.

        Patches come first, since they can be taken back, and whole tensors last. ``buffer()`` gives the next
        buffer, of ``size`` bytes; no more than ``most`` patches lie in one, and fewer in the first ones. ``stay`` says
        that tensors stay as they are while others are asked for. Raises PrecisionError if a tensor is not as announced,
        comes twice, or does not come.
        """
        for kept in self.kept.values():
            for plane in kept.planes.values():
                plane.changed = 0
        free, used, heads, fit = None, 0, list[Piece | Patch](), min(FIRST, most)

        def wanted() -> int:
            return fit - len(heads)

        for i, what, change in self._changes(tensors, size, wanted, stay, quick):
            row, rows, coding, ups, downs, others, raw = change
            if used + len(raw) > size or len(heads) == fit:
                yield heads, used
                free, used, heads, fit = None, 0, [], min(2 * fit, most)
            free = buffer().numpy() if free is None else free
            free[used : used + len(raw)] = raw  # in numpy, since torch would wake all threads for so little
            heads.append((i, what, row, rows, coding, ups, downs, others, used))
            used = aligned(used + len(raw))
        if heads:
            yield heads, used
        going = ((self.manifest[i].name, self.whole[i].values) for i in self.going())
        yield from cut(going, self.manifest, buffer, self.whole)  # type: ignore[arg-type]
        self.expected = self._expected()  # while the workers write the last buffer

    def _changes(
        self, tensors: Iterable[tuple[str, torch.Tensor]], size: int, wanted: Callable[[], int], stay: bool, quick: bool
    ) -> Iterator[tuple[int, int, Change]]:
        """Yield every change, of at most ``size`` bytes, with the number of its tensor and the plane.

        Strips are looked at together until they have about as many patches as are ``wanted``: between two calls of the
        kernel all threads but one wait. Those of a tensor are not kept waiting for the next one unless tensors
        ``stay``, and none whose codes lie where those of the next strip will.
        """
        waiting, count, together = list[tuple[int, Strip, Look]](), 0, 0
        for came in self._come(tensors):
            for i, strip in came:
                plane = self.kept[i].planes[strip.what]
                rows = self.kept[i].patch_rows(strip.what, min(PATCH, size // plane.values.itemsize), size)
                new = strip.rows if isinstance(strip.rows, torch.Tensor) else strip.rows.job(rows) or strip.rows.made()
                look = Look(plane, strip.row, new, rows, quick)
                waiting.append((i, strip, look))
                count += look.patches + (strip.cast is not None)
                together += look.bytes
                passes = strip.cast is not None and isinstance(new, torch.Tensor)
                if passes or count >= wanted() or together >= TOGETHER:
                    yield from self._looked_at(waiting, size, quick)
                    waiting, count, together = [], 0, 0
            if not stay:
                yield from self._looked_at(waiting, size, quick)
                waiting, count, together = [], 0, 0
        yield from self._looked_at(waiting, size, quick)

    def _looked_at(
        self, waiting: Sequence[tuple[int, Strip, Look]], size: int, quick: bool
    ) -> Iterator[tuple[int, int, Change]]:
        """Yield the changes of strips, and of their scales; they lie in the ledger's room until other ones are looked
        at."""
        values = sum(look.bytes for *_, look in waiting)
        casts = [(i, strip.scales_row, strip.cast) for i, strip, _ in waiting if strip.cast is not None]
        out, looks = self.room.bytes(values + sum(cast.scales.nbytes for *_, cast in casts)), list[Look]()
        found = changes([look for *_, look in waiting], out)
        for i, row, cast in casts:
            plane, kept = self.kept[i].planes[SCALES], self.kept[i]
            rows = kept.patch_rows(SCALES, min(PATCH, size // plane.values.itemsize), size)
            looks.append(Look(plane, row, kept.scales_of(cast), rows, quick))
        of_scales = iter(changes(looks, out[values:]))
        for (i, strip, _), some in zip(waiting, found, strict=True):
            yield from ((i, strip.what, change) for change in some)
            if strip.cast is not None:
                yield from ((i, SCALES, change) for change in next(of_scales))

    def _come(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Iterator[tuple[int, Strip]]]:
        """Check every tensor that comes, and yield its strips."""
        came = set[int]()
        for name, tensor in tensors:
            i = self.manifest.places.get(name)
            same_as_announced(name, tensor, None if i is None else self.manifest[i])
            assert i is not None
            if i in came:
                raise PrecisionError(
                    f"{name} came twice.", "A push takes every tensor once.", "Give every tensor once."
                )
            came.add(i)
            yield self._strips(i, tensor)
        left = [entry.name for i, entry in enumerate(self.manifest) if i not in came | self.passed_over]
        if left:
            raise PrecisionError(
                f"{len(left)} of {len(self.manifest)} tensors did not come: {', '.join(left[:5])}.",
                "They were announced in the manifest, and the push ended without them.",
                "Push every tensor, also those that have not changed.",
            )

    def going(self) -> list[int]:
        """Return the numbers of the tensors that go whole: what changed, and what the engine gathers with it."""
        going, more = set[int](), {i for i, one in self.whole.items() if one.changed}
        while more:
            going |= more
            groups = (group for group in self.together if going.intersection(group))
            more = {i for group in groups for i in group} - going
        return sorted(going)

    def _expected(self) -> dict[str, dict[str, str]]:
        going, found = set(self.going()), dict[str, dict[str, str]]()
        for i, kept in self.kept.items():
            found[str(i)] = {part: kept.digest(part) for part in kept.planes[VALUES].parts}
        for i, one in self.whole.items():
            before = self.written.get(one.entry.name)
            if before is not None and i not in going:
                found[str(i)] = dict(before.fingerprints)
            elif before is not None and before.kind not in CODED:  # else in blocks that the ledger does not know
                assert one.values is not None
                # A part with words in its name is no box of the tensor: a view of it, or what the loader computed.
                boxes = {part: box_of(part) for part in before.fingerprints if ":" in part and " " not in part}
                found[str(i)] = {part: fingerprint(one.values[slices(box)]) for part, box in boxes.items()}
        return found

    def settle_changes(self, push: str, written: Iterable[Written]) -> tuple[tuple[Written, ...], Delta]:
        """End a push of changes; return the rows of its receipt, and what it changed.

        ``written`` are the engine's rows. A tensor that was not sent and that no worker can read keeps its last row.
        """
        base, self.version = self.version, push
        going = self.going()
        for one in written:
            i, before = self.manifest.places[one.name], self.written.get(one.name)
            if i in self.kept:
                one = self.kept[i].told(one)
            elif i not in going and before is not None:
                one = replace(before, fingerprints=one.fingerprints, verified=one.verified)
            self.written[one.name] = one
        planes = [kept.planes[VALUES] for kept in self.kept.values()]
        delta = Delta(
            base=base,
            changed=sum(plane.changed for plane in planes),
            elements=sum(plane.values.numel() for plane in planes),
            full_bytes=sum(k.bytes for k in self.kept.values()) + sum(w.entry.bytes for w in self.whole.values()),
            whole={self.whole[i].entry.name: self.whole[i].why for i in going},
            confirmed=sum(one.verified is not None for one in self.written.values()),
        )
        return tuple(self.written.values()), delta
