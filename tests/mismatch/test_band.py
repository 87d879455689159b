"""The band: its formula by hand, its quantile against scipy, and how often sound samples leave it."""

import math

import numpy as np
import pytest
import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch.band import Band, Sample, band, student_t


@pytest.mark.parametrize("degrees", [7, 15, 63, 1000])
@pytest.mark.parametrize("tail", [0.05, 1e-2, 1e-3, 5e-4])
def test_quantile_of_student(degrees, tail):
    scipy = pytest.importorskip("scipy.stats")
    assert student_t(1 - tail, degrees) == pytest.approx(scipy.t.ppf(1 - tail, degrees), rel=2e-3)


def test_by_hand():
    d = torch.tensor([[1.0, 4.0, 9.0], [0.0, 16.0, 5.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    sample = Sample.of(d, mask)
    assert sample.sums.tolist() == [6.0, 4.0]
    assert sample.counts.tolist() == [3.0, 2.0]
    assert sample.mean == 2.0
    assert sample.typical == 4.0
    assert sample.effective == pytest.approx(25 / 13)
    assert sample.deviation == 0.0
    even = Sample(torch.tensor([4.0, 6.0] * 8, dtype=torch.float64), torch.full((16,), 5.0, dtype=torch.float64))
    sd = 0.2 * math.sqrt(16 / 15)
    assert even.deviation == pytest.approx(sd)
    found = band(even, even, 0.01, 1.5)
    reach = math.exp(2 * student_t(0.99, 15) * sd * math.sqrt(2 / 16)) * 1.5
    assert (found.expected, found.low, found.high) == pytest.approx((1.0, 1 / reach, reach))
    assert [found.side(x) for x in (0.0, 1.0, 100.0, float("nan"))] == ["below", "inside", "above", "above"]
    shorter = Sample(even.sums / 5, even.counts / 5)
    wider = math.exp(2 * student_t(0.99, 15) * sd * math.sqrt(1 / 16 + 5 / 16))
    assert band(even, shorter, 0.01).high == pytest.approx(wider)


def test_the_unit_of_d_carries_over_and_sequences_without_tokens_do_not_count():
    g = torch.Generator().manual_seed(0)
    d, mask = torch.randn(20, 9, generator=g), torch.rand(20, 9, generator=g) < 0.6
    one, ten = (band(Sample.of(k * d, mask), Sample.of(d, mask), 0.01) for k in (1, 10))
    assert (ten.expected, ten.low, ten.high) == pytest.approx((10 * one.expected, 10 * one.low, 10 * one.high))
    padded = torch.cat((mask, torch.zeros(5, 9, dtype=torch.bool)))
    assert band(Sample.of(torch.cat((d, d[:5])), padded), Sample.of(d, mask), 0.01) == one


def test_questions_without_an_answer():
    some = Sample(torch.ones(16, dtype=torch.float64), torch.ones(16, dtype=torch.float64))
    none = Sample(torch.ones(0, dtype=torch.float64), torch.ones(0, dtype=torch.float64))
    with pytest.raises(PrecisionError, match="from 7 sequences"):
        band(Sample(some.sums[:7], some.counts[:7]), some, 0.01)
    with pytest.raises(PrecisionError, match="no token to judge"):
        band(some, none, 0.01)
    for sums in (some.sums * 0, some.sums * float("nan"), some.sums * float("inf")):
        with pytest.raises(PrecisionError, match="The prediction finds a difference"):
            band(Sample(sums, some.counts), some, 0.01)


def draw(rng, sequences, tail, spread):
    """Noise like FP8's and worse: Student's t for tokens, a size of its own for each sequence, lengths from 20 to
    60."""
    lengths = rng.integers(20, 60, size=sequences)
    d = np.zeros((sequences, 60))
    for i, n in enumerate(lengths):
        tokens = rng.standard_t(tail, size=n) if tail else rng.normal(size=n)
        d[i, :n] = 0.1 * math.exp(spread * rng.normal()) * tokens
    return Sample.of(torch.from_numpy(d), torch.arange(60)[None] < torch.from_numpy(lengths)[:, None])


@pytest.mark.parametrize(("predicted", "observed"), [(8, 8), (8, 64), (32, 32), (32, 256)])
@pytest.mark.parametrize(("tail", "spread"), [(0, 0.0), (0, 0.5), (3, 0.5)])
def test_how_often_sound_samples_leave_it(predicted, observed, tail, spread):
    """At 1% and without any room: at most 3% of 400 pairs above, with tails far heavier than a model's; usually 1%."""
    rng = np.random.default_rng(predicted + observed)
    sides = []
    for _ in range(400):
        a, b = draw(rng, predicted, tail, spread), draw(rng, observed, tail, spread)
        sides.append(band(a, b, 0.01).side(b.typical))
    assert sides.count("above") <= 12
    assert sides.count("below") <= 16


@pytest.mark.parametrize("times", [1.5, 2.0])
def test_it_is_left_by_what_is_worse(times):
    rng = np.random.default_rng(1)
    for _ in range(50):
        a, b = draw(rng, 32, 0, 0.2), draw(rng, 32, 0, 0.2)
        worse = Sample(b.sums * math.sqrt(times), b.counts)
        assert band(a, worse, 1e-3).side(worse.typical) == "above"


def test_sides():
    assert Band(1.0, 0.5, 2.0).side(2.0) == "inside"
