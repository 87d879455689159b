"""Codes, scales and results of te.Linear are those of nemo_fp8.numerics, to the bit, on both architectures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from support.te_cases import BITS, CASES
from support.te_layouts import copies
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from nemo_fp8.numerics.delayed import DelayedState, update
from nemo_fp8.numerics.linear import linear, quantize_weight

SUMS = {"blockwise": ("dw",), "blockwise.fp32": ("y", "dx", "dw")}
"""What is equal to rounding only. TE holds the columns of both operands turned round, and the matmul may add its sums
up in another order; Hopper's product multiplies FP32 scales into partial sums."""


def _bytes(tensor):
    return tensor.contiguous().reshape(tensor.shape or (1,)).view(torch.uint8)


def _parts(quantized):
    """What TE's copies are held to: codes, scales, and NVFP4's amax."""
    return [quantized.data, quantized.scale_inv, *([quantized.amax] if hasattr(quantized, "amax") else [])]


@pytest.mark.parametrize("name", BITS)
def test_three_steps_of_a_linear_are_those_of_numerics(name, arch):
    case = BITS[name]
    torch.manual_seed(0)
    module = te.Linear(256, 384, bias=True, params_dtype=torch.bfloat16)
    if arch not in case.archs:
        why = "FP32 scales of blocks on Blackwell.*=90" if case.fp32_scales else "compute capability"
        with pytest.raises(Exception, match=why), te.autocast(enabled=True, recipe=case.build()):
            module(torch.randn(192, 256).bfloat16())
        FP8GlobalStateManager.reset()  # TE stays in FP8 where its autocast finds late that the GPU has not the recipe
        return
    with torch.no_grad():
        module.bias.normal_()
    state = DelayedState(case.precision) if name == "delayed" else None
    for _ in range(3):
        x, dy = torch.randn(192, 256).bfloat16(), (torch.randn(192, 384) * 0.01).bfloat16()
        theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
        weight, bias = (p.detach().clone().requires_grad_() for p in (module.weight, module.bias))
        module.zero_grad()
        with te.autocast(enabled=True, recipe=case.build()):
            y = module(theirs, is_first_microbatch=True)
        row, col = quantize_weight(weight.detach(), case.precision, state)
        expected = linear(ours, weight, bias, precision=case.precision, delayed=state, weight_quantized=(row, col))
        y.backward(dy)
        expected.backward(dy)
        if state is not None:
            update([state.forward])
            update([state.backward])
        kept = copies(module._fp8_workspaces["weight"])
        assert kept["row"] is not None
        assert (kept["col"] is None) == (name in ("delayed", "tensorwise") and arch >= 100)  # one copy serves both
        for quantized, copy in zip((row, col), (kept["row"], kept["col"]), strict=True):
            for part, held in zip(_parts(quantized), copy or (), strict=bool(copy)):
                assert torch.equal(_bytes(held), _bytes(part))
        assert torch.equal(module.bias.grad, bias.grad)
        for what, found, expects in (
            ("y", y, expected), ("dx", theirs.grad, ours.grad), ("dw", module.weight.grad, weight.grad)
        ):  # fmt: skip
            if what in SUMS.get(name, ()):
                torch.testing.assert_close(found, expects, rtol=2**-7, atol=1e-6)
            else:
                assert torch.equal(found, expects), what
    if state is not None:
        meta = module.fp8_meta
        assert torch.equal(meta["scaling_fwd"].scale[:2], state.forward.scale)
        assert torch.equal(meta["scaling_bwd"].scale[:1], state.backward.scale)


def test_one_bit_of_a_code_would_be_seen():
    """The comparison above can say no."""
    torch.manual_seed(0)
    case = CASES["tensorwise"]
    module = te.Linear(128, 128, bias=False, params_dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=case.build()):
        module(torch.randn(32, 128).bfloat16(), is_first_microbatch=True)
    row, _ = quantize_weight(module.weight.detach(), case.precision, None)
    codes = copies(module._fp8_workspaces["weight"])["row"][0]
    assert torch.equal(codes, _bytes(row.data))
    codes.view(-1)[77] ^= 1
    assert not torch.equal(codes, _bytes(row.data))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_a_scalar_stays_one(shape):
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    quantizer = Float8Quantizer(scale=torch.full([1], 4.0), amax=torch.zeros(1), fp8_dtype=te.DType.kFloat8E4M3)
    assert torch.equal(quantizer(torch.full(shape, 0.25)).dequantize(), torch.full(shape, 0.25))


@pytest.mark.skipif(
    os.environ.get("NEMO_FP8_TE_TESTS_ARCH") is not None, reason="this is the run on the other architecture"
)
def test_the_same_on_hopper():
    """Hopper keeps transposed copies of FP8 tensors, has no MXFP8, and other rules of GEMMs: again, in a process that
    stands for it."""
    names = ("bits", "modules", "golden_of_te", "extension", "grouped", "context_parallel", "shards")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=os.environ | {"NEMO_FP8_TE_TESTS_ARCH": "90"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
