"""Let workers answer a process that called them through an interface without answers, in memory of its own.

vLLM's weight-transfer API drops what a worker returns, and an exception there can end the engine. So the trainer sends
the handle of a mailbox with each call, and every worker writes its answer into the slot of its rank:

    slot = number of the call, length of the answer (8 bytes each), the answer as JSON

The call returns when all workers are done, so a letter is there by then, or the worker did not answer. A second letter
to the same call is another engine's: its worker writes that in the place of the first. Pages of the
memory exist once they are written, so slots are as large as the largest answer. Nothing in a letter is trusted: not its
length, and it is JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from typing import Any

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit.memory import Opened, Shared
from nemo_fp8.storage.safetensors import bytes_of

Answer = dict[str, Any]
MOST_WORKERS, SLOT = 256, 1 << 27  # about 500 bytes for each tensor of the longest manifest
_HEAD = struct.Struct("<QQ")
_TWO_ENGINES = (
    "Two engines answer one trainer.",
    "Its client calls several, and a push has one receipt, of the engine whose weights it has seen written.",
    "Make a trainer for each engine, with a client that calls that one alone.",
)


class Mailbox:
    """The caller's side: memory with a slot for each worker."""

    def __init__(self) -> None:
        self._shared = Shared(MOST_WORKERS * SLOT)
        self.number = 0
        """The number of the last call."""

    def address(self) -> dict[str, Any]:
        """Return where workers shall write the answers to the next call, as plain values."""
        self.number += 1
        return self._shared.handle | {"number": self.number}

    def answers(self) -> list[Answer]:
        """Return the answers of all workers to the last call, in the order of ranks.

        Raises PrecisionError if a worker wrote none.
        """
        first = self._answer(0)
        count = first.get("workers")
        if type(count) is not int or not 0 < count <= MOST_WORKERS:
            raise _unanswered(0, f"it says that it is one of {str(count)[:20]} workers")
        return [first, *(self._answer(rank) for rank in range(1, count))]

    def close(self) -> None:
        """Free the memory."""
        self._shared.close()

    def _answer(self, rank: int) -> Answer:
        slot = bytes_of(self._shared.tensor[rank * SLOT : (rank + 1) * SLOT])
        number, length = _HEAD.unpack(slot[: _HEAD.size])
        if number != self.number:
            raise _unanswered(rank, "it wrote nothing")
        if length > SLOT - _HEAD.size:
            raise _unanswered(rank, f"it wrote {length} bytes, more than there is room for")
        try:
            found = json.loads(bytes(slot[_HEAD.size : _HEAD.size + length]))
        except (ValueError, RecursionError) as error:
            raise _unanswered(rank, str(error)) from None
        if not isinstance(found, dict):
            raise _unanswered(rank, "it wrote no JSON object")
        return found


def write(address: Any, rank: int, answer: Answer) -> None:
    """Write a worker's answer. Raises PrecisionError if ``address``, which came from outside, is no mailbox."""
    Opened(address)  # the checks of memory that is read
    number = address.get("number")
    if (
        address["size"] != MOST_WORKERS * SLOT
        or type(number) is not int
        or not 0 <= number < 1 << 64
        or not 0 <= rank < MOST_WORKERS
    ):
        raise PrecisionError(
            f"{str(address)[:120]} is no mailbox for worker {rank}.",
            f"It has {MOST_WORKERS} slots of {SLOT} bytes, and a number.",
            "Push with nemo_fp8.rollout.refit.transfer.",
        )
    file = os.open(f"/proc/{address['pid']}/fd/{address['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # The process may have ended since, and another one may have its number: the name is that of this memory alone.
        if os.readlink(f"/proc/self/fd/{file}") == f"/memfd:{address['name']} (deleted)":
            start = rank * SLOT
            fcntl.lockf(file, fcntl.LOCK_EX, _HEAD.size, start)  # until it is closed
            before, _ = _HEAD.unpack(os.pread(file, _HEAD.size, start))
            text = json.dumps(answer | {"problems": [_TWO_ENGINES]} if before == number else answer).encode()
            if len(text) > SLOT - _HEAD.size:
                text = json.dumps(
                    {"problems": [["A worker's answer is too long.", f"{len(text)} bytes.", "Report it."]]}
                ).encode()
            os.pwrite(file, text, start + _HEAD.size)
            os.pwrite(file, _HEAD.pack(number, len(text)), start)
    finally:
        os.close(file)


def _unanswered(rank: int, why: str) -> PrecisionError:
    return PrecisionError(
        f"Worker {rank} did not answer.",
        f"Its answer would lie in this process's memory, but {why}.",
        "Look at the engine's log. Trainer and workers need one host, one user and one list of processes; push to "
        "another host with Refit(url).",
    )
