"""What a push costs: FP8 against BF16, against an engine start, against a plain copy, and in memory.

Only ratios within one run mean anything. An engine for each format holds the same model, and pushes to them take turns;
the best of each counts. Each begins after a pause, so that processes of another engine, which ask for messages for a
while, take no processor. The wall clock is what a trainer waits. A push keeps three processes busy (the sender
casts or copies while the worker writes, and vLLM's EngineCore asks for an answer), so on a machine with few processors,
or a busy one, the processor time of the sender and of the worker is told beside it. Threads of OpenMP that wait do not
spin (`OMP_WAIT_POLICY=passive`, unless the variable says otherwise): they would take a processor from the other side.
"From shared memory" is a push of SharedWeights, which are not copied. "By rows" is BF16 that is multiplied as it lies
in a checkpoint, and not packed. vLLM's own reload reads the same checkpoint from disk (the system's cache) in the
worker, through the same quantization method, in an engine to which nothing is pushed: a push has the C library keep
freed memory, by which a later reload is faster, too. The copy limit is that of a plain torch copy of as many bytes as
the tensors have, in turns with the pushes. Extra memory is what the high-water marks of the sender and of the worker
rise by. A stack of experts is 128 experts in each of 48 layers, of 128x128 matrices, as two tensors a layer; it is
pushed to an engine of its own, in turns with a dense model of as many bytes. A push of changes is one after a step that
moves every weight by 3e-6; its goal is to take less time than a push of everything, and a tenth of the bytes of all
codes, scales and BF16 values. It quantizes in the trainer and compares with what was sent, so it has to save more time
on the way than that takes: on one host it is measured through shared memory, where bytes cost next to nothing, and over
HTTP to a server of its own, as to another host. A push of codes is one of a trainer that keeps FP8 weights: codes with
their scales, which are there before it begins; its limit is a copy of the BF16 values that they stand for.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import functools
import json
import math
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
EXPERTS = {"hidden": 128, "layers": 48, "intermediate": 512, "heads": 1, "kv_heads": 1, "head_dim": 128, "experts": 128}
AS_MANY = {"hidden": 2048, "layers": 6, "intermediate": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128}
CHANGES = "FP8 push of changes"
CODES = "FP8 push of codes"
# A format -> the contract and options of its engine; None without our plugin, packed by vLLM.
FORMATS: dict[str, dict[str, str] | None] = {
    "FP8": {},
    "NVFP4": {"rollout": "nvfp4", "activation_scheme": "none"},
    "BF16": None,
    "BF16 by rows": {"rollout": "compute", "unquantized": "rows"},
}
# One run as one JSON object: key -> where it is in the record.
KEYS = {
    "fp8_push_s": ("best", "FP8 push", "wall"),
    "nvfp4_push_s": ("best", "NVFP4 push", "wall"),
    "bf16_push_s": ("best", "BF16 push", "wall"),
    "fp8_shared_push_s": ("best", "FP8 push from shared memory", "wall"),
    "bf16_shared_push_s": ("best", "BF16 push from shared memory", "wall"),
    "bf16_by_rows_push_s": ("best", "BF16 by rows push", "wall"),
    "bf16_by_rows_shared_push_s": ("best", "BF16 by rows push from shared memory", "wall"),
    "vllm_reload_fp8_s": ("best", "vLLM's own reload, FP8", "wall"),
    "vllm_reload_bf16_s": ("best", "vLLM's own reload, BF16", "wall"),
    "engine_start_s": ("start_seconds", "FP8"),
    "copy_s": ("copy_seconds",),
    "delta_push_s": ("best", CHANGES, "wall"),
    "http_push_s": ("http", "push"),
    "http_delta_push_s": ("http", "changes"),
    "delta_bytes": ("changes", "bytes"),
    "full_bytes": ("changes", "full_bytes"),
    "bf16_bytes": ("bytes",),
}
LR = 3e-6  # a learning rate of RL: about what a step of Adam moves each weight by


def workers() -> set[int]:
    """Return the workers of all engines that run."""
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
        self.changes: dict[str, float] = {}

    @classmethod
    def started(cls, path: Path, profile: bool, arguments: dict[str, Any]) -> Race:
        """Start an engine. The first thing done to it is not to be measured: it plans, and touches memory."""
        from support.rollout import engines

        from nemo_fp8.rollout.arguments import EXECUTOR

        others = workers()
        extension = "refit_profile.ProfiledWorker" if profile else engines.fp8()["worker_extension_cls"]
        own = {"worker_extension_cls": extension, "distributed_executor_backend": EXECUTOR}
        llm = engines.start(path, **arguments | own)
        (worker,) = workers() - others
        return cls(llm, {"sender": os.getpid(), "worker": worker})

    def push(self, tensors: Any) -> None:
        self.refit.push(tensors)

    def push_changes(self, tensors: Any) -> None:
        receipt = self.refit.push(tensors, delta=True).require()
        assert not receipt.delta.instead, receipt.delta.instead
        self.changes = {"bytes": receipt.bytes, "full_bytes": receipt.delta.full_bytes, "share": receipt.delta.share}

    def profiled(self, tensors: Any) -> dict[str, Any]:
        """Return where the time of a push goes: of the sender and of the worker, each in a push of its own."""
        from refit_profile import SENDER, rows_of

        mine = cProfile.Profile()
        start = time.perf_counter()
        mine.runcall(self.push, tensors)
        seconds = {"sender": time.perf_counter() - start}
        self.llm.collective_rpc("profile_begin")
        start = time.perf_counter()
        self.push(tensors)
        seconds["worker"] = time.perf_counter() - start
        (theirs,) = self.llm.collective_rpc("profile_end")
        return {"seconds": seconds, "rows": {"sender": rows_of(mine, SENDER), "worker": theirs}}

    def reload(self, path: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def measured(self, what: Callable[[Any], None], argument: Any) -> dict[str, float]:
        from support.rollout.engines import ASLEEP

        time.sleep(ASLEEP)
        for pid in self.pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark begins again
        before = {who: memory(pid, "VmRSS") for who, pid in self.pids.items()}
        busy, start = self._processor(), time.perf_counter()
        what(argument)
        wall = time.perf_counter() - start
        extra = {f"extra_{who}": memory(pid, "VmHWM") - before[who] for who, pid in self.pids.items()}
        return {"wall": wall, "processor": self._processor() - busy, **extra}

    def _processor(self) -> float:
        """Return the seconds that both have computed, all threads together."""
        import psutil

        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pids.values())


def main() -> None:
    from support.rollout import settings

    from nemo_fp8.extras import require

    settings.put_in_place()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and the JSON beside it")
    parser.add_argument("--json", action="store_true", help="print the times of this run as one JSON object, no page")
    parser.add_argument("--profile", action="store_true", help="say where the time of a push goes, on both sides")
    parser.add_argument("--experts", action="store_true", help="push a stack of 128 experts in 48 layers, too")
    options = parser.parse_args()
    require("rollout")
    if options.json:  # vLLM and its workers print what they do, which is no JSON
        stdout = os.dup(1)
        os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.rounds, options.profile)
        result |= measure_http(Path(folder), options.rounds)
        if options.experts:
            result |= measure_experts(Path(folder), options.rounds)
    if options.json:
        with os.fdopen(stdout, "w") as out:
            print(json.dumps(in_short(result)), file=out)
        return
    text = page(result)
    print(text)
    if options.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)
        PAGE.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def measure(folder: Path, rounds: int, profile: bool) -> dict[str, Any]:
    """Return the record of pushes and reloads of a dense model, in turns."""
    import torch
    from support.rollout import engines, models

    from nemo_fp8.rollout.refit import SharedWeights

    paths = [models.write(folder / str(seed), "qwen3", seed, **SHAPE) for seed in (0, 1)]
    tensors = [read(path) for path in paths]
    size = sum(t.nbytes for t in tensors[0].values())
    runs: dict[str, list[dict[str, float]]] = {}
    copies: list[float] = []
    starts, racers, reloading = {}, {}, {}
    for kind, contract in FORMATS.items():
        arguments = {} if contract is None else engines.fp8(**contract)
        start = time.perf_counter()
        racers[kind] = Race.started(paths[0], profile, arguments)
        racers[kind].push(tensors[0])
        starts[kind] = time.perf_counter() - start
        reloading[kind] = Race.started(paths[0], profile, arguments)
        reloading[kind].reload(str(paths[0]))
    shared = [SharedWeights(one) for one in tensors]
    coded = [in_codes(one) for one in tensors]
    # One alone: a worker keeps few pieces of memory mapped, and would find the pages of all of them anew in each round.
    coded_shared = [SharedWeights(coded[0])] * 2
    stepped = after_a_step(tensors[0])
    racers["FP8"].push(coded_shared[0])  # once each, since a worker finds the pages of all that it maps
    for race in racers.values():
        for given in shared:
            race.push(given)
    for i in range(rounds):
        copies.append(copy_seconds(size))
        for kind, race in racers.items():
            other = reloading[kind]
            for what, engine, do, given in (
                (f"{kind} push", race, race.push, tensors[(i + 1) % 2]),
                (f"{kind} push from shared memory", race, race.push, shared[i % 2]),
                (f"vLLM's own reload, {kind}", other, other.reload, str(paths[i % 2])),
            ):
                runs.setdefault(what, []).append(engine.measured(do, given))
        fp8 = racers["FP8"]
        for what, given in ((CODES, coded), (f"{CODES} from shared memory", coded_shared)):
            fp8.push(given[(i + 1) % 2])  # plans again, since other tensors were pushed before
            runs.setdefault(what, []).append(fp8.measured(fp8.push, given[i % 2]))
        racers["FP8"].refit.push(tensors[0], delta=True)  # begins a ledger, since other pushes came between
        runs.setdefault(CHANGES, []).append(racers["FP8"].measured(racers["FP8"].push_changes, stepped))
    for what in ("FP8 push from shared memory", f"{CODES} from shared memory"):
        anew = min(run["extra_worker"] for run in runs[what])
        assert anew < size / 10, f"{what}: the worker found {anew} bytes of it anew in every round, which takes longer"
    changes = racers["FP8"].changes
    chunk_bytes = racers["FP8"].refit.push(tensors[0]).chunk_bytes
    profiles = {kind: race.profiled(tensors[0]) for kind, race in racers.items()} if profile else {}
    for race in (*racers.values(), *reloading.values()):
        engines.stop(race.llm)
    return about() | {
        "parameters": sum(t.numel() for t in tensors[0].values()),
        "bytes": size,
        "start_seconds": starts,
        "copy_seconds": min(copies),
        "changes": changes,
        "chunk_bytes": chunk_bytes,
        "torch_threads": torch.get_num_threads(),
        "best": {name: {key: min(one[key] for one in several) for key in several[0]} for name, several in runs.items()},
        "worst_extra": {
            name: max(one["extra_sender"] + one["extra_worker"] for one in several) for name, several in runs.items()
        },
        "profiles": profiles,
    }


def measure_http(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of a push of everything and of one of changes, in turns, to a server over HTTP."""
    from support.rollout import models
    from support.rollout.servers import Served

    from nemo_fp8 import Precision
    from nemo_fp8.rollout import Refit

    path = models.write(folder / "served", "qwen3", 0, **SHAPE)
    before = read(path)
    after = after_a_step(before)
    served = Served(path, Precision(rollout="fp8"))
    coded = in_codes(before)
    found: dict[str, list[float]] = {"push": [], "changes": [], "codes": []}
    try:
        refit = Refit(served.url, transport="http")
        refit.push(before)
        for _ in range(rounds):
            for what, tensors, delta in (
                ("codes", coded, False), ("push", before, False), ("", before, True), ("changes", after, True)
            ):  # fmt: skip
                start = time.perf_counter()
                receipt = refit.push(tensors, delta=delta).require()
                if what:  # else it begins a ledger
                    found[what].append(time.perf_counter() - start)
        assert receipt.delta is not None
        assert not receipt.delta.instead, receipt.delta.instead
    finally:
        served.stop()
    return {"http": {what: min(several) for what, several in found.items()}}


def measure_experts(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds and bytes of pushes of a stack of experts, and of a dense model of about as many bytes."""
    from support.rollout import engines, models

    races, pushed, seconds = {}, {}, {}
    for name, kind, shape in (("experts", "qwen3_moe", EXPERTS), ("dense", "qwen3", AS_MANY)):
        path = models.write(folder / name, kind, 0, **shape)
        pushed[name], seconds[name] = models.stacked(read(path)), math.inf
        races[name] = Race.started(path, False, engines.fp8() | {"load_format": "dummy"})
        races[name].push(pushed[name])
    for _ in range(rounds):
        for name, race in races.items():
            seconds[name] = min(seconds[name], race.measured(race.push, pushed[name])["wall"])
    for race in races.values():
        engines.stop(race.llm)
    return {
        "experts": {
            name: {"seconds": seconds[name], "bytes": sum(t.nbytes for t in tensors.values()), "tensors": len(tensors)}
            for name, tensors in pushed.items()
        }
    }


def read(path: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint, in memory of their own."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}


def after_a_step(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return BF16 tensors after a step that moves the FP32 weights behind them by LR, up or down.

    What BF16 does not hold of a weight may be anything up to half a step of BF16, so a value changes with the
    probability LR over such a step.
    """
    import torch

    draws, found = torch.Generator().manual_seed(0), {}
    for name, tensor in tensors.items():
        _, exponent = torch.frexp(tensor.float())
        rest = torch.ldexp(torch.rand(tensor.shape, generator=draws) - 0.5, exponent - 8)
        up = torch.rand(tensor.shape, generator=draws) < 0.5
        found[name] = (tensor.float() + 0.999 * rest + torch.where(up, LR, -LR)).to(tensor.dtype)
    return found


def in_codes(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors as a trainer has them that keeps linears in FP8: codes, with their scales beside them."""
    from nemo_fp8.contract import Operand
    from nemo_fp8.numerics import quantize

    found = dict(tensors)
    for name in [name for name in tensors if "_proj" in name]:
        made = quantize(tensors[name], Operand("e4m3", (128, 128), "fp32"))
        found |= {name: made.data, f"{name}_scale_inv": made.scale_inv}
    return found


def copy_seconds(size: int) -> float:
    """Return how long a plain copy of so many bytes takes, into memory that was there."""
    import torch

    flat = torch.ones(size, dtype=torch.uint8)
    into = torch.ones_like(flat)
    start = time.perf_counter()
    into.copy_(flat)
    return time.perf_counter() - start


def about() -> dict[str, Any]:
    """Return the machine and the versions."""
    import torch

    from nemo_fp8 import __version__

    units = [torch.backends.cpu.get_cpu_capability(), *["AMX"] * torch.cpu._is_amx_tile_supported()]
    kind = f"{platform.machine()} with {' and '.join(units)}"
    return {
        "about": {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} processors, {kind}, load {os.getloadavg()[0]:.1f} at the end",
            "versions": f"nemo_fp8 {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            "command": f"python benchmarks/refit.py {' '.join(sys.argv[1:])}",
        }
    }


def in_short(result: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a run under the names of ``KEYS``."""
    short = {key: functools.reduce(lambda at, name: at[name], path, result) for key, path in KEYS.items()}
    for name, found in result.get("experts", {}).items():
        short |= {f"{name}_push_s": found["seconds"], f"{name}_bytes": found["bytes"]}
    return short


def page(result: dict[str, Any]) -> str:
    from refit_profile import page as profile_page

    best, size = result["best"], result["bytes"]
    fp8, bf16 = best["FP8 push"], best["BF16 push"]
    quantized = [kind for kind in result["start_seconds"] if kind != "BF16"]
    out = ["# What a push costs", "", "Written by `benchmarks/refit.py`; do not edit.", ""]
    out += [f"- {key}: {value}" for key, value in result["about"].items()]
    out += [f"- model: Qwen3 with {result['parameters'] / 1e6:.0f} million parameters, {size / 1e6:.0f} MB in BF16", ""]
    out += [(__doc__ or "").split("\n\n", 1)[-1].strip().replace("\n", " "), ""]
    out += ["| | asked for | measured |", "|---|---:|---:|"]
    changes = result["changes"]
    rows = (
        (f"{CHANGES} over FP8 push, wall clock", "less than 1", f"{best[CHANGES]['wall'] / fp8['wall']:.2f}"),
        (
            f"{CHANGES} over FP8 push, over HTTP, wall clock",
            "less than 1",
            f"{result['http']['changes'] / result['http']['push']:.2f}",
        ),
        (f"{CODES} over FP8 push, wall clock", "", f"{best[CODES]['wall'] / fp8['wall']:.2f}"),
        (
            f"{CODES} over FP8 push, over HTTP, wall clock",
            "",
            f"{result['http']['codes'] / result['http']['push']:.2f}",
        ),
        (
            f"bytes of all codes, scales and BF16 values, over those of {changes['share']:.2%} that change",
            "at least 10",
            f"{changes['full_bytes'] / changes['bytes']:.0f}",
        ),
        *(
            (f"{kind} push over BF16 push, {what}", goal, f"{best[f'{kind} push'][key] / bf16[key]:.2f}")
            for kind in quantized
            for what, key, goal in (
                ("wall clock", "wall", "at most 1.2" if kind == "FP8" else ""),
                ("processor time", "processor", ""),
            )
        ),
        (
            "engine start over FP8 push, wall clock",
            "at least 50",
            f"{result['start_seconds']['FP8'] / fp8['wall']:.0f}",
        ),
        *(
            (f"{name}, of the copy limit", "35%", f"{result['copy_seconds'] / best[name]['wall']:.0%}")
            for name in best
            if "push" in name and name != CHANGES
        ),
        *(
            (
                f"{name} over vLLM's own reload",
                "less than 1",
                f"{best[name]['wall'] / reload['wall']:.2f}",
            )
            for kind in result["start_seconds"]
            for name in (f"{kind} push", f"{kind} push from shared memory")
            for reload in [best[f"vLLM's own reload, {kind}"]]
        ),
        *(
            (
                "experts over a dense model, wall clock by the byte",
                "at most 2",
                f"{stack['seconds'] / stack['bytes'] / (dense['seconds'] / dense['bytes']):.2f}",
            )
            for stack, dense in [tuple(found.values()) for found in [result.get("experts")] if found]
        ),
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
    names = {"push": "FP8 push over HTTP", "changes": f"{CHANGES} over HTTP", "codes": f"{CODES} over HTTP"}
    out += [
        f"| {name} | {result['http'][what]:.3f} | | {size / result['http'][what] / 1e9:.2f} |"
        for what, name in names.items()
    ]
    out += [f"| engine start, {kind} | {result['start_seconds'][kind]:.1f} | | |" for kind in quantized]
    for name, found in result.get("experts", {}).items():
        what = f"{name}: {found['bytes'] / 1e6:.0f} MB in {found['tensors']} tensors"
        out += [f"| {what} | {found['seconds']:.3f} | | {found['bytes'] / found['seconds'] / 1e9:.2f} |"]
    for kind, profile in result["profiles"].items():
        out += ["", f"## Where the time of a push goes, {kind}", *profile_page(profile["rows"], profile["seconds"])]
    out += [""]
    return "\n".join(out)


if __name__ == "__main__":
    main()
