"""Progress bars, on stderr, gone when they are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count


@contextmanager
def byte_bar(heading: str = "") -> Iterator[Callable[[int], Callable[[int, str], None]]]:
    """A bar that counts bytes: ``start(total)`` gives the function that is told of each ``count`` and what it belongs to."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        *([TextColumn(heading)] if heading else []),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def start(total: int) -> Callable[[int, str], None]:
            task = bar.add_task("", total=total)
            return lambda count, name: bar.update(task, advance=count, description=name.removesuffix(".weight"))

        yield start


@contextmanager
def run_bars(runs: int, steps: int) -> Iterator[Callable[[str], Callable[[int, str], None]]]:
    """Two bars, of all runs and of the present one: ``start(name)`` gives the function that is told of a step and what to say of it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        everything = bars.add_task("", total=runs * steps)
        each = bars.add_task("", total=steps)
        begun = count()

        def start(name: str) -> Callable[[int, str], None]:
            before = next(begun) * steps
            bars.update(everything, completed=before)
            bars.reset(each, description=f"{name}: starting")

            def told(step: int, what: str) -> None:
                bars.update(everything, completed=before + step)
                bars.update(each, completed=step, description=f"{name}: {what}")

            return told

        yield start
