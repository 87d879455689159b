"""Keep, on the trainer's side, the bits that an engine holds, and find what a push has to change: the ledger.

    first push     everything is sent, and the ledger quantizes it too: codes and scales as the engine makes them
    further ones   strip by strip: quantize, compare with the ledger, send the differences (patch.py), note them

A compiled kernel (fp8_patch.c) compares, notes and writes a patch in one pass over the strip, which quantization left
in the cache. Where there is no compiler numpy does it; tests hold both to the same bits.

The engine says how it keeps each tensor. One in FP8 whose blocks are those of the unsharded tensor is two planes here,
its codes and its scales. One that is kept as it is pushed is one plane of values. Any other (packed by a kernel as a
whole, quantized in other blocks) has a copy here, and is sent whole if a bit of it changed, with all that the engine
gathers with it.

A fingerprint is made of sums of words, so the ledger carries those of every part that a worker holds through each
change. The engine has to come to the same from the memory that it reads. The trade-off: the ledger takes a byte for
each FP8 weight and two for each BF16 one, and every push quantizes in the trainer, on its processors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nemo_fp8.contract import Operand
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.formats import decode_e8m0, format_of
from nemo_fp8.numerics.kernels import build, patches
from nemo_fp8.numerics.kernels.cpu import CastJob, cast_job
from nemo_fp8.numerics.kernels.patches import Bytes
from nemo_fp8.numerics.quantize import STRIP, find_scales, quantize_into, quantize_reference
from nemo_fp8.rollout.refit.casting import operand_of, scales_type
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, fingerprint, together
from nemo_fp8.rollout.refit.manifest import SCALES as SUFFIX
from nemo_fp8.rollout.refit.manifest import Box, Entry, Manifest
from nemo_fp8.rollout.refit.memory import aligned
from nemo_fp8.rollout.refit.patch import PATTERNS, SCALES, VALUES, Patch, blocks_of, encode, grid_of, matrix_of
from nemo_fp8.rollout.refit.receipt import CODED, Delta, Written
from nemo_fp8.rollout.refit.wire import AT_ONCE, Piece, cut, same_as_announced

PATCH = 1 << 21  # elements of a patch, at most: a patch is one thread's work
FIRST = 4  # patches of the first buffer, at most, so that workers begin early; each further one may have twice as many
LOOKED_AT = 4 * STRIP  # elements that are cast and compared in one call: patches for all threads
Change = tuple[int, int, int, int, Bytes]
"""(first row, rows, steps, others, bytes of the patch)"""
Sums = tuple[torch.Tensor, torch.Tensor]
Words = tuple[int, int, int, int]
"""(first row, last row, first word, last word)"""
Filled = tuple[Sequence[Sequence[int]], int]
"""What lies in a full buffer, and the bytes used."""


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
        self.by_kernel = None if rows % block[0] else cast_job(self.values, block, format, kind, self.scales)
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


Rows = torch.Tensor | Cast


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

    def put(self, row: int, rows: Rows) -> None:
        """Note rows from ``row`` on, whatever was there."""
        new = rows.made() if isinstance(rows, Cast) else rows
        self.matrix[row : row + len(new)].copy_(new)
        self.prints.clear()
        self.top = None

    def change(self, row: int, rows: Rows, patch_rows: int, room: Room) -> Iterator[Change]:
        """Note rows that may have changed, and yield a patch for every ``patch_rows`` of them in which one has.

        A patch lies in ``room`` until the next rows are noted.
        """
        new = (rows.job(patch_rows) or rows.made()) if isinstance(rows, Cast) else rows
        old = self.matrix[row : row + (rows.values if isinstance(rows, Cast) else rows).shape[0]]
        out = room.bytes(old.nbytes)
        kept = {part: print_.sums() for part, print_ in self.prints.items() if part in self.words}
        found = patches.find(
            old, new, out, row=row, patch_rows=patch_rows, sign=self.sign,
            parts=[_part(self.words[part], *sums) for part, sums in kept.items()],
        )  # fmt: skip
        if found is None:
            new = rows.made() if isinstance(rows, Cast) else rows
            found = self._find(old, new, row, patch_rows, kept)
        for i, (steps, others, raw, changed, largest) in enumerate(found):
            if changed:
                self.prints = {part: self.prints[part] for part in kept}
                self.changed += changed
                self.top = None if self.top is None else max(self.top, largest)
                first = i * patch_rows
                yield row + first, min(patch_rows, len(old) - first), steps, others, raw

    def _find(
        self, old: torch.Tensor, new: torch.Tensor, row: int, patch_rows: int, kept: Mapping[str, Sums]
    ) -> list[patches.Found]:
        """Do what the kernel does, in numpy: the reference."""
        found = list[patches.Found]()
        for part, (of_rows, of_columns) in kept.items():
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
            found.append((*encode(len(now), at, now[at] - was[at]), len(at), largest))
        old.copy_(new)
        return found

    def digest(self, part: str) -> str:
        """Return the fingerprint of a part."""
        if part not in self.prints:
            self.prints[part] = Fingerprint()
            self.prints[part].add(self.values[_slices(self.parts[part])])
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
            self._bytes = np.empty(size, np.uint8)
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


class Patchable:
    """A tensor that can be patched: its values, or its codes and their scales."""

    def __init__(self, entry: Entry, operand: Operand | None, parts: Collection[str]) -> None:
        self.entry, self.operand = entry, operand
        boxes = {part: _box_of(part) for part in parts}
        self.planes = {VALUES: Plane(entry.shape, torch.float8_e4m3fn if operand else entry.torch_dtype, boxes)}
        if operand is not None:
            assert operand.block is not None
            boxes = {part: blocks_of(box, operand.block) for part, box in boxes.items()}
            self.planes[SCALES] = Plane(grid_of(entry.shape, operand.block), scales_type(operand), boxes)
        self.as_reference = True
        """Whether all codes and scales of the last push that were held against the reference cast were its."""
        self.infinite = 0
        """Infinities among what was quantized last. No code tells of them: each became the format's largest value."""

    def strips(self, tensor: torch.Tensor, verify: bool, room: Room) -> Iterator[tuple[int, int, Rows]]:
        """Yield what the engine makes of a tensor, strip by strip: plane, first row, rows. These may lie in ``room``,
        until the next strip is asked for, and then codes have been made."""
        rows, columns = matrix_of(self.entry.shape)
        if self.operand is None or self.entry.is_codes:
            matrix, step = tensor.detach().cpu().resolve_neg().reshape(rows, columns), max(1, STRIP // columns)
            yield from ((VALUES, row, matrix[row : row + step].contiguous()) for row in range(0, rows, step))
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
                scales = room.of("scales", grid_of(tuple(values.shape), self.operand.block), kind, values.device)
                cast = Cast(values, self.operand, scales, room)
                made: Rows = cast
                if verify:
                    made = cast.made()
                    self._compare(values, made.to(values.device), scales)
                yield VALUES, m * each + row, made
                self.infinite += cast.infinities()
                yield SCALES, m * -(-each // high) + row // high, scales.cpu()

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
            for i, what, row, new in self._strips(self.manifest.places[name], tensor):
                self.kept[i].planes[what].put(row, new)

    def settle(self, push: str, written: Iterable[Written]) -> None:
        """End a push of everything. A tensor whose fingerprints are not the engine's will not be patched."""
        self.version, self.written = push, {one.name: one for one in written}
        for i, kept in [*self.kept.items()]:
            kept.told(one := self.written[kept.entry.name])
            if any(kept.digest(part) != print_ for part, print_ in one.fingerprints.items()):
                self._send_whole(i, "The trainer's quantization has other bits than the engine's")

    def _strips(self, i: int, tensor: torch.Tensor) -> Iterator[tuple[int, int, int, Rows]]:
        """Yield new rows of planes: number of the tensor, plane, first row, rows. Note a tensor that goes whole."""
        entry = self.manifest[i]
        codes = self.manifest.places[entry.name.removesuffix(SUFFIX)] if self.manifest.is_scales(entry) else None
        if i in self.whole:
            self.whole[i].see(tensor)
        elif codes is not None:
            yield codes, SCALES, 0, tensor.detach().cpu().reshape(matrix_of(entry.shape)).contiguous()
        elif i in self.kept:
            yield from ((i, *strip) for strip in self.kept[i].strips(tensor, self.verify, self.room))

    # ------------------------------------------------------------------ a push of changes

    def changes(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        buffer: Callable[[], torch.Tensor],
        size: int,
        most: int = AT_ONCE,
    ) -> Iterator[Filled]:
        """Copy what changed into buffers; yield for each full buffer what lies in it and the bytes used.

        Patches come first, since they can be taken back, and whole tensors last. ``buffer()`` gives the next
        buffer, of ``size`` bytes; no more than ``most`` patches lie in one, and fewer in the first ones. Raises
        PrecisionError if a tensor is not as announced, comes twice, or does not come.
        """
        for kept in self.kept.values():
            for plane in kept.planes.values():
                plane.changed = 0
        free, used, heads, fit = None, 0, list[Piece | Patch](), min(FIRST, most)
        for i, what, first, new in self._come(tensors):
            plane = self.kept[i].planes[what]
            patch_rows = self.kept[i].patch_rows(what, min(PATCH, size // plane.values.itemsize), size)
            for row, rows, steps, others, raw in plane.change(first, new, patch_rows, self.room):
                if used + len(raw) > size or len(heads) == fit:
                    yield heads, used
                    free, used, heads, fit = None, 0, [], min(2 * fit, most)
                free = buffer().numpy() if free is None else free
                free[used : used + len(raw)] = raw  # in numpy, since torch would wake all threads for so little
                heads.append((i, what, row, rows, steps, others, used))
                used = aligned(used + len(raw))
        if heads:
            yield heads, used
        going = ((self.manifest[i].name, self.whole[i].values) for i in self.going())
        yield from cut(going, self.manifest, buffer, self.whole)  # type: ignore[arg-type]
        self.expected = self._expected()  # while the workers write the last buffer

    def _come(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[int, int, int, Rows]]:
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
            yield from self._strips(i, tensor)
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
                boxes = {part: _box_of(part) for part in before.fingerprints if ":" in part and " " not in part}
                found[str(i)] = {part: fingerprint(one.values[_slices(box)]) for part, box in boxes.items()}
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


def _part(words: Words, of_rows: torch.Tensor, of_columns: torch.Tensor) -> patches.Part:
    return patches.Part(*words, of_rows.data_ptr(), of_columns.data_ptr())


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in box)


def _box_of(part: str) -> Box:
    """Return the box that a receipt calls ``0:128,0:512``; none for a scalar (``whole``)."""
    return tuple((int(a), int(b)) for a, _, b in (one.partition(":") for one in part.split(","))) if ":" in part else ()
