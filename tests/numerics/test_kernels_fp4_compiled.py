"""NVFP4's Triton programs: that the list is complete, that a check says no, and that Blackwell's way has the same bits.
test_kernels_compiled.py compiles them.

No GPU runs the PTX here: it is emulated, statement by statement, as NVIDIA defines its instructions.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from nemo_fp8.te_cpu import has_gpu

if importlib.util.find_spec("transformer_engine") and not has_gpu():
    pytest.skip("TransformerEngine is here: the rollout environment runs these", allow_module_level=True)
pytest.importorskip("triton", reason="no triton here: it comes with the rollout environment")
import triton

if triton.knobs.runtime.interpret:
    pytest.skip("triton interprets in this process, and compiles in another", allow_module_level=True)

from benchmarks import compile_kernels
from benchmarks.compile_kernels import compile_launch, problems
from nemo_fp8.numerics import nvfp4
from nemo_fp8.numerics.kernels import cuda_fp4, triton_fp4

VARIANTS = dict(cuda_fp4.variants())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_a_program_that_spills_and_one_of_narrow_stores_are_seen(cache):
    launch = VARIANTS["bfloat16 to e2m1, 1x16"]
    made = compile_launch("", launch, 90)
    assert any("registers are spilled" in problem for problem in problems(compile_launch("", launch, 90, maxnreg=16)))
    narrow = compile_launch("", VARIANTS["bfloat16, unaligned to e2m1, 1x16"], 90)
    assert problems(made) == problems(narrow) == []
    assert len(problems(replace(narrow, wide=True))) == 1


def test_the_list_holds_every_program_that_calls_launch(monkeypatch):
    def program(launch):
        triton.runtime.driver.set_active(compile_kernels.Named(90))
        kernel = getattr(triton_fp4, launch.kernel)
        *_, binder = kernel.create_binder()
        bound = binder(*launch.arguments, **launch.constants, num_warps=launch.warps)
        return launch.kernel, str(bound[1]), launch.warps

    asked = set()
    monkeypatch.setattr(cuda_fp4, "_start", lambda launch: asked.add(program(launch)))
    for dtype in cuda_fp4.SOURCES:
        big = torch.empty(64, 512, dtype=dtype)
        for x in (big, big[:, 16:48], big[:, 1:33], big[::2, :16], torch.empty(1, 16, dtype=dtype)):
            for tile_rows in (1, 16):
                for convention, encode in (("te", torch.ones(len(x))), ("vllm", torch.ones(1))):
                    codes, scales = cuda_fp4.quantize(x, encode, tile_rows, convention)
                for amax in (None, torch.ones(len(x)), torch.ones(())):
                    cuda_fp4.decode(codes, scales, amax, 1536.0, dtype)
    listed = {program(launch) for launch in VARIANTS.values()}
    assert len(listed) == len(VARIANTS)
    assert asked == listed


# ---------------------------------------------------------------------- Blackwell's own conversion


@pytest.mark.parametrize("target", [100, 103, 120])
@pytest.mark.parametrize("name", ["bfloat16 to e2m1, 1x16", "bfloat16 to e2m1, 16x16"])
def test_blackwell_converts_in_hardware_and_spills_nothing(cache, name, target):
    made = compile_launch("", VARIANTS[name], target, sass=True)
    assert problems(made) == []
    assert 2 * made.f2fp == made.values == made.conversions
    by_integers = compile_launch("", VARIANTS[name], target, sass=True, HARDWARE=False)
    assert problems(by_integers) == [f"the hardware converts 0 of {made.values} values"]
    assert by_integers.f2fp == 0
    assert made.executed["integers, comparisons"] < 0.5 * by_integers.executed["integers, comparisons"]


def test_blackwells_maximum_is_the_one_that_skips_nan(cache):
    triton.runtime.driver.set_active(compile_kernels.Named(100))
    launch = VARIANTS["bfloat16 to e2m1, 1x16"]
    constants = launch.constants | {"HARDWARE": True}
    made = triton_fp4.quantize_fp4_kernel.warmup(*launch.arguments, grid=(1,), **constants, num_warps=launch.warps)
    assert re.findall(r"\bmax\.f32", made.asm["ptx"])
    assert not re.findall(r"\bmax(?:\.\w+)*\.NaN", made.asm["ptx"])


def test_hopper_has_no_such_conversion(cache):
    made = compile_launch("", VARIANTS["bfloat16 to e2m1, 1x16"], 90, sass=True)
    assert (made.conversions, made.f2fp, made.converts, problems(made)) == (0, 0, False, [])


def emulate(ptx, registers):
    """Run PTX on arrays: $1, $2, .. are the registers, and $0, four bytes, is returned as [4, ..]."""
    held = {f"${number}": array for number, array in enumerate(registers, 1)} | {"0": (np.float32(0), np.float32(0))}
    for statement in ptx.removeprefix("{ ").removesuffix("; }").split("; "):
        operation, _, operands = statement.partition(" ")
        into, *given = re.findall(r"{[^}]*}|[^, ]+", operands)
        several = [tuple(held[name] for name in re.findall(r"[^{}, ]+", one)) for one in given if one.startswith("{")]
        match operation:
            case "mov.b64" | "mov.b32" if several:
                held[into] = several[0]
            case "mov.b64":
                names = re.findall(r"[^{}, ]+", into)
                held |= dict(zip(names, held[given[0]], strict=True)) if len(names) > 1 else {into: held[given[0]]}
            case "mul.rn.f32x2":
                held[into] = tuple(a * b for a, b in zip(*(held[name] for name in given), strict=True))
            case "add.rn.f32x2":
                held[into] = tuple(a + b for a, b in zip(*(held[name] for name in given), strict=True))
            case "cvt.rn.satfinite.e2m1x2.f32":  # the first operand becomes the upper half
                upper, lower = (as_the_instruction_rounds(held[name]) for name in given)
                held[into] = upper << 4 | lower
            case ".reg":
                pass
            case _:
                raise NotImplementedError(statement)
    return np.stack(held["$0"])


def as_the_instruction_rounds(x):
    """The nearest code, ties to even; what is larger than 6 becomes 6, NaN +6, and zero keeps its sign."""
    codes = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return np.where(np.isnan(x), 7, codes).astype(np.uint8)


def cases():
    """Pairs of a value and a factor: every tie and its neighbours in FP32, and every BF16 number with factors that
    overflow, underflow and do neither."""
    ties = np.float32([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, np.inf])
    around = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    around = np.concatenate([around, -around])
    bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    found = [(around / np.float32(factor), factor) for factor in (1, 2**-100, 2**100)]
    found += [(bf16, factor) for factor in (1, 0.37, 1 / 3e-3, 1e-38, 3.4028234663852886e38)]
    x = np.concatenate([x for x, _ in found])
    factor = np.concatenate([np.full(x.shape, factor, np.float32) for x, factor in found])
    short = -len(x) % 8  # four bytes of two values
    return np.pad(x, (0, short)), np.pad(factor, (0, short), constant_values=1)


@pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value):RuntimeWarning")
def test_blackwells_conversion_has_the_codes_of_the_specification():
    x, factor = cases()
    even, odd = x.reshape(-1, 4, 2).transpose(2, 1, 0)
    factors = factor.reshape(-1, 4, 2)[:, :, 0].T
    codes = nvfp4.nearest(torch.from_numpy(x * factor)).view(-1, 4, 2).numpy()
    wanted = (codes[..., 0] | codes[..., 1] << 4).T

    ptx = triton_fp4.CONVERT.value
    np.testing.assert_array_equal(emulate(ptx, [*even, *odd, *factors]), wanted)
    with_signs_of_zero = re.sub(r"add\.rn\.f32x2 [^;]*; ", "", ptx)
    swapped = ptx.replace("high, low;", "low, high;")
    for wrong in (with_signs_of_zero, swapped):
        assert wrong != ptx
        assert (emulate(wrong, [*even, *odd, *factors]) != wanted).any()
