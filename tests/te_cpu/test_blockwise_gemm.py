"""The GEMM of Hopper's blockwise operands has the bits of its formula, whichever way it is computed."""

import pytest
import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.kernels import build
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.te_cpu import blockwise

SHAPES = [(128, 256, 512), (72, 40, 400), (1, 8, 16), (513, 264, 128)]  # of B, of A, and what both contract


def _formula(a, b):
    """One block of 128 after the other, in whole matrices."""
    out = torch.zeros(len(b.data), len(a.data))
    for k in range(-(-a.data.shape[1] // 128)):
        block = slice(128 * k, 128 * k + 128)
        of_b, of_a = (
            (q.scale_inv[:, k] if q.block == (1, 128) else q.scale_inv[:, k].repeat_interleave(128)[: len(q.data)])
            for q in (b, a)
        )
        partial = b.data[:, block].float() @ a.data[:, block].float().t()
        first, last = (of_a, of_b[:, None]) if (a.block, b.block) == ((1, 128), (128, 128)) else (of_b[:, None], of_a)
        scaled = partial * first
        powers = torch.frexp(last).mantissa.eq(0.5).all()
        out = out + scaled * last if powers else (out.double() + scaled.double() * last.double()).float()
    return out


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("square", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_the_formula(shape, square, scales, compiled, monkeypatch):
    if compiled and build.library() is None:
        pytest.skip("no C compiler on this machine")
    if not compiled:
        monkeypatch.setattr(build, "library", lambda: None)
    torch.manual_seed(0)
    rows, columns, inner = shape
    a, b = (
        quantize(
            torch.randn(n, inner) * torch.logspace(-6, 6, inner), Operand("e4m3", (128 if two else 1, 128), scales)
        )
        for n, two in zip((columns, rows), square, strict=True)
    )
    assert torch.equal(blockwise.product(a, b), _formula(a, b))


@pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_compiled_sum_is_torchs_at_every_magnitude(exact, columns_first):
    """Subnormals, overflows, cancellations, infinities and NaNs. An exact product is one that FP32 holds: none of it
    overflows."""
    torch.manual_seed(0)
    size, bits = (130, 1037), torch.iinfo(torch.int32)
    numbers = [torch.randint(bits.min, bits.max, size, dtype=torch.int32).view(torch.float32) for _ in range(2)]
    of_rows, of_columns = (torch.randint(0, 1 << 31, (n,)).int().view(torch.float32) for n in size)
    if exact:
        of_rows, of_columns = (torch.exp2(torch.randint(-20, 20, (n,)).float()) for n in size)
        numbers[1] = torch.randn(size) * torch.exp2(torch.randint(-40, 40, size).float())
        numbers[1][:, 1] = torch.inf
    y, partial = numbers
    y[:, ::3] = -partial[:, ::3] * of_rows[:, None] * of_columns[::3]  # what nearly cancels
    found, expected = y.clone(), y.clone()
    blockwise.accumulate(found, partial.clone(), of_rows, of_columns, columns_first)
    blockwise.accumulate_reference(expected, partial.clone(), of_rows, of_columns, columns_first, exact)
    assert torch.equal(found.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(found[known].view(torch.int32), expected[known].view(torch.int32))
    assert 0.2 < known.float().mean() < 1


@pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")
def test_it_is_the_compiled_sum_that_runs(monkeypatch):
    a, b = (quantize(torch.randn(128, 256), Operand("e4m3", (1, 128), "fp32")) for _ in range(2))
    monkeypatch.setattr(blockwise, "accumulate_reference", None)
    assert blockwise.product(a, b).isfinite().all()
