"""The gate at every step: are trainer and rollout as far apart as the contract's FP8 makes them, or is an engine
broken?

Some of the step's samples are emulated with the weights that sampled them, and the log-probs that came back are held
against that (:mod:`nemo_fp8.mismatch.gate`). Samples that are one step old are judged by the weights of that step, so
that what the policy has learnt meanwhile is not taken for a fault. Where the gate fires, nothing has been learnt from
these samples yet, and what the engines hold is read back, to name the weights that are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from nemo_fp8.experiments.rl.experience import Experience
from nemo_fp8.experiments.rl.settings import GrpoSettings
from nemo_fp8.mismatch import Gate, LogProbs, Verdict, compare_weights, predict
from nemo_fp8.mismatch.weights import Held


class Watch:
    """Judges a run's steps one after the other, in rank 0."""

    def __init__(self, settings: GrpoSettings) -> None:
        self.settings = settings
        self.config = settings.policy.hugging_face(settings.seq_length + 1)
        self._before: Mapping[str, torch.Tensor] | None = None

    def judge(self, experience: Experience, age: int, weights: Mapping[str, torch.Tensor]) -> Verdict | None:
        """The verdict on a step's samples, ``weights`` being the policy's; None where the gate is off."""
        sampled_by = self._before if age else weights
        self._before = (
            {name: tensor.clone() for name, tensor in weights.items()} if self.settings.one_step_off else None
        )
        if self.settings.gate_samples == 0 or sampled_by is None:
            return None
        some = slice(0, None, max(1, len(experience) // self.settings.gate_samples))
        tokens = torch.cat([experience.tokens[some, :1], experience.labels[some]], 1)
        mask, rollout, trainer = (
            _behind_the_first(x[some]) for x in (experience.mask, experience.rollout, experience.trainer)
        )
        prediction = predict(self.config, sampled_by, tokens, self.settings.precision, mask=mask.bool())
        pair = LogProbs(prediction.trainer if age else trainer, rollout, mask)
        return Gate().judge(prediction, pair, tokens)

    def name_weights(
        self, verdict: Verdict, weights: Mapping[str, torch.Tensor], engines: Sequence[Mapping[str, Held]]
    ) -> Verdict:
        """The verdict with every weight in which one of the engines is not the policy; each engine tells what it
        holds."""
        found = [d for held in engines for d in compare_weights(weights, held, self.settings.precision)]
        return replace(verdict, differences=tuple(dict.fromkeys(found)), told=True)


def _behind_the_first(labels: torch.Tensor) -> torch.Tensor:
    """What is said of labels, as said of tokens: nothing comes before the first one."""
    return torch.cat([torch.zeros(len(labels), 1), labels], 1)
