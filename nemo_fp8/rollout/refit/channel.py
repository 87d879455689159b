"""Talk to the workers of an engine on this host past vLLM's scheduler: one call of theirs lasts for a whole push.

    sender    Channel     listens on a socket, sends messages to all workers, and waits for what they answer
    worker    Line        connects to it, and answers each message with one byte when it has done what it says

A call of vLLM goes from the sender to EngineCore, from there to the workers, and back. A push that made one for each of
its buffers would wait for four processes to be woken each time. A message here wakes the worker, and it has the next
one before it is done with the first. The trade-off: EngineCore waits for the call, and does nothing else meanwhile. It
must not, since weights change.

The socket has a random name that is no file's ("abstract"), so nothing is left of it if the sender is killed; the
kernel then closes it, and the workers' calls end. Sender and worker must be of one user, or the worker root's, as for
shared memory. A worker takes nothing from it but JSON, of a bounded size.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit.memory import NAME

LARGEST = 1 << 16  # bytes of a message; the kernel takes twice as many by default
LOOK = 0.2  # seconds between two checks of whether the workers' call has ended
LATEST = 60.0  # seconds from the first worker that connects to the last
UNREAD = 32  # answers that may wait for the sender: the kernel has room for 70 of a worker that does not wait for ever
DONE, FAILED = b"+", b"-"
_END = b"{}"


class Ended(Exception):
    """Raised where a worker has ended its call: the answer to the call says why."""


class Channel:
    """The sender's side. ``ended`` says whether the workers' call has ended; then nobody is waited for."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self.name, self.ended = f"{NAME}-{secrets.token_hex(16)}", ended
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.door.settimeout(LOOK)
        self.door.bind(f"\0{self.name}")
        self.door.listen(1024)
        self.lines: list[socket.socket] = []

    def connect(self, workers: int) -> None:
        """Wait until all workers have connected. Raises Ended if their call ends before, or one stays away.

        The call has one answer for all: a worker that cannot connect is not heard of while another one streams.
        """
        first = math.inf
        while len(self.lines) < workers:
            try:
                line, _ = self.door.accept()
            except TimeoutError:
                if self.ended() or time.monotonic() > first + LATEST:
                    raise Ended from None
                continue
            first = min(first, time.monotonic())
            if _user(line) in (os.geteuid(), 0):  # else it could not map the memory either
                line.settimeout(LOOK)
                self.lines.append(line)
            else:
                line.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to every worker. Raises Ended if one of them has ended its call."""
        self._send(json.dumps(message).encode())

    def end(self) -> None:
        """Tell the workers that no message follows."""
        self._send(_END)

    def wait(self) -> None:
        """Wait until all workers have done what the oldest unanswered message says. Raises Ended if one could not."""
        for line in self.lines:
            while True:
                try:
                    answer = line.recv(1)
                    break
                except TimeoutError:
                    if self.ended():
                        raise Ended from None
                except OSError:
                    raise Ended from None
            if answer != DONE:
                raise Ended

    def close(self) -> None:
        """Close all sockets; a worker that still waits for a message ends its call."""
        for one in (self.door, *self.lines):
            one.close()

    def _send(self, text: bytes) -> None:
        for line in self.lines:
            while True:
                try:
                    line.send(text)
                    break
                except TimeoutError:  # its queue is full
                    if self.ended():
                        raise Ended from None
                except OSError:
                    raise Ended from None


class Line:
    """The worker's side: ``name`` came from outside. ``silence`` is after how many seconds the sender counts as dead.

    Raises PrecisionError if it is not that of a ``Channel`` of this user on this host.
    """

    def __init__(self, name: Any, silence: float | None = None) -> None:
        if not isinstance(name, str) or not name.startswith(f"{NAME}-") or len(name) > 100:
            raise _refused(name, "It is not one that a Refit made")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.settimeout(silence)
            self.socket.connect(f"\0{name}")
            if os.geteuid() not in (_user(self.socket), 0):
                raise _refused(name, "It belongs to another user")
        except OSError as error:
            self.socket.close()
            raise _refused(name, f"It cannot be reached: {error.strerror}. Both sides need one network") from None
        except PrecisionError:
            self.socket.close()
            raise

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the sender ends, or goes away: the push then lacks what did not come.

        Each is answered when the next one is asked for. Raises PrecisionError if nothing comes for too long, or
        something that is no message.
        """
        while True:
            try:
                text = self.socket.recv(LARGEST + 1)
            except TimeoutError:
                told = f"Nothing came for {self.socket.gettimeout():.0f} seconds."
                raise PrecisionError("The sender of a push is silent.", told, "Push again.") from None
            except OSError:
                return
            if text in (b"", _END):
                return
            message = json.loads(text) if len(text) <= LARGEST else None
            if not isinstance(message, dict):
                raise PrecisionError(
                    "A message of a push cannot be read.", "It is no JSON object.", "Push with nemo_fp8.rollout.Refit."
                )
            yield message
            try:
                self.socket.send(DONE)
            except TimeoutError:
                raise PrecisionError(
                    "The sender of a push takes no answers.",
                    f"It read none for {self.socket.gettimeout():.0f} seconds.",
                    "Push again.",
                ) from None
            except OSError:
                pass  # the sender went away, which the next message shows

    def fail(self) -> None:
        """Tell the sender to look at the answer of the call, which has the problem."""
        with suppress(OSError):
            self.socket.send(FAILED)

    def close(self) -> None:
        """Close the connection, by which the sender sees that this worker left."""
        self.socket.close()


def _user(line: socket.socket) -> int:
    """Return the user of the process at the other end."""
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def _refused(name: Any, why: str) -> PrecisionError:
    return PrecisionError(
        f"The socket {str(name)[:120]} is refused.",
        f"{why}.",
        "Push from the same host, user and container, or over HTTP with Refit(url, transport='http').",
    )
