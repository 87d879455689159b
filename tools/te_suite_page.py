"""The results of ``te_suite`` as data and as a page: counts of every file, and every failure with its cause.

A cause is a row of :data:`CAUSES`: words of the file and test, words of the error, and what it is. A failure that no row explains is
listed as unexplained, with its error. So a row says only what was found out; ``ours`` marks those that are the implementation's to mend.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA, PAGE = "te_suite.json", "te_suite.md"


@dataclass(frozen=True)
class Cause:
    """Why tests fail whose ``file::test`` and whose error line these patterns find."""

    test: str
    error: str
    why: str
    ours: bool = False


CAUSES: tuple[Cause, ...] = (Cause("", r"CUDAGraph|cuda graph|_cuda_beginAllocate|graph_pool", "needs CUDA graphs"),)


def cause_of(file: str, test: str, line: str) -> str | None:
    """Why this test failed, if it is known."""
    for cause in CAUSES:
        if re.search(cause.test, f"{file}::{test}") and re.search(cause.error, line):
            return cause.why + (" (ours to write)" if cause.ours else "")
    return None


def join(folder: Path, arch: int, file: str, found: dict[str, Any]) -> None:
    """Put one file's results among those of the runs before, and draw the page."""
    path = folder / DATA
    results = json.loads(path.read_text()) if path.exists() else {}
    results.setdefault(str(arch), {})[file] = found
    path.write_text(json.dumps({a: dict(sorted(results[a].items())) for a in sorted(results, reverse=True)}, indent=1) + "\n")
    folder.joinpath(PAGE).write_text(page(results))


def page(results: dict[str, dict[str, Any]]) -> str:
    """The page."""
    return "\n".join([_HEAD, *_counts(results), "", *_causes(results), *_unexplained(results), *_skips(results)]) + "\n"


_HEAD = """# TransformerEngine's own tests on the CPU implementation

Written by `tools/te_suite.py` from `te_suite.json`, which holds every failure by its name; do not edit. A row again, its whole file:

```text
PYTHONPATH=.te_cpu .venv/bin/python tools/te_suite.py CHECKOUT --only FILE
```

CHECKOUT is a copy of TransformerEngine's public repository; of it only `tests/pytorch` is used, and TE itself is the wheel of 2.20.2.
*Sample* is how many of a file's tests were run, chosen at random with seed 0 (with `--sample`), and *limits* the seconds for the file and
for a test. Tests of matrices with a side of 8192 or more are left out. *Not reached* are tests that the file's limit cut off.
"""


def _counts(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| file | GPU | passed | failed | skipped | not reached | sample | limits |", "|---|---|---|---|---|---|---|---|"]
    totals = {arch: [0, 0, 0] for arch in results}
    for file in sorted({file for files in results.values() for file in files}):
        for arch, files in results.items():
            if file in files:
                r = files[file]
                sums = [r["passed"], r["failed"], r["skipped"]]
                totals[arch] = [a + b for a, b in zip(totals[arch], sums, strict=True)]
                cells = [file.removesuffix(".py"), f"sm{arch}", *sums, r["not_reached"] or "", r["sample"] or "all"]
                lines.append(f"| {' | '.join(map(str, cells))} | {r['limit']}, {r['test_limit']} |")
    lines += [f"| **all** | sm{arch} | {' | '.join(f'**{n}**' for n in sums)} | | | |" for arch, sums in totals.items()]
    return lines


def _failures(results: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [
        (arch, file, test, line)
        for arch, files in results.items()
        for file, found in files.items()
        for test, line in found["failures"].items()
    ]


def _causes(results: dict[str, dict[str, Any]]) -> list[str]:
    by_cause: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for arch, file, test, line in _failures(results):
        cause = cause_of(file, test, line)
        if cause:
            by_cause[cause][file.removesuffix(".py")].append(arch)
    lines = ["## Failures whose cause is known", "", "| cause | tests |", "|---|---|"]
    for cause, files in sorted(by_cause.items(), key=lambda row: -sum(map(len, row[1].values()))):
        lines.append(f"| {cause} | {', '.join(f'{file} {len(archs)}' for file, archs in sorted(files.items()))} |")
    return [*lines, ""] if by_cause else []


def _unexplained(results: dict[str, dict[str, Any]]) -> list[str]:
    unknown = [row for row in _failures(results) if cause_of(row[1], row[2], row[3]) is None]
    if not unknown:
        return ["No failure is unexplained.", ""]
    lines = ["## Unexplained", ""]
    for arch, file, test, line in unknown:
        lines.append(f"- `{file}::{test}` (sm{arch}): {_plain(line)}")
    return [*lines, ""]


def _skips(results: dict[str, dict[str, Any]]) -> list[str]:
    reasons: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for arch, files in results.items():
        for found in files.values():
            for reason, n in found["skips"].items():
                reasons[_plain(reason.removeprefix("Skipped: "))][arch] += n
    lines = ["## Skipped, in TE's own words", "", "| reason | tests |", "|---|---|"]
    for reason, archs in sorted(reasons.items(), key=lambda row: -sum(row[1].values())):
        lines.append(f"| {reason} | {', '.join(f'{n} (sm{arch})' for arch, n in archs.items())} |")
    return lines if reasons else []


def _plain(text: str) -> str:
    """Text that a table of Markdown can hold."""
    return re.sub(r"([|<>*_`])", r"\\\1", text[:240])
