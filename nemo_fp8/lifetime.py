"""Run processes that end with the one that started them, however it ends: a signal, Ctrl-C, an exception, or SIGKILL.

    with running(["torchrun", ...]) as process: ...           everything that the command started ends with the block
    with watched(): ...                                       the same for processes that a library starts, such as Ray
    with orderly(): ...                                       SIGTERM and SIGHUP end the block as Ctrl-C does
    python -I -S nemo_fp8/lifetime.py $PPID 5 bash demo.sh    running(), for a Makefile

Between this process and the command stands a small process, the keeper. Several times a second it looks whether its
parent is still there. It adopts descendants that lose their parent (PR_SET_CHILD_SUBREAPER), so a process cannot escape
by starting a session of its own, as torchrun's ranks do. When its parent is gone, or sends it SIGTERM, it asks the
command to end and then what is left below it, and after ``patience`` seconds it kills the rest: last Python's resource
trackers, which first remove what killed processes leave in /dev/shm. If the command ends by itself, its descendants
have as long to follow. If the keeper is killed, the kernel kills the command (PR_SET_PDEATHSIG).

Simpler ways fail: killing the process group misses new sessions; PR_SET_PDEATHSIG reaches children only, and already
when the *thread* that started them ends; the end of a pipe stays open in every process that was forked meanwhile. The
trade-off: a process of 10 MiB and 30 ms for each command. Adoption exists on Linux only: elsewhere the keeper ends the
descendants of the command, and misses those whose parents ended before.

The keeper runs this file by its path and without site-packages, so the file imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

PATIENCE = 3.0
"""Seconds that a command has to end by itself once it is asked."""
_TRACKER_PATIENCE = 2.0  # seconds more that a resource tracker has: it ends once those are dead that it works for
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


@contextmanager
def running(command: Sequence[str], *, patience: float = PATIENCE, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while the block lasts; yield the process, which ends as the command does.

    ``options`` are those of Popen. At the end of the block everything that the command started is ended, within
    ``patience`` seconds.
    """
    # A session of its own: Ctrl-C in a terminal reaches this process only, which passes it on.
    process = subprocess.Popen([*_keeper(patience), *command], start_new_session=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def watched() -> Iterator[None]:
    """End everything below this process if it ends within the block. On Linux, for commands only.

    A library must not use it: it cannot know what else its process has started. Code that starts processes ends them at
    the end of the block itself, and mostly also when this process is killed; Ray's agents outlive it by half a minute.
    """
    process = subprocess.Popen(_keeper(PATIENCE), start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _keeper(patience: float) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(patience)]


@contextmanager
def orderly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, and then the process: raise SystemExit(128 + signal number).

    A signal that the shell told us to ignore (``nohup``) stays ignored. For the main thread.
    """
    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not told:  # a second signal must not interrupt the cleanup that the first one began
            told.append(number)
            raise KeyboardInterrupt

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if told:
            raise SystemExit(128 + told[0])


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, which must be its parent's main thread."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


# ---------------------------------------------------------------------- the keeper


class _Keeper:
    """Watch a command for ``parent``."""

    def __init__(self, parent: int, patience: float, command: Sequence[str]) -> None:
        self.parent, self.patience = parent, patience
        self.told: list[int] = []
        self.ended: int | None = None
        """How the command ended, as ``wait`` tells it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.told.append(number))
        _prctl(_SET_CHILD_SUBREAPER, 1)
        self.command = _start(command)

    def keep(self) -> int:
        """Wait until the command has ended and nothing is left of it; return its wait status."""
        deadline: float | None = None
        asked: set[int] = set()
        while self._any_left():
            orphaned = os.getppid() != self.parent
            if deadline is None and (self.told or orphaned or self.ended is not None):
                deadline = time.monotonic() + self.patience
            if deadline is not None and time.monotonic() > deadline:
                _kill(_below(os.getpid()), deadline)
            elif (
                orphaned or signal.SIGTERM in self.told
            ):  # the other signals come from a terminal, which sends them to the command, too
                wanted = {self.command} if self.ended is None else _below(os.getpid())
                _send(signal.SIGTERM, wanted - asked)
                asked |= wanted
            time.sleep(0.05)
        return 0 if self.ended is None else self.ended

    def _any_left(self) -> bool:
        """Reap processes that have ended, the command or adopted ones; return whether any is left."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self.command:
                    self.ended = status
                if pid == 0:
                    return True
        return False


def _watch(parent: int, patience: float) -> None:
    """Remember all processes below the parent, and end those that are left when the parent is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    known: dict[int, bytes] = {}
    while os.getppid() == parent:
        known = {pid: started for pid in {*known, *_below(parent)} - {os.getpid()} if (started := _started(pid))}
        time.sleep(0.5)

    def left() -> list[int]:  # the number may belong to another process by now
        return [pid for pid, started in known.items() if _started(pid) == started]

    _send(signal.SIGTERM, left())
    deadline = time.monotonic() + patience
    while (pids := left()) and time.monotonic() < deadline + _TRACKER_PATIENCE:
        if time.monotonic() > deadline:
            _kill(pids, deadline)
        time.sleep(0.05)
    _kill(left(), deadline)


def _start(command: Sequence[str]) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with_parent()
        if os.getppid() == keeper:  # else the parent ended before prctl was called
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], list(command))
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    os._exit(127)


def _below(root: int) -> set[int]:
    """Return the children of a process, and theirs."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, new = set[int](), [root]
    while new:
        new = [child for pid in new for child in children.get(pid, [])]
        found.update(new)
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Map every process of this machine to its parent."""
    if not os.path.isdir("/proc/self"):
        for line in subprocess.run(
            ["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            pid, parent = map(int, line.split())
            yield pid, parent
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            yield int(name), int(file.read().rpartition(b")")[2].split()[1])


def _started(pid: int) -> bytes:
    """Return when a process was started, as Linux writes it; empty if it does not run."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        state, *_, started = file.read().rpartition(b")")[2].split()[:20]
        return b"" if state == b"Z" else started
    return b""


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _kill(pids: Iterable[int], deadline: float) -> None:
    """End processes by SIGKILL; resource trackers only ``_TRACKER_PATIENCE`` seconds after the deadline."""
    late = time.monotonic() > deadline + _TRACKER_PATIENCE
    _send(signal.SIGKILL, (pid for pid in pids if late or not _is_tracker(pid)))


def _is_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker of Python's ``multiprocessing``. Elsewhere than on Linux none is
    known."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"multiprocessing.resource_tracker" in file.read()
    return False


def _end_as(status: int) -> None:
    """End this process as another one did, for the process that waits for it."""
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # without a core dump of its own
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    _parent, _patience, *_command = sys.argv[1:]
    if _command:
        _end_as(_Keeper(int(_parent), float(_patience), _command).keep())
    _watch(int(_parent), float(_patience))
