# ruff: noqa: E402
"""NVFP4's Triton kernels against the specification in torch: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys

import pytest
import torch
from support.kernel_cases import same, values

from nemo_fp8.te_cpu import has_gpu

DEVICE = "cuda" if has_gpu() else "cpu"
if DEVICE == "cpu" and importlib.util.find_spec("transformer_engine"):
    pytest.skip(
        "TransformerEngine is here, and has Triton compile: the rollout environment runs these", allow_module_level=True
    )
if DEVICE == "cpu":
    known = sys.modules.get("nemo_fp8.numerics.kernels.triton_kernels")
    interpreted = known is not None and type(known._bits).__name__ == "InterpretedFunction"  # by test_kernels_triton.py
    if "triton" in sys.modules and not interpreted:
        pytest.skip("triton is imported already, and cannot be told any more to interpret", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it while functions are being defined, its own among them
try:
    pytest.importorskip("triton", reason="no triton here: it comes with the rollout environment")
    from nemo_fp8.numerics.kernels import triton_fp4  # noqa: F401
finally:
    os.environ.pop("TRITON_INTERPRET", None)

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import nvfp4, nvfp4_tensor
from nemo_fp8.numerics.kernels import cuda_fp4

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPERANDS = {1: Operand("e2m1", (1, 16), "e4m3"), 16: Operand("e2m1", (16, 16), "e4m3")}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def hold(x, tile_rows, convention="te", amax=None):
    operand = OPERANDS[tile_rows]
    amax = nvfp4.amax_of(x, operand) if amax is None else amax
    encode = nvfp4.encode_scale(amax.float(), convention=convention).reshape(-1)
    fast = cuda_fp4.quantize(x.to(DEVICE), encode.to(DEVICE), tile_rows, convention)
    slow = nvfp4.cast_reference(x, operand, amax, convention=convention)
    assert fast is not None
    same(fast[0].cpu(), slow[0])
    same(fast[1].cpu(), slow[1])
    return slow


@pytest.mark.parametrize("tile_rows", OPERANDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_scales_equal_the_specification(dtype, tile_rows):
    kinds = ["gaussian", "magnitudes", "specials", "bits", "zero"]
    for seed, (kind, shape) in enumerate(itertools.product(kinds, ((33, 288), (5, 48)))):
        x = values(shape, dtype, seed, kind)
        x.view(-1)[::7] = -0.0
        hold(x, tile_rows)


def test_other_amaxes_and_the_other_convention():
    x = values((20, 96), torch.bfloat16, 1, "gaussian")
    hold(x, 1, amax=torch.linspace(0.01, 500, 20))
    for amax in (1e-44, 1e-5, 1.0, 3e38, float("inf")):
        hold(x, 16, amax=torch.tensor(amax))
        hold(x, 1, "vllm", amax=torch.tensor(amax))
    for step in torch.linspace(1.0, 1.6, 7):  # values reach 7, 8 and beyond
        hold((torch.linspace(-1, 1, 16).repeat(2, 8) * 6 * step * 2.0**-9).bfloat16(), 1, amax=torch.tensor(2688.0))


def test_every_byte_and_every_scale_decoded():
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(16, 128)
    scales = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)
    dtypes = (
        (torch.float32,) if DEVICE == "cpu" else (torch.float32, torch.bfloat16)
    )  # the interpreter truncates to BF16
    for dtype, amax in itertools.product(dtypes, (None, torch.tensor(3.3), torch.rand(16))):
        for columns in (256, 48):
            some, few = codes[:, : columns // 2], scales[:, : columns // 16]
            arguments = (t if t is None else t.to(DEVICE) for t in (some, few, amax))
            fast = cuda_fp4.decode(*arguments, 2688.0, dtype).cpu()
            whole = torch.ones(()) if amax is None else amax
            q = nvfp4_tensor.QuantizedNVFP4(some, few, (1, 16), amax=whole, source=torch.Size((16, columns)))
            slow = q._times(few.float() if amax is None else q.scale_inv_fp32).to(dtype)
            number = ~slow.isnan()
            same(fast[number], slow[number])
            assert torch.equal(fast.isnan(), slow.isnan())
