"""Scales, against numpy's arithmetic and TransformerEngine's own reference, at every edge that has bitten somebody."""

import numpy as np
import pytest
import torch
from support import oracles

from nemo_fp8.numerics import scales
from nemo_fp8.numerics.formats import FORMATS, FP32_MAX
from nemo_fp8.numerics.quantize import quantize_reference

EVERY_BF16 = (
    torch.arange(32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
)  # all non-negative, inf and NaN too
FINITE = EVERY_BF16[EVERY_BF16.isfinite()]
SOME_FP32 = (
    torch.randint(0, 0x7F800000, (1 << 18,), generator=torch.Generator().manual_seed(0))
    .to(torch.int32)
    .view(torch.float32)
)
ELEMENTS = ("e4m3", "e5m2")


@pytest.fixture(scope="module")
def te_scale():
    if not oracles.TE.is_dir():
        pytest.fail("TransformerEngine is not in .te. Remedy: make setup")
    return oracles.te_scale()


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ELEMENTS)
def test_scales_are_those_of_te_s_reference(te_scale, name, source, pow2, epsilon):
    for amax in (FINITE, SOME_FP32):
        theirs, theirs_inv, _ = te_scale(source, amax, FORMATS[name].dtype, eps=epsilon, pow_2_scales=pow2)
        ours = scales.scale_from_amax(
            amax, FORMATS[name], epsilon=epsilon, pow2=pow2, value_for_inf=torch.finfo(source).max
        )
        assert oracles.differences(ours.numpy(), theirs.numpy()) == 0
        assert oracles.differences(torch.reciprocal(ours).numpy(), theirs_inv.numpy()) == 0


@pytest.mark.parametrize("name", ELEMENTS)
def test_scales_are_one_correctly_rounded_division(name):
    with np.errstate(all="ignore"):
        theirs = oracles.LARGEST[name] / SOME_FP32.numpy()
    ours = scales.scale_from_amax(SOME_FP32, FORMATS[name], value_for_inf=float("inf"))
    positive = SOME_FP32 > 0
    assert oracles.differences(ours[positive].numpy(), theirs[positive.numpy()]) == 0


def test_amaxes_that_say_nothing():
    """TE's kernel gives scale 1, where its Python reference gives 0 or NaN for infinity and NaN."""
    amax = torch.tensor([0.0, float("inf"), float("nan")])
    for pow2 in (False, True):
        assert scales.scale_from_amax(amax, FORMATS["e4m3"], pow2=pow2).tolist() == [1, 1, 1]


def test_a_scale_that_overflows_becomes_the_largest():
    amax = torch.tensor([1e-40])
    assert scales.scale_from_amax(amax, FORMATS["e4m3"]).item() == FP32_MAX
    assert scales.scale_from_amax(amax, FORMATS["e4m3"], pow2=True).item() == 2.0**127


def test_amax_passes_over_nan_but_not_over_infinity():
    x = torch.tensor([[1.0, float("nan"), -3.0], [float("nan")] * 3, [0.0, -float("inf"), float("nan")]])
    assert scales.amax_of(x, (1,)).tolist() == [3.0, 0.0, float("inf")]
    assert scales.amax_of(x).item() == float("inf")
    assert scales.amax_of(x[:2]).item() == 3.0


@pytest.mark.parametrize("tile", [(128, 128), (1, 32), None], ids=str)
def test_no_device_is_waited_for(tile):
    """A tensor on the meta device has no values that could be asked for: whoever waits fails."""
    x = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    codes, scale_inv, _ = quantize_reference(x, tile, FORMATS["e4m3"], "e8m0" if tile == (1, 32) else "pow2")
    assert codes.shape == x.shape
    assert scale_inv.device == x.device


def test_amax_of_nothing_is_zero():
    assert scales.amax_of(torch.empty(0, 3)).item() == 0
    assert scales.amax_of(torch.empty(2, 0), (1,)).tolist() == [0, 0]


@pytest.mark.parametrize("name", ELEMENTS)
def test_e8m0_is_the_exact_ceiling(name):
    """Against Python's unlimited integers: 2**(code - 127) >= amax / max > 2**(code - 128)."""
    from fractions import Fraction

    largest = Fraction(FORMATS[name].max)
    amaxes = [float(a) for a in FINITE[1:].tolist()][:: 7 if name == "e5m2" else 5]
    codes = scales.e8m0_from_amax(torch.tensor(amaxes), FORMATS[name]).tolist()
    for amax, code in zip(amaxes, codes, strict=True):
        ratio = Fraction(amax) / largest
        assert ratio <= Fraction(2) ** (code - 127) or code == 254
        assert ratio > Fraction(2) ** (code - 128) or code == 0


def test_e8m0_of_what_is_no_number():
    assert scales.e8m0_from_amax(torch.tensor([0.0, float("inf"), float("nan")]), FORMATS["e4m3"]).tolist() == [
        0,
        254,
        255,
    ]


def test_deepgemm_is_another_convention():
    """It differs from TE's in about half of the scales, by one ulp, and in none once both are powers of two."""
    amax = SOME_FP32[(SOME_FP32 > 2e-4) & (SOME_FP32 < 1e30)]
    te = torch.reciprocal(scales.scale_from_amax(amax, FORMATS["e4m3"]))
    deepgemm = scales.deepgemm_scale_inv(amax, FORMATS["e4m3"])
    ulps = (te.view(torch.int32) - deepgemm.view(torch.int32)).abs()
    assert ulps.max() == 1
    assert 0.2 < (ulps == 1).float().mean() < 0.8
    te = torch.reciprocal(scales.scale_from_amax(amax, FORMATS["e4m3"], pow2=True))
    assert torch.equal(te, scales.deepgemm_scale_inv(amax, FORMATS["e4m3"], pow2=True))


def test_delayed_scales():
    previous = torch.full((6,), 7.0)
    amax = torch.tensor([2.0, 0.0, float("inf"), float("nan"), 1e-44, 448.0])
    found = scales.delayed_scale(amax, previous, FORMATS["e4m3"])
    assert found.tolist() == [224.0, 7.0, 7.0, 7.0, FP32_MAX, 1.0]
    assert scales.delayed_scale(amax, previous, FORMATS["e4m3"], margin=2)[0].item() == 56.0
    assert scales.delayed_scale(amax, previous, FORMATS["e5m2"], margin=-1)[0].item() == 57344.0
