"""What a step learns from: sampled answers as rows of one length, and what was computed for them.

A row holds a problem and its answer. ``labels[t]`` is the token after ``tokens[t]``, and every other field at ``t`` is
about that label. ``mask`` is 1 for a sampled label, the end mark included; nothing else counts. All ranks hold all
rows: they are small, and metrics need them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.rl.grpo import token_weights


@dataclass
class Experience:
    """The samples of one step, [samples, tokens] each."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    rollout: torch.Tensor
    """The engine's log-probs."""
    advantages: torch.Tensor
    """[samples]."""
    trainer: torch.Tensor
    """The trainer's log-probs before the step."""
    reference: torch.Tensor
    """The base model's log-probs."""
    importance: torch.Tensor
    """The weights of the importance-sampling correction."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[list[int]],
        answers: Sequence[tuple[list[int], list[float]]],
        advantages: torch.Tensor,
        seq_length: int,
    ) -> Experience:
        """Make rows of prompts and their answers (tokens, the engine's log-probs); other log-probs are still zero."""
        rows = [row(prompt, ids, seq_length) for prompt, (ids, _) in zip(prompts, answers, strict=True)]
        tokens, labels, mask = (torch.stack(column) for column in zip(*rows, strict=True))
        rollout = torch.zeros(tokens.shape)
        for i, (_, logprobs) in enumerate(answers):
            rollout[i, mask[i].bool()] = torch.tensor(logprobs)
        nothing = torch.zeros(tokens.shape)
        return cls(tokens, labels, mask, rollout, advantages.float(), nothing, nothing, mask)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def weights(self) -> torch.Tensor:
        """Return the weight of each token in the mean over samples."""
        return token_weights(self.mask)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Return a row as the trainer's batch needs it."""
        fields = {
            "tokens": self.tokens,
            "labels": self.labels,
            "loss_mask": self.mask,
            "weights": self.weights,
            "advantages": self.advantages,
            "trainer": self.trainer,
            "reference": self.reference,
            "importance": self.importance,
        }
        return {name: value[index] for name, value in fields.items()} | {
            "position_ids": torch.arange(self.tokens.shape[1])
        }


def row(prompt: list[int], answer: list[int], seq_length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels and mask of one sample, padded with zeros to ``seq_length``.

    Raises PrecisionError if the sample is longer.
    """
    whole = prompt + answer
    if len(whole) > seq_length + 1:
        raise PrecisionError(
            f"A sample of {len(whole)} tokens in rows of {seq_length}.",
            "An answer would be cut off.",
            "Generate fewer tokens.",
        )
    padded = torch.tensor(whole + [0] * (seq_length + 1 - len(whole)))
    mask = torch.zeros(seq_length)
    mask[len(prompt) - 1 : len(whole) - 1] = 1.0
    return padded[:-1], padded[1:], mask
