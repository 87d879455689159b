"""Training with TransformerEngine on a GPU: what each recipe costs and saves, what it does to the loss, and our
emulation beside it.

    python3 scripts/gpu/train.py llama            four layers of Llama-3.1-8B
    python3 scripts/gpu/train.py moe              two layers of Qwen3-30B-A3B, 128 experts
    python scripts/gpu/train.py llama --cpu       a tiny model, everything emulated

Every case runs in a process of its own (run_megatron.py says what it does), so that one that fails takes nothing with
it; while one trains, the next has imported everything and waits. Step times are medians over the steps behind the
warm-up; TFLOP/s count the matrix products. ``FP8 weights`` are FP8 primary weights, which the distributed optimizer
gathers as bytes (on one GPU there is nobody to gather from: what shows here is memory and the cost of casting).

The emulation runs the same contract with nemo_fp8.numerics in Megatron's own linears. Its distance from TE is told
beside the distance of BF16 in those same linears from BF16 in TE's: what is beyond that is the emulation's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

from common import Run, number, table, why_not  # noqa: E402
from run_megatron import WARM_UP  # noqa: E402
from slices import CASES, SHAPES  # noqa: E402

CHILD = Path(__file__).with_name("run_megatron.py")
# What is run, the most wanted first: (case, steps).
SETS: dict[str, list[tuple[str, int]]] = {
    "llama": [
        ("bf16", 200),
        ("tensorwise", 200),
        ("blockwise fp32", 200),
        ("delayed", 200),
        ("blockwise pow2", 200),
        ("bf16 in parts", 200),
        ("tensorwise, emulated", 200),
        ("blockwise fp32, emulated", 200),
        ("delayed, emulated", 200),
        ("tensorwise, FP8 weights", 200),
        ("delayed, FP8 weights", 200),
        ("blockwise pow2, FP8 weights", 200),
        ("blockwise pow2, emulated", 200),
    ],
    "moe": [
        ("bf16", 200),
        ("tensorwise", 200),
        ("blockwise pow2", 200),
        ("delayed", 200),
        ("tensorwise, FP8 weights", 200),
        ("bf16 in parts", 40),
        ("tensorwise, emulated", 40),
    ],
}
CPU_STEPS = 4
# A case takes some 20 s; one that hangs costs no more than this.
CASE_SECONDS = 100.0


class Child:
    """One case's process: it imports, waits for the word, trains, and writes what it finds as it goes."""

    def __init__(self, run: Run, case: str, steps: int, folder: Path, unfused: bool) -> None:
        from nemo_fp8.render.te import te_environment

        self.case, self.steps = case, CPU_STEPS if run.cpu else steps
        self.file = folder / f"{len(list(folder.iterdir()))}.json"
        self.file.touch()
        shape = ("tiny" if run.options.set == "llama" else "tiny_moe") if run.cpu else run.options.set
        command = [sys.executable, "-u", "-W", "ignore", str(CHILD), case, shape, str(self.file)]
        command += ["--steps", str(self.steps), "--wait"]
        command += ["--cpu"] if run.cpu else []
        command += ["--plain"] if unfused else []
        # TE reads its variables when it is imported: they are the child's from the start.
        environment = (
            os.environ
            | te_environment(CASES[case].precision)
            | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        )
        self.log = self.file.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment, text=True
            )

    def train(self, seconds: float) -> dict[str, Any]:
        """Let it go, and wait; what it has found by then, if it takes too long."""
        started = time.monotonic()
        try:
            self.process.communicate("go\n", timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            self.end()
        found = json.loads(self.file.read_text() or "{}")
        if not found.get("losses"):
            raise RuntimeError(
                f"exit code {self.process.returncode} after {time.monotonic() - started:.0f} s: {self.said()}"
            )
        if not found.get("done"):
            found["stopped"] = self.said(300)
        return found

    def said(self, characters: int = 1500) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines)[-characters:]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def cases(run: Run, folder: Path) -> None:
    """Every case of the set in its turn, the next one importing meanwhile."""
    todo = SETS[run.options.set]
    if run.options.only:
        todo = [(case, steps) for case, steps in todo if case in run.options.only.split(";")]
    unfused = run.cpu
    child: Child | None = None
    waiting: Child | None = None

    def train(name: str) -> Any:
        assert child is not None
        most = CASE_SECONDS * (10 if run.cpu else 1)
        result = run.part(
            name, lambda: child.train(min(most, run.options.limit + 30 - run.elapsed())), seconds=CASE_SECONDS
        )
        run.say(next(reversed(child.said(200).splitlines()), "it said nothing"))
        child.end()
        return result

    try:
        for i, (case, steps) in enumerate(todo):
            if run.late():
                run.part(case, dict)  # says that it came too late
                continue
            child = waiting or Child(run, case, steps, folder, unfused)
            ahead = todo[i + 1 : i + 2]
            waiting = Child(run, *ahead[0], folder, unfused) if ahead else None
            if train(case) is None and i == 0 and not unfused:
                # Megatron's fusions are compiled where they run: do without, if the first case shows that they do not
                # compile.
                unfused = True
                run.record["parts"][f"{case}, with fusions"] = run.record["parts"].pop(case)
                if waiting is not None:
                    waiting.end()
                    waiting = None
                child = Child(run, case, steps, folder, unfused)
                train(case)
            run.record["unfused"] = unfused
    finally:
        for each in (child, waiting):
            if each is not None:
                each.end()


# ---------------------------------------------------------------------- comparing


def pairs(parts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Which two cases are compared, and under which name."""
    found = [("BF16: Megatron's linears against TE's", "bf16 in parts", "bf16")]
    names = [name.removesuffix(", emulated") for name in parts if name.endswith(", emulated")]
    found += [(f"{name}: emulated against TE", f"{name}, emulated", name) for name in names]
    found += [
        (f"{name} against BF16", name, "bf16")
        for name in parts
        if name not in ("bf16", "bf16 in parts") and ", " not in name
    ]
    return [pair for pair in found if all(parts.get(case, {}).get("result") for case in pair[1:])]


def distance(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of two loss curves, over the steps that both have, and of the statistics of their layers."""
    losses = list(zip(a["losses"], b["losses"], strict=False))
    gaps = [abs(x - y) for x, y in losses]
    last = losses[-max(1, len(losses) // 10) :]
    found: dict[str, Any] = {
        "steps": len(losses),
        "mean_gap": mean(gaps),
        "largest_gap": max(gaps),
        "last_tenth": mean(x for x, _ in last) - mean(y for _, y in last),
    }
    for what in ("amax", "scale", "snr_db"):
        values = [
            (x[what], y[what])
            for step in a["statistics"].keys() & b["statistics"].keys()
            for key in a["statistics"][step].keys() & b["statistics"][step].keys()
            for x, y in [(a["statistics"][step][key], b["statistics"][step][key])]
            if isinstance(x.get(what), int | float) and isinstance(y.get(what), int | float)
        ]
        off = [abs(x - y) if what == "snr_db" else abs(x / y - 1) for x, y in values if what == "snr_db" or y]
        found[what] = {"median": median(off), "largest": max(off), "values": len(off)} if off else None
    return found


# ---------------------------------------------------------------------- telling


def tell(record: dict[str, Any]) -> str:
    """The tables of a record."""
    parts = record["parts"]
    base = _time(parts.get("bf16", {}).get("result"))
    rows = []
    for case, part in parts.items():
        found = part.get("result")
        if not found:
            rows.append([case, None, None, None, None, None, None, why_not(part)])
            continue
        ms, last = _time(found), found["losses"][-max(1, len(found["losses"]) // 10) :]
        peak, built = found.get("memory_peak"), found.get("memory_built")
        told = f"{len(found['losses'])} steps, engine {found['engine'] or 'none'}"
        told += f", {found['fp8_weights']} FP8 weights" if found["fp8_weights"] else ""
        speed, faster = ms and number(found["flops"] / ms / 1e9), ms and base and f"{base / ms:.2f}x"
        rows.append([case, number(ms), speed, faster, _gib(built), _gib(peak), f"{mean(last):.4f}", told])
    head = ["case", "ms a step", "TFLOP/s", "faster than BF16", "GiB built", "GiB peak", "loss, last tenth", ""]
    any_found = next((p["result"] for p in parts.values() if p.get("result")), None)
    title = (
        f"{record['set']}: {any_found['parameters']:,} parameters, {any_found['tokens']:,} tokens a step"
        if any_found
        else record["set"]
    )
    if record.get("unfused"):
        title += ", without Megatron's fusions"
    out = [f"{title}.", "", table(head, rows)]
    compared = [(name, distance(parts[a]["result"], parts[b]["result"])) for name, a, b in pairs(parts)]
    if compared:
        lines = []
        for name, d in compared:
            gaps = [f"{d['mean_gap']:.4f}", f"{d['largest_gap']:.4f}", f"{d['last_tenth']:+.4f}"]
            lines.append([name, d["steps"], *gaps, *(_off(d[what], what) for what in ("amax", "scale", "snr_db"))])
        head = [
            "loss curves",
            "steps",
            "mean gap",
            "largest",
            "last tenth",
            "amax off by",
            "delayed scale off by",
            "SNR off by, dB",
        ]
        out += [
            "",
            "Gaps are absolute differences of the loss at equal steps; statistics are those of every layer and "
            "operand,",
        ]
        out += ["median (largest):", "", table(head, lines)]
    return "\n".join(out)


def _gib(size: int | None) -> str | None:
    return size and f"{size / 2**30:.1f}"


def _time(found: dict[str, Any] | None) -> float | None:
    if not found:
        return None
    steps = [ms for ms in found["ms"][min(WARM_UP, len(found["ms"]) // 2) :] if ms is not None]
    return median(steps) if steps else None


def _off(found: dict[str, Any] | None, what: str) -> str:
    if not found:
        return ""
    if what == "snr_db":
        return f"{found['median']:.2f} ({found['largest']:.2f})"
    return f"{found['median']:.2%} ({found['largest']:.2%})"


def series(record: dict[str, Any]) -> list[tuple[str, str, list[float]]]:
    """Every loss curve: the case, the recipe whose colour it has, the losses."""
    recipes = ("delayed", "tensorwise", "blockwise")
    return [
        (case, next((recipe for recipe in recipes if case.startswith(recipe)), "bf16"), part["result"]["losses"])
        for case, part in record["parts"].items()
        if part.get("result")
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = [
        (("set",), {"choices": SETS}),
        (("--only",), {"help": "some cases of the set, separated by semicolons"}),
    ]
    run = Run("train", __doc__, options)
    shape = SHAPES["tiny" if run.cpu else run.options.set]
    run.record |= {"set": run.options.set, "shape": vars(shape)}
    if not run.cpu:
        from common import te_version

        if te_version() is None:
            raise SystemExit(
                "TransformerEngine does not import here (or there is no GPU): nothing to train with. Try --cpu."
            )
    with tempfile.TemporaryDirectory() as folder:
        cases(run, Path(folder))
    run.finish(tell)


if __name__ == "__main__":
    main()
