#!/usr/bin/env python
"""How fast values become FP8 and come back, against what the machine can copy and against other people's ways.

    python scripts/bench_quantize.py --quick            a minute
    python scripts/bench_quantize.py --write            everything, into docs/benchmarks/quantize.md
    PYTHONPATH=/tmp/torchao python scripts/...          with torchao among the peers
                                                        (pip install --no-deps --target /tmp/torchao "torchao==0.18.*")

Quantizing a BF16 element moves 3 bytes (2 in, 1 out), and so does decoding it; scales and statistics are not counted. The
yardstick is a copy that moves as many bytes with as many threads, of three kinds: torch's `copy_` into memory that is there;
torch's `clone` to a new tensor, for which the operating system has to find and clear pages; and the C library's `memcpy`, a
part for each thread, the fastest copy that we know on such a machine. Only ratios within one run mean anything. All ways take
turns, round after round, each on another piece of memory, more of them than caches hold; and each is timed right after its
yardstick. A share is the median of these neighbours' ratios, and GB/s come from the median time. Pairs in which the operating
system took a processor away from this process are thrown away (unless none is left), so that a machine that others use too
gives the same shares, only from fewer pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import itertools
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nemo_fp8 import __version__
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize_reference

PAGE = Path(__file__).parents[1] / "docs/benchmarks/quantize.md"
E4M3 = torch.float8_e4m3fn
BYTES = 3  # that an element moves

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
DECODED: dict[str, tuple[int, int]] = {"decode 128x128 to BF16": (128, 128), "decode 1x128 to BF16": (1, 128)}
Ways = dict[str, Callable[[], Any]]


# ---------------------------------------------------------------------- other people's ways


def padded_eager(x: torch.Tensor, power_of_2: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """NeMo RL's algorithm, written anew: pad with the last element, bring each block together, scale it, put it back."""
    rows, cols = x.shape
    down, right = -rows % 128, -cols % 128
    if down or right:
        x = torch.nn.functional.pad(x, (0, right, 0, down), value=float(x[-1, -1]))
    high, wide = x.shape[0] // 128, x.shape[1] // 128
    blocks = x.reshape(high, 128, wide, 128).permute(0, 2, 1, 3).to(torch.float32).contiguous().flatten(2)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    scale = torch.div(448.0, amax)
    scale = torch.where(amax == 0, 1.0, scale)
    scale = torch.where(amax == torch.inf, 1.0, scale)
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    codes = (blocks * scale).clamp(-448, 448).to(E4M3)
    codes = codes.reshape(high, wide, 128, 128).permute(0, 2, 1, 3).reshape(high * 128, wide * 128)
    return codes[:rows, :cols].contiguous(), torch.reciprocal(scale).reshape(high, wide)


def two_pass(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The shortest way in torch: one pass for amaxes, one for codes."""
    tiles = x.view(x.shape[0] // 128, 128, x.shape[1] // 128, 128)
    scale = 448.0 / tiles.abs().amax((1, 3)).float()
    return (tiles * scale[:, None, :, None]).clamp(-448, 448).to(E4M3).view(x.shape), 1 / scale


def two_pass_back(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    tiles = codes.view(scale_inv.shape[0], 128, scale_inv.shape[1], 128)
    return (tiles.float() * scale_inv[:, None, :, None]).to(torch.bfloat16).view(codes.shape)


def peers(x: torch.Tensor, compiled: bool) -> tuple[Ways, Ways, Ways]:
    """The ways of others to quantize weights in 128x128 blocks, to decode them, and to quantize to MX."""
    codes, scale_inv = two_pass(x)
    there: Ways = {"NeMo RL's algorithm, eager": lambda: padded_eager(x), "two passes, eager": lambda: two_pass(x)}
    back: Ways = {"eager": lambda: two_pass_back(codes, scale_inv)}
    mx: Ways = {}
    there["our specification, eager"] = lambda: quantize_reference(x, (128, 128), format_of("e4m3"), "fp32")
    if compiled:
        fused, fused_back = torch.compile(two_pass), torch.compile(two_pass_back)
        there["two passes, torch.compile"] = lambda: fused(x)
        back["torch.compile"] = lambda: fused_back(codes, scale_inv)
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.quantization import quant_primitives as ao
    except ImportError as error:
        print(f"torchao is left out: {error}", file=sys.stderr)
        return there, back, mx

    def torchao_blocks() -> Any:
        scale = ao._choose_scale_float8(x, (128, 128), E4M3)
        return ao._quantize_affine_float8(x, scale, E4M3), scale

    there["torchao, eager"] = torchao_blocks
    back["torchao, eager"] = lambda: ao._dequantize_affine_float8(codes, scale_inv, torch.bfloat16)
    mx["torchao to_mx, eager"] = lambda: to_mx(x, E4M3, 32)
    if compiled:
        fused_blocks = torch.compile(torchao_blocks)
        there["torchao, torch.compile"] = lambda: fused_blocks()
    return there, back, mx


# ---------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Pair:
    """A way, timed right after its yardstick, in seconds."""

    yardstick: float
    way: float
    disturbed: bool


def undisturbed(pairs: list[Pair]) -> list[Pair]:
    return [p for p in pairs if not p.disturbed] or pairs


def seconds(pairs: list[Pair]) -> float:
    return median(p.way for p in undisturbed(pairs))


def share(pairs: list[Pair]) -> float:
    return median(p.yardstick / p.way for p in undisturbed(pairs))


def pair_up(ways: Pairs, places: list[Place], rounds: int, device: str) -> dict[str, list[Pair]]:
    """Every way and its yardstick, round after round; they take turns, and each turn has the next place in memory."""

    def once(run: Callable[[Place], Any], place: Place) -> float:
        start = time.perf_counter()
        run(place)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def interruptions() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    for pair in ways.values():  # builds, compiles, allocates
        for run in pair:
            run(places[0])
    found: dict[str, list[Pair]] = {name: [] for name in ways}
    turn = itertools.cycle(places)
    for _ in range(rounds):
        for name, (way, yardstick) in ways.items():
            place, before = next(turn), interruptions()
            found[name].append(Pair(once(yardstick, place), once(way, place), interruptions() > before))
    return found


@dataclass(frozen=True)
class Place:
    """Memory for one turn. There are as many as outgrow the caches, so that every turn finds its own in main memory."""

    x: torch.Tensor
    codes: torch.Tensor
    values: torch.Tensor
    plain: torch.Tensor
    target: torch.Tensor


Pairs = dict[str, tuple[Callable[[Place], Any], Callable[[Place], Any]]]
OUTGROWN = 1 << 30  # no processor that this has seen has caches of a GiB


def places_for(shape: tuple[int, int], device: str) -> list[Place]:
    def place() -> Place:
        x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        codes = torch.ones(shape, dtype=torch.uint8, device=device).view(E4M3)
        plain = torch.ones(x.numel() * BYTES // 2, dtype=torch.uint8, device=device)
        return Place(x, codes, torch.ones_like(x), plain, torch.ones_like(plain))

    first = place()
    size = sum(t.numel() * t.itemsize for t in vars(first).values())
    return [first, *(place() for _ in range(OUTGROWN // size))]


def memcpy_in_parts(threads: int) -> Callable[[Place], Any] | None:
    """The C library's copy, a part for each of torch's own threads, if OpenMP can be asked for them."""
    from nemo_fp8.numerics.kernels import cpu

    address, pointer = cpu._parallel(), ctypes.c_void_p
    if address is None:
        return None
    function = ctypes.CFUNCTYPE(None, pointer)
    parallel = ctypes.CFUNCTYPE(None, function, pointer, ctypes.c_uint, ctypes.c_uint)(address)
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = (pointer, pointer, ctypes.c_size_t), pointer

    def run(place: Place) -> None:
        size = place.plain.numel() // threads
        part = itertools.count()

        def work(_: Any) -> None:
            at = next(part) * size
            copy(place.target.data_ptr() + at, place.plain.data_ptr() + at, size)

        parallel(function(work), None, threads, 0)

    return run


def measure(shape: tuple[int, int], rounds: int, device: str, with_peers: bool, compiled: bool) -> dict[str, Any]:
    with tensors_from_the_system(device):
        places = places_for(shape, device)
    given = torch.tensor(37.0, device=device)

    def copy(place: Place) -> Any:
        return place.target.copy_(place.plain)

    def clone(place: Place) -> Any:
        return place.plain.clone()

    there: Pairs = {"copy/there": (copy, copy)}
    new: Pairs = {"copy/new": (clone, clone)}
    if device == "cpu" and (memcpy := memcpy_in_parts(torch.get_num_threads())):
        there["copy/memcpy"] = (memcpy, copy)
    for name, (tile, kind) in OPERATIONS.items():
        scale = given if tile is None else None

        def run(x: torch.Tensor, statistics: bool, out: Any, tile: Any = tile, kind: str = kind, scale: Any = scale) -> Any:
            return require(kernels.quantize(x, tile, "e4m3", kind, "te", statistics, scale, out))

        scale_inv = run(places[0].x, False, None)[1]
        there[f"{name}/there"] = (lambda p, run=run, s=scale_inv: run(p.x, False, (p.codes, s)), copy)
        there[f"{name}/statistics"] = (lambda p, run=run, s=scale_inv: run(p.x, True, (p.codes, s)), copy)
        new[f"{name}/new"] = (lambda p, run=run: run(p.x, False, None), clone)
    for name, tile in DECODED.items():

        def back(place: Place, out: Any, tile: Any = tile, scale_inv: Any = None) -> Any:
            return require(kernels.decode(place.codes, scale_inv, tile, torch.bfloat16, out))

        scale_inv = require(kernels.quantize(places[0].x, tile, "e4m3", "fp32"))[1]
        there[f"{name}/there"] = (lambda p, back=back, s=scale_inv: back(p, p.values, scale_inv=s), copy)
        new[f"{name}/new"] = (lambda p, back=back, s=scale_inv: back(p, None, scale_inv=s), clone)
    with tensors_from_the_system(device):
        pairs = pair_up(new, places, max(4, rounds // 4), device)
    pairs |= pair_up(there, places, rounds, device)
    result: dict[str, Any] = {"shape": shape, "pairs": pairs}
    if with_peers:
        x = places[0].x
        quantizing, backwards, mx = peers(x, compiled)

        def against(ours: Callable[[], Any], others: Ways) -> dict[str, float]:
            ways: Pairs = {name: ((lambda p, w=way: w()),) * 2 for name, way in ({"nemo_fp8": ours} | others).items()}
            return {name: seconds(found) for name, found in pair_up(ways, places[:1], max(3, rounds // 8), device).items()}

        codes, scale_inv, _ = require(kernels.quantize(x, (128, 128), "e4m3", "fp32"))
        result["peers"] = {
            "BF16 to FP8, 128x128": against(lambda: kernels.quantize(x, (128, 128), "e4m3", "fp32"), quantizing),
            "FP8 to BF16, 128x128": against(lambda: kernels.decode(codes, scale_inv, (128, 128)), backwards),
            "BF16 to MX, 1x32": against(lambda: kernels.quantize(x, (1, 32), "e4m3", "e8m0"), mx),
        }
    return result


@contextlib.contextmanager
def tensors_from_the_system(device: str) -> Iterator[None]:
    """Inside, every large tensor is memory that the process has never had: glibc keeps nothing back of what is freed."""
    threshold, least, most = -3, 1 << 20, 1 << 25  # M_MMAP_THRESHOLD, and what glibc moves it up to by itself
    libc = ctypes.CDLL(None) if device == "cpu" and sys.platform == "linux" else None
    if libc:
        libc.mallopt(threshold, least)
        libc.malloc_trim(0)
    yield
    if libc:
        libc.mallopt(threshold, most)


def require(answer: Any) -> Any:
    if answer is None:
        sys.exit("There is no fast kernel on this machine (the log says why), so there is nothing to measure.")
    return answer


def peak_memory(shape: tuple[int, int]) -> dict[str, float]:
    """What quantizing adds to a process's resident memory at its highest, as a share of the BF16 source, in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--memory-of"]
    shares = {}
    for name in ("kernel", "kernel with statistics", "kernel into memory that is there", "NeMo RL's algorithm, eager"):
        done = subprocess.run([*command, name, *map(str, shape)], capture_output=True, text=True, check=True)
        shares[name] = float(done.stdout)
    return shares


def memory_of(way: str, rows: int, cols: int) -> float:
    def run(x: torch.Tensor, out: Any = None) -> Any:
        return padded_eager(x) if "NeMo" in way else kernels.quantize(x, (128, 128), "e4m3", "fp32", "te", "statistics" in way, out=out)

    run(torch.ones(256, 256, dtype=torch.bfloat16))
    x = torch.empty(rows, cols, dtype=torch.bfloat16).normal_()
    out = None
    if "there" in way:
        out = (torch.ones(rows, cols, dtype=torch.uint8).view(E4M3), torch.ones(-(-rows // 128), -(-cols // 128)))
    before = _resident("VmRSS")
    kept = run(x, out)
    added = _resident("VmHWM") - before  # the high-water mark
    del kept
    return max(0, added) / (x.numel() * x.itemsize)


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
        "command": f"python scripts/bench_quantize.py {' '.join(sys.argv[1:])}",
        "scheduling": f"policy {os.sched_getscheduler(0)} (0: as any process, 1: real time), niceness {os.nice(0)}",
    }


def tables(result: dict[str, Any]) -> list[str]:
    rows, cols = result["shape"]
    elements, pairs = rows * cols, result["pairs"]
    memcpy = share(pairs["copy/memcpy"]) if "copy/memcpy" in pairs else None  # how much faster it is than torch's copy

    def speed(name: str) -> str:
        return f"{elements * BYTES / seconds(pairs[name]) / 1e9:.1f}" if name in pairs else ""

    def shares(name: str, by: float = 1.0) -> str:
        return f"{share(pairs[name]) / by:.0%}" if name in pairs else ""

    kept = sum(not p.disturbed for found in pairs.values() for p in found) / sum(map(len, pairs.values()))
    out = [f"## {rows} x {cols}", ""]
    out += [f"A plain copy: {speed('copy/new')} GB/s to a new tensor, {speed('copy/there')} GB/s into memory that is there"]
    out[-1] += f", {speed('copy/memcpy')} GB/s by memcpy. " if memcpy else ". "
    out[-1] += f"Pairs: {len(pairs['copy/there'])} for each way; {kept:.0%} of all were undisturbed."
    out += [
        "",
        "| | new tensor, GB/s | of a clone | memory that is there, GB/s | of a copy | of memcpy | with statistics, GB/s | of a copy |",
    ]
    out += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name in dict.fromkeys(key.split("/")[0] for key in pairs if not key.startswith("copy")):
        new, there, counted = (f"{name}/{how}" for how in ("new", "there", "statistics"))
        cells = [speed(new), shares(new), speed(there), shares(there), shares(there, memcpy) if memcpy else ""]
        out.append(f"| {name} | {' | '.join([*cells, speed(counted), shares(counted)])} |")
    out.append("")
    for title, times in result.get("peers", {}).items():
        out += [f"### {title}, to a new tensor", "", "| way | ms | GB/s | slower than nemo_fp8 |", "|---|---:|---:|---:|"]
        for name, t in times.items():
            out.append(f"| {name} | {t * 1e3:.1f} | {elements * BYTES / t / 1e9:.1f} | {t / times['nemo_fp8']:.1f}x |")
        out.append("")
    return out


def page(about: dict[str, str], results: list[dict[str, Any]], memory: dict[str, float]) -> str:
    out = ["# Quantizing at memory speed", "", "Written by `scripts/bench_quantize.py`; do not edit.", ""]
    out += [f"- {key}: {value}" for key, value in about.items()] + [""]
    out += [(__doc__ or "").split("\n\n")[-1].strip().replace("\n", " "), ""]
    for result in results:
        out += tables(result)
    if memory:
        out += [
            "## Memory",
            "",
            "The most that a call adds to the process's resident memory, codes included, as a share of the BF16 source:",
            "",
        ]
        out += ["| way | share |", "|---|---:|"] + [f"| {name} | {share:.2f} |" for name, share in memory.items()] + [""]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape, few rounds, no torch.compile")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[2])}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=0, help="how many turns each way has")
    parser.add_argument("--memory-of", nargs=3, metavar=("WAY", "ROWS", "COLS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.memory_of:
        way, rows, cols = options.memory_of
        print(memory_of(way, int(rows), int(cols)))
        return
    shapes = [(4096, 4096)] if options.quick else [(4096, 4096), (8192, 28672)]
    results = []
    for number, shape in enumerate(shapes):
        rounds = options.rounds or (5 if options.quick else 40 if number == 0 else 8)
        results.append(measure(shape, rounds, options.device, number == 0, not options.quick))
    memory = peak_memory(shapes[-1]) if options.device == "cpu" else {}
    about = machine(options.device)
    text = page(about, results, memory)
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": results, "memory": memory}, indent=1, default=vars))
    if options.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
