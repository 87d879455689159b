#!/usr/bin/env python
"""Every Triton program that our code can launch, compiled without a GPU, with Triton's own ptxas; and what its
instructions allow.

    .venv-rollout/bin/python benchmarks/compile_kernels.py             the table of what was compiled
    .venv-rollout/bin/python benchmarks/compile_kernels.py --write     into docs/benchmarks/triton.md and triton.json

Programs of the record are compiled again where their file, a launch or Triton changed. The list is `variants()` of
`cuda.py` and of `cuda_fp4.py`: launches, made by the functions that make all launches. Triton's `warmup` compiles them
as a launch would, for a GPU that a small driver names (`Named`). Registers and stack are read from the machine code
(`cuobjdump`), the width of loads and stores and the hardware's conversions from PTX, and instructions from SASS
(`nvdisasm`).

The bound on a kernel's time is computed, and never measured:

    time <= max( instructions of a pipe / what the pipe starts in a second,  bytes / what the memory moves in a second )

with each instruction of a program counted once, both sides of every branch among them, and a loop as often as it runs.
What the page lists as left out comes on top: it bounds what the instructions and the bytes need, and not a latency that
nothing hides.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from nemo_fp8.numerics.kernels import cuda, cuda_fp4

PAGE = Path(__file__).parents[1] / "docs/benchmarks/triton.md"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = (90, 100, 120)

# Lanes that an SM starts in a clock: the CUDA programming guide's table of arithmetic throughput for 9.0 and 10.0. What
# it does not list is taken at the lowest rate of its kind: F2FP at that of conversions on the slowest architecture,
# comparisons as integers.
PIPES = {
    "issue": (128, r"."),
    "integers, comparisons": (
        64,
        r"I(ADD|SETP|MNMX|ABS)|LOP|SHF|SEL|FSEL|FSETP|FMNMX|VI|PRMT|LEA|PLOP|P2R|R2P|BMSK|SGXT|FLO|POPC",
    ),
    "conversions": (16, r"F2F|F2I|I2F|F2FP|I2FP"),
    "special functions": (16, r"MUFU"),
    "FP64": (64, r"D(ADD|MUL|FMA|SETP)"),
    "loads, stores, shuffles": (32, r"LD|ST|SHFL|ATOM|RED|BAR"),
}


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: int
    processors: int
    clock: float
    bandwidth: float


GPUS = (Gpu("H100 SXM", 90, 132, 1.755e9, 3.35e12), Gpu("B200", 100, 148, 1.85e9, 8.0e12))
SHAPES = ((4096, 4096), (8192, 28672))  # those of bench_quantize.py and of benchmarks/gpu/kernels.py


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of one program."""

    name: str
    capability: int
    warps: int
    strips: int
    values: int
    """How many elements a thread holds at once."""
    registers: int
    spilled: int
    """Registers of a thread that lie in memory: its stack in words, as Triton counts them."""
    loads: dict[int, int]
    """Bits of a load from global memory -> how many of them a thread makes."""
    stores: dict[int, int]
    conversions: int
    """Values that the hardware's own conversion takes."""
    wide: bool
    """Whether the launch promised that 128 bits can be moved at once."""
    converts: bool
    """Whether the program has values that the GPU's hardware can convert: FP8, and E2M1 from sm_100 on."""
    source_bits: int
    result_bits: int
    executed: dict[str, float] = field(default_factory=dict)
    """Instructions that a thread executes at most, by pipe; only where SASS was asked for."""
    f2fp: int = 0
    module: str = "triton_kernels"
    other_bits: int = 0
    """Of an element, beside ``source_bits`` and ``result_bits``: NVFP4's codes, which nobody asks to be moved 128 bits
    at a time."""


# ---------------------------------------------------------------------- compiling


class Named:
    """A driver of no GPU at all, for which Triton compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps its programs by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(name: str, launch: cuda.Launch, capability: int, sass: bool = False, **options: Any) -> Compiled:
    """Compile what a launch would, for a GPU of that compute capability."""
    triton.runtime.driver.set_active(Named(capability))
    since = (cuda_fp4 if launch.module == "triton_fp4" else cuda).HARDWARE_SINCE
    can_convert = divmod(capability, 10) >= since
    constants = {
        **launch.constants,
        **({"HARDWARE": can_convert} if "HARDWARE" in launch.constants else {}),
        **{k: v for k, v in options.items() if k in launch.constants},
    }
    options = {k: v for k, v in options.items() if k not in launch.constants}
    kernel = getattr(importlib.import_module(f"nemo_fp8.numerics.kernels.{launch.module}"), launch.kernel)
    made = kernel.warmup(*launch.arguments, grid=(launch.programs,), **constants, num_warps=launch.warps, **options)
    strips = constants.get("STRIPS", 1)
    if "HIGH" in constants:
        elements = constants["HIGH"] * constants["TILE_ROWS"] * constants["WIDE"] * constants["TILE_COLS"] // strips
    else:
        elements = constants["ROWS"] * constants["COLS"]
    values = elements // launch.warps // 32
    source, result = (0 if t is None else 8 * t.itemsize for t in launch.arguments[:2])
    if launch.kernel == "decode_kernel":
        result = 8 * launch.arguments[2].itemsize
    other = 0
    if launch.module == "triton_fp4":
        source, result = (0, 8 * launch.arguments[3].itemsize) if "AMAX" in constants else (source, 0)
        other = 4
    registers, stack = _resources(made.asm["cubin"])
    executed, f2fp = _executed(made.asm["cubin"], strips, values * source // 128) if sass else ({}, 0)
    ptx = made.asm["ptx"]
    converts = launch.kernel == "decode_kernel" or constants.get("CAST", "HARDWARE" in constants and can_convert)
    return Compiled(
        name, capability, launch.warps, strips, values, registers, stack // 4, _widths(ptx, "ld"), _widths(ptx, "st"),
        2 * len(re.findall(r"cvt\.rn\.(?:satfinite\.e[245]m[123]x2\.f32|f16x2\.e[45]m[32]x2)", ptx)),
        constants["ALIGNED"], converts, source, result,
        executed, f2fp, launch.module, other,
    )  # fmt: skip


def problems(made: Compiled) -> list[str]:
    """Return what is wrong with a program: registers in memory, narrow loads or stores, conversions by integers where
    the hardware has its own."""
    found = []
    if made.spilled:
        found.append(f"{made.spilled} registers are spilled to memory, beside {made.registers}")
    for what, moved, bits in (("loads", made.loads, made.source_bits), ("stores", made.stores, made.result_bits)):
        if made.wide and moved.get(128, 0) * 128 < made.values * bits:
            found.append(f"{moved.get(128, 0)} {what} of 128 bits for {made.values} values of {bits}")
    if made.converts and made.conversions < made.values:
        found.append(f"the hardware converts {made.conversions} of {made.values} values")
    return found


def _tool(name: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / name, *options, file.name], check=True, capture_output=True, text=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of its stack."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", cubin, "-res-usage"))
    assert found is not None
    return int(found[1]), int(found[2])


def _widths(ptx: str, kind: str) -> dict[int, int]:
    found = re.findall(rf"\b{kind}\.global(?:\.[a-z]\w*)*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return dict(sorted(collections.Counter(int(vector or 1) * int(bits) for vector, bits in found).items()))


def _executed(cubin: bytes, strips: int, loads: int) -> tuple[dict[str, float], int]:
    """Return the instructions by pipe, those of a loop over strips as often as it runs, which its wide loads tell:
    ``loads`` are those of a strip."""
    text = _tool("nvdisasm", cubin, "-ndf", "-c")
    labels, lines = {}, []
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)(.*)", line):
            lines.append((instruction[1], instruction[2]))
    times = [1.0] * len(lines)
    for end, (operation, operands) in enumerate(lines):
        target = re.search(r"`\((\.L_\w+)\)", operands)
        begin = labels.get(target[1], end) if operation.startswith("BRA") and target else end
        wide = sum(operation.startswith("LDG") and ".128" in operation for operation, _ in lines[begin : end + 1])
        if begin < end and wide:
            times[begin : end + 1] = [max(1.0, strips * loads / wide)] * (end + 1 - begin)
    executed = {
        pipe: sum(n for n, (operation, _) in zip(times, lines, strict=True) if re.match(pattern, operation))
        for pipe, (_, pattern) in PIPES.items()
    }
    return executed, sum(operation.startswith("F2FP") for operation, _ in lines)


def variants() -> list[tuple[str, cuda.Launch]]:
    """Return every program that our code can ask Triton for, with its name."""
    return [*cuda.variants(), *cuda_fp4.variants()]


def sources() -> dict[str, str]:
    """Return a digest of all that decides what is compiled, by file of kernels: its source and that of the kernels that
    it takes from another file, every launch, Triton's version."""
    folder, digests = Path(cuda.__file__).parent, {}
    for name, launch in variants():
        if launch.module not in digests:
            source = (folder / f"{launch.module}.py").read_text(encoding="utf-8")
            taken = re.findall(r"(?m)^from nemo_fp8\.numerics\.kernels\.(\w+) import", source)
            source += "".join((folder / f"{module}.py").read_text(encoding="utf-8") for module in taken)
            digests[launch.module] = hashlib.sha256((source + triton.__version__).encode())
        takes = [
            (a.dtype, a.shape, a.stride(), a.data_ptr() % 16) if isinstance(a, torch.Tensor) else a
            for a in launch.arguments
        ]
        about = (name, launch.kernel, launch.programs, launch.warps, launch.constants, takes)
        digests[launch.module].update(repr(about).encode())
    return {module: digest.hexdigest() for module, digest in digests.items()}


def recorded() -> dict[tuple[str, int], Compiled]:
    """Return the programs of the record that are of today's sources, by name and target."""
    found, today = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8")), sources()
    rows = (
        row | {way: {int(bits): n for bits, n in row[way].items()} for way in ("loads", "stores")}
        for row in found["programs"]
    )
    made = [Compiled(**row) for row in rows]
    return {(m.name, m.capability): m for m in made if found["sources"].get(m.module) == today.get(m.module)}


def _compile_by_number(number: int, capability: int, sass: bool) -> Compiled:
    name, launch = variants()[number]
    return compile_launch(name, launch, capability, sass)


def _begin(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    torch.set_num_threads(1)


def start(
    pool: concurrent.futures.Executor, wanted: Callable[[str, int], bool], sass: Callable[[str], bool] = lambda _: False
) -> dict[tuple[str, int], concurrent.futures.Future[Compiled]]:
    """Begin to compile every program that is ``wanted``, by its name and its target."""
    return {
        (name, target): pool.submit(_compile_by_number, number, target, sass(name))
        for target in TARGETS
        for number, (name, _) in enumerate(variants())
        if wanted(name, target)
    }


def processes(cache: str, workers: int | None = None) -> concurrent.futures.ProcessPoolExecutor:
    """Open processes that compile, with a cache of their own."""
    return concurrent.futures.ProcessPoolExecutor(
        workers or os.cpu_count(), multiprocessing.get_context("spawn"), initializer=_begin, initargs=(cache,)
    )


# ---------------------------------------------------------------------- the bound


def bound(made: Compiled, gpu: Gpu) -> tuple[float, str, float]:
    """Return the seconds for an element that the slowest pipe needs at most, which pipe it is, and the seconds that its
    bytes need."""
    elements = made.values * made.strips
    needs = {
        pipe: made.executed[pipe] / elements / (lanes * gpu.processors * gpu.clock)
        for pipe, (lanes, _) in PIPES.items()
    }
    slowest = max(needs, key=lambda pipe: needs[pipe])
    return needs[slowest], slowest, (made.source_bits + made.result_bits + made.other_bits) / 8 / gpu.bandwidth


# ---------------------------------------------------------------------- telling


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" + "---:|" * (len(heads) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def tell(made: list[Compiled]) -> str:
    """Return the page about compiled programs."""
    out = [
        "# The GPU kernels, compiled without a GPU",
        "",
        "Written by `benchmarks/compile_kernels.py --write`; do not edit.",
        "",
        f"Triton {triton.__version__} with its own ptxas. `kernels/cuda.py` and `cuda_fp4.py` can ask for "
        f"{len(variants())} programs; "
        f"{len({m.name for m in made})} are here, compiled for {', '.join(f'sm_{t}' for t in TARGETS)}. "
        "`tests/numerics/test_kernels_compiled.py` compiles a part of them in every run of the suite, and all of them "
        "where the record beside this page is of other kernels or another Triton; it fails for a spilled register, "
        "for loads or stores of less than 128 bits where the launch found everything aligned, and where the hardware "
        "has a conversion that is not used.",
        "",
        "NVFP4's cast has two ways, equal to the bit on paper: integer arithmetic for sm_90, and from sm_100 on the "
        "hardware's own conversion (`cvt.rn.satfinite.e2m1x2`). The second is compiled here, and its PTX is emulated "
        "in `tests/numerics/test_kernels_fp4_compiled.py`. **It has never run on a GPU.**",
        "",
        f"Of {len(made)} compilations, {sum(bool(m.spilled) for m in made)} spill.",
        "",
        "## The bound on paper",
        "",
        "**Computed from instructions and bytes, not measured**; what an H100 made of it is [here](gpu.md). The time "
        "of the busiest pipe of an SM beside the time that the bytes need at the memory's full rate, the copy limit, "
        "for BF16 with E4M3 and with NVFP4 where rows are aligned. A share of 100% says that the bytes take longer "
        "than the instructions: then the kernel can run at the speed of a copy, if enough loads are in flight.",
        "",
        *(
            f"- {g.name}: {g.processors} SMs at {g.clock / 1e9:.3f} GHz, {g.bandwidth / 1e12:.2f} TB/s, code for "
            f"sm_{g.capability}."
            for g in GPUS
        ),
        "- Lanes that an SM starts in a clock: "
        + ", ".join(f"{pipe} {lanes}" for pipe, (lanes, _) in PIPES.items())
        + ".",
        "- Every instruction is counted once, both sides of a branch among them (a program holds the FP32 and the E8M0 "
        "rules, and the slow path of each division), and a loop over strips as often as it runs. So the busiest pipe "
        "needs at most this long.",
        "- Left out: latencies that too few loads in flight do not hide, barriers, bank conflicts, sectors of the "
        "cache that a warp's vectors touch twice, what strips read again from the cache, the last wave of programs, "
        "launching, clocks under a power limit, bytes of scales and of statistics. A copy itself reaches some 90% of "
        "the memory's rate.",
        "",
    ]
    for gpu in GPUS:
        rows = []
        for m in made:
            if not m.executed or m.capability != gpu.capability:
                continue
            busy, pipe, moved = bound(m, gpu)
            rows.append(
                [
                    m.name,
                    f"{m.executed['issue'] / m.values / m.strips:.1f}",
                    pipe if busy > moved else "memory",
                    f"{min(1.0, moved / busy):.0%}",
                    *(f"{max(busy, moved) * rows_ * cols * 1e6:.0f}" for rows_, cols in SHAPES),
                    *(f"{moved * rows_ * cols * 1e6:.0f}" for rows_, cols in SHAPES[-1:]),
                ]
            )
        shown = [f"{r} x {c}, µs" for r, c in SHAPES]
        heads = [
            "program",
            "instructions an element",
            "limit",
            "of the copy limit, at least",
            *shown,
            f"copy limit of {shown[-1]}",
        ]
        out += [f"### {gpu.name}", "", *_table(heads, rows), ""]
    out += [
        "## Every program",
        "",
        "What one thread has: its registers (`252 + 4 spilled` where they do not fit), its loads and stores by their "
        "width in bits, and how many of its values the hardware converts to or from FP8 or, from sm_100 on, to E2M1.",
        "",
    ]
    by_name: dict[str, dict[int, Compiled]] = collections.defaultdict(dict)
    for m in made:
        by_name[m.name][m.capability] = m
    rows = []
    for name, found in by_name.items():
        first, last = found[TARGETS[0]], found[TARGETS[-1]]
        rows.append(
            [
                name, str(first.warps), f"{first.values} x {first.strips}",
                *(
                f"{found[t].registers}" + (f" + {found[t].spilled} spilled" if found[t].spilled else "")
                for t in TARGETS
            ),
                _moved(first.loads), _moved(first.stores),
                f"{min(last.values, last.conversions)} of {last.values}" if last.converts else "none to do",
            ]
        )  # fmt: skip
    heads = ["program", "warps", "values x strips", *(f"sm_{t}" for t in TARGETS), "loads", "stores", "in hardware"]
    out += _table(heads, rows)
    return "\n".join(out) + "\n"


def record(made: list[Compiled]) -> str:
    """Return the page's numbers as JSON, a program a line."""
    programs = ",\n".join(json.dumps(asdict(m)) for m in made)
    return f'{{"triton": "{triton.__version__}", "sources": {json.dumps(sources())}, "programs": [\n{programs}\n]}}\n'


def _moved(widths: dict[int, int]) -> str:
    return ", ".join(f"{n} of {bits}" for bits, n in sorted(widths.items(), reverse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page and its record")
    given = parser.parse_args()

    def timed(name: str) -> bool:
        shown = "bfloat16 to e4m3|e4m3 to bf|amax of bf|bfloat16 to e2m1|e2m1 to bf"
        return "unaligned" not in name and re.search(shown, name) is not None

    known = recorded()
    with tempfile.TemporaryDirectory() as cache, processes(cache) as pool:
        started = start(pool, lambda *which: which not in known, timed)
        known |= {which: future.result() for which, future in started.items()}
    made = [known[name, target] for target in TARGETS for name, _ in variants()]
    page = tell(made)
    if given.write:
        PAGE.write_text(page, encoding="utf-8")
        PAGE.with_suffix(".json").write_text(record(made), encoding="utf-8")
    else:
        print(page)
    for m in made:
        for problem in problems(m):
            print(f"{m.name} for sm_{m.capability}: {problem}")


if __name__ == "__main__":
    main()
