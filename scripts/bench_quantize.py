#!/usr/bin/env python
"""How fast values become FP8 and come back, against what the machine can copy and against other people's ways.

    python scripts/bench_quantize.py --quick            a minute
    python scripts/bench_quantize.py --write            everything, into docs/benchmarks/quantize.md
    python scripts/bench_quantize.py --busy --write     the same by one thread's CPU time, where others use the machine too
    PYTHONPATH=/tmp/torchao python scripts/...          with torchao among the peers
                                                        (pip install --no-deps --target /tmp/torchao "torchao==0.18.*")

Only ratios within one run mean anything: all ways take turns, round after round, and the best round of each counts,
so that a busy machine slows them all. Quantizing a BF16 element moves 3 bytes (2 in, 1 out), and so does decoding it;
scales and statistics are not counted. The yardstick is a plain torch copy that moves as many bytes, twice: to a new tensor, for
which the kernel has to find and clear pages, and into memory that is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
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


def race(ways: Ways, rounds: int, device: str) -> dict[str, float]:
    """The best time of each way in seconds; they take turns."""
    # One thread's CPU time does not count while others have the processor (but caches and memory are shared all the same).
    clock = time.thread_time if device == "busy" else time.perf_counter

    def once(way: Callable[[], Any]) -> float:
        start = clock()
        way()
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    for way in ways.values():  # builds, compiles, allocates
        way()
    times = [{name: once(way) for name, way in ways.items()} for _ in range(rounds)]
    return {name: min(t[name] for t in times) for name in ways}


def measure(shape: tuple[int, int], rounds: int, mode: str, with_peers: bool, compiled: bool) -> dict[str, Any]:
    device = "cuda" if mode == "cuda" else "cpu"
    x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    codes = torch.empty(shape, dtype=E4M3, device=device)
    plain = torch.ones(x.numel() * BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.ones_like(plain)
    given = torch.tensor(37.0, device=device)
    values = torch.empty_like(x)
    block_codes, block_scales, _ = require(kernels.quantize(x, (128, 128), "e4m3", "fp32"))

    ways: Ways = {"copy/new": plain.clone, "copy/there": lambda: target.copy_(plain)}
    for name, (tile, kind) in OPERATIONS.items():

        def run(statistics: bool, out: Any, tile: Any = tile, kind: str = kind) -> Any:
            return require(kernels.quantize(x, tile, "e4m3", kind, "te", statistics, given if tile is None else None, out))

        there = (codes, run(False, None)[1])
        ways |= {
            f"{name}/new": lambda run=run: run(False, None),
            f"{name}/there": lambda run=run, there=there: run(False, there),
            f"{name}/statistics": lambda run=run, there=there: run(True, there),
        }
    decode = "decode 128x128 to BF16"
    ways[f"{decode}/new"] = lambda: require(kernels.decode(block_codes, block_scales, (128, 128)))
    ways[f"{decode}/there"] = lambda: require(kernels.decode(block_codes, block_scales, (128, 128), out=values))
    result: dict[str, Any] = {"shape": shape, "seconds": race(ways, rounds, mode)}
    if with_peers:
        there, back, mx = peers(x, compiled)
        ours: Ways = {"nemo_fp8": lambda: kernels.quantize(x, (128, 128), "e4m3", "fp32")}
        few = max(3, rounds // 4)
        result["peers"] = {
            "BF16 to FP8, 128x128": race(ours | there, few, mode),
            "FP8 to BF16, 128x128": race({"nemo_fp8": ways[f"{decode}/new"]} | back, few, mode),
            "BF16 to MX, 1x32": race({"nemo_fp8": ways["MX 1x32, E8M0 scales/new"]} | mx, few, mode),
        }
    return result


def require(answer: Any) -> Any:
    if answer is None:
        sys.exit("There is no fast kernel on this machine (the log says why), so there is nothing to measure.")
    return answer


def peak_memory(shape: tuple[int, int]) -> dict[str, float]:
    """What quantizing adds to a process's resident memory at its highest, as a share of the BF16 source, in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--memory-of"]
    shares = {}
    for name in ("kernel", "kernel with statistics", "NeMo RL's algorithm, eager"):
        done = subprocess.run([*command, name, *map(str, shape)], capture_output=True, text=True, check=True)
        shares[name] = float(done.stdout)
    return shares


def memory_of(way: str, rows: int, cols: int) -> float:
    def run(x: torch.Tensor) -> Any:
        return padded_eager(x) if "NeMo" in way else kernels.quantize(x, (128, 128), "e4m3", "fp32", "te", "statistics" in way)

    run(torch.ones(256, 256, dtype=torch.bfloat16))
    x = torch.empty(rows, cols, dtype=torch.bfloat16).normal_()
    before = _resident("VmRSS")
    kept = run(x)
    added = _resident("VmHWM") - before  # the high-water mark
    del kept
    return added / (x.numel() * x.itemsize)


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
    }


def tables(result: dict[str, Any]) -> list[str]:
    rows, cols = result["shape"]
    elements, seconds = rows * cols, result["seconds"]

    def speed(name: str) -> str:
        return f"{elements * BYTES / seconds[name] / 1e9:.1f}" if name in seconds else ""

    def share(name: str, copy: str) -> str:
        return f"{seconds[copy] / seconds[name]:.0%}" if name in seconds else ""

    out = [f"## {rows} x {cols}", ""]
    out += [f"A plain copy: {speed('copy/new')} GB/s to a new tensor, {speed('copy/there')} GB/s into memory that is there.", ""]
    out += ["| | new tensor, GB/s | of the copy | memory that is there, GB/s | of the copy | with statistics, GB/s | of the copy |"]
    out += ["|---|---:|---:|---:|---:|---:|---:|"]
    for name in dict.fromkeys(key.split("/")[0] for key in seconds if not key.startswith("copy")):
        cells = [speed(f"{name}/new"), share(f"{name}/new", "copy/new"), speed(f"{name}/there"), share(f"{name}/there", "copy/there")]
        cells += [speed(f"{name}/statistics"), share(f"{name}/statistics", "copy/there")]
        out.append(f"| {name} | {' | '.join(cells)} |")
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
    parser.add_argument("--busy", action="store_true", help="one thread and its CPU time, for a machine that others use too")
    parser.add_argument("--rounds", type=int, default=0, help="how many turns each way has")
    parser.add_argument("--memory-of", nargs=3, metavar=("WAY", "ROWS", "COLS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.memory_of:
        way, rows, cols = options.memory_of
        print(memory_of(way, int(rows), int(cols)))
        return
    mode = "busy" if options.busy and options.device == "cpu" else options.device
    if mode == "busy":
        torch.set_num_threads(1)
    shapes = [(4096, 4096)] if options.quick else [(4096, 4096), (8192, 28672)]
    results = []
    for number, shape in enumerate(shapes):
        rounds = options.rounds or (5 if options.quick else 40 if number == 0 else 8)
        results.append(measure(shape, rounds, mode, number == 0, not options.quick))
    memory = peak_memory(shapes[-1]) if options.device == "cpu" else {}
    about = machine(options.device) | {"clock": "CPU time of one thread" if mode == "busy" else "wall"}
    text = page(about, results, memory)
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": results, "memory": memory}, indent=1))
    if options.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
