"""Print for people and for scripts: tables that fit 80 columns, sentences with headings, errors, JSON.

Text is escaped for rich, which would read names such as ``[128, 128]`` as markup.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nemo_fp8.errors import Problem

_STYLES = {
    "native": "green",
    "emulated": "cyan",
    "unsupported": "red",
    "unknown": "yellow",
    "error": "bold red",
    "warning": "yellow",
    "info": "cyan",
}


def word(value: Any) -> str:
    """Return a value as text for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == []:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout. JSON has no word for NaN and infinities, which become null."""
    sys.stdout.write(json.dumps(_in_json(value), indent=2, default=str, allow_nan=False) + "\n")


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
    """Print a table with a heading for each column; the first column names the rows."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption=caption or None,
        caption_justify="left",
    )
    for i, column in enumerate(columns):
        table.add_column(escape(column), overflow="fold", style="bold" if i == 0 else None)
    for row in rows:
        table.add_row(*(escape(word(cell)) for cell in row))
    Console(highlight=False).print(table)


def print_pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Print headings and their sentences, in two columns."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, sentence in rows:
        table.add_row(escape(heading), escape(sentence))
    Console(highlight=False).print(table)


def print_answers(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Print verdicts, each with its reason and its remedy below it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for about, verdict, reason, remedy in rows:
        style = _STYLES.get(verdict, "bold")
        table.add_row("", "")
        table.add_row(f"[{style}]{escape(verdict)}[/]", f"[bold]{escape(about)}[/]")
        table.add_row("", escape(reason))
        if remedy:
            table.add_row("[dim]remedy[/]", escape(remedy))
    Console(highlight=False).print(table)


def print_findings(findings: Iterable[Problem]) -> None:
    """Print findings with their severity, code, cause and remedy."""
    print_answers((f"{f.what} [{f.code}]" if f.code else f.what, f.severity, f.why, f.remedy) for f in findings)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr, so that stdout can be piped into a file."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}")


def print_problems(problems: Iterable[Problem]) -> None:
    """Print errors on stderr: what, why, remedy."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(f"[bold red]error[/]: {escape(problem.what)}\n  [dim]why:[/]    {escape(problem.why)}")
        console.print(f"  [green]remedy:[/] {escape(problem.remedy)}")
