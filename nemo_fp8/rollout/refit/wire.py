"""Cut tensors into pieces that fit a buffer of a fixed size, and deliver buffers to the workers.

    piece = (number of its tensor in the manifest, first row, rows, offset in the memory)

Matrices are cut between rows of blocks, so that a worker can quantize every piece as it comes; other tensors between
any two rows. A tensor that some worker needs in one piece is not cut. The pieces of a tensor come in order. So the
memory of a push depends neither on the size of the model nor on that of its largest tensor, unless that is not cut.
A tensor that lies in shared memory already (:class:`nemo_fp8.rollout.refit.memory.SharedWeights`) is one piece of that
memory, and is not copied.

    memory   the workers map the sender's memory (:mod:`nemo_fp8.rollout.refit.memory`) and are told of pieces through a
             socket (:mod:`nemo_fp8.rollout.refit.channel`): same host, no copy on the way
    http     the buffer is the body of a request; the server hands it to its workers through shared memory of its own

NCCL and CUDA IPC are not here: vLLM runs them itself, and :mod:`nemo_fp8.rollout.refit.worker.transfer` takes what they
bring.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, MutableSet, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, Protocol
from weakref import WeakSet

import torch

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.moved import renamed
from nemo_fp8.rollout.refit.casting import Casts
from nemo_fp8.rollout.refit.channel import UNREAD, Channel, Ended
from nemo_fp8.rollout.refit.control import LARGEST_BODY, Answer, Carrier, Control, Server
from nemo_fp8.rollout.refit.manifest import Entry, Manifest, not_sendable
from nemo_fp8.rollout.refit.memory import ALIGNMENT, BUFFERS, NAME, Shared, aligned
from nemo_fp8.storage.safetensors import bytes_of

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"pairs": "nemo_fp8.rollout.refit.manifest.pairs"})

FEW = 4  # processors
AT_ONCE = 500  # pieces of a message: few enough for the largest that a socket takes
MESSAGE = 1 << 20  # bytes of a body that its message may take
Piece = tuple[int, int, int, int] | tuple[int, int, int, int, int]
"""(number of the tensor, first row, rows, offset in the buffer) of values; of codes there is one number more before the
offset: how many bytes behind it their scales begin."""


def capacity(manifest: Manifest, wanted: int, whole: Collection[int] = ()) -> int:
    """Return the bytes of a buffer: ``wanted``, or less if the model is smaller, or more if a piece needs more.

    ``whole`` are the numbers of tensors that are not cut.
    """
    parts = (e.bytes if i in whole else min(e.step, e.rows) * e.row_bytes for i, e in enumerate(manifest))
    everything = sum(aligned(e.bytes) for e in manifest)
    return max(ALIGNMENT, min(wanted, everything), max(map(aligned, parts), default=0))


def cut(
    tensors: Iterable[tuple[str, torch.Tensor]],
    manifest: Manifest,
    buffer: Callable[[], torch.Tensor],
    whole: Collection[int] = (),
    shared: Shared | None = None,
    casts: Casts | None = None,
) -> Iterator[tuple[list[Piece], int]]:
    """Copy tensors into buffers, or cast them there; yield for each full buffer the pieces in it and the bytes used.

    ``buffer()`` gives the next buffer to fill (uint8, as large as :func:`capacity` says). It is called only after the
    last one was yielded. ``whole`` are the numbers of tensors that are not cut. Tensors that lie in ``shared`` are not
    copied: they are pieces of that memory, and are yielded with 0 bytes used, several at once. Of the others ``casts``
    says which go as codes.

    Raises PrecisionError if a tensor is not as announced, or comes twice.
    """
    pieces: list[Piece] = []
    placed: list[Piece] = []
    room, used = None, 0
    came: set[int] = set()
    for name, tensor in tensors:
        i = manifest.places.get(name)
        entry = same_as_announced(name, tensor, None if i is None else manifest[i])
        assert i is not None
        if i in came:
            raise PrecisionError(f"{name} came twice.", "A push writes every tensor once.", "Give every tensor once.")
        came.add(i)
        place = None if shared is None else shared.place_of(tensor)
        if place is not None:
            placed.append((i, 0, entry.rows, place))
            if len(placed) == AT_ONCE:
                yield placed, 0
                placed = []
            continue
        cast = None if casts is None else casts.of(i, tensor)
        row, step = 0, entry.rows if i in whole else entry.step
        while row < entry.rows:
            room = buffer() if room is None else room
            left, free = entry.rows - row, room.numel() - used
            size = entry.bytes_of if cast is None else cast.bytes
            rows = left if size(left) <= free else free // max(1, size(step)) * step
            if rows == 0 or len(pieces) == AT_ONCE:
                yield pieces, used
                room, pieces, used = None, [], 0
                continue
            part = tensor[row : row + rows] if entry.shape else tensor
            if cast is None:
                _copy(part, room, used)
                pieces.append((i, row, rows, used))
            else:
                cast.put(row, part, room, used, threads=1 if _few_processors() else None)
                pieces.append((i, row, rows, cast.gap(rows), used))
            row, used = row + rows, aligned(used + size(rows))
    if placed:
        yield placed, 0
    if pieces:
        yield pieces, used


Memory = Shared | list[torch.Tensor]
"""Of buffers: all of them in one piece that workers map, or one by one."""


class Transport(Protocol):
    """The buffers of a push, and the way from them to the workers."""

    size: int
    """Bytes of one buffer."""
    buffers: int
    """How many buffers there are."""
    patches: int
    """The most patches of a message."""
    travels: bool
    """Whether bytes go elsewhere, so that fewer of them take less time."""

    @property
    def memory(self) -> Memory:
        """Return the memory of the buffers, which the next push may use again."""

    def open(self, push: str, workers: int) -> None:
        """Begin a push. Raises PrecisionError, before the first byte, if the workers cannot be reached."""

    def buffer(self) -> torch.Tensor:
        """Return the next buffer to fill, once the workers are done with it; raises PrecisionError as ``send`` does.

        All of them may be filled before the first is sent, also before ``open``.
        """

    def send(self, pieces: Sequence[Sequence[int]], used: int) -> None:
        """Have all workers write the pieces in the first ``used`` bytes of the oldest buffer that was not sent yet.

        With ``used`` 0 the pieces lie in the trainer's own shared memory. It may return before they are written. Raises
        PrecisionError with what the workers found wrong, now or in an earlier buffer.
        """

    def end(self) -> None:
        """Wait until everything is written. Raises PrecisionError with what the workers found wrong."""

    def close(self) -> None:
        """End the push, and let the workers go if it died."""


class SharedMemory:
    """Delivers pieces of memory that the workers map, through a socket, while one call of the workers lasts.

    The buffers are few and small: while they lie in a cache that all cores share, what is copied there does not go
    through main memory. ``weights`` is the trainer's own shared memory, if its tensors lie in some. ``kept`` are the
    buffers of an earlier push, used again if they are as large: the operating system takes longer to find, clear and
    free the pages of new ones than it takes to fill them. ``mapped`` is the memory that these workers have mapped in an
    earlier push, and are not asked about again.
    """

    most, buffers = 8 << 20, 4
    patches = 32  # few enough for the workers to add these while the sender looks for others
    travels = False

    def __init__(
        self, control: Control, size: int, weights: Shared | None, kept: Memory | None, mapped: MutableSet[Shared]
    ) -> None:
        self.control, self.size, self.weights, self.mapped = control, size, weights, mapped
        all_ = size * self.buffers
        self.shared = kept if isinstance(kept, Shared) and kept.size == all_ else Shared(all_)
        self.turn, self.filled, self.unanswered = 0, 0, 0
        self.courier = ThreadPoolExecutor(1, NAME)
        self.channel: Channel | None = None
        self.call: Future[list[Answer]] | None = None

    @property
    def memory(self) -> Memory:
        """Return what the workers map."""
        return self.shared

    def open(self, push: str, workers: int) -> None:
        """Have every worker map what it has not mapped yet, which fails on another host, and connect."""
        for memory in (self.shared, self.weights):
            if memory is not None and memory not in self.mapped:
                raise_problems(self.control.call("write", {"push": push, "memory": memory.handle, "pieces": []}))
                self.mapped.add(memory)
        self.channel = Channel(lambda: self.call is not None and self.call.done())
        self.call = self.courier.submit(self.control.call, "stream", {"push": push, "socket": self.channel.name})
        with self._problems():
            self.channel.connect(workers)

    def buffer(self) -> torch.Tensor:
        with self._problems():
            while self.filled + self.unanswered >= self.buffers:
                self._wait()
        self.turn, self.filled = (self.turn + 1) % self.buffers, self.filled + 1
        return self.shared.tensor[self.turn * self.size : (self.turn + 1) * self.size]

    def send(self, pieces: Sequence[Sequence[int]], used: int) -> None:
        assert self.channel is not None
        if used:
            self.filled -= 1
            handle, first = self.shared.handle, (self.turn - self.filled) % self.buffers * self.size
        else:
            assert self.weights is not None
            handle, first = self.weights.handle, 0
        with self._problems():
            while self.unanswered >= UNREAD:  # as tensors that lie in shared memory can make it, which fill no buffer
                self._wait()
            moved = [[*about, offset + first] for *about, offset in pieces]
            self.channel.send({"memory": handle, "pieces": moved, "stays": not used})
        self.unanswered += 1

    def end(self) -> None:
        assert self.channel is not None
        assert self.call is not None
        with self._problems():
            while self.unanswered:
                self._wait()
            self.channel.end()
        raise_problems(self.call.result())

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.courier.shutdown()  # the workers' call ends when they see the sockets closed
        self.channel = None  # it asks this object for its call: the buffers would wait for the collector of cycles

    def _wait(self) -> None:
        assert self.channel is not None
        self.channel.wait()
        self.unanswered -= 1

    @contextmanager
    def _problems(self) -> Iterator[None]:
        """Raise what the workers' call says where one of them has ended it."""
        try:
            yield
        except Ended:
            assert self.channel is not None
            assert self.call is not None
            self.channel.close()  # the others end theirs
            raise_problems(self.call.result())
            raise PrecisionError(
                "A worker left the push.", "It ended its call before the last tensor.", "Push again."
            ) from None


class Body:
    """Delivers buffers as the bodies of requests: one is filled while the other one is under way. ``kept`` are those of
    an earlier push, used again if they are as large.

    Raises PrecisionError if the engine is not reached by requests.
    """

    most, buffers, patches, travels = 32 << 20, BUFFERS, AT_ONCE, True

    def __init__(self, control: Control, size: int, kept: Memory | None) -> None:
        if not isinstance(control, Carrier):
            raise PrecisionError(
                "transport='http' without a URL.",
                "An engine of this process takes no requests.",
                "Leave transport out.",
            )
        self.control, self.size = control, size
        if isinstance(kept, list) and len(kept[0]) == size:
            self.both = [*kept]
        else:
            self.both = [torch.empty(size, dtype=torch.uint8) for _ in range(self.buffers)]
        self.filled = 0
        self.courier = ThreadPoolExecutor(1, NAME)
        self.under_way: Future[list[Answer]] | None = None
        self.push = ""

    @property
    def memory(self) -> Memory:
        """Return both buffers."""
        return self.both

    def open(self, push: str, workers: int) -> None:
        self.push = push  # the server makes the shared memory, on the workers' host

    def buffer(self) -> torch.Tensor:
        self.both.reverse()  # at most one request is under way, so the buffer before the last one is free
        self.filled += 1
        return self.both[0]

    def send(self, pieces: Sequence[Sequence[int]], used: int) -> None:
        self.end()
        self.filled -= 1
        body = bytes_of(self.both[self.filled][:used])
        message = {"push": self.push, "pieces": [list(piece) for piece in pieces]}
        self.under_way = self.courier.submit(self.control.carry, message, body)

    def end(self) -> None:
        if self.under_way is not None:
            raise_problems(self.under_way.result())

    def close(self) -> None:
        self.courier.shutdown()  # no request reads the buffers any longer


def way_of(name: str, control: Control) -> str:
    """Return ``memory`` or ``http``, whichever is meant; ``auto`` is memory if the engine may be on this host."""
    if name != "auto":
        return name
    local = not isinstance(control, Carrier) or control.local
    return "memory" if local and hasattr(os, "memfd_create") else "http"


WAYS: dict[str, type[SharedMemory | Body]] = {"memory": SharedMemory, "http": Body}
"""What ``way_of`` returns -> the transport."""


def transport_of(
    name: str,
    control: Control,
    manifest: Manifest,
    chunk: int,
    whole: Collection[int] = (),
    weights: Shared | None = None,
    kept: Memory | None = None,
    mapped: MutableSet[Shared] | None = None,
) -> Transport:
    """Return the transport of that name, as ``way_of`` has it.

    ``chunk`` bounds the bytes of all buffers together; a tensor of ``whole`` may need more. ``kept`` are the buffers of
    an earlier push, to be used again, and ``mapped`` is what these workers have mapped; more is added to it. Raises
    PrecisionError if a server takes no body that is large enough.
    """
    way = WAYS[way_of(name, control)]
    size = capacity(manifest, min(chunk // way.buffers, way.most), whole)
    if way is Body:
        if isinstance(control, Server) and size > LARGEST_BODY - MESSAGE:
            _refuse_body(manifest, whole)
        return Body(control, size, kept)
    return SharedMemory(control, size, weights, kept, WeakSet() if mapped is None else mapped)


def _refuse_body(manifest: Manifest, whole: Collection[int]) -> NoReturn:
    largest = max((manifest[i] for i in whole or range(len(manifest))), key=lambda entry: entry.bytes)
    raise PrecisionError(
        f"{largest.name} has {largest.bytes / 1e9:.1f} GB, and a server takes {LARGEST_BODY / 1e9:.1f} GB at once.",
        "The engine's loader makes other values of this tensor, so it comes in one piece.",
        "Push from the server's host, where it goes through shared memory.",
    )


def raise_problems(answers: list[Answer]) -> list[Answer]:
    """Return the answers, or raise all problems in them, each once: workers often find the same."""
    problems = dict.fromkeys(Problem(*row) for answer in answers for row in answer.get("problems", ()))
    if problems:
        raise Refused(problems)
    return answers


class Refused(PrecisionError):
    """What workers found wrong, and answered: the engine is alive."""


@torch.no_grad()
def _copy(source: torch.Tensor, room: torch.Tensor, offset: int) -> None:
    """Copy a tensor of any strides and device into a buffer, contiguously.

    On few processors one thread copies, and leaves the others to the workers: threads that copy together spin for a
    while after each copy, where the workers could compute.
    """
    size = source.numel() * source.itemsize
    plain = (
        source.is_cpu
        and source.is_contiguous()
        and not source.is_neg()
        and type(source) in (torch.Tensor, torch.nn.Parameter)
    )
    if plain and _few_processors():
        ctypes.memmove(room.data_ptr() + offset, source.data_ptr(), size)
        return
    room[offset : offset + size].view(source.dtype).view(source.shape).copy_(source)


@functools.cache
def _few_processors() -> bool:
    """Return whether there are few processors; the operating system reads a file for the answer."""
    return (os.cpu_count() or 1) <= FEW


def same_as_announced(name: str, tensor: torch.Tensor, entry: Entry | None) -> Entry:
    """Return the entry of a tensor that came; raise PrecisionError if it is not the announced ``entry``."""
    found = Entry.of(name, tensor)
    if problem := not_sendable(name, tensor):
        raise PrecisionError([problem])
    if found == entry:
        return found
    said = "is not in it" if entry is None else f"is {list(entry.shape)} in {entry.dtype} there"
    raise PrecisionError(
        f"{name} came as {list(found.shape)} in {found.dtype}, and {said}.",
        "The tensors of a push must be those of its manifest: the engine was asked about those only.",
        "Give a manifest of what the iterator brings (manifest=), or a mapping, of which it is made.",
    )
