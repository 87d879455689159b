"""How the bytes of a push get to the workers: a buffer to fill, and a way to deliver what is in it.

    memory   the workers map the sender's buffer (:mod:`nemo_fp8.rollout.refit.memory`): same host, no copy on the way
    http     the buffer goes along with the message, as the body of a request; whoever takes it hands it to the workers through
             such memory of its own

Two buffers take turns, so that one is filled while the workers read the other. NCCL and CUDA IPC are not here: vLLM
runs those itself, and :mod:`nemo_fp8.rollout.in_vllm.reload_transfer` joins its engines to the same receiver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit.control import Answer, Carrier, Control
from nemo_fp8.rollout.refit.memory import BUFFERS, Shared
from nemo_fp8.rollout.refit.stream import Piece
from nemo_fp8.storage.safetensors import bytes_of


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
            raise PrecisionError("transport='http' without a URL.", "An engine of this process takes no requests.", "Leave transport out.")
        self.control = control
        self.buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(BUFFERS)]

    def open(self, push: str) -> list[Answer]:
        return []  # who takes the bytes makes the memory, on the host of the workers

    def buffer(self, i: int) -> torch.Tensor:
        return self.buffers[i]

    def deliver(self, i: int, pieces: Sequence[Piece], used: int, push: str) -> list[Answer]:
        return self.control.carry({"push": push, "pieces": [list(piece) for piece in pieces]}, bytes_of(self.buffers[i][:used]))

    def close(self) -> None:
        self.buffers.clear()


def transport_of(name: str, control: Control, size: int) -> Transport:
    """By name; ``auto`` takes shared memory wherever an engine may be on this host."""
    local = not isinstance(control, Carrier) or control.local
    ways: dict[str, Callable[[Control, int], Transport]] = {"memory": SharedMemory, "http": Body}
    if name == "auto":
        name = "memory" if local and hasattr(os, "memfd_create") else "http"
    return ways[name](control, size)
