#!/usr/bin/env python
"""How fast values become FP8 and come back, against what the machine can copy and against other people's ways.

    python benchmarks/quantize.py --quick            a minute
    python benchmarks/quantize.py --write            everything, into docs/benchmarks/quantize.md
    python benchmarks/quantize.py --processes 5      in five processes, one after the other, and medians over all
    python benchmarks/quantize.py --only "MX 1x32"   single operations
    python benchmarks/quantize.py --memory --write   nothing but memory, into the page as it is
    python benchmarks/quantize.py --isa avx2 --write  the kernels as an AVX2 processor gets them, into the same page
    PYTHONPATH=/tmp/torchao python benchmarks/...        with torchao among the peers
                                                        (pip install --no-deps --target /tmp/torchao "torchao==0.18.*")

Quantizing a BF16 element moves 3 bytes (2 in, 1 out), and so does decoding it; scales and statistics are not counted,
though the latter are 15 bytes a tile, half a byte for each MX element, in memory that the process has had before (new
memory for them costs as much as the cast, or more). NVFP4 moves 2.5625 bytes an
element (2 in, half a byte and a scale's sixteenth out) where the tensor's amax is given, and 4.5625 where it is found
first, in a pass of its own that reads everything once more; so does its yardstick. Rounding by chance reads four more,
the drawn numbers, which are not drawn here. The yardstick is a copy that moves as many bytes with as many threads, of
three kinds: torch's `copy_` into memory that is there; torch's `clone` to a new tensor, for which the operating system
has to find and clear pages; and the C library's `memcpy`, a part for each thread, the fastest copy that we know on such
a machine. Only ratios within one run mean anything. All ways take turns, round after round, each on another piece of
memory, more of them than caches hold; and each is timed right after its yardstick. A share is the median of these
neighbours' ratios, and GB/s come from the median time. Pairs in which the operating system took a processor away from
this process are thrown away (unless none is left), so that a machine that others use too gives the same shares, only
from fewer pairs. `--isa` changes our kernels alone: torch and memcpy copy with everything the processor has. On a
machine that shares its memory with other machines the copy itself differs from process to process (4096x4096 on an
idle EPYC of the newest kind: from 42 to 86 GB/s), so a record is made in several (`--processes`); a kernel whose
arithmetic is the limit, as the AVX2 build's is there at 31 to 47 GB/s, stays as it is, and its share moves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pairs import (
    BYTES,
    Pair,
    Pairs,
    Place,
    freed_memory_stays,
    memcpy_in_parts,
    pair_up,
    places_for,
    seconds,
    share,
    tensors_from_the_system,
)
from peers import E4M3, Ways, padded_eager, peers

from nemo_fp8 import __version__
from nemo_fp8.numerics import kernels, nvfp4
from nemo_fp8.numerics.kernels import build

PAGE = Path(__file__).parents[1] / "docs/benchmarks/quantize.md"
RECORD = PAGE.with_suffix(".json")
OTHER = "# The kernels built for {isa}"  # begins that part of the page

SMALL, LARGE = (4096, 4096), (8192, 28672)
# name: tile, kind of scale
OPERATIONS: dict[str, tuple[tuple[int, int] | None, str]] = {
    "weight 128x128, FP32 scales": ((128, 128), "fp32"),
    "weight 128x128, power-of-2 scales": ((128, 128), "pow2"),
    "activation 1x128, FP32 scales": ((1, 128), "fp32"),
    "activation 1x128, power-of-2 scales": ((1, 128), "pow2"),
    "activation 128x1 (column usage)": ((128, 1), "fp32"),
    "MX 1x32, E8M0 scales": ((1, 32), "e8m0"),
    "MX 32x1 (column usage)": ((32, 1), "e8m0"),
    "whole tensor, given scale": (None, "fp32"),
}
# name: rows of a block, whether the tensor's amax is given
NVFP4: dict[str, tuple[int, bool]] = {
    "NVFP4 1x16, given amax": (1, True),
    "NVFP4 16x16, given amax": (16, True),
    "NVFP4 1x16": (1, False),
    "NVFP4 16x16": (16, False),
}
# What training casts beside that, beneath a given amax: columns, columns after the Hadamard transform, and both by
# chance. name: whether columns are cast, whether they are transformed, whether codes are rounded by chance
NVFP4_VARIANTS: dict[str, tuple[bool, bool, bool]] = {
    "NVFP4 16x1 (column usage)": (True, False, False),
    "NVFP4 16x1 after the transform": (True, True, False),
    "NVFP4 1x16 by chance": (False, False, True),
    "NVFP4 16x1 after the transform, by chance": (True, True, True),
}
NVFP4_DECODED = "decode NVFP4 to BF16"
# Bytes that an element moves, where they are not BYTES.
MOVED = {name: 2.5625 if given else 4.5625 for name, (_, given) in NVFP4.items()} | {NVFP4_DECODED: 2.5625}
MOVED |= {name: 6.5625 if by_chance else 2.5625 for name, (*_, by_chance) in NVFP4_VARIANTS.items()}
DECODED: dict[str, tuple[int, int]] = {"decode 128x128 to BF16": (128, 128), "decode 1x128 to BF16": (1, 128)}


# ---------------------------------------------------------------------- measuring


def measure(shape: tuple[int, int], rounds: int, device: str, only: str = "") -> dict[str, Any]:
    """Measure every operation whose name contains ``only``: to new memory, into memory that is there, and with
    statistics."""
    with tensors_from_the_system(device):
        places = places_for(shape, device)
    there, new = ways_to_copy(device)
    for name, (tile, kind) in OPERATIONS.items():
        if only in name:
            add_quantizing(name, tile, kind, places[0].x, there, new)
    for name, tile in DECODED.items():
        if only in name:
            add_decoding(name, tile, places[0].x, there, new)
    for name in NVFP4:
        if only in name and device in kernels.FP4_DEVICES:
            add_nvfp4(name, places[0].x, there, new)
    for name in NVFP4_VARIANTS:
        if only in name and device == "cpu":
            add_nvfp4_variant(name, places[0].x, there)
    if only in NVFP4_DECODED and device in kernels.FP4_DEVICES:
        add_decoding_nvfp4(places[0].x, there, new)
    with tensors_from_the_system(device):
        pairs = pair_up(new, places, max(4, rounds // 4), device)
    with freed_memory_stays(device):
        pairs |= pair_up(there, places, rounds, device)
    return {"shape": shape, "pairs": pairs, "places": places}


def measure_here(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what this process measures of every shape, and beside others' ways of the first."""
    results = []
    for number, shape in enumerate([SMALL] if options.quick else [SMALL, LARGE]):
        rounds = options.rounds or (5 if options.quick else 40 if number == 0 else 8)
        results.append(measure(shape, rounds, options.device, options.only))
        places = results[-1].pop("places")
        if number == 0 and not options.only and not options.isa:
            results[-1]["peers"] = measure_peers(places, max(3, rounds // 8), options.device, not options.quick)
        del places
    return results


def copy(place: Place) -> Any:
    return place.target.copy_(place.plain)


def clone(place: Place) -> Any:
    return place.plain.clone()


def ways_to_copy(device: str) -> tuple[Pairs, Pairs]:
    """Return the yardsticks, themselves measured: into memory that is there, and to new memory."""
    there: Pairs = {"copy/there": (copy, copy)}
    if device == "cpu" and (memcpy := memcpy_in_parts(torch.get_num_threads())):
        there["copy/memcpy"] = (memcpy, copy)
    return there, {"copy/new": (clone, clone)}


def add_quantizing(
    name: str, tile: tuple[int, int] | None, kind: str, x: torch.Tensor, there: Pairs, new: Pairs
) -> None:
    scale = torch.tensor(37.0, device=x.device) if tile is None else None

    def run(x: torch.Tensor, statistics: bool, out: Any) -> Any:
        return require(kernels.quantize(x, tile, "e4m3", kind, "te", statistics, scale, out))

    scale_inv = run(x, False, None)[1]
    there[f"{name}/there"] = (lambda p: run(p.x, False, (p.codes, scale_inv)), copy)
    there[f"{name}/statistics"] = (lambda p: run(p.x, True, (p.codes, scale_inv)), copy)
    new[f"{name}/new"] = (lambda p: run(p.x, False, None), clone)


def add_decoding(name: str, tile: tuple[int, int], x: torch.Tensor, there: Pairs, new: Pairs) -> None:
    scale_inv = require(kernels.quantize(x, tile, "e4m3", "fp32"))[1]
    there[f"{name}/there"] = (
        lambda p: require(kernels.decode(p.codes, scale_inv, tile, torch.bfloat16, p.values)),
        copy,
    )
    new[f"{name}/new"] = (lambda p: require(kernels.decode(p.codes, scale_inv, tile, torch.bfloat16, None)), clone)


def add_nvfp4(name: str, x: torch.Tensor, there: Pairs, new: Pairs) -> None:
    tile_rows, given = NVFP4[name]
    encode = nvfp4.encode_scale(require(kernels.amax(x))).reshape(1)

    def run(x: torch.Tensor, out: Any) -> Any:
        found = encode if given else nvfp4.encode_scale(require(kernels.amax(x))).reshape(1)
        return require(kernels.quantize_fp4(x, found, tile_rows, out=out))

    scales = run(x, None)[1]
    there[f"{name}/there"] = (lambda p: run(p.x, (half_of(p.codes), scales)), copy_of(MOVED[name]))
    new[f"{name}/new"] = (lambda p: run(p.x, None), clone_of(MOVED[name]))


def add_nvfp4_variant(name: str, x: torch.Tensor, there: Pairs) -> None:
    columns, transforms, by_chance = NVFP4_VARIANTS[name]
    encode = nvfp4.encode_scale(require(kernels.amax(x))).reshape(1)
    shape = x.shape[::-1] if columns else x.shape
    chance = torch.rand(shape) if by_chance else None
    signs = nvfp4.SIGNS if transforms else None
    scales = torch.empty(shape[0], shape[1] // 16, dtype=torch.float8_e4m3fn)

    def run(p: Place) -> Any:
        out = half_of(p.codes).view(shape[0], shape[1] // 2), scales
        return require(
            kernels.quantize_fp4(p.x.t() if columns else p.x, encode, 1, out=out, signs=signs, chance=chance)
        )

    there[f"{name}/there"] = (run, copy_of(MOVED[name]))


def add_decoding_nvfp4(x: torch.Tensor, there: Pairs, new: Pairs) -> None:
    amax = require(kernels.amax(x))
    scales = require(kernels.quantize_fp4(x, nvfp4.encode_scale(amax).reshape(1), 1))[1]

    def run(p: Place, out: Any) -> Any:
        return require(kernels.decode_fp4(half_of(p.codes), scales, amax, 2688.0, torch.bfloat16, out))

    there[f"{NVFP4_DECODED}/there"] = (lambda p: run(p, p.values), copy_of(MOVED[NVFP4_DECODED]))
    new[f"{NVFP4_DECODED}/new"] = (lambda p: run(p, None), clone_of(MOVED[NVFP4_DECODED]))


def half_of(codes: torch.Tensor) -> torch.Tensor:
    """Return half of the memory for FP8 codes, as bytes of two."""
    rows, columns = codes.shape
    return codes.view(torch.uint8).view(-1)[: codes.numel() // 2].view(rows, columns // 2)


def copy_of(moved: float) -> Callable[[Place], Any]:
    """Return a copy that moves so many bytes an element: of a part of what FP8 moves, or of that and of the source."""

    def run(p: Place) -> None:
        rest = moved if moved <= BYTES else moved - 4
        if moved > BYTES:
            p.values.copy_(p.x)
        part = int(p.x.numel() * rest) // 2
        p.target[:part].copy_(p.plain[:part])

    return run


def clone_of(moved: float) -> Callable[[Place], Any]:
    """Return :func:`copy_of` to new memory. Of what is read twice only the cast writes: the other reading is an amax of
    torch's."""

    def run(p: Place) -> Any:
        if moved > BYTES:
            torch.aminmax(p.x.view(-1))
        return p.plain[: int(p.x.numel() * 2.5625) // 2].clone()

    return run


def measure_peers(places: list[Place], rounds: int, device: str, compiled: bool) -> dict[str, dict[str, float]]:
    """Measure the seconds of our way and of others', side by side, to new memory."""
    x = places[0].x
    quantizing, backwards, mx = peers(x, compiled)
    codes, scale_inv, _ = require(kernels.quantize(x, (128, 128), "e4m3", "fp32"))

    def against(ours: Callable[[], Any], others: Ways) -> dict[str, float]:
        ways: Pairs = {name: ((lambda p, w=way: w()),) * 2 for name, way in ({"nemo_fp8": ours} | others).items()}
        return {name: seconds(found) for name, found in pair_up(ways, places[:1], rounds, device).items()}

    return {
        "BF16 to FP8, 128x128": against(lambda: kernels.quantize(x, (128, 128), "e4m3", "fp32"), quantizing),
        "FP8 to BF16, 128x128": against(lambda: kernels.decode(codes, scale_inv, (128, 128)), backwards),
        "BF16 to MX, 1x32": against(lambda: kernels.quantize(x, (1, 32), "e4m3", "e8m0"), mx),
    }


def over_processes(count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what so many processes measured, one after the other, as the pairs of one run.

    How fast memory is read and written depends on where it lies, which stays for the whole of a process.
    """
    command = [sys.executable, "-W", "ignore", __file__, "--no-memory", "--device", options.device]
    command += ["--only", options.only, "--rounds", str(options.rounds), "--isa", options.isa]
    command += ["--quick"] * options.quick
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = Path(folder, f"{number}.json")
            subprocess.run([*command, "--json", str(path)], stdout=subprocess.DEVNULL, check=True)
            for shape, ways in json.loads(path.read_text()).items():
                if shape not in ("about", "memory"):
                    joined = found.setdefault(shape, {})
                    for name, told in ways.items():
                        joined.setdefault(name, []).append(told)
    return [read_back(shape, ways) for shape, ways in found.items()]


def read_back(shape: str, ways: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the result of a shape from what each process wrote of it: pairs of ways, and times of peers by title."""
    pairs = {
        name: [Pair(yardstick, way, bool(disturbed)) for told in several for yardstick, way, disturbed in told]
        for name, several in ways.items()
        if isinstance(several[0], list)
    }
    peers = {
        title: {name: median(told[name] for told in several) for name in several[0]}
        for title, several in ways.items()
        if isinstance(several[0], dict)
    }
    rows, cols = map(int, shape.split(" x "))
    return {"shape": (rows, cols), "pairs": pairs} | ({"peers": peers} if peers else {})


def require(answer: Any) -> Any:
    if answer is None:
        sys.exit("There is no fast kernel on this machine (the log says why), so there is nothing to measure.")
    return answer


def build_for(isa: str) -> None:
    """Let this process build the kernels for less than its processor has."""
    build.MACHINE_FLAGS = (build.OTHERS[isa],)


def peak_memory(shape: tuple[int, int], ways: Iterable[str] | None = None) -> dict[str, float]:
    """Measure what quantizing adds to a process's resident memory at its highest, as a share of the BF16 source, in a
    process of its own for each of these ways (of all in MEMORY, if none are given)."""
    command = [sys.executable, "-W", "ignore", __file__, "--memory-of"]
    shares = {}
    for name in MEMORY if ways is None else ways:
        done = subprocess.run([*command, name, *map(str, shape)], capture_output=True, text=True, check=True)
        shares[name] = float(done.stdout)
    return shares


def memory_of(way: str, rows: int, cols: int) -> float:
    run, there = MEMORY[way]
    run(torch.ones(256, 256, dtype=torch.bfloat16), None)
    x = torch.empty(rows, cols, dtype=torch.bfloat16).normal_()
    out = there and there(rows, cols)
    before = _resident("VmRSS")
    kept = run(x, out)
    added = _resident("VmHWM") - before  # the high-water mark
    del kept
    return max(0, added) / (x.numel() * x.itemsize)


def fp8_of(x: torch.Tensor, out: Any, statistics: bool = False) -> Any:
    return kernels.quantize(x, (128, 128), "e4m3", "fp32", "te", statistics, out=out)


def fp8_there(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, cols, dtype=torch.uint8).view(E4M3), torch.ones(-(-rows // 128), -(-cols // 128))


def nvfp4_of(x: torch.Tensor, out: Any) -> Any:
    encode = nvfp4.encode_scale(require(kernels.amax(x))).reshape(1)
    return require(kernels.quantize_fp4(x, encode, 1, out=out))


def nvfp4_there(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, cols // 2, dtype=torch.uint8), torch.ones(rows, cols // 16, dtype=torch.uint8).view(E4M3)


# way: how it casts, into memory that is there or else to new, and how that memory is made
MEMORY: dict[str, tuple[Callable[[torch.Tensor, Any], Any], Callable[[int, int], Any] | None]] = {
    "kernel": (fp8_of, None),
    "kernel with statistics": (partial(fp8_of, statistics=True), None),
    "kernel into memory that is there": (fp8_of, fp8_there),
    "NVFP4 kernel": (nvfp4_of, None),
    "NVFP4 kernel into memory that is there": (nvfp4_of, nvfp4_there),
    "NeMo RL's algorithm, eager": (lambda x, out: padded_eager(x), None),
}


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


# ---------------------------------------------------------------------- telling


def machine(device: str) -> dict[str, str]:
    name = platform.processor()
    if device == "cuda":
        name = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{name}, threads: {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}",
        "versions": f"nemo_fp8 {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "command": f"python benchmarks/quantize.py {' '.join(sys.argv[1:])}",
        "scheduling": f"policy {os.sched_getscheduler(0)} (0: as any process, 1: real time), niceness {os.nice(0)}",
        "load": f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} processors in the minute before, others' "
        "among them",
    }


def tables(result: dict[str, Any]) -> list[str]:
    rows, cols = result["shape"]
    elements, pairs = rows * cols, result["pairs"]
    memcpy = share(pairs["copy/memcpy"]) if "copy/memcpy" in pairs else None  # how much faster it is than torch's copy

    def speed(name: str) -> str:
        moved = MOVED.get(name.split("/")[0], BYTES)
        return f"{elements * moved / seconds(pairs[name]) / 1e9:.1f}" if name in pairs else ""

    def shares(name: str, by: float = 1.0) -> str:
        return f"{share(pairs[name]) / by:.0%}" if name in pairs else ""

    kept = sum(not p.disturbed for found in pairs.values() for p in found) / sum(map(len, pairs.values()))
    out = [f"## {rows} x {cols}", ""]
    out += [
        f"A plain copy: {speed('copy/new')} GB/s to a new tensor, {speed('copy/there')} GB/s into memory that is there"
    ]
    out[-1] += f", {speed('copy/memcpy')} GB/s by memcpy. " if memcpy else ". "
    out[-1] += f"Pairs: {len(pairs['copy/there'])} for each way; {kept:.0%} of all were undisturbed."
    out += [
        "",
        "| | new tensor, GB/s | of a clone | memory that is there, GB/s | of a copy | of memcpy | with statistics, "
        "GB/s | of a copy |",
    ]
    out += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name in dict.fromkeys(key.split("/")[0] for key in pairs if not key.startswith("copy")):
        new, there, counted = (f"{name}/{how}" for how in ("new", "there", "statistics"))
        cells = [speed(new), shares(new), speed(there), shares(there), shares(there, memcpy) if memcpy else ""]
        out.append(f"| {name} | {' | '.join([*cells, speed(counted), shares(counted)])} |")
    out.append("")
    for title, times in result.get("peers", {}).items():
        out += [
            f"### {title}, to a new tensor",
            "",
            "| way | ms | GB/s | slower than nemo_fp8 |",
            "|---|---:|---:|---:|",
        ]
        for name, t in times.items():
            out.append(f"| {name} | {t * 1e3:.1f} | {elements * BYTES / t / 1e9:.1f} | {t / times['nemo_fp8']:.1f}x |")
        out.append("")
    return out


def page(about: dict[str, str], results: list[dict[str, Any]], memory: dict[str, float], isa: str) -> str:
    out = [
        OTHER.format(isa=isa) if isa else "# Quantizing at memory speed",
        "",
        "Written by `benchmarks/quantize.py`; do not edit.",
        "",
    ]
    out += [f"- {key}: {value}" for key, value in about.items()] + [""]
    if not isa:
        out += [(__doc__ or "").split("\n\n")[-1].strip().replace("\n", " "), ""]
    for result in results:
        out += tables(result)
    out += memory_table(memory) if memory else []
    out += ["Reproduce it:", "", f"    {about['command']}", ""] if isa else []
    return "\n".join(out)


def memory_table(memory: dict[str, float]) -> list[str]:
    return [
        "## Memory",
        "",
        "The most that a call adds to the process's resident memory, codes included, as a share of the BF16 source:",
        "",
        "| way | share |",
        "|---|---:|",
        *(f"| {name} | {share:.2f} |" for name, share in memory.items()),
        "",
    ]


def write_memory(memory: dict[str, float]) -> None:
    """Put shares of memory into the page and its record, where a machine too busy to time anything measured them."""
    written = json.loads(RECORD.read_text())["memory"]
    for path, old, new in (
        (PAGE, "\n".join(memory_table(written)), "\n".join(memory_table(memory))),
        (RECORD, in_lines("memory", written), in_lines("memory", memory)),
    ):
        text = path.read_text()
        assert text.count(old) == 1, f"{path.name} does not hold the memory of its record"
        path.write_text(text.replace(old, new))


def record(about: dict[str, str], results: list[dict[str, Any]], memory: dict[str, float]) -> str:
    """Return everything that was measured, as JSON with a line for each way: its turns as (yardstick, way,
    disturbed)."""
    told: dict[str, Any] = {"about": about, "memory": memory}
    for result in results:
        ways = {
            name: [[round(pair.yardstick, 6), round(pair.way, 6), int(pair.disturbed)] for pair in found]
            for name, found in result["pairs"].items()
        }
        told[" x ".join(map(str, result["shape"]))] = {**ways, **result.get("peers", {})}
    return "{\n" + ",\n".join(in_lines(key, part) for key, part in told.items() if part) + "\n}\n"


def in_lines(key: str, part: dict[str, Any]) -> str:
    """Return a part of the record, with a line for each of its entries."""
    lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in part.items())
    return f" {json.dumps(key)}: {{\n  {lines}\n }}"


def merged(old: str, text: str, isa: str) -> str:
    """Return the page with one of its parts replaced: this machine's kernels first, then those for others, each
    once."""
    parts = dict.fromkeys(("", *build.OTHERS), "")
    first, *others = re.split(rf"(?m)^(?={OTHER.format(isa='')})", old)
    parts[""] = first
    for part in others:
        parts[part.splitlines()[0].removeprefix(OTHER.format(isa=""))] = part
    parts[isa] = text
    return "\n".join(part.strip() + "\n" for part in parts.values() if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape, few rounds, no torch.compile")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[2])}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only operations whose names contain it: no peers, no memory"
    )
    parser.add_argument("--rounds", type=int, default=0, help="how many turns each way has")
    parser.add_argument(
        "--isa", default="", choices=("", *build.OTHERS), help="build our kernels for that, whatever the processor has"
    )
    parser.add_argument("--processes", type=int, default=1, help="measure in so many, one after the other")
    parser.add_argument("--no-memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help="nothing but memory, which a busy machine changes little")
    parser.add_argument("--memory-of", nargs=3, metavar=("WAY", "ROWS", "COLS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.isa:
        build_for(options.isa)
    if options.memory_of:
        way, rows, cols = options.memory_of
        print(memory_of(way, int(rows), int(cols)))
        return
    if options.memory:
        found = peak_memory(LARGE)
        print("\n".join(memory_table(found)))
        if options.write:
            write_memory(found)
        return
    about = machine(options.device)
    results = over_processes(options.processes, options) if options.processes > 1 else measure_here(options)
    whole = options.device == "cpu" and not options.only and not options.isa and not options.no_memory
    memory = peak_memory(results[-1]["shape"]) if whole else {}
    text = page(about, results, memory, options.isa)
    print(text)
    records = [options.json] if options.json else []
    if options.write and not options.only:
        PAGE.write_text(merged(PAGE.read_text(), text, options.isa))
        records.append(PAGE.with_name(f"quantize{'_' * bool(options.isa)}{options.isa}.json"))
    for path in records:
        path.write_text(record(about, results, memory))


if __name__ == "__main__":
    main()
