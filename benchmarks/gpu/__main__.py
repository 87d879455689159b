"""Measure FP8 on a GPU, each measure in a process of its own: one that dies, hangs or breaks CUDA takes nothing with
it.

    make gpu                                          everything, into docs/benchmarks and tests/golden
    make gpu PART=kernels                             one part
    python3 -m benchmarks.gpu kernels --only casts    some measures of it, into out/gpu
    python -m benchmarks.gpu --cpu                    the same code on small shapes without a GPU, into out/gpu

With ``--cpu`` TransformerEngine runs on ``nemo_fp8.te_cpu``, and the CPU is its GPU: that tries every line but those of
CUDA graphs, and its numbers mean nothing. A measure that takes longer than ``--limit`` seconds is ended; what it had
found by then is kept.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_fp8.lifetime import running

from . import parts, report

# Where a measure finds what is not in this folder: our package, and the format of golden vectors.
PLACES = (parts.ROOT, parts.ROOT / "tests" / "golden")


def measured(part: str, name: str, folder: Path, cpu: bool, limit: float) -> dict[str, Any]:
    """Run one measure, in a process of its own."""
    child = [sys.executable, "-u", "-W", "ignore", "-m", "benchmarks.gpu.measuring"]
    return outcome([*child, part, name, str(folder), *["--cpu"] * cpu], limit)


def outcome(command: Sequence[str], limit: float) -> dict[str, Any]:
    """Return what a command wrote into the file that is its last argument, or why it wrote nothing."""
    path = os.pathsep.join([*map(str, PLACES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as scratch:
        found, log, why = Path(scratch) / "found.json", Path(scratch) / "log", ""
        started = time.monotonic()
        output = {"stderr": subprocess.STDOUT, "env": os.environ | {"PYTHONPATH": path}}
        with log.open("w") as said, running([*command, str(found)], stdout=said, **output) as process:
            try:
                code = process.wait(limit)
                why = f"the process ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                why = f"ended after {limit:g} s"
        told = parts.read(found)
        if "error" not in told and (why or not told):
            last = log.read_text(errors="replace").splitlines()[-5:]
            told["error"] = " | ".join([why or "it wrote nothing", *last])[:600]
        return told | {"seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", help=f"some of {', '.join(parts.PARTS)}; all of them by default")
    parser.add_argument("--only", help="some measures of these parts, named as in parts.py, between semicolons")
    parser.add_argument("--cpu", action="store_true", help="a dry run on small shapes, without a GPU")
    parser.add_argument("--out", type=Path, help="the folder of records and golden vectors")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one measure may take")
    options = parser.parse_args()
    if unknown := set(options.part).difference(parts.PARTS):
        parser.error(f"there is no {', '.join(unknown)}; the parts are {', '.join(parts.PARTS)}")
    chosen = {part: parts.PARTS[part].measures for part in options.part or parts.PARTS}
    only = set(options.only.split(";")) if options.only else set().union(*chosen.values())
    if unknown := only.difference(*chosen.values()):
        known = "; ".join(itertools.chain(*chosen.values()))
        parser.error(f"there is no {'; '.join(unknown)}; the measures are {known}")
    if not options.cpu and (lacking := parts.missing()):
        sys.exit(
            f"make gpu cannot begin: {sys.executable} lacks {', '.join(lacking)}.\n"
            "It measures TransformerEngine's kernels and ours beside them, on a GPU.\n"
            "Install them with torch there already (TransformerEngine is compiled, with CUDA's nvcc, in minutes):\n"
            f"  {sys.executable} {parts.PIP}"
        )
    real = not (options.cpu or options.only or options.out)
    folder = parts.DOCS if real else (options.out or parts.ROOT / "out" / "gpu").resolve()
    golden = parts.GOLDEN if real else folder
    folder.mkdir(parents=True, exist_ok=True)
    about = parts.about(shlex.join(["python3", "-m", "benchmarks.gpu", *sys.argv[1:]]), options.cpu)
    failed = 0
    for part, names in chosen.items():
        record: dict[str, Any] = {"about": about, "measures": {}}
        for name in filter(only.__contains__, names):
            told = measured(part, name, golden, options.cpu, options.limit)
            record["measures"][name] = told
            parts.write(folder / f"gpu_{part}.json", record)
            failed += "error" in told
            said = told.get("error") or told.get("skipped") or "done"
            print(f"{part}, {name}: {said} ({told['seconds']} s)", flush=True)
    report.write(folder, golden)
    sys.exit(f"{failed} measures failed." if failed else None)


if __name__ == "__main__":
    main()
