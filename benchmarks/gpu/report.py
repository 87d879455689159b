"""From the records to docs/benchmarks/gpu.md: what is measured, what is missing, what was checked without a GPU.
Standard library only.

python -m benchmarks.gpu.report            write the page from the records that lie beside it
python -m benchmarks.gpu.report --check    say whether it is up to date
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from . import parts

HEAD = """# On a GPU

Written by `benchmarks/gpu/report.py` from the records beside this page; do not edit. On an H100, H200 or B200:

```bash
make gpu                        # all of it; with another Python: make gpu PYTHON=/opt/te/bin/python
make gpu PART=kernels           # one of {parts}
```

That Python needs TransformerEngine and megatron-core; where one is missing, `make gpu` names it and the line of pip that installs it. Each
measure runs in a process of its own, fifteen minutes at most: one that fails takes nothing with it, and what it had found is kept.
"""
CHECKED = """## What was checked without a GPU

`.venv/bin/python -m benchmarks.gpu --cpu` runs all of it with TransformerEngine 2.20.2 on `nemo_fp8.te_cpu`, on small shapes. The CPU stands
for Blackwell there, and for Hopper in the measures named after blocks with FP32 scales, which Hopper alone has; with `NEMO_FP8_TE_CPU=90` it
stands for Hopper in all. `tests/gpu` holds it to that:

- every call of TE's quantizers, layers, recipes and states, and the layouts in which codes and scales come back;
- whole steps of megatron-core 0.15.3 under each recipe, with FP8 weights and with experts;
- recording golden vectors, and the tests that hold our numerics to them;
- a measure that fails, dies or takes too long: the others go on, and what it had found is kept.

Our Triton kernels are compiled for sm_90, sm_100 and sm_120 in every run of the suite ([a bound on their time](triton.md)), and run in
Triton's interpreter.

What is missing yet is of Blackwell: golden vectors and times of MXFP8 and NVFP4, whose conversion in hardware has never run. On no GPU was
tried: `torch.compile`, and more GPUs than one.
"""


def page(docs: Path, golden: Path) -> str:
    """Return the document, from the records in a folder and the golden vectors in another."""
    records = {name: parts.read(docs / f"gpu_{name}.json") for name in parts.PARTS}
    out = [HEAD.format(parts=", ".join(parts.PARTS)), _state(records, golden)]
    for name, record in records.items():
        if record:
            runs = parts.runs(record)
            out += [f"## {parts.PARTS[name].title}\n", *_about([run["about"] for run in runs])]
            found = [{each: m["result"] for each, m in run["measures"].items() if "result" in m} for run in runs]
            out += ["\n".join(TELL[name](*found)).strip() + "\n", _without(parts.measured(record))]
    return "\n".join([*filter(None, out), CHECKED])


def _about(runs: list[dict[str, Any]]) -> list[str]:
    """Return where the numbers come from: of one run line by line, of each of several in a line."""
    dry = ["- A DRY RUN without a GPU: the numbers mean nothing."] if any(about["dry_run"] for about in runs) else []
    told = [
        [*(f"{what}: {about[what]}" for what in ("date", "machine", "versions")), f"command: `{about['command']}`\n"]
        for about in runs
    ]
    if len(told) == 1:
        return [*dry, *(f"- {line}" for line in told[0])]
    each = [f"- run {number}, {'; '.join(lines)}".strip() for number, lines in enumerate(told, 1)]
    return [*dry, *each, "\nA row is compared with the BF16 of its own run.\n"]


def _state(records: dict[str, Any], golden: Path) -> str:
    rows = []
    for name, part in parts.PARTS.items():
        measures = parts.measured(records[name]).values()
        failed, skipped = sum("error" in m for m in measures), sum("skipped" in m for m in measures)
        counts = {"measured": len(measures) - failed - skipped, "failed": failed, "not for this GPU": skipped}
        counts["**missing**"] = len(part.measures) - len(measures)
        rows.append([f"`{name}`", part.shows, ", ".join(f"{count} {what}" for what, count in counts.items() if count)])
    here = [name for name in parts.VECTORS if (golden / f"{name}.safetensors").exists()]
    lacking = [name for name in parts.VECTORS if name not in here]
    state = filter(None, [", ".join(here), f"**missing**: {', '.join(lacking)}" if lacking else ""])
    rows.append(["`tests/golden`", "golden vectors of TE's CUDA kernels", "; ".join(state)])
    return f"## What is measured, and what is missing\n\n{table('part | what it shows | measures', rows)}\n"


def _without(measures: dict[str, Any]) -> str:
    """Return what was not measured, or not to its end, and why."""
    said = [(name, found.get("error") or found.get("skipped")) for name, found in measures.items()]
    return "".join(f"- {name}: {' '.join(why.split())[:300]}\n" for name, why in said if why)


# ---------------------------------------------------------------------- the parts


def conformance(results: dict[str, Any]) -> list[str]:
    """Return golden vectors, our kernels, TE beside us: how much was compared, and how much differs."""
    out, rows, notes = [], [], []
    for name, found in ((name, found) for name, found in results.items() if name.startswith("golden ")):
        for on, counts in found["compared"].items():
            rows.append([name.removeprefix("golden "), found["cases"], len(found["left_out"]), on, *counts.values()])
        notes += [*found["different"].values(), *(f"{case}: {why}" for case, why in found["left_out"].items())]
    if rows:
        head = "file | cases | left out | on | codes | scales | histories | different"
        out += _told("Golden vectors, and nemo_fp8 held to them", head, rows)
        out += [*(f"- {note}" for note in notes[:8]), ""]
    if beside := results.get("TE beside us"):
        counts = [(key, what) for what in ("codes", "scales") for key in ("compared", "different")]
        rows = [
            [name, *(found.get(key, {}).get(what) for key, what in counts), found.get("left_out")]
            for name, found in beside.items()
        ]
        head = "tensor | codes | different | scales | different | left out"
        out += _told("TE and nemo_fp8 on the same device", head, rows)
    if own := results.get("our kernels"):
        rows = [[what, count, own["different"][what]] for what, count in own["compared"].items()]
        out += _told("Our kernels against our specification in torch on the CPU", "| compared | different", rows)
        out += [own["first"]]
    return out


def kernels(results: dict[str, Any]) -> list[str]:
    """Return casts as shares of a copy, GEMMs and layers as ratios to BF16."""
    out = []
    if found := results.get("casts"):
        ways, kinds = found["ways"], ("", ", new tensor", ", by TE", ", with statistics")
        rows = []
        for name in (name for name in ways if not name.endswith(kinds[1:])):
            # Other formats move other bytes, and have a copy of their own.
            how = found | found.get("others", {}).get(name, {})
            copy = _ms(ways[how.get("copy", "copy")])
            rows.append([name, *(cell for kind in kinds for cell in _speed(how, ways.get(name + kind, {}), copy))])
        title = f"Casts of {' x '.join(map(str, found['shape']))} BF16 into memory that is there, to a new tensor"
        columns = [f"{way}GB/s | of the copy" for way in ("", "new, ", "TE, ", "statistics, ")]
        out += _told(f"{title} by us and by TE, and with statistics", " | ".join(["cast", *columns]), rows)
    head = "way | ms | TFLOP/s | faster than BF16"
    if found := results.get("gemms"):
        errors = found["relative_error"]
        rows = [[*row, found["by"].get(row[0]), number(errors.get(row[0]), 2)] for row in _faster(found)]
        title = f"GEMMs of {found['n']} cubed, operands quantized before"
        out += _told(title, f"{head} | by | relative error", rows)
    for name, title in {"linear": "A linear", "layer": "A Llama-8B layer"}.items():
        if found := results.get(name):
            rows = [*_faster(found), *([case, None, None, why] for case, why in found["left_out"].items())]
            out += _told(f"{title}, forward and backward, {found['tokens']} tokens", head, rows)
    return out


# Measure -> what its weights are pushed into.
INTO = {"8B": "FP8 blocks of 128x128 with FP32 scales", "8B in NVFP4": "NVFP4, in ModelOpt's layout"}


def refit(results: dict[str, Any]) -> list[str]:
    """Return every way as a share of the copy, and whether all wrote the same."""
    out = []
    for name, found in ((name, results[name]) for name in INTO if results.get(name)):
        copy, prints = found["ways"]["copy"].get("ms"), found.get("fingerprints", {})
        odd = [way for way, text in prints.items() if text != next(iter(prints.values()))]
        rows = []
        for way, times in found["ways"].items():
            speed = _speed(found, {"ms": times.get("ms")}, copy)
            rows.append([way, times.get("error") or number(times["ms"]), *speed, number(times.get("graph_ms"))])
        same = f"{', '.join(prints)} wrote the same codes and scales"
        said = f"Other codes or scales: {', '.join(odd)}" if odd else same
        title = f"{found['bytes'] / 1e9:.1f} GB of BF16 weights, pushed into {INTO[name]} ({said})"
        out += _told(title, "way | ms | GB/s of BF16 | of the copy | as a graph, ms", rows)
    return out


def train(*runs: dict[str, Any]) -> list[str]:
    """Return time, memory and loss of each case, beside the BF16 of its run."""
    out = []
    for shape in dict.fromkeys(name.partition(": ")[0] for run in runs for name in run):
        rows, some = [], None
        for number_of_run, run in enumerate(runs, 1):
            named = [(name.partition(": ")[2], found) for name, found in run.items() if name.startswith(shape)]
            cases = {case: found for case, found in named if found.get("losses")}
            some = some or next(iter(cases.values()), None)
            rows += [[number_of_run, *row] for row in _steps(cases)]
        if some:
            title = f"{shape}: {some['parameters']:,} parameters, {some['tokens']:,} tokens a step"
            head = "case | ms a step | TFLOP/s | faster than BF16 | GiB built | GiB peak | steps | loss, last tenth"
            head += " | from BF16's, mean | FP8 weights"
            several = len(runs) > 1
            out += _told(title, f"run | {head}" if several else head, rows if several else [row[1:] for row in rows])
    return out


def _steps(cases: dict[str, Any]) -> list[list[Any]]:
    """Return the rows of one run."""
    rows = []
    times = {case: median(found["ms"][min(20, len(found["ms"]) // 2) :]) for case, found in cases.items()}
    for case, found in cases.items():
        losses, ms = found["losses"], times[case]
        gaps = [abs(a - b) for a, b in zip(losses, cases.get("bf16", {}).get("losses", []), strict=False)]
        rows.append([case, number(ms), number(found["flops"] / ms / 1e9), _ratio(times.get("bf16"), ms)])
        rows[-1] += [f"{found[key] / 2**30:.1f}" for key in ("memory_built", "memory_peak")]
        rows[-1] += [len(losses), f"{mean(losses[-max(1, len(losses) // 10) :]):.4f}"]
        rows[-1] += [f"{mean(gaps):.4f}" if gaps else None, found["fp8_weights"]]
    return rows


TELL = {"conformance": conformance, "kernels": kernels, "refit": refit, "train": train}


# ---------------------------------------------------------------------- words


def _ms(way: dict[str, Any]) -> float | None:
    return way.get("graph_ms") or way.get("ms")


def _speed(found: dict[str, Any], way: dict[str, Any], copy: float | None) -> list[str | None]:
    ms = _ms(way)
    return [way.get("error"), None] if ms is None else [number(found["bytes"] / ms / 1e6), copy and f"{copy / ms:.0%}"]


def _ratio(a: float | None, b: float | None) -> str | None:
    return a and b and f"{a / b:.2f}x"


def _faster(found: dict[str, Any]) -> list[list[Any]]:
    """Return name, ms, TFLOP/s and the speed over BF16's, of every way."""
    rows, base = [], found["ways"]["bf16"].get("ms")
    for name, way in found["ways"].items():
        ms = way.get("ms")
        rows.append([name, way.get("error") or number(ms), number(ms and found["flops"] / ms / 1e9), _ratio(base, ms)])
    return rows


def _told(title: str, head: str, rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a table and of the sentence above it."""
    return [f"{title}:\n", table(head, rows), ""]


def table(head: str, rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown beneath the cells of ``head``; a column of numbers is right-aligned, and what is None
    is left empty."""
    cells = [
        ["" if c is None else f"{c:,}" if isinstance(c, int) else " ".join(str(c).split())[:160] for c in row]
        for row in rows
    ]
    numeric = [
        all(cell.rstrip("%x").replace(",", "").replace(".", "").isdigit() for cell in column if cell)
        for column in zip(*cells, strict=True)
    ]
    lines = [f"| {head} |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def number(value: float | None, digits: int = 3) -> str:
    """Return a measured number with as many digits as it is good for; empty where there is none."""
    if not isinstance(value, int | float):
        return value or ""
    return "0" if value == 0 else f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def write(docs: Path, golden: Path) -> None:
    """Write the page beside the records."""
    (docs / "gpu.md").write_text(page(docs, golden))


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        file = parts.DOCS / "gpu.md"
        stale = not file.exists() or file.read_text() != page(parts.DOCS, parts.GOLDEN)
        sys.exit(f"{file} is out of date: .venv/bin/python -m benchmarks.gpu.report" if stale else None)
    write(parts.DOCS, parts.GOLDEN)


if __name__ == "__main__":
    main()
