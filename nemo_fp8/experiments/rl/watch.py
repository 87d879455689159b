"""Run the mismatch gate at every step: it tells the contract's FP8 rounding from a broken engine.

Some of the step's samples are emulated with the weights that sampled them, and their log-probs are compared with the
engine's (:mod:`nemo_fp8.mismatch.gate`). Samples that are one step old are compared under the weights of that step, so
that what the policy has learnt since is not taken for a fault. If the gate fires, nothing has been learnt from these
samples yet, and what the engines hold is read back, to name the weights that are wrong.
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
    """Run the gate on the steps of a run, in rank 0."""

    def __init__(self, settings: GrpoSettings) -> None:
        self.settings = settings
        self.config = settings.policy.hugging_face(settings.seq_length + 1)
        self._before: Mapping[str, torch.Tensor] | None = None

    def judge(self, experience: Experience, age: int, weights: Mapping[str, torch.Tensor]) -> Verdict | None:
        """Return the verdict on a step's samples under the policy's ``weights``; None if the gate is off."""
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
        """Add to the verdict every weight that differs between the policy and an engine, by what the engines hold."""
        found = [d for held in engines for d in compare_weights(weights, held, self.settings.precision)]
        return replace(verdict, differences=tuple(dict.fromkeys(found)), told=True)


def _behind_the_first(labels: torch.Tensor) -> torch.Tensor:
    """Shift a field of labels to the tokens: nothing comes before the first one."""
    return torch.cat([torch.zeros(len(labels), 1), labels], 1)
