"""Show the progress of long work on stderr: bars in a terminal, removed at the end, and plain lines in a log.

    bf16_mixed, seed 1234: 30 of 150, loss 4.123, 12:30 left

A line is printed at the start, at every tenth but at most once a second, at the end, and after ten seconds without a
line, so that a log that stops means a process that hangs. The time left is estimated from the pace so far.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

EVERY, NOT_WITHIN = 10.0, 1.0
"""Seconds: the longest time without a line, and the shortest time between two lines for tenths."""


@contextmanager
def byte_bar(heading: str = "") -> Iterator[Callable[[int], Callable[[int, str], None]]]:
    """Count bytes: ``start(total)`` returns a function that is called with each number of bytes and their name."""
    if not _in_terminal():
        with _Lines(lambda done, total: f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB") as lines:

            def start_lines(total: int) -> Callable[[int, str], None]:
                lines.start(heading or "reading", total)
                return lambda count, name: lines.tell(lines.done + count, name.removesuffix(".weight"))

            yield start_lines
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        *([TextColumn(heading)] if heading else []),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=_console(), transient=True) as bar:

        def start(total: int) -> Callable[[int, str], None]:
            task = bar.add_task("", total=total)
            return lambda count, name: bar.update(task, advance=count, description=name.removesuffix(".weight"))

        yield start


@contextmanager
def run_bars(runs: int, steps: int) -> Iterator[Callable[[str], Callable[[int, str], None]]]:
    """Count steps of all runs and of the current one.

    ``start(name)`` begins a run, and returns a function that is called with each step and a text about it.
    """
    begun = -1
    if not _in_terminal():
        with _Lines(lambda done, total: f"{done} of {total}") as lines:

            def start_lines(name: str) -> Callable[[int, str], None]:
                nonlocal begun
                begun += 1
                lines.start(name, steps, before=begun, of=runs)
                return lines.tell

            yield start_lines
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=_console(), transient=True) as bars:
        everything = bars.add_task("", total=runs * steps)
        each = bars.add_task("", total=steps)

        def start(name: str) -> Callable[[int, str], None]:
            nonlocal begun
            begun += 1
            before = begun * steps
            bars.update(everything, completed=before)
            bars.reset(each, description=f"{name}: starting")

            def told(step: int, what: str) -> None:
                bars.update(everything, completed=before + step)
                bars.update(each, completed=step, description=f"{name}: {what}")

            return told

        yield start


@contextmanager
def step_bar(heading: str, steps: int) -> Iterator[Callable[[], None]]:
    """Count to ``steps``; yields a function that is called for each step."""
    if not _in_terminal():
        with _Lines(lambda done, total: f"{done} of {total}") as lines:
            lines.start(heading, steps)
            yield lambda: lines.tell(lines.done + 1)
        return
    from rich.progress import Progress

    with Progress(console=_console(), transient=True) as bar:
        task = bar.add_task(heading, total=steps)
        yield lambda: bar.advance(task)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that work is going on which reports no progress until it is done."""
    if not _in_terminal():
        with _Lines(lambda done, total: "") as lines:
            lines.start(what, 1)
            yield
        return
    with _console().status(what):
        yield


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _in_terminal() -> bool:
    """Return whether stderr can show a bar."""
    return sys.stderr.isatty() and not _console().is_dumb_terminal


class _Lines:
    """Prints progress as plain lines. ``count`` makes a text of what is done and the total."""

    def __init__(self, count: Callable[[int, int], str]) -> None:
        self.count = count
        self.done = self.total = self.before = 0
        self.of = 1
        self._heading = self._what = ""
        self._started = self._said = time.monotonic()
        self._tenth = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._clock = threading.Thread(target=self._break_silence, name="progress", daemon=True)

    def __enter__(self) -> _Lines:
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._clock.join()

    def start(self, heading: str, total: int, before: int = 0, of: int = 1) -> None:
        """Begin to count to ``total``: one of ``of`` equal parts of the work, of which ``before`` are done."""
        with self._lock:
            self._heading, self.total, self.before, self.of = heading, total, before, of
            self.done = self._tenth = 0
            self._what = "starting"
            self._say()

    def tell(self, done: int, what: str = "") -> None:
        """Set how much is done, and the text about it."""
        with self._lock:
            self.done, self._what = done, what
            tenth = 10 * done // self.total if self.total else 10
            if tenth > self._tenth and (tenth >= 10 or time.monotonic() - self._said >= NOT_WITHIN):
                self._tenth = tenth
                self._say()

    def _break_silence(self) -> None:
        while not self._over.wait(max(0.01, self._said + EVERY - time.monotonic())):
            with self._lock:
                if self._heading and time.monotonic() - self._said >= EVERY:
                    self._say()

    def _say(self) -> None:
        now = self._said = time.monotonic()
        parts = [self.count(self.done, self.total) if self.done else "", self._what, self._left(now)]
        sys.stderr.write(f"{self._heading}: {', '.join(part for part in parts if part)}\n")
        sys.stderr.flush()

    def _left(self, now: float) -> str:
        passed, share = now - self._started, (self.before + self.done / max(1, self.total)) / self.of
        if not self.done:
            return f"{_clock(passed)} so far" if passed >= 1 else ""
        return f"{_clock(passed * (1 - share) / share)} left" if share < 1 else f"{_clock(passed)} in all"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
