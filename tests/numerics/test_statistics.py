"""Statistics, against a second pass over the dequantized tensor in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors import OPERANDS, name, tensors

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import quantize, quantize_reference
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.statistics import TOTALS

COUNTS = ("elements", "underflow", "saturated", "nonfinite", "amax", "least_code", "largest_code")


@pytest.mark.parametrize("operand", OPERANDS, ids=name)
@settings(max_examples=15, deadline=None)
@given(x=tensors(), usage=st.sampled_from(["row", "col"]))
def test_every_number_against_a_second_pass(operand, x, usage):
    q = quantize(x, operand, usage=usage, statistics=True)
    source, values = x.double(), q.dequantize_reference().double()
    finite = source.isfinite()
    whole = q.statistics.total()
    assert int(whole.elements) == x.numel()
    assert int(whole.nonfinite) == int((~finite).sum())
    assert int(whole.underflow) == int(((values == 0) & (source != 0) & finite).sum())
    assert float(whole.amax) == float(source[~source.isnan()].abs().max() if (~source.isnan()).any() else 0)
    if not values[finite].isinf().any():
        signal, noise = source[finite].square().sum(), (source - values)[finite].square().sum()
        if 1e-25 < float(signal) < 1e30:  # FP32 sums of the fast kernels; beyond, squares leave FP32
            assert float(whole.signal) == pytest.approx(float(signal), rel=1e-4)
            assert float(whole.noise) == pytest.approx(float(noise), rel=1e-3, abs=float(signal) * 1e-9)


@settings(max_examples=30, deadline=None)
@given(x=tensors(), operand=st.sampled_from(OPERANDS), usage=st.sampled_from(["row", "col"]))
def test_each_tile_is_the_reference_s(x, operand, usage):
    q = quantize(x, operand, usage=usage, statistics=True)
    _, _, reference = quantize_reference(x, q.block, FORMATS[operand.format], operand.scale, statistics=True)
    assert q.statistics.elements.shape == q.scale_inv.shape
    for field in COUNTS:
        assert torch.equal(getattr(q.statistics, field).double(), getattr(reference, field).double()), field
    assert torch.equal(q.statistics.scale_inv, reference.scale_inv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("usage", ["row", "col"])
@pytest.mark.parametrize("operand", [o for o in OPERANDS if o.block], ids=name)
def test_values_beside_an_infinity_are_counted(operand, usage, dtype):
    """An MX tile with an infinity has the scale 2**127, beneath which squares of the others are zero."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)).mul_(100).to(dtype)
    x[5, 7], x[200, 130] = float("inf"), -float("inf")
    q = quantize(x, operand, usage=usage, statistics=True)
    _, _, reference = quantize_reference(x, q.block, FORMATS[operand.format], operand.scale, statistics=True)
    for field in ("norm", "error_norm"):
        torch.testing.assert_close(
            getattr(q.statistics, field), getattr(reference, field).float(), rtol=1e-4, atol=1e-6
        )
    sums = [getattr(reference, field).double().square().sum().item() for field in ("norm", "error_norm")]
    assert q.statistics.totals()[0, :2].tolist() == pytest.approx(sums, rel=1e-4)


def test_saturation_is_counted_beyond_half_a_step():
    x = torch.tensor([[440.0, 448.0, 464.0, 464.1, 1e6, -1e6, float("inf"), float("nan")]])
    q = quantize(x, Operand("e4m3", None, "fp32", delayed=True), scale=torch.ones(()), statistics=True)
    assert int(q.statistics.saturated) == 4
    assert float(q.statistics.saturation_percent) == 50.0


def test_lossless_is_infinitely_good_and_zeros_are_no_underflow():
    q = quantize(torch.tensor([[0.0, 1.0, 2.0, -448.0]]), Operand("e4m3", None, "fp32"), statistics=True)
    assert q.statistics.snr_db == math.inf
    assert q.statistics.mse == 0
    assert q.statistics.underflow == 0


def test_the_range_used():
    format = FORMATS["e4m3"]
    q = quantize(torch.tensor([[format.max, 1.0]]), Operand("e4m3", None, "fp32"), statistics=True)
    assert float(q.statistics.range_used_percent) == pytest.approx(
        100 * math.log2(448) / math.log2(format.max / format.smallest)
    )
    q = quantize(torch.tensor([[format.max, format.smallest]]), Operand("e4m3", None, "fp32"), statistics=True)
    assert float(q.statistics.range_used_percent) == pytest.approx(100)
    q = quantize(torch.zeros(2, 2), Operand("e4m3", None, "fp32"), statistics=True)
    assert float(q.statistics.range_used_percent) == 0


def test_a_gaussian_has_the_snr_of_its_mantissa():
    """E4M3 loses 2.65% in norm on Gaussian BF16 weights in 128x128 tiles (measured on TE): 31.5 dB."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    summary = quantize(x, Operand("e4m3", (128, 128), "fp32"), statistics=True).statistics.summary()
    assert summary["snr_db"] == pytest.approx(-20 * math.log10(0.0265), abs=0.1)
    assert summary["scale_inv_min"] < summary["scale_inv_max"]
    assert all(isinstance(v, float) for v in summary.values())


@pytest.mark.parametrize("block", [(1, 32), (2, 2), None])
def test_asking_twice_gives_the_same_numbers(block):
    """The sums of the specification are in FP64 already: squaring them must not write over them."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = quantize_reference(x, block, FORMATS["e4m3"], "fp32", statistics=True)[2]
    expected = float(x.double().square().sum())
    for _ in range(2):
        assert float(found.total().signal) == pytest.approx(expected, rel=1e-6)
        assert 30 < float(found.total().snr_db) < 60


def test_the_sums_of_many_tiles_are_those_of_all_and_leave_them_as_they_are():
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    for found in (
        quantize(x, Operand("e4m3", (1, 32), "e8m0"), statistics=True).statistics,  # by a kernel, in FP32
        quantize_reference(x, (1, 32), FORMATS["e4m3"], "e8m0", statistics=True)[2],  # in FP64
    ):
        assert found.norm.numel() > 1 << 14
        total = found.total()
        expected = [float(getattr(total, name)) for name in TOTALS]
        for _ in range(2):
            assert found.totals()[0].tolist() == pytest.approx(expected, rel=1e-12)
        halves = found.totals(2)
        assert halves[:, :-1].sum(0).tolist() == pytest.approx(expected[:-1], rel=1e-12)
        assert float(halves[:, -1].amax()) == expected[-1]
