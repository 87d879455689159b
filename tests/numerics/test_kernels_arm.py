"""The CPU kernels on ARM: cross-compiled, run by an emulator, and compared to the bit with the specification in torch.

Python and torch stay on this machine; only the compiled job runs as ARM code. `Elsewhere` stands where the loaded
library stands, takes each job apart into the memory that it names, and puts the results back.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support import SUPPORT
from support.kernel_cases import FP8, SOURCES, jobs_of_every_kind, large_results, same, values

from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.kernels import build, cpu
from nemo_fp8.numerics.quantize import quantize_reference

COMPILER, DISASSEMBLER = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objdump"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
MACHINES = {"NEON": "-march=armv8-a", "SVE and BF16": "-march=armv8.6-a+sve+bf16"}

missing = [tool for tool in (COMPILER, DISASSEMBLER) if not shutil.which(tool)]
missing += [] if any(map(shutil.which, EMULATORS)) else ["qemu-aarch64"]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"no {', no '.join(missing)}: apt-get install gcc-aarch64-linux-gnu qemu-user-static"
)


class Elsewhere:
    """The two functions of the library, each call a process of the emulator's."""

    def __init__(self, program: Path) -> None:
        emulator = next(path for name in EMULATORS if (path := shutil.which(name)))
        self.command = [emulator, "-cpu", "max", str(program)]

    def nemo_fp8_quantize(self, reference) -> None:
        j = reference._obj
        high, wide = -(-j.rows // j.tile_rows), -(-j.cols // j.tile_cols)
        scales = ((high - 1) * j.scale_stride + wide) * (1 if j.scaling == cpu.SCALINGS["te", "e8m0"] else 4)
        sizes = {"x": ((j.rows - 1) * j.stride + j.cols) * (4 if j.source == cpu.FP32 else 2)}
        sizes |= {"codes": (j.rows - 1) * j.codes_stride + j.cols, "scale_inv": scales}
        for name, dtype in cpu._COUNTS.items():
            sizes[name] = high * wide * (j.count_bytes if dtype == torch.int32 else dtype.itemsize)
        self._run("nemo_fp8_quantize", j, sizes)

    def nemo_fp8_decode(self, reference) -> None:
        j = reference._obj
        tiles = -(-j.rows // j.tile_rows) * -(-j.cols // j.tile_cols)
        elements = j.rows * j.cols
        out = elements * (4 if j.target == cpu.FP32 else 2)
        self._run("nemo_fp8_decode", j, {"codes": elements, "scale_inv": tiles * (1 if j.e8m0 else 4), "out": out})

    def _run(self, function: str, job: ctypes.Structure, sizes: dict[str, int]) -> None:
        there = type(job).from_buffer_copy(job)
        pointers = [name for name, kind, *_ in job._fields_ if kind is ctypes.c_void_p]
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
        assert len(done.stdout) == len(memory)
        for name, (address, at, size) in places.items():
            if name != "x":
                ctypes.memmove(address, done.stdout[at : at + size], size)


@pytest.fixture(scope="module", params=MACHINES)
def program(request, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("arm") / "kernels"
    flags = [flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC")]
    sources = [*map(str, build.SOURCES), str(SUPPORT / "kernel_driver.c")]
    subprocess.run([COMPILER, *flags, MACHINES[request.param], "-static", *sources, "-lm", "-o", str(made)], check=True)
    return made


@pytest.fixture
def on_arm(program, monkeypatch) -> Path:
    monkeypatch.setattr(build, "library", lambda: Elsewhere(program))
    monkeypatch.setattr(cpu, "parallel", lambda: None)
    return program


def test_jobs_of_every_kind_equal_the_specification(on_arm):
    jobs_of_every_kind()


def test_large_results(on_arm):
    large_results((128, 128), ("te", "fp32"), torch.bfloat16)


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


def test_a_wrong_kernel_would_be_seen(on_arm, monkeypatch):
    """The comparison, and the way through the emulator, seen to say no: one scale is changed on its way there."""
    run = Elsewhere._run

    def half(self, function, job, sizes):
        job.format_max /= 2
        run(self, function, job, sizes)

    monkeypatch.setattr(Elsewhere, "_run", half)
    with pytest.raises(AssertionError, match="bytes differ"):
        large_results((128, 128), ("te", "fp32"), torch.bfloat16)


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
