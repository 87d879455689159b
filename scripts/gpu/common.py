"""What the GPU scripts share: parts that fail alone, a record that grows while they run, clocks, the machine.

A GPU is lent for minutes, so a script must give what it can: each measurement is a *part*, its result or its error goes
into the record as soon as it is there, and a part that would begin after the deadline is left out, with that as its
reason. A part has a budget, which supervise.py holds it to, and which is printed. ``--cpu`` runs the same code on small
shapes, which proves everything but the numbers; such a record is marked ``dry_run`` and never published.

    run = Run("kernels", __doc__)
    run.part("copy", lambda: ..., seconds=30)
    run.finish(table)
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

import records  # noqa: E402

import nemo_fp8  # noqa: E402
from nemo_fp8.contract import Precision  # noqa: E402

# Every layer in FP8, primary weights in BF16: what a recipe costs, and nothing else. TE's block recipe is E4M3, and so
# is this one.
CONTRACTS = {
    "delayed": Precision(format="hybrid", scaling="delayed", amax_history_len=1024, amax_compute_algo="max"),
    "tensorwise": Precision(format="hybrid", scaling="tensorwise"),
    "blockwise pow2": Precision(format="e4m3", scaling="blockwise", weight_scale="pow2", activation_scale="pow2"),
    "blockwise fp32": Precision(format="e4m3", scaling="blockwise", weight_scale="fp32", activation_scale="fp32"),
    "mxfp8": Precision(format="e4m3", scaling="mxfp8"),
}
# Ours and theirs, as far as they are installed; TE lies in .te where there is no GPU.
PACKAGES = ("torch", "triton", "transformer-engine", "megatron-core", "nemo-toolkit", "numpy")
Ways = dict[str, Callable[[], Any]]


class Skipped(Exception):
    """A part that does not apply here; the message says why."""


class Run:
    """One script's run: its options, its record, its clock."""

    def __init__(
        self, script: str, description: str | None, options: Sequence[tuple[tuple[str, ...], dict[str, Any]]] = ()
    ) -> None:
        parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
        parser.add_argument("--cpu", action="store_true", help="a dry run on small shapes, without a GPU")
        parser.add_argument("--out", type=Path, help="the folder for the record (default: $OUT, or out/gpu)")
        parser.add_argument("--limit", type=float, default=540.0, help="begin nothing after so many seconds")
        parser.add_argument("--resume", action="store_true", help="leave out what the record has an outcome of")
        for names, settings in options:
            parser.add_argument(*names, **settings)
        self.began = time.monotonic()
        self.options = parser.parse_args()
        self.script, self.cpu = script, self.options.cpu
        self.device = "cpu" if self.cpu else "cuda"
        self.folder = records.folder(self.options.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        kind = f"_{self.options.set}" if "set" in self.options else ""
        self.file = self.folder / f"{script}{kind}.json"
        self.record: dict[str, Any] = {"about": about(script, self.cpu), "parts": {}}
        if self.options.resume:
            self.record["parts"] = records.read(self.file)["parts"]
        torch.manual_seed(0)
        self.say(f"{script}: {self.record['about']['device']}, into {self.file}")

    # ------------------------------------------------------------------ parts

    def part(self, name: str, function: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Run one part and record it; None where it failed, did not apply, came too late or has an outcome from before.

        It may take ``seconds`` on a GPU; a CPU, which may be busy with other things, is given ten times as long.
        """
        parts, seconds = self.record["parts"], seconds * (10 if self.cpu else 1)
        if name in parts and self.options.resume:
            return None
        if self.late():
            parts[name] = {"skipped": f"not begun within {self.options.limit:g} s"}
            self.write()
            return None
        parts[name] = {records.RUNNING: {"since": time.time(), "budget": seconds}}
        self.write()
        self.say(f"{name}: begins, {seconds:g} s at most")
        started = time.monotonic()
        result, outcome = None, {}
        try:
            result = function()
            self.wait()
            outcome = {"result": result}
        except Skipped as reason:
            outcome = {"skipped": str(reason)}
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome = {
                "error": f"{type(error).__name__}: {str(error).strip()[:600]}",
                "where": f"{Path(where.filename).name}:{where.lineno} {where.name}",
                "traceback": traceback.format_exc()[-3000:],
            }
            result = None
        outcome["seconds"] = round(time.monotonic() - started, 2)
        parts[name] = outcome
        self.write()
        self.say(f"{name}: {outcome.get('error') or outcome.get('skipped') or 'done'} ({outcome['seconds']} s)")
        self._go_on_in_good_health()
        return result

    def _go_on_in_good_health(self) -> None:
        """A CUDA context that is broken stays so, and a graph that could not be captured leaves traces: ask for a new
        process."""
        if self.device != "cuda":
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            healthy = not _failed_captures
        except (RuntimeError, AssertionError):  # the second is a torch without CUDA
            healthy = False
        if not healthy and self.options.resume:
            sys.stdout.flush()
            os._exit(records.AGAIN)

    def race(self, ways: Ways, seconds: float, *, graphs: bool = False) -> dict[str, Any]:
        """:func:`race` on this run's device; a dry run takes each way twice."""
        return race(ways, self.device, 0.0 if self.cpu else seconds, 2 if self.cpu else 5, graphs)

    def late(self) -> bool:
        """Whether nothing more shall begin."""
        return self.elapsed() > self.options.limit

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def wait(self) -> None:
        """For everything that was launched."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    # ------------------------------------------------------------------ telling

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():6.1f} s] {text}", flush=True)

    def write(self) -> None:
        """The record as it is by now."""
        self.record["about"]["seconds"] = round(self.elapsed(), 1)
        records.write(self.file, plain(self.record))

    def finish(self, tell: Callable[[dict[str, Any]], str]) -> None:
        """Print the table, and end with 1 where a part failed."""
        self.write()
        record = records.read(self.file)
        print(f"\n{tell(record)}\n", flush=True)
        failed = {name: part["error"] for name, part in record["parts"].items() if "error" in part}
        for name, error in failed.items():
            print(f"FAILED {name}: {error}", flush=True)
        sys.exit(1 if failed else 0)


# ---------------------------------------------------------------------- clocks


def race(ways: Ways, device: str, seconds: float, least: int, graphs: bool) -> dict[str, Any]:
    """Median milliseconds of each way, with the first and ninth decile; they take turns. A way that fails has its error
    instead.

    On a GPU the clock is the device's. With ``graphs`` a way is also captured and replayed, so that ``graph_ms`` is
    free of what Python takes to launch it; a way that cannot be captured has no such number.
    """
    found: dict[str, Any] = {}
    ready: Ways = {}
    for name, way in ways.items():
        try:
            for _ in range(3 if device == "cuda" else 1):  # builds, compiles, allocates
                way()
            _wait(device)
            ready[name] = way
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    times = _turns(ready, device, seconds, least)
    found |= {name: _summary(values) for name, values in times.items()}
    if graphs and device == "cuda":
        replays = {name: replay for name, way in ready.items() if (replay := _captured(way)) is not None}
        for name, values in _turns(replays, device, seconds, least).items():
            found[name]["graph_ms"] = _summary(values)["ms"]
    return found


def _turns(ways: Ways, device: str, seconds: float, least: int, most: int = 60) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    started, rounds = time.monotonic(), 0
    while ways and rounds < most and (rounds < least or time.monotonic() - started < seconds):
        for name, way in ways.items():
            times[name].append(once(way, device))
        rounds += 1
    return times


def once(way: Callable[[], Any], device: str) -> float:
    """Milliseconds of one call."""
    if device != "cuda":
        started = time.perf_counter()
        way()
        return (time.perf_counter() - started) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    way()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


_failed_captures: list[str] = []


def _captured(way: Callable[[], Any]) -> Callable[[], None] | None:
    """A way as a CUDA graph, or None. One that waits for the device is found out before, since a capture that fails
    does harm."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(stream):
            way()
    except RuntimeError:
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            way()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        _failed_captures.append(f"{type(error).__name__}: {error}")
        return None
    return graph.replay


def _summary(values: list[float]) -> dict[str, float]:
    low, *_, high = quantiles(values, n=10) if len(values) > 1 else (values[0], values[0])
    return {"ms": median(values), "low_ms": low, "high_ms": high, "rounds": len(values)}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------- the machine, and words


def about(script: str, cpu: bool) -> dict[str, Any]:
    """When, where, with what and how: everything that a number needs beside it."""
    return {
        "script": f"scripts/gpu/{script}.py",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python3", f"scripts/gpu/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "dry_run": cpu,
        "device": _device(cpu),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        for path in (sys.path, [str(ROOT / ".te")]):
            held = next((d.version for d in importlib.metadata.distributions(name=package, path=path)), None)
            if held is not None:
                found[package] = held
                break
    found |= {"torch": torch.__version__, "nemo-fp8": nemo_fp8.__version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    packed = ROOT / ".gpu" / "commit"  # git's own folder does not travel to a lent machine
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or (
        packed.read_text().strip() if packed.exists() else ""
    )
    return {name: text for name, text in (found | {"commit": commit}).items() if text}


def _device(cpu: bool) -> str:
    if not cpu and torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        return f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, {p.multi_processor_count} multiprocessors"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {torch.get_num_threads()} threads"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def te_version() -> str | None:
    """TE's version, or None where TE does not import: then whatever needs its kernels is skipped."""
    try:
        import transformer_engine
        import transformer_engine.pytorch
    except Exception:  # ImportError, RuntimeError or OSError: whatever loading CUDA libraries runs into
        return None
    return str(transformer_engine.__version__) if torch.cuda.is_available() else None


def require_te() -> Any:
    """``transformer_engine.pytorch``, or the part is skipped."""
    if te_version() is None:
        raise Skipped("TransformerEngine's kernels are not here")
    import transformer_engine.pytorch as te

    return te


def plain(value: Any) -> Any:
    """A value as JSON takes it: no tensors, and NaN and infinities as words."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown; numbers are right-aligned, and what is None is left empty."""
    rows = [["" if cell is None else " ".join(str(cell).split())[:160] for cell in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in rows if row[i]) for i in range(len(head))]
    lines = [f"| {' | '.join(head)} |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _is_number(text: str) -> bool:
    return text.rstrip("%x").replace(",", "").replace(".", "").lstrip("+-").isdigit()


def number(value: float | str | None, digits: int = 3) -> str:
    """A measured number with as many digits as it is good for; empty where there is none."""
    if value is None or isinstance(value, str):
        return value or ""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def result_of(record: dict[str, Any], part: str) -> Any:
    """What a part found, or None."""
    return record["parts"].get(part, {}).get("result")


def why_not(part: dict[str, Any]) -> str:
    """Why a part found nothing, in a line."""
    said = part.get("error") or part.get("skipped") or "ended while it ran"
    return str(said).strip().splitlines()[-1][:160]
