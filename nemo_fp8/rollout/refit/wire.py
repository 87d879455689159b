"""The bytes of a push: named tensors, cut into pieces that fit a buffer of a fixed size, and the way of a buffer to the
workers.

    piece = (number of its tensor in the manifest, first row, rows, offset in the buffer)

Matrices are cut between rows of blocks, so that a worker can quantize every piece as it comes; everything else between
the slabs of its first dimension. A tensor that some worker needs in one piece is not cut at all. Pieces of one tensor
come in order. So the memory a push takes does not depend on the size of the model, nor on that of its largest tensor.

    memory   the workers map the sender's buffer (:mod:`nemo_fp8.rollout.refit.memory`): same host, no copy on the way
    http     the buffer goes along with the message, as the body of a request; whoever takes it hands it to the workers
             through such memory of its own

Two buffers take turns: one is filled while the workers read the other. NCCL and CUDA IPC are not here: vLLM runs those
itself, and :mod:`nemo_fp8.rollout.refit.worker.transfer` joins its engines to the same receiver.
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

ALIGNMENT = 64
Piece = tuple[int, int, int, int]


def capacity(manifest: Manifest, wanted: int, whole: Collection[int] = ()) -> int:
    """The size of buffer that a push needs: what is wanted, or less for a small model, or what cannot be cut
    smaller."""
    parts = (e.bytes if i in whole else min(e.step, e.rows) * e.row_bytes for i, e in enumerate(manifest))
    everything = sum(_aligned(e.bytes) for e in manifest)
    return max(ALIGNMENT, min(wanted, everything), max(map(_aligned, parts), default=0))


def cut(
    tensors: Iterable[tuple[str, torch.Tensor]],
    manifest: Manifest,
    buffer: Callable[[], torch.Tensor],
    whole: Collection[int] = (),
) -> Iterator[tuple[list[Piece], int]]:
    """Fill buffers with the tensors' bytes; yields what lies in each and how many bytes that is.

    ``buffer()`` gives the next one to fill (uint8, as large as :func:`capacity` says), after the last was yielded.
    """
    pieces: list[Piece] = []
    room, used = buffer(), 0
    came: set[int] = set()
    for name, tensor in tensors:
        i = manifest.places.get(name)
        entry = _same(name, tensor, None if i is None else manifest[i])
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
            row, used = row + rows, _aligned(used + rows * entry.row_bytes)
    if pieces:
        yield pieces, used


def pairs(tensors: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """A mapping or an iterator of pairs, as an iterator of pairs."""
    return tensors.items() if isinstance(tensors, Mapping) else tensors


class Transport(Protocol):
    """Buffers of a push, and the way from them to the workers."""

    def open(self, push: str) -> list[Answer]: ...

    def buffer(self, i: int) -> torch.Tensor: ...

    def deliver(self, i: int, pieces: Sequence[Piece], used: int, push: str) -> list[Answer]: ...

    def close(self) -> None: ...


class SharedMemory:
    """Hands weights over in shared memory of the sender, which workers read."""

    def __init__(self, control: Control, size: int) -> None:
        self.control = control
        self.shared = [Shared(size) for _ in range(BUFFERS)]

    def open(self, push: str) -> list[Answer]:
        """Have every worker map a buffer, before the first byte: not all of them need be on this host."""
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
    """The bytes go along with the message that says what they are."""

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
        return []  # who takes the bytes makes the memory, on the host of the workers

    def buffer(self, i: int) -> torch.Tensor:
        return self.buffers[i]

    def deliver(self, i: int, pieces: Sequence[Piece], used: int, push: str) -> list[Answer]:
        return self.control.carry(
            {"push": push, "pieces": [list(piece) for piece in pieces]}, bytes_of(self.buffers[i][:used])
        )

    def close(self) -> None:
        self.buffers.clear()


def transport_of(name: str, control: Control, size: int) -> Transport:
    """By name; ``auto`` takes shared memory wherever an engine may be on this host."""
    local = not isinstance(control, Carrier) or control.local
    ways: dict[str, Callable[[Control, int], Transport]] = {"memory": SharedMemory, "http": Body}
    if name == "auto":
        name = "memory" if local and hasattr(os, "memfd_create") else "http"
    return ways[name](control, size)


@torch.no_grad()
def _copy(source: torch.Tensor, room: torch.Tensor, offset: int) -> None:
    size = source.numel() * source.itemsize
    room[offset : offset + size].view(source.dtype).view(source.shape).copy_(source)


def _same(name: str, tensor: torch.Tensor, entry: Entry | None) -> Entry:
    """The entry of a tensor that came, which must be what was announced."""
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


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
