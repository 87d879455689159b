"""From the GPU scripts' records to docs/benchmarks/gpu.md: tables, plots, and what is missing, said plainly.

    python scripts/gpu/report.py --from FOLDER      take a run's records and golden vectors in, and write the page
    python scripts/gpu/report.py                    write the page from the records that are here
    python scripts/gpu/report.py --check            say whether the page is up to date

Records lie beside the page as gpu_<script>.json, golden vectors in tests/golden. A dry run's record is refused: its
numbers mean nothing. ``--docs FOLDER --golden FOLDER`` write elsewhere, dry runs too, to try this script out.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

import conformance  # noqa: E402
import kernels  # noqa: E402
import refit  # noqa: E402
import train  # noqa: E402
from common import result_of, table  # noqa: E402

BETS = Path(__file__).with_name("bets.md")
DOCS, GOLDEN = ROOT / "docs" / "benchmarks", ROOT / "tests" / "golden"
# record -> (title, what it shows, who tells it, the call that makes it)
SCRIPTS: dict[str, tuple[str, str, Any, str]] = {
    "conformance": (
        "The same bits",
        "golden vectors of TE's kernels, our Triton kernels, TE live beside us",
        conformance.tell,
        "bits",
    ),
    "kernels": (
        "Kernels",
        "casts against the copy limit and their peers, FP8 GEMMs, a linear, a Llama layer",
        kernels.tell,
        "bits",
    ),
    "refit": ("Refit", "quantizing and pushing an 8B model from device to device", refit.tell, "bits"),
    "train_llama": (
        "Training: Llama-3.1-8B's layers",
        "TE under each recipe, FP8 weights, the emulation beside it",
        train.tell,
        "llama",
    ),
    "train_moe": ("Training: a mixture of experts", "the same for two layers of Qwen3-30B-A3B", train.tell, "moe"),
}
VECTORS = {
    "TE's CUDA kernels": ("tensorwise", "blockwise_fp32", "blockwise_pow2", "delayed"),
    "TE's Python": ("te_python_reference",),
}
CALLS = {"bits": "conformance, kernels, refit, golden vectors", "llama": "train_llama", "moe": "train_moe"}
HEAD = """# On a GPU

Written by `scripts/gpu/report.py` from the records beside this page; do not edit.
"""
HOW = """## How to take them

Everything is written and dry-run on the CPU (`--cpu`, `tests/gpu`). A lent H200 gives all results in three calls of under ten minutes
each, in any order (`bits` gives most); TE and megatron-core travel along in `.gpu`, 31 MiB:

```text
bash scripts/gpu/run.sh pack
device.run  command: bash scripts/gpu/run.sh bits    carry: [".gpu"]  timeout_s: 590
device.run  command: bash scripts/gpu/run.sh llama   carry: [".gpu"]  timeout_s: 590
device.run  command: bash scripts/gpu/run.sh moe     carry: [".gpu"]  timeout_s: 590
.venv/bin/python scripts/gpu/report.py --from FOLDER
.venv/bin/python -m pytest tests/golden tests/gpu
```

Back come: {back}.
FOLDER is where the reply says that the files lie (`files_at`), one call after the other. A call that ends early brings what was
measured by then: golden vectors come first, every part is noted as soon as it is measured, and a part that fails ends no other. One
that dies, hangs or breaks CUDA is ended by `scripts/gpu/supervise.py`, which starts the script again behind it. The last line but one
puts records beside this page and golden vectors into `tests/golden`, where the CPU tests hold nemo_fp8.numerics to them.

On a machine of one's own with TransformerEngine and megatron-core 0.15.3, each script runs by itself: `python3 scripts/gpu/kernels.py`.
"""
INK = {"ink": "#1f2328", "muted": "#59636e", "rule": "#d1d9e0", "paper": "#ffffff"}


def page(docs: Path, golden: Path) -> str:
    """The document, from the records in a folder."""
    records = {name: json.loads(path.read_text()) for name in SCRIPTS if (path := docs / f"gpu_{name}.json").exists()}
    out = [HEAD, _missing(records, golden)]
    for name, (title, _, tell, _) in SCRIPTS.items():
        if name not in records:
            continue
        about = records[name]["about"]
        versions = ", ".join(f"{what} {version}" for what, version in about["versions"].items())
        lines = [
            f"- date: {about['date']}",
            f"- device: {about['device']}",
            f"- versions: {versions}",
            f"- command: `{about['command']}`",
        ]
        if about["dry_run"]:
            lines.insert(0, "- A DRY RUN on a CPU: the numbers mean nothing.")
        out += [f"## {title}\n", "\n".join(lines) + "\n", tell(records[name]) + "\n"]
        out += [f"![{shown}]({file.name})\n" for file, shown in plots(name, records[name], docs)]
    how = HOW.format(back="; ".join(f"`{call}`: {files}" for call, files in CALLS.items()))
    return "\n".join([*out, how, BETS.read_text()])


def _missing(records: dict[str, Any], golden: Path) -> str:
    rows = []
    for name, (_, shows, _, _) in SCRIPTS.items():
        parts = records.get(name, {}).get("parts", {})
        failed = [part for part, told in parts.items() if "result" not in told and "skipped" not in told]
        late = [part for part, told in parts.items() if "skipped" in told]
        state = (
            "**missing**: no GPU was at hand yet"
            if name not in records
            else f"{sum('result' in told for told in parts.values())} parts"
        )
        state += f"; failed: {', '.join(failed)}" if failed else ""
        state += f"; left out: {', '.join(late)}" if late else ""
        rows.append([f"`{name}`", shows, state])
    here = {path.stem for path in golden.glob("*.safetensors")}
    for whose, names in VECTORS.items():
        lacking, held = ([f"`{name}`" for name in names if (name in here) == there] for there in (False, True))
        state = f"**missing**: {', '.join(lacking)}" if lacking else ""
        rows.append(
            [
                f"golden vectors of {whose}",
                "codes, scales and histories in `tests/golden`",
                "; ".join(filter(None, [state, ", ".join(held)])),
            ]
        )
    return f"## What is here, and what is missing\n\n{table(['record', 'what it shows', 'state'], rows)}\n"


# ---------------------------------------------------------------------- plots


def plots(name: str, record: dict[str, Any], docs: Path) -> list[tuple[Path, str]]:
    """Draw what a record has for the eye; (file, description) of each plot."""
    drawn = {"kernels": _casts, "train_llama": _losses, "train_moe": _losses}.get(name)
    if drawn is None:
        return []
    from nemo_fp8.report.figures import drawing, to_svg

    file = docs / f"gpu_{name}.svg"
    with drawing(8, 3.2) as (figure, axes):
        shown = drawn(figure, axes, record)
        if shown is None:
            return []
        svg = to_svg(figure, name)
    for what, ink in INK.items():
        svg = svg.replace(f"var(--{what})", ink)
    svg = re.sub(r'style="width:100%[^"]*"', f'style="background:{INK["paper"]}"', svg, count=1)
    file.write_text(svg)
    return [(file, shown)]


def _losses(figure: Any, axes: Any, record: dict[str, Any]) -> str | None:
    from nemo_fp8.report.figures import legend, lines

    series = [(label, recipe, losses) for label, recipe, losses in train.series(record) if len(losses) > 1]
    if not series:
        return None
    for line, (_, _, losses) in zip(lines((label, recipe) for label, recipe, _ in series), series, strict=True):
        axes[0, 0].plot(range(1, len(losses) + 1), losses, **line.style | {"marker": "", "linewidth": 1.0})
    axes[0, 0].set(xlabel="step", ylabel="loss")
    legend(figure, axes)
    return f"Loss of every case, {record['set']}"


def _casts(figure: Any, axes: Any, record: dict[str, Any]) -> str | None:
    from nemo_fp8.report.figures import color

    ways = (result_of(record, "casts") or {}).get("ways", {})
    shares = {name: kernels.share(ways.get("copy", {}), ways.get(name, {})) for name in kernels.CASTS}
    shares = {name: share for name, share in shares.items() if share is not None}
    if not shares:
        return None
    axes[0, 0].barh(list(shares), [100 * share for share in shares.values()], color=color("blockwise"))
    axes[0, 0].axvline(80, color=color("tensorwise"), linestyle="--", linewidth=1.0)
    axes[0, 0].invert_yaxis()
    axes[0, 0].set(xlabel="% of the speed of a copy (goal: 80%)")
    return "Casts as a share of the copy limit"


# ---------------------------------------------------------------------- taking in


def take_in(source: Path, docs: Path, golden: Path) -> list[str]:
    """Copy a run's records and golden vectors to where they belong; what was taken."""
    taken, real = [], docs == DOCS
    for name in SCRIPTS:
        path = source / f"{name}.json"
        if not path.exists():
            continue
        if real and json.loads(path.read_text())["about"]["dry_run"]:
            raise SystemExit(
                f"{path} is the record of a dry run; its numbers mean nothing. --docs FOLDER --golden FOLDER write "
                "elsewhere."
            )
        shutil.copyfile(path, docs / f"gpu_{name}.json")
        taken.append(f"gpu_{name}.json")
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, golden / path.name)
        taken.append(path.name)
    if not taken:
        raise SystemExit(f"{source} holds no record and no golden vector.")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, help="a folder of records and golden vectors to take in")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--golden", type=Path, default=GOLDEN)
    parser.add_argument("--check", action="store_true", help="say whether the page is up to date, and write nothing")
    options = parser.parse_args()
    docs, golden = options.docs.resolve(), options.golden.resolve()
    if options.source:
        print("taken in:", ", ".join(take_in(options.source, docs, golden)))
    file = docs / "gpu.md"
    text = page(docs, golden)
    if options.check:
        sys.exit(
            None
            if file.exists() and file.read_text() == text
            else f"{file} is out of date: .venv/bin/python scripts/gpu/report.py"
        )
    file.write_text(text)
    print(f"{file} written.")


if __name__ == "__main__":
    main()
