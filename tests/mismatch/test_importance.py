"""Importance-sampling weights against their definitions, written out sequence by sequence in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch import ImportanceSampling, LogProbs, metrics

BOUNDS = {"tis": (2.0, None), "icepop": (5.0, 0.5), "seq-mask-tis": (1.05, 0.95)}


def correction(kind, high=None, low=None, **more):
    if kind is not None and high is None:
        high, low = BOUNDS[kind]
    return ImportanceSampling(
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=low,
        **more,
    )


def by_definition(t, g, mask, kind, high, low, sequence_level=False):
    """Weights, and the share out of bounds, in Python's floats."""
    low, weights, out, of = low or 0.0, [], 0, 0
    for ts, gs, ms in zip(t.tolist(), g.tolist(), mask.tolist(), strict=True):
        logs = [a - b for a, b, m in zip(ts, gs, ms, strict=True) if m]
        whole = math.exp(sum(logs))
        mean = math.exp(sum(logs) / len(logs)) if logs else 1.0
        keep = low <= mean <= high if kind == "seq-mask-tis" else True
        if kind == "seq-mask-tis" and logs:
            out, of = out + (not keep), of + 1
        row = []
        for a, b, m in zip(ts, gs, ms, strict=True):
            w = whole if sequence_level else math.exp(a - b)
            inside = low <= w <= (high or math.inf)
            if m and kind in ("tis", "icepop"):
                out, of = out + (not inside), of + 1
            if kind == "tis":
                w = min(max(w, low), high)
            elif kind == "icepop":
                w = w if inside else 0.0
            elif kind == "seq-mask-tis":
                w = w if keep else 0.0
            row.append(w if m else 0.0)
        weights.append(row)
    return weights, out / of if of else None


@st.composite
def batches(draw):
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rollout = -torch.rand(rows, columns, generator=g, dtype=torch.float64) * 6
    trainer = (rollout + draw(st.sampled_from([0.01, 0.3, 2.0])) * torch.randn(rows, columns, generator=g)).clamp_max(0)
    mask = torch.rand(rows, columns, generator=g) < 0.8
    mask[0, 0] = True
    return trainer, rollout, mask


@given(batches(), st.sampled_from([None, *BOUNDS]), st.booleans())
def test_by_definition(batch, kind, sequence_level):
    if kind == "seq-mask-tis":
        sequence_level = False
    c = correction(kind, sequence_level_importance_ratios=sequence_level)
    pair = LogProbs(*batch)
    found = c.weights(pair)
    weights, out = by_definition(*batch, kind, *BOUNDS.get(kind, (None, None)), sequence_level)
    torch.testing.assert_close(found.values, torch.tensor(weights), rtol=1e-6, atol=1e-7)
    if kind is None:
        assert found.out_of_bounds is None
        assert "is_oob_ratio" not in metrics(pair, c)
    else:
        assert metrics(pair, c)["is_oob_ratio"] == pytest.approx(out, abs=1e-12)


@given(batches(), st.sampled_from(list(BOUNDS)))
def test_bounds_hold(batch, kind):
    pair = LogProbs(*batch)
    high, low = BOUNDS[kind]
    w = correction(kind).weights(pair).values
    assert not w[~pair.mask].any()
    if kind != "seq-mask-tis":
        kept = w[w != 0]
        assert not kept.numel() or (kept.min() >= (low or 0) and kept.max() <= high * (1 + 1e-6))
    wide = correction(kind, 1e30, 0.0).weights(pair)
    plain = ImportanceSampling().weights(pair).values
    torch.testing.assert_close(wide.values, plain)
    assert not wide.out_of_bounds.any()


def test_the_ratio_metric_stays_raw_and_follows_the_level():
    t, g = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]), torch.tensor([[-2.0, -2.0], [-3.0, -1.0]])
    pair = LogProbs(t, g)
    raw = (math.e + 1 + math.e**2 + 1) / 4
    for kind in (None, *BOUNDS):
        assert metrics(pair, correction(kind))["sampling_importance_ratio"] == pytest.approx(raw)
    whole = ImportanceSampling(sequence_level_importance_ratios=True)
    assert metrics(pair, whole)["sampling_importance_ratio"] == pytest.approx((math.e + math.e**2) / 2)
    torch.testing.assert_close(whole.weights(pair).values, torch.tensor([[math.e] * 2, [math.e**2] * 2]))


def test_without_correction_every_weight_is_one():
    t, g, mask = -torch.rand(2, 4), -torch.rand(2, 4), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    off = ImportanceSampling(use_importance_sampling_correction=False)
    assert torch.equal(off.weights(LogProbs(t, g, mask)).values, mask.float())


def test_weights_carry_no_gradient_and_a_ratio_beyond_fp32_counts_as_zero():
    t = torch.tensor([[-0.5, -1.0, -300.0]], requires_grad=True)
    g = torch.tensor([[-1.0, -200.0, -1.0]])
    w = ImportanceSampling().weights(LogProbs(t, g)).values
    assert not w.requires_grad
    assert w.dtype == torch.float32
    assert w[0].tolist() == pytest.approx([math.exp(0.5), 0.0, 0.0])
    whole = ImportanceSampling(sequence_level_importance_ratios=True).weights(LogProbs(t[:, :2], g[:, :2])).values
    assert not whole.any()


def test_a_sequence_without_tokens_is_no_reason_to_divide_by_zero():
    pair = LogProbs(-torch.ones(2, 3), -torch.ones(2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]]), torch.tensor([1, 1]))
    assert metrics(pair, correction("seq-mask-tis"))["is_oob_ratio"] == 0
    w = correction("seq-mask-tis").weights(pair).values
    assert torch.equal(w, torch.tensor([[1.0, 1, 1], [0, 0, 0]]))


def test_from_nemo_rl_s_loss_fn():
    """The section as it stands in examples/configs: other keys pass, and the correction is off unless asked for."""
    c = ImportanceSampling.of({"ratio_clip_min": 0.2, "reference_policy_kl_type": "k3"})
    assert c == ImportanceSampling(use_importance_sampling_correction=False)
    c = ImportanceSampling.of(
        {
            "ratio_clip_min": 0.2,
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 5.0,
            "truncated_importance_sampling_ratio_min": 0.5,
        }
    )
    assert c == correction("icepop")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "clip", "high": 2.0}, "Unknown truncated_importance_sampling_type 'clip'"),
        ({"kind": "tis", "high": -1.0}, "upper bound above 0"),
        ({"kind": "icepop", "high": 5.0}, "without truncated_importance_sampling_ratio_min"),
        ({"kind": "icepop", "high": 0.5, "low": 5.0}, "bounds 5.0 and 0.5"),
        ({"kind": "tis", "high": 2.0, "use_importance_sampling_correction": False}, "no weights to truncate"),
        (
            {"kind": "seq-mask-tis", "high": 1.1, "low": 0.9, "sequence_level_importance_ratios": True},
            "masks sequences",
        ),
        ({"kind": None, "high": 2.0}, "without truncated_importance_sampling_type"),
    ],
)
def test_contradictions_are_refused(fields, says):
    with pytest.raises(PrecisionError, match=says):
        correction(**{"high": None, **fields})
