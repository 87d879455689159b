"""Cut tensors into pieces that fit a buffer of a fixed size, and deliver buffers to the workers.

    piece = (number of its tensor in the manifest, first row, rows, offset in the buffer)

Matrices are cut between rows of blocks, so that a worker can quantize every piece as it comes; other tensors between
any two rows. A tensor that some worker needs in one piece is not cut. The pieces of a tensor come in order. So the
memory of a push depends neither on the size of the model nor on that of its largest tensor, unless that is not cut.

    memory   the workers map the sender's buffer (:mod:`nemo_fp8.rollout.refit.memory`): same host, no copy on the way
    http     the buffer is the body of a request; the server hands it to its workers through shared memory of its own

NCCL and CUDA IPC are not here: vLLM runs them itself, and :mod:`nemo_fp8.rollout.refit.worker.transfer` takes what they
bring.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit.control import Answer, Carrier, Control
from nemo_fp8.rollout.refit.manifest import Entry, Manifest, not_sendable
from nemo_fp8.rollout.refit.memory import BUFFERS, Shared
from nemo_fp8.storage.safetensors import bytes_of

ALIGNMENT = 64  # bytes; each piece begins at a multiple
Piece = tuple[int, int, int, int]
"""(number of the tensor, first row, rows, offset in the buffer)"""


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
) -> Iterator[tuple[list[Piece], int]]:
    """Copy tensors into buffers; yield for each full buffer the pieces in it and the bytes used.

    ``buffer()`` gives the next buffer to fill (uint8, as large as :func:`capacity` says). It is called only after the
    last one was yielded. ``whole`` are the numbers of tensors that are not cut.

    Raises PrecisionError if a tensor is not as announced, or comes twice.
    """
    pieces: list[Piece] = []
    room, used = buffer(), 0
    came: set[int] = set()
    for name, tensor in tensors:
        i = manifest.places.get(name)
        entry = same_as_announced(name, tensor, None if i is None else manifest[i])
        assert i is not None
        if i in came:
            raise PrecisionError(f"{name} came twice.", "A push writes every tensor once.", "Give every tensor once.")
        came.add(i)
        row, step = 0, entry.rows if i in whole else entry.step
        while row < entry.rows:
            fits = (room.numel() - used) // max(1, entry.row_bytes)
            rows = entry.rows - row if fits >= entry.rows - row else fits // step * step
            if rows == 0:
                yield pieces, used
                room, pieces, used = buffer(), [], 0
                continue
            _copy(tensor[row : row + rows] if entry.shape else tensor, room, used)
            pieces.append((i, row, rows, used))
            row, used = row + rows, aligned(used + rows * entry.row_bytes)
    if pieces:
        yield pieces, used


def pairs(tensors: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the (name, tensor) pairs of a mapping, or of an iterable of pairs."""
    return tensors.items() if isinstance(tensors, Mapping) else tensors


class Transport(Protocol):
    """The buffers of a push, and the way from them to the workers."""

    def open(self, push: str) -> list[Answer]:
        """Make sure, before the first byte, that the workers can be reached; return their answers."""

    def buffer(self, i: int) -> torch.Tensor:
        """Return buffer ``i`` of ``BUFFERS``, to be filled."""

    def deliver(self, i: int, pieces: Sequence[Piece], used: int, push: str) -> list[Answer]:
        """Have all workers write the pieces in the first ``used`` bytes of buffer ``i``; return their answers."""

    def close(self) -> None:
        """Free the buffers."""


class SharedMemory:
    """Delivers buffers as shared memory of the sender, which the workers read."""

    def __init__(self, control: Control, size: int) -> None:
        self.control = control
        self.shared = [Shared(size) for _ in range(BUFFERS)]

    def open(self, push: str) -> list[Answer]:
        """Have every worker map a buffer: it fails if one of them is on another host."""
        return self.deliver(0, [], 0, push)

    def buffer(self, i: int) -> torch.Tensor:
        return self.shared[i].tensor

    def deliver(self, i: int, pieces: Sequence[Piece], used: int, push: str) -> list[Answer]:
        message = {"push": push, "memory": self.shared[i].handle, "pieces": [list(piece) for piece in pieces]}
        return self.control.call("write", message)

    def close(self) -> None:
        for one in self.shared:
            one.close()


class Body:
    """Delivers buffers as the bodies of requests.

    Raises PrecisionError if the engine is not reached by requests.
    """

    def __init__(self, control: Control, size: int) -> None:
        if not isinstance(control, Carrier):
            raise PrecisionError(
                "transport='http' without a URL.",
                "An engine of this process takes no requests.",
                "Leave transport out.",
            )
        self.control = control
        self.buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(BUFFERS)]

    def open(self, push: str) -> list[Answer]:
        return []  # the server makes the shared memory, on the workers' host

    def buffer(self, i: int) -> torch.Tensor:
        return self.buffers[i]

    def deliver(self, i: int, pieces: Sequence[Piece], used: int, push: str) -> list[Answer]:
        return self.control.carry(
            {"push": push, "pieces": [list(piece) for piece in pieces]}, bytes_of(self.buffers[i][:used])
        )

    def close(self) -> None:
        self.buffers.clear()


def transport_of(name: str, control: Control, size: int) -> Transport:
    """Return the transport of that name; ``auto`` is shared memory if the engine may be on this host, else HTTP."""
    local = not isinstance(control, Carrier) or control.local
    ways: dict[str, Callable[[Control, int], Transport]] = {"memory": SharedMemory, "http": Body}
    if name == "auto":
        name = "memory" if local and hasattr(os, "memfd_create") else "http"
    return ways[name](control, size)


@torch.no_grad()
def _copy(source: torch.Tensor, room: torch.Tensor, offset: int) -> None:
    """Copy a tensor of any strides and device into a buffer, contiguously."""
    size = source.numel() * source.itemsize
    room[offset : offset + size].view(source.dtype).view(source.shape).copy_(source)


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


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
