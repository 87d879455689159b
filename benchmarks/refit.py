"""What a push costs: FP8 against BF16, against an engine start, against a plain copy, and in memory.

Only ratios within one run mean anything. One engine in FP8 and one in BF16 hold the same model, and pushes to them take
turns; the best of each counts. The wall clock is what a trainer waits. A push keeps three processes busy (the sender
fills one buffer while the worker reads the other, and vLLM's EngineCore spins while it waits), so on a machine with few
processors, or a busy one, the processor time of the sender and of the worker is told beside it. vLLM's own reload reads
the same checkpoint from disk in the worker, through the same quantization method. The copy limit is that of a plain
torch copy of as many bytes as the tensors have. Extra memory is what the high-water marks of the sender and of the
worker rise by.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks/refit.md"
sys.path.insert(0, str(ROOT / "tests"))  # whose engines and models it takes

SHAPE = {"hidden": 2048, "layers": 4, "intermediate": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128}


def workers() -> set[int]:
    """The workers of all engines that run."""
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True) if "Worker" in child.name()}


def memory(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


class Race:
    """One engine, and what things done to it cost."""

    def __init__(self, llm: Any, pids: dict[str, int]) -> None:
        from nemo_fp8.rollout import Refit

        self.llm, self.pids, self.refit = llm, pids, Refit(llm)
        self.receipt: Any = None

    def push(self, tensors: Any) -> None:
        self.receipt = self.refit.push(tensors)

    def reload(self, path: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def measured(self, what: Callable[[Any], None], argument: Any) -> dict[str, float]:
        for pid in self.pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark begins again
        before = {who: memory(pid, "VmRSS") for who, pid in self.pids.items()}
        busy, start = self._processor(), time.perf_counter()
        what(argument)
        wall = time.perf_counter() - start
        extra = {f"extra_{who}": memory(pid, "VmHWM") - before[who] for who, pid in self.pids.items()}
        return {"wall": wall, "processor": self._processor() - busy, **extra}

    def _processor(self) -> float:
        """Seconds that both have computed, all threads together."""
        import psutil

        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pids.values())


def main() -> None:
    from support.rollout import settings

    settings.put_in_place()
    import torch
    from safetensors.torch import load_file
    from support.rollout import engines, models

    from nemo_fp8 import __version__

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and the JSON beside it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [models.write(Path(folder) / str(seed), "qwen3", seed, **SHAPE) for seed in (0, 1)]
        tensors = [load_file(path / "model.safetensors") for path in paths]
        tensors = [{name: t.clone() for name, t in one.items()} for one in tensors]
        size = sum(t.nbytes for t in tensors[0].values())
        runs: dict[str, list[dict[str, float]]] = {}
        starts, running, last = {}, {}, {}
        for kind, arguments in (
            ("FP8", engines.fp8()),
            ("BF16", {"worker_extension_cls": engines.fp8()["worker_extension_cls"]}),
        ):
            others, start = workers(), time.perf_counter()
            running[kind] = engines.start(paths[0], **arguments)
            starts[kind] = time.perf_counter() - start
            (worker,) = workers() - others
            last[kind] = Race(running[kind], {"sender": os.getpid(), "worker": worker})
            last[kind].push(tensors[0])  # plans, and touches the memory that it will use
        for i in range(options.rounds):
            for kind, race in last.items():
                runs.setdefault(f"{kind} push", []).append(race.measured(race.push, tensors[(i + 1) % 2]))
                runs.setdefault(f"vLLM's own reload, {kind}", []).append(race.measured(race.reload, str(paths[i % 2])))
        for llm in running.values():
            engines.stop(llm)
    flat = torch.ones(size, dtype=torch.uint8)
    into = torch.ones_like(flat)
    copies = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        into.copy_(flat)
        copies.append(time.perf_counter() - start)
    result = {
        "about": {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} at the end, {platform.machine()}",
            "versions": f"nemo_fp8 {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            "command": f"python benchmarks/refit.py {' '.join(sys.argv[1:])}",
        },
        "parameters": sum(t.numel() for t in tensors[0].values()),
        "bytes": size,
        "start_seconds": starts,
        "copy_seconds": min(copies),
        "chunk_bytes": last["FP8"].receipt.chunk_bytes,
        "best": {name: {key: min(one[key] for one in rounds) for key in rounds[0]} for name, rounds in runs.items()},
        "worst_extra": {
            name: max(one["extra_sender"] + one["extra_worker"] for one in rounds) for name, rounds in runs.items()
        },
    }
    text = page(result)
    print(text)
    if options.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)
        PAGE.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def page(result: dict[str, Any]) -> str:
    best, size = result["best"], result["bytes"]
    fp8, bf16 = best["FP8 push"], best["BF16 push"]
    out = ["# What a push costs", "", "Written by `benchmarks/refit.py`; do not edit.", ""]
    out += [f"- {key}: {value}" for key, value in result["about"].items()]
    out += [f"- model: Qwen3 with {result['parameters'] / 1e6:.0f} million parameters, {size / 1e6:.0f} MB in BF16", ""]
    out += [(__doc__ or "").split("\n\n", 1)[-1].strip().replace("\n", " "), ""]
    out += ["| | asked for | measured |", "|---|---:|---:|"]
    rows = (
        ("FP8 push over BF16 push, wall clock", "at most 1.2", f"{fp8['wall'] / bf16['wall']:.2f}"),
        ("FP8 push over BF16 push, processor time", "", f"{fp8['processor'] / bf16['processor']:.2f}"),
        (
            "engine start over FP8 push, wall clock",
            "at least 50",
            f"{result['start_seconds']['FP8'] / fp8['wall']:.0f}",
        ),
        ("FP8 push, of the copy limit", "", f"{result['copy_seconds'] / fp8['wall']:.0%}"),
        (
            "most extra memory, sender and worker together",
            f"{result['chunk_bytes'] / 1e6:.0f} MB of buffers, seen from both",
            f"{result['worst_extra']['FP8 push'] / 1e6:.0f} MB",
        ),
    )
    out += [f"| {' | '.join(row)} |" for row in rows]
    out += ["", "| | wall, s | processor, s | GB/s of BF16 |", "|---|---:|---:|---:|"]
    out += [
        f"| {name} | {one['wall']:.3f} | {one['processor']:.2f} | {size / one['wall'] / 1e9:.2f} |"
        for name, one in best.items()
    ]
    out += [f"| a plain copy | {result['copy_seconds']:.3f} | | {size / result['copy_seconds'] / 1e9:.2f} |"]
    out += [f"| engine start, FP8 | {result['start_seconds']['FP8']:.1f} | | |", ""]
    return "\n".join(out)


if __name__ == "__main__":
    main()
