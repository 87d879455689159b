"""The metrics against their definitions in plain Python, NeMo RL's own worked example, and what must hold for any
numbers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch import ImportanceSampling, LogProbs, metrics, token_errors

ERRORS = ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error")


def pairs(sequences=3, tokens=17, spread=0.3, seed=0):
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(sequences, tokens, generator=g) * 8
    trainer = (rollout + spread * torch.randn(sequences, tokens, generator=g)).clamp_max(0)
    mask = torch.rand(sequences, tokens, generator=g) < 0.7
    mask[:, 0] = True
    return trainer, rollout, mask


def by_definition(trainer, rollout, mask, kl_type="k3"):
    """Token by token in Python's floats, the mixture of the JS divergence written out."""
    kl = {"k1": lambda r: -r, "k2": lambda r: r * r / 2, "k3": lambda r: math.exp(r) - 1 - r}[kl_type]
    k3 = lambda r: math.exp(r) - 1 - r  # noqa: E731
    sums, count = dict.fromkeys((*ERRORS, "sampling_importance_ratio"), 0.0), 0
    for t, g, m in zip(trainer.flatten().tolist(), rollout.flatten().tolist(), mask.flatten().tolist(), strict=True):
        if not m:
            continue
        count += 1
        mixture = math.log(0.5 * math.exp(t) + 0.5 * math.exp(g))
        sums["token_mult_prob_error"] += math.exp(abs(t - g))
        sums["gen_kl_error"] += kl(t - g)
        sums["policy_kl_error"] += kl(g - t)
        # exp(log p - log m) - (log p - log m) - 1
        sums["js_divergence_error"] += 0.5 * k3(t - mixture) + 0.5 * k3(g - mixture)
        sums["sampling_importance_ratio"] += math.exp(t - g)
    return {name: value / count for name, value in sums.items()}


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3, 3.0])
def test_by_definition(kl_type, spread):
    trainer, rollout, mask = pairs(spread=spread)
    found = metrics(LogProbs(trainer, rollout, mask), kl_type=kl_type)
    expected = by_definition(trainer, rollout, mask, kl_type)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-14), name


def test_the_same_in_fp32_as_nemo_rl_computes_it():
    """Its loss runs in FP32: sums of values times mask over the global count."""
    t, g, mask = pairs(spread=0.2)
    m = mask.float()
    mixture = torch.log(0.5 * torch.exp(t) + 0.5 * torch.exp(g))
    terms = {
        "token_mult_prob_error": torch.exp((g - t).abs() * m),
        "gen_kl_error": torch.exp(t - g) - 1 - (t - g),
        "policy_kl_error": torch.exp(g - t) - 1 - (g - t),
        "js_divergence_error": 0.5 * (torch.exp(t - mixture) - (t - mixture) - 1)
        + 0.5 * (torch.exp(g - mixture) - (g - mixture) - 1),
        "sampling_importance_ratio": torch.exp(t - g),
    }
    found = metrics(LogProbs(t, g, mask))
    for name, term in terms.items():
        assert found[name] == pytest.approx(float((term * m).sum() / (m.sum() + 1e-8)), rel=2e-5, abs=1e-7), name


def test_the_worked_example_of_nemo_rl_s_guide():
    """One rare token, -5 by vLLM and -15 by the trainer: KLs of 9 and 22015 (docs/guides/grpo.md)."""
    found = metrics(LogProbs(torch.tensor([-15.0]), torch.tensor([-5.0])))
    assert found["gen_kl_error"] == pytest.approx(9.0, abs=1e-3)
    assert found["policy_kl_error"] == pytest.approx(22015, abs=1)
    # The guide says "about 9" of the JS divergence; by its own formula it is half of that, log cosh 5.
    assert found["js_divergence_error"] == pytest.approx(math.log(math.cosh(5)), rel=1e-12)


log_probs = st.floats(-60, 0, allow_nan=False, width=32)
some_pairs = st.lists(st.tuples(log_probs, log_probs), min_size=1, max_size=30)


@given(some_pairs)
def test_what_holds_for_any_numbers(tokens):
    t, g = (torch.tensor(side, dtype=torch.float64) for side in zip(*tokens, strict=True))
    found, turned = metrics(LogProbs(t, g)), metrics(LogProbs(g, t))
    assert found["token_mult_prob_error"] >= 1
    assert found["gen_kl_error"] >= 0
    assert found["policy_kl_error"] >= 0
    assert 0 <= found["js_divergence_error"] <= float((t - g).abs().mean()) / 2 + 1e-15
    # Turned round, the two KLs change places and the symmetric ones stay.
    assert turned["gen_kl_error"] == found["policy_kl_error"]
    assert turned["js_divergence_error"] == found["js_divergence_error"]
    assert turned["token_mult_prob_error"] == found["token_mult_prob_error"]
    # The order of tokens is nothing, nor how they are laid out in sequences.
    shuffled = torch.randperm(len(t))
    assert metrics(LogProbs(t[shuffled], g[shuffled])) == pytest.approx(found, rel=1e-12)
    assert metrics(LogProbs(t[:, None], g[:, None])) == pytest.approx(found, rel=1e-12)


@given(some_pairs, st.floats(-5, 0))
def test_only_the_difference_counts(tokens, shift):
    t, g = (torch.tensor(side, dtype=torch.float64) for side in zip(*tokens, strict=True))
    assert metrics(LogProbs(t + shift, g + shift)) == pytest.approx(metrics(LogProbs(t, g)), rel=1e-6, abs=1e-9)


def test_what_is_masked_is_never_looked_at():
    t, g, mask = pairs()
    found = metrics(LogProbs(t, g, mask))
    for junk in (float("nan"), float("inf"), -float("inf"), 7.0):
        assert metrics(LogProbs(t.masked_fill(~mask, junk), g.masked_fill(~mask, -junk), mask)) == found


def test_a_sample_mask_takes_whole_samples_out():
    t, g, mask = pairs()
    samples = torch.tensor([True, False, True])
    assert metrics(LogProbs(t, g, mask, samples)) == pytest.approx(
        metrics(LogProbs(t[samples], g[samples], mask[samples])), rel=1e-12
    )


def test_micro_batches_add_up_to_the_batch():
    t, g, mask = pairs(sequences=6)
    whole = LogProbs(t, g, mask)
    truncated = ImportanceSampling(
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio=1.2,
        truncated_importance_sampling_ratio_min=0.8,
    )
    parts = [
        metrics(
            LogProbs(t[i : i + 2], g[i : i + 2], mask[i : i + 2]),
            truncated,
            global_tokens=whole.tokens,
            global_sequences=6,
        )
        for i in (0, 2, 4)
    ]
    nothing = LogProbs(t[:2], g[:2], torch.zeros_like(mask[:2]))
    parts.append(metrics(nothing, truncated, global_tokens=whole.tokens, global_sequences=6))
    for name, value in metrics(whole, truncated).items():
        assert sum(part[name] for part in parts) == pytest.approx(value, rel=1e-12)
    masked = replace(
        truncated, truncated_importance_sampling_type="seq-mask-tis", truncated_importance_sampling_ratio_min=0.9
    )
    of_sequences = ImportanceSampling(sequence_level_importance_ratios=True)
    for correction in (masked, of_sequences):
        assert set(metrics(nothing, correction, global_tokens=whole.tokens).values()) == {0.0}
    with pytest.raises(PrecisionError, match="global_tokens=1, and"):
        metrics(whole, global_tokens=1)


def test_long_sequences_and_improbable_tokens_stay_numbers():
    """200,000 tokens, log-probs below anything FP32 can exponentiate."""
    g = torch.Generator().manual_seed(1)
    rollout = -torch.rand(1, 200_000, generator=g) * 400
    trainer = (rollout + 0.05 * torch.randn(1, 200_000, generator=g)).clamp_max(0)
    found = metrics(LogProbs(trainer, rollout))
    d = (trainer - rollout).double().flatten()
    assert found["js_divergence_error"] == pytest.approx(math.fsum((d / 2).cosh().log().tolist()) / len(d), rel=1e-9)
    assert found["token_mult_prob_error"] == pytest.approx(math.fsum(d.abs().exp().tolist()) / len(d), rel=1e-12)


@given(st.floats(1e-9, 600))
def test_js_divergence_keeps_its_digits(d):
    """Against the mixture written out in 60 digits."""
    from decimal import Decimal, localcontext

    found = float(
        token_errors(LogProbs(torch.zeros(1, dtype=torch.float64), torch.tensor([-d], dtype=torch.float64)))[
            "js_divergence_error"
        ]
    )
    with localcontext() as context:
        context.prec = 60
        t, g = Decimal(0), -Decimal(d)
        mixture = ((t.exp() + g.exp()) / 2).ln()
        exact = sum(((x - mixture).exp() - (x - mixture) - 1) / 2 for x in (t, g))
    assert found == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize(
    ("value", "says"),
    [(float("nan"), "nan at"), (float("inf"), "inf at"), (0.5, "logits"), (-float("inf"), "-inf")],
)
@pytest.mark.parametrize("side", [0, 1])
def test_numbers_that_are_no_log_probs_are_refused(value, says, side):
    both = [torch.full((2, 3), -1.0), torch.full((2, 3), -1.0)]
    both[side][1, 2] = value
    with pytest.raises(PrecisionError, match=says) as error:
        LogProbs(*both)
    assert "[1, 2]" in str(error.value)


def test_infinite_tokens_can_be_left_out_and_are_counted():
    t, g, mask = pairs()
    expected_mask = mask.clone()
    t[0, 0], g[2, 0] = -float("inf"), -float("inf")
    expected_mask[0, 0] = expected_mask[2, 0] = False
    pair = LogProbs(t, g, mask, infinite="drop")
    assert pair.dropped == 2
    assert metrics(pair) == metrics(LogProbs(t, g, expected_mask))


def test_questions_without_an_answer():
    t, g, mask = pairs()
    with pytest.raises(PrecisionError, match="no token to compare"):
        metrics(LogProbs(t, g, torch.zeros_like(mask)))
    with pytest.raises(PrecisionError, match="bfloat16"):
        LogProbs(t.bfloat16(), g)
    with pytest.raises(PrecisionError, match=r"\(3, 17\).*\(3, 16\)"):
        LogProbs(t, g[:, 1:], mask)
    with pytest.raises(PrecisionError, match="other values than 0 and 1"):
        LogProbs(t, g, mask * 0.5)
    with pytest.raises(PrecisionError, match="trainer's log-probs are a list"):
        LogProbs(t.tolist(), g)
    with pytest.raises(PrecisionError, match="rollout's log-probs are a NoneType"):
        LogProbs(t, None)
    with pytest.raises(PrecisionError, match="mask are a list"):
        LogProbs(t, g, mask.tolist())
    with pytest.raises(PrecisionError, match="shape"):
        LogProbs(t[..., None], g[..., None])
    with pytest.raises(PrecisionError, match="Unknown kl_type 'k4'"):
        metrics(LogProbs(t, g, mask), kl_type="k4")
    with pytest.raises(PrecisionError, match="Unknown infinite="):
        LogProbs(t, g, mask, infinite="zero")
