"""Group-relative policy optimization: advantages from a group of answers to one problem, and the loss of a token.

    A     = (r - mean(r)) / (std(r) + eps)                       over the answers to one problem
    ratio = exp(new - old)                                        of the policy that is trained to the policy that was
    loss  = -w * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)  +  beta * KL
    KL    = exp(ref - new) - (ref - new) - 1                      to the reference policy, never negative, without bias

``old`` are the trainer's own log-probs of the sampled tokens before the step. The tokens were drawn by the rollout
engine, whose policy differs from the trainer's by its precision, and by a step if it runs one step ahead: ``w`` is the
weight that corrects for that (:mod:`nemo_fp8.mismatch.importance`). A group whose answers are all right or all wrong
has advantages of 0.

``token_weights`` turns the mean over the samples of a step into the mean over its tokens, whichever micro-batches and
ranks hold them:

    mean over samples of sum_t(weight_t * loss_t)  =  sum over all tokens of loss_t / number of tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_fp8.errors import PrecisionError


@dataclass(frozen=True, kw_only=True)
class GrpoLoss:
    """The loss of a token, and its coefficients. Raises PrecisionError if one is out of its range."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.01
    """The factor of the KL to the reference policy; 0 leaves it out."""

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0 and self.kl_beta >= 0):
            raise PrecisionError(
                f"clip_low={self.clip_low}, clip_high={self.clip_high}, kl_beta={self.kl_beta}.",
                "A ratio is clipped to [1 - clip_low, 1 + clip_high], and a penalty is no reward.",
                "Choose clip_low in [0, 1], and the others at 0 or above.",
            )

    def __call__(
        self,
        new: torch.Tensor,
        old: torch.Tensor,
        reference: torch.Tensor,
        advantages: torch.Tensor,
        importance: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of every token [samples, tokens]; ``advantages`` [samples]. Only ``new`` has a gradient."""
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        advantages = advantages[:, None]
        policy = -importance * torch.minimum(ratio * advantages, clipped * advantages)
        return policy + self.kl_beta * kl_divergence(new, reference) if self.kl_beta else policy


def kl_divergence(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimate KL(new || reference) from each token, which ``new`` must have drawn."""
    log_ratio = reference - new
    return log_ratio.exp() - log_ratio - 1


def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Compare rewards [problems, answers] with the others of their problem; return 0 if all are equal.

    Raises PrecisionError for fewer than two answers to a problem.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise PrecisionError(
            f"Rewards of shape {tuple(rewards.shape)}.",
            "An answer is judged against the other answers to its problem: [problems, answers], at least two of them.",
            "Sample at least two answers to each problem.",
        )
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, correction=0, keepdim=True) + eps)


def token_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return weights [samples, tokens] that make a mean over samples the mean over the tokens of the mask."""
    return mask * (mask.shape[0] / mask.sum().clamp_min(1))
