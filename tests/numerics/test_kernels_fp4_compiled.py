"""NVFP4's Triton programs: that the list is complete, and that a check says no. test_kernels_compiled.py compiles
them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

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
