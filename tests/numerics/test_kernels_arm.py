"""The CPU kernels on ARM: cross-compiled, run by an emulator, and compared to the bit with the specification in torch.

Python and torch stay on this machine; only the compiled job runs as ARM code. `Elsewhere` stands where the loaded
library stands, takes each job apart into the memory that it names, and puts the results back.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from numerics import test_kernels_fp4, test_kernels_fp4_variants, test_quantize_summed
from support import SUPPORT
from support.kernel_cases import FP8, SOURCES, jobs_of_every_kind, large_results, matrices_turned, same, values

from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.kernels import build, cpu
from nemo_fp8.numerics.quantize import quantize_reference
from nemo_fp8.numerics.statistics import TOTALS

COMPILER, DISASSEMBLER = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objdump"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
# name: what the compiler may use, the processor that is emulated, whether it rounds to BF16 itself
MACHINES = {
    "NEON": ("-march=armv8-a", "cortex-a57", False),
    "SVE and BF16": ("-march=armv8.6-a+sve+bf16", "max", True),
}

missing = [tool for tool in (COMPILER, DISASSEMBLER) if not shutil.which(tool)]
missing += [] if any(map(shutil.which, EMULATORS)) else ["qemu-aarch64"]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"no {', no '.join(missing)}: apt-get install gcc-aarch64-linux-gnu qemu-user-static"
)


class Elsewhere:
    """The functions of the library that cast and decode, each call a process of the emulator's."""

    def __init__(self, program: Path, processor: str) -> None:
        emulator = next(path for name in EMULATORS if (path := shutil.which(name)))
        self.command = [emulator, "-cpu", processor, str(program)]

    def nemo_fp8_quantize(self, reference) -> bool:
        j = reference._obj
        high, wide = -(-j.rows // j.tile_rows), -(-j.cols // j.tile_cols)
        scales = ((high - 1) * j.scale_stride + wide) * (1 if j.scaling == cpu.SCALINGS["te", "e8m0"] else 4)
        sizes = {"x": ((j.rows - 1) * j.stride + j.cols) * (4 if j.source == cpu.FP32 else 2)}
        sizes |= {"codes": (j.rows - 1) * j.codes_stride + j.cols, "scale_inv": scales}
        for name, dtype in cpu._COUNTS.items():
            sizes[name] = high * wide * (j.count_bytes if dtype == torch.int32 else dtype.itemsize)
        if j.totals:
            sizes["totals"] = 8 * len(TOTALS) * (j.rows // j.rows_of_total)
        sizes |= {"of_rows": 8 * j.rows, "of_columns": 8 * -(-j.cols // 8)}
        self._run("nemo_fp8_quantize", j, sizes)
        return not j.failed

    def nemo_fp8_sums(self, reference) -> bool:
        j = reference._obj
        sizes = {"x": (j.rows - 1) * j.stride + j.bytes, "to": (j.rows - 1) * j.to_stride + j.bytes}
        sizes |= {"of_rows": 8 * j.rows, "of_columns": 8 * -(-j.bytes // 8), "largest": 4 * j.rows}
        self._run("nemo_fp8_sums", j, sizes)
        return not j.failed

    def nemo_fp8_turn(self, reference) -> None:
        j = reference._obj
        x = (j.parts - 1) * j.part + (j.rows - 1) * j.stride + j.cols * j.size
        to = (j.parts - 1) * j.to_part + (j.cols - 1) * j.to_stride + j.rows * j.size
        self._run("nemo_fp8_turn", j, {"x": x, "to": to})

    def nemo_fp8_decode(self, reference) -> None:
        j = reference._obj
        tiles = -(-j.rows // j.tile_rows) * -(-j.cols // j.tile_cols)
        elements = j.rows * j.cols
        out = elements * (4 if j.target == cpu.FP32 else 2)
        self._run("nemo_fp8_decode", j, {"codes": elements, "scale_inv": tiles * (1 if j.e8m0 else 4), "out": out})

    def nemo_fp4_quantize(self, reference) -> None:
        j = reference._obj
        scales = 4 * (j.rows if j.encode_stride else 1)
        sizes = {"codes": j.rows * j.cols // 2, "scales": j.rows * j.cols // 16, "encode": scales, "amax": scales}
        self._run("nemo_fp4_quantize", j, _matrix(j) | sizes | {"chance": 4 * j.rows * j.cols, "signs": 64})

    def nemo_fp4_transformed_top(self, reference) -> None:
        j = reference._obj
        self._run("nemo_fp4_transformed_top", j, _matrix(j) | {"signs": 64})

    def nemo_fp4_decode(self, reference) -> None:
        j = reference._obj
        elements, amax = j.rows * j.cols, 4 * (j.rows if j.amax_stride else 1)
        out = elements * (4 if j.target == cpu.FP32 else 2)
        sizes = {"codes": elements // 2, "scales": elements // 16, "amax": amax, "out": out}
        self._run("nemo_fp4_decode", j, sizes)

    def nemo_fp4_total(self, reference) -> bool:
        j, last = reference._obj, {}
        for name, wide in {"x": j.cols, "codes": j.cols // 2, "scales": j.cols // 16}.items():
            part, row = getattr(j, f"{name}_part"), getattr(j, f"{name}_row")
            last[name] = (j.parts - 1) * part + (j.rows - 1) * row + wide
        last["x"] *= 4 if j.source == cpu.FP32 else 2
        self._run("nemo_fp4_total", j, last | {"beneath": 4 * j.parts, "totals": 8 * len(TOTALS) * j.parts})
        return True

    def _run(self, function: str, job: ctypes.Structure, sizes: dict[str, int]) -> None:
        there = type(job).from_buffer_copy(job)
        pointers = [name for name, _ in itertools.takewhile(lambda field: field[1] is ctypes.c_void_p, job._fields_)]
        memory, places = bytearray(64), {}
        for name in pointers:
            address = getattr(job, name) if name in sizes else None
            setattr(there, name, len(memory) if address else 0)
            if address:
                places[name] = (address, len(memory), sizes[name])
                memory += ctypes.string_at(address, sizes[name]) + bytes(-sizes[name] % 64)
        head = b"".join(n.to_bytes(8, "little") for n in (len(pointers), ctypes.sizeof(there), len(memory)))
        done = subprocess.run(
            [*self.command, function], input=head + bytes(there) + memory, capture_output=True, check=True
        )
        job_after, after = done.stdout[: ctypes.sizeof(there)], done.stdout[ctypes.sizeof(there) :]
        assert len(after) == len(memory)
        for name, (address, at, size) in places.items():
            if name != "x":
                ctypes.memmove(address, after[at : at + size], size)
        told = type(job).from_buffer_copy(job_after)
        for name, kind, *_ in job._fields_:
            if kind is not ctypes.c_void_p:
                setattr(job, name, getattr(told, name))


def _matrix(job: ctypes.Structure) -> dict[str, int]:
    """How much memory the matrix of a job spans."""
    apart, together = (job.cols, job.rows) if job.turned else (job.rows, job.cols)
    return {"x": ((apart - 1) * job.stride + together) * (4 if job.source == cpu.FP32 else 2)}


@pytest.fixture(scope="module", params=["NEON", pytest.param("SVE and BF16", marks=pytest.mark.long)])
def machine(request) -> tuple[str, str, bool]:
    return MACHINES[request.param]


@pytest.fixture(scope="module")
def program(machine, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("arm") / "kernels"
    flags = [flag for flag in build.FLAGS if flag != "-fPIC"]
    sources = [*map(str, build.SOURCES), str(SUPPORT / "kernel_driver.c")]
    subprocess.run([COMPILER, *flags, machine[0], "-static", *sources, "-lm", "-o", str(made)], check=True)
    return made


@pytest.fixture
def on_arm(program, machine, monkeypatch) -> Path:
    monkeypatch.setattr(build, "library", lambda: Elsewhere(program, machine[1]))
    monkeypatch.setattr(cpu, "parallel", lambda: None)
    return program


def test_jobs_of_every_kind_equal_the_specification(on_arm):
    jobs_of_every_kind()


@pytest.mark.parametrize("tile", test_quantize_summed.TILES, ids=str)
def test_casts_that_are_summed_up(on_arm, tile):
    """In two strips, of which the last ends within a word, and of stacks."""
    for dtype, kind, parts in ((torch.bfloat16, "fp32", 4), (torch.float32, "e8m0", 1)):
        test_quantize_summed.compare(values((512, 4102), dtype, 5, "specials"), tile, kind, parts)


def test_large_results(on_arm):
    large_results((128, 128), ("te", "fp32"), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["codes", "halves"])
def test_matrices_are_turned(on_arm, dtype):
    matrices_turned(dtype)


@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("dtype", SOURCES, ids=str)
def test_a_given_scale_and_any_bits(on_arm, dtype, element):
    x, scale = values((130, 515), dtype, 1, "bits"), torch.tensor(0.37)
    fast = kernels.quantize(x, None, element, "fp32", "te", False, scale)
    slow = quantize_reference(x, None, FORMATS[element], "fp32", "te", False, scale=scale)
    same(fast[0], slow[0])


def test_every_code_and_every_bfloat16_value(on_arm):
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    for element in FP8:
        format = FORMATS[element]
        codes = kernels.quantize(x, None, element, "fp32", "te", False, torch.tensor(1.0))[0]
        expected = x.float().clamp(-format.max, format.max).to(format.dtype).view(torch.uint8)
        same(codes.view(torch.uint8), torch.where(x.isnan(), torch.full_like(expected, 0x7F), expected))
        every = torch.arange(256, dtype=torch.uint8).view(1, 256).view(format.dtype)
        for dtype in (torch.bfloat16, torch.float32):
            back = kernels.decode(every, torch.ones(1, 2), (1, 128), dtype)
            torch.testing.assert_close(back, every.float().to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cast", [test_kernels_fp4, test_kernels_fp4_variants], ids=["plain", "variants"])
def test_casts_to_four_bits_of_every_kind(on_arm, cast):
    """Of values as weights have them, and of special ones among them: every job is a process."""
    cast.jobs_of_every_kind(("gaussian", "specials"))


def test_totals_of_four_bits(on_arm):
    test_kernels_fp4.totals_of_every_kind(("gaussian", "specials"))


def test_every_byte_of_four_bits_and_every_mantissa(on_arm):
    test_kernels_fp4.test_every_byte_and_every_scale_decoded()
    test_kernels_fp4.every_mantissa()
    test_kernels_fp4_variants.every_chance()


def test_a_wrong_kernel_would_be_seen(on_arm, monkeypatch):
    """The comparison, and the way through the emulator, seen to say no: one scale is changed on its way there."""
    run = Elsewhere._run

    def half(self, function, job, sizes):
        job.format_max /= 2
        run(self, function, job, sizes)

    monkeypatch.setattr(Elsewhere, "_run", half)
    with pytest.raises(AssertionError, match="bytes differ"):
        large_results((128, 128), ("te", "fp32"), torch.bfloat16)

    def other_rule(self, function, job, sizes):
        if function == "nemo_fp4_quantize":
            job.vllm = not job.vllm
            ctypes.c_float.from_address(job.encode).value *= 1.5
        run(self, function, job, sizes)

    monkeypatch.setattr(Elsewhere, "_run", other_rule)
    with pytest.raises(AssertionError, match="bytes differ"):
        test_kernels_fp4.every_mantissa()


@pytest.mark.parametrize(
    "row", ["PAIR_tame", "PAIR_tame_add", "FP32_tame", "FP16_tame", "e4m3_to_PAIR_tame", "e4m3_to_FP32_tame"]
)
def test_the_compiler_makes_vectors_of_the_rows(program, row):
    """Four multiplications at a time (NEON), or as many as a vector has (SVE)."""
    text = subprocess.run(
        [DISASSEMBLER, "-d", "--no-show-raw-insn", f"--disassemble={row}", str(program)],
        capture_output=True,
        check=True,
    )
    assert re.search(r"\bfmul\s+(v\d+\.4s|z\d+\.s)", text.stdout.decode()), row


def test_the_processors_own_rounding_to_bf16_is_used_where_there_is_one(program, machine):
    text = subprocess.run([DISASSEMBLER, "-d", "--no-show-raw-insn", str(program)], capture_output=True, check=True)
    functions = re.split(r"\n(?=[0-9a-f]+ <)", text.stdout.decode())
    using = {re.search(r"<(\w+)", body)[1] for body in functions if "bfcvtn2" in body}
    rounding = ("work_back", "work_back4", "transform") if machine[2] else ()
    assert [name for name in rounding if not any(found.startswith(name) for found in using)] == []
    assert bool(using) is machine[2]


def test_the_emulated_processor_without_such_rounding_has_none(program, machine, monkeypatch):
    """What was built for one with it ends there by an illegal instruction, so the plain build was tested on its own."""
    if not machine[2]:
        pytest.skip("built for the processor without")
    monkeypatch.setattr(build, "library", lambda: Elsewhere(program, MACHINES["NEON"][1]))
    monkeypatch.setattr(cpu, "parallel", lambda: None)
    codes = torch.arange(128, dtype=torch.uint8).view(1, 128).view(torch.float8_e4m3fn)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        kernels.decode(codes, torch.ones(1, 1), (1, 128), torch.bfloat16)
    assert raised.value.returncode == -signal.SIGILL
