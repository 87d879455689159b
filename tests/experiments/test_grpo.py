"""GRPO against closed forms: gradients by hand, expectations by enumeration of a small vocabulary."""

import pytest
import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.rl.grpo import GrpoLoss, group_advantages, kl_divergence, token_weights
from nemo_fp8.mismatch import ImportanceSampling, LogProbs


def full(value, shape=(2, 3)):
    return torch.full(shape, float(value))


def gradient(loss, new, *others):
    new = new.clone().requires_grad_()
    loss(new, *others).sum().backward()
    return new.grad


def test_advantages_are_standardized_in_each_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    found = group_advantages(rewards)
    spread = (0.25 * 0.75) ** 0.5
    assert torch.allclose(found[0], torch.tensor([0.75, -0.25, -0.25, -0.25]) / spread, atol=1e-5)
    assert found[1:].abs().max() == 0
    with pytest.raises(PrecisionError, match="at least two"):
        group_advantages(torch.ones(3, 1))


def test_gradient_on_policy_is_the_policy_gradient():
    """With new = old the ratio is 1, and the gradient is that of -w A log p + beta KL, which is -w A + beta (1 - ref /
    new)."""
    torch.manual_seed(0)
    new, reference, importance = -torch.rand(2, 3), -torch.rand(2, 3), torch.rand(2, 3)
    advantages = torch.tensor([1.5, -0.5])
    found = gradient(GrpoLoss(kl_beta=0.1), new, new, reference, advantages, importance)
    expected = -importance * advantages[:, None] + 0.1 * (1 - (reference - new).exp())
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.1, 1, True), (1.3, 1, False), (1.3, -1, True), (0.9, -1, True), (0.7, -1, False), (0.7, 1, True)],
)
def test_the_ratio_is_clipped_where_it_would_be_overdone(ratio, advantage, moves):
    old = full(-1.0)
    new = old + torch.tensor(ratio).log()
    found = gradient(GrpoLoss(kl_beta=0), new, old, old, full(advantage, (2,)), full(1))
    expected = -advantage * ratio if moves else 0.0
    assert torch.allclose(found, full(expected), atol=1e-6)


def test_bounds_of_the_clip_differ():
    old = full(-1.0)
    new = old + torch.tensor(1.25).log()
    args = (new, old, old, full(1, (2,)), full(1))
    assert gradient(GrpoLoss(kl_beta=0, clip_high=0.28), *args).abs().min() > 0
    assert gradient(GrpoLoss(kl_beta=0, clip_high=0.2), *args).abs().max() == 0


def test_the_estimate_of_kl_has_the_right_mean():
    torch.manual_seed(1)
    p, q = torch.randn(50).log_softmax(0), torch.randn(50).log_softmax(0)
    estimate = (p.exp() * kl_divergence(p, q)).sum()
    assert estimate == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-5)
    assert kl_divergence(p, q).min() >= 0
    assert kl_divergence(p, p).abs().max() == 0


def test_weights_make_the_rollouts_mean_the_trainers():
    """Over all tokens of a vocabulary: tokens drawn by the engine and weighed give the gradient of tokens drawn by the
    trainer."""
    torch.manual_seed(2)
    logits = torch.randn(20, dtype=torch.float64)
    advantages = torch.randn(20)
    trainer = logits.log_softmax(0)
    rollout = (logits + 0.3 * torch.randn(20)).log_softmax(0)
    weights = ImportanceSampling().weights(LogProbs(trainer[:, None], rollout[:, None])).values

    def gradient_of(draws, weights):
        x = logits.clone().requires_grad_()
        new = x.log_softmax(0)[:, None]
        loss = GrpoLoss(kl_beta=0)(new, trainer[:, None], trainer[:, None], advantages, weights)
        (draws.exp() * loss[:, 0]).sum().backward()
        return x.grad

    ones = torch.ones(20, 1)
    expected = gradient_of(trainer, ones)
    assert torch.allclose(gradient_of(rollout, weights), expected, atol=1e-6)
    assert not torch.allclose(gradient_of(rollout, ones), expected, atol=1e-2)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 8), (1, 2), (2, 2), (4, 1)])
def test_mean_over_samples_is_mean_over_tokens(ranks, micro_batch):
    torch.manual_seed(3)
    loss, mask = torch.randn(8, 5), (torch.rand(8, 5) < 0.6).float()
    weighted = (loss * token_weights(mask)).sum(1)
    parts = weighted.view(ranks, -1, micro_batch).mean(
        2
    )  # of a micro-batch, as Megatron averages: over them, then over ranks
    assert parts.mean(1).mean() == pytest.approx(float((loss * mask).sum() / mask.sum()), abs=1e-6)


def test_settings_of_the_loss_are_checked():
    for wrong in ({"clip_low": 1.5}, {"clip_high": -0.1}, {"kl_beta": -1}):
        with pytest.raises(PrecisionError, match="clip"):
            GrpoLoss(**wrong)
