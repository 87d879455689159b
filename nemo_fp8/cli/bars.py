"""Progress bars, on stderr, gone when they are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
