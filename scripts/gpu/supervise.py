"""Run one GPU script so that no part of it takes another along: a crash, a hang, a broken CUDA context cost that part
alone.

    python3 scripts/gpu/supervise.py SECONDS kernels.py [arguments]

A script notes in its record which part it began and how long that may take. One that overstays is ended, one that dies
is noted with its exit code, and the script is started again: with --resume it leaves out what has an outcome already.
(After an illegal memory access every later call of the same process fails, so going on in it would lose all parts that
follow.) When SECONDS are over all is ended. The price is half a second between two looks, and Python's and torch's
start after each such end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

import records  # noqa: E402

LOOK = 0.5  # seconds between two looks at the record
GRACE = 5.0  # beyond a part's budget, to write down what it found
PATIENCE = 2  # deaths outside of any part, before giving up


def supervise(script: Path, arguments: list[str], file: Path, seconds: float) -> int:
    """Start it until every part has an outcome or the time is over; the exit code of the last start."""
    deadline, deaths = time.monotonic() + seconds, 0
    file.unlink(missing_ok=True)
    while True:
        began = time.monotonic()
        code, why = _once([sys.executable, "-W", "ignore", str(script), *arguments, "--resume"], file, deadline)
        if code in (0, 1) and not why:
            return code
        record = records.read(file)
        name, _ = records.running(record)
        if name is not None:
            record["parts"][name] = {
                "error": why or f"the process ended with {code}",
                "where": Path(__file__).name,
                "seconds": None,
            }
            records.write(file, record)
        elif code != records.AGAIN:
            deaths += 1
        print(f"supervisor: {script.name}{f', {name}' if name else ''}: {why or f'exit code {code}'}", flush=True)
        if time.monotonic() > deadline or deaths >= PATIENCE:
            return 1
        arguments = _with_less_time(arguments, time.monotonic() - began)


def _once(command: list[str], file: Path, deadline: float) -> tuple[int, str]:
    """One start of the script: its exit code, and why it was ended, if it was."""
    process = subprocess.Popen(command, start_new_session=True)
    why = ""
    while process.poll() is None and not why:
        time.sleep(LOOK)
        name, note = records.running(records.read(file))
        if time.monotonic() > deadline:
            why = "ended: the time for this script was over"
        elif name is not None and time.time() > note["since"] + note["budget"] + GRACE:
            why = f"ended after the {note['budget']:g} s that it may take"
    if why:
        os.killpg(process.pid, signal.SIGKILL)  # what waits for a GPU hears no gentler signal
    return process.wait(), why


def _with_less_time(arguments: list[str], spent: float) -> list[str]:
    """A script counts its --limit from its own start."""
    if "--limit" not in arguments:
        return arguments
    at = arguments.index("--limit") + 1
    return [*arguments[:at], f"{float(arguments[at]) - spent:.0f}", *arguments[at + 1 :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("script")
    options, arguments = parser.parse_known_args()
    places = argparse.ArgumentParser()
    places.add_argument("--out", type=Path)
    out = places.parse_known_args(arguments)[0].out
    script = FOLDER / options.script
    sys.exit(supervise(script, arguments, records.folder(out) / f"{script.stem}.json", options.seconds))


if __name__ == "__main__":
    main()
