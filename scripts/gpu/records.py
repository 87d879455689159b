"""A script's record on disk, and the notes that pass through it between a script and its supervisor. Standard library
only.

A record is JSON: ``about`` says where its numbers come from, ``parts`` maps each part to one of

    {"running": {"since", "budget"}}      begun, and how many seconds it may take
    {"result": ..., "seconds": ...}       what it found
    {"skipped": why}                      it does not apply here, or came too late
    {"error": ..., "where": ...}          it failed, died or was ended

It is written anew at each step, in one piece, so that whoever reads it finds a whole one at any time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUNNING = "running"
AGAIN = 75  # exit code: start me again, this process is no good any more


def folder(out: Path | None) -> Path:
    """Where records go: what was asked for, else ``$OUT``, else out/gpu."""
    return out or Path(os.environ.get("OUT") or ROOT / "out" / "gpu")


def read(file: Path) -> dict[str, Any]:
    """The record, or an empty one."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return {"about": {}, "parts": {}} | found


def write(file: Path, record: dict[str, Any]) -> None:
    """The record, whole at any time."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1))
    partial.replace(file)


def running(record: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The part that was begun and has no outcome, with its note."""
    return next(((name, part[RUNNING]) for name, part in record["parts"].items() if RUNNING in part), (None, {}))
