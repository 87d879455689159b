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

`.venv/bin/python -m benchmarks.gpu --cpu` runs all of it with TransformerEngine 2.20.2 on `nemo_fp8.te_cpu`, on small shapes;
`tests/gpu` holds it to that:

- every call of TE's quantizers, layers, recipes and states, and the layouts in which codes and scales come back;
- whole steps of megatron-core 0.15.3 under each recipe, with FP8 weights and with experts;
- recording golden vectors, and the tests that hold our numerics to them;
- a measure that fails, dies or takes too long: the others go on, and what it had found is kept.

Our Triton kernels are compiled for sm_90, sm_100 and sm_120 in every run of the suite ([a bound on their time](triton.md)), and run in
Triton's interpreter.

Only a GPU can show: every time on this page, CUDA graphs, `torch.compile`, torch's FP8 GEMM (`scaled_mm`), cuDNN's fused attention, whether
gloo reduces CUDA tensors of two ranks that share a GPU (golden vectors of delayed scaling), the bits of TE's kernels themselves.
"""


def page(docs: Path, golden: Path) -> str:
    """Return the document, from the records in a folder and the golden vectors in another."""
    records = {name: parts.read(docs / f"gpu_{name}.json") for name in parts.PARTS}
    out = [HEAD.format(parts=", ".join(parts.PARTS)), _state(records, golden)]
    for name, record in records.items():
        if not record:
            continue
        about, results = record["about"], {each: m["result"] for each, m in record["measures"].items() if "result" in m}
        lines = [f"- {what}: {about[what]}" for what in ("date", "machine", "versions")] + [
            f"- command: `{about['command']}`"
        ]
        lines[:0] = ["- A DRY RUN without a GPU: the numbers mean nothing."] if about["dry_run"] else []
        out += [
            f"## {parts.PARTS[name].title}\n",
            "\n".join(lines) + "\n",
            TELL[name](results) + "\n",
            _without(record),
        ]
    return "\n".join([*filter(None, out), CHECKED])


def _state(records: dict[str, Any], golden: Path) -> str:
    rows = []
    for name, part in parts.PARTS.items():
        measures = records[name].get("measures", {}).values()
        failed, skipped = sum("error" in m for m in measures), sum("skipped" in m for m in measures)
        counts = {"measured": len(measures) - failed - skipped, "failed": failed, "not for this GPU": skipped}
        counts["**missing**"] = len(part.measures) - len(measures)
        rows.append([f"`{name}`", part.shows, ", ".join(f"{count} {what}" for what, count in counts.items() if count)])
    here = [name for name in parts.VECTORS if (golden / f"{name}.safetensors").exists()]
    lacking = [name for name in parts.VECTORS if name not in here]
    state = [*([", ".join(here)] if here else []), *([f"**missing**: {', '.join(lacking)}"] if lacking else [])]
    rows.append(["`tests/golden`", "golden vectors of TE's CUDA kernels", "; ".join(state)])
    return f"## What is measured, and what is missing\n\n{table(['part', 'what it shows', 'measures'], rows)}\n"


def _without(record: dict[str, Any]) -> str:
    """Return what was not measured, or not to its end, and why."""
    said = [(name, found.get("error") or found.get("skipped")) for name, found in record["measures"].items()]
    return "".join(f"- {name}: {' '.join(why.split())[:300]}\n" for name, why in said if why)


# ---------------------------------------------------------------------- the parts


def conformance(results: dict[str, Any]) -> str:
    """Return golden vectors, our kernels, TE beside us: how much was compared, and how much differs."""
    out, rows, notes = [], [], []
    for name, found in ((name, found) for name, found in results.items() if name.startswith("golden ")):
        for on, counts in found["compared"].items():
            rows.append([name.removeprefix("golden "), found["cases"], len(found["left_out"]), on, *counts.values()])
        notes += [*found["different"].values(), *(f"{case}: {why}" for case, why in found["left_out"].items())]
    if rows:
        out += ["Golden vectors, and nemo_fp8 held to them:\n"]
        out += [table(["file", "cases", "left out", "on", "codes", "scales", "histories", "different"], rows), ""]
        out += [*(f"- {note}" for note in notes[:8]), ""]
    if beside := results.get("TE beside us"):
        keys = ("codes", "codes_different", "scales", "scales_different", "left_out")
        rows = [[name, *map(found.get, keys)] for name, found in beside.items()]
        out += [
            "TE and nemo_fp8 on the same device:\n",
            table(["tensor", "codes", "different", "scales", "different", "left out"], rows),
            "",
        ]
    if own := results.get("our kernels"):
        rows = [[name.replace("_", " "), count] for name, count in own.items() if name != "first"]
        out += [
            "Our kernels against our specification in torch on the CPU:\n",
            table(["", "count"], rows),
            f"\n{own['first']}",
        ]
    return "\n".join(out).strip()


def kernels(results: dict[str, Any]) -> str:
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
        shape = " x ".join(map(str, found["shape"]))
        out += [
            f"Casts of {shape} BF16 into memory that is there, to a new tensor by us and by TE, and with statistics:\n"
        ]
        head = (
            "cast",
            "GB/s",
            "of the copy",
            "new, GB/s",
            "of the copy",
            "TE, GB/s",
            "of the copy",
            "statistics, GB/s",
            "of the copy",
        )
        out += [table(head, rows), ""]
    if found := results.get("gemms"):
        rows = [
            [*row, found["by"].get(row[0]), number(found["relative_error"].get(row[0]), 2)] for row in _faster(found)
        ]
        out += [f"GEMMs of {found['n']} cubed, operands quantized before:\n"]
        out += [table(["GEMM", "ms", "TFLOP/s", "faster than BF16", "by", "relative error"], rows), ""]
    for name, title in (
        ("linear", "A linear, forward and backward"),
        ("layer", "A Llama-8B layer, forward and backward"),
    ):
        if found := results.get(name):
            rows = [*_faster(found), *([case, None, None, why] for case, why in found["left_out"].items())]
            out += [
                f"{title}, {found['tokens']} tokens:\n",
                table(["way", "ms", "TFLOP/s", "faster than BF16"], rows),
                "",
            ]
    return "\n".join(out).strip()


# Measure -> what its weights are pushed into.
INTO = {"8B": "FP8 blocks of 128x128 with FP32 scales", "8B in NVFP4": "NVFP4, in ModelOpt's layout"}


def refit(results: dict[str, Any]) -> str:
    """Return every way as a share of the copy, and whether all wrote the same."""
    return "\n".join(_pushed(results[name], into) for name, into in INTO.items() if results.get(name))


def _pushed(found: dict[str, Any], into: str) -> str:
    copy, prints = found["ways"]["copy"].get("ms"), found.get("fingerprints", {})
    first = next(iter(prints.values()), None)
    odd = [name for name, text in prints.items() if text != first]
    rows = [
        [
            name,
            way.get("error") or number(way["ms"]),
            *_speed(found, {"ms": way.get("ms")}, copy),
            number(way.get("graph_ms")),
        ]
        for name, way in found["ways"].items()
    ]
    said = (
        f"{', '.join(prints)} wrote the same codes and scales."
        if not odd
        else f"Other codes or scales: {', '.join(odd)}."
    )
    head = f"{found['bytes'] / 1e9:.1f} GB of BF16 weights, pushed into {into}. {said}\n"
    return "\n".join([head, table(["way", "ms", "GB/s of BF16", "of the copy", "as a graph, ms"], rows)])


def train(results: dict[str, Any]) -> str:
    """Return time, memory and loss of each case, beside BF16."""
    out = []
    for shape in dict.fromkeys(name.partition(": ")[0] for name in results):
        cases = {
            name.partition(": ")[2]: found
            for name, found in results.items()
            if name.startswith(shape) and found.get("losses")
        }
        times = {case: median(found["ms"][min(20, len(found["ms"]) // 2) :]) for case, found in cases.items()}
        rows = []
        for case, found in cases.items():
            losses, base = found["losses"], cases.get("bf16", {}).get("losses", [])
            gaps = [abs(a - b) for a, b in zip(losses, base, strict=False)]
            memory = [f"{found[key] / 2**30:.1f}" for key in ("memory_built", "memory_peak")]
            speed = [
                number(times[case]),
                number(found["flops"] / times[case] / 1e9),
                _ratio(times.get("bf16"), times[case]),
            ]
            loss = [f"{mean(losses[-max(1, len(losses) // 10) :]):.4f}", f"{mean(gaps):.4f}" if gaps else None]
            rows.append([case, *speed, *memory, len(losses), *loss, found["fp8_weights"]])
        if rows:
            some = next(iter(cases.values()))
            out += [f"{shape}: {some['parameters']:,} parameters, {some['tokens']:,} tokens a step:\n"]
            head = [
                "case",
                "ms a step",
                "TFLOP/s",
                "faster than BF16",
                "GiB built",
                "GiB peak",
                "steps",
                "loss, last tenth",
            ]
            out += [table([*head, "from BF16's, mean", "FP8 weights"], rows), ""]
    return "\n".join(out).strip()


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


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown; a column of numbers is right-aligned, and what is None is left empty."""
    cells = [
        ["" if c is None else f"{c:,}" if isinstance(c, int) else " ".join(str(c).split())[:160] for c in row]
        for row in rows
    ]
    numeric = [
        all(row[i].rstrip("%x").replace(",", "").replace(".", "").isdigit() for row in cells if row[i])
        for i in range(len(head))
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|"]
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
