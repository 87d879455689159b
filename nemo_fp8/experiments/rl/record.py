"""The record of a run: one line of JSON a step, of which a run that goes on keeps what it has not to do again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Record:
    """Lines of ``{"step": ..., ...}``, written as they come."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_record(path) if row["step"] < step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.replace(path)
        self._file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        """Append one step as a JSON line and flush."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def read_record(path: Path) -> list[dict[str, Any]]:
    """Return the steps of a record, without one that a killed run left unfinished; none if there is no file."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
