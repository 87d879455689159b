"""The data that NeMo's trainer reads: demonstrations for the base model, and experience for GRPO.

Both are the stories' data module (:mod:`nemo_fp8.experiments.stories`) with other samples.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from nemo_fp8.experiments.rl.experience import Experience, row
from nemo_fp8.experiments.rl.settings import GrpoSettings
from nemo_fp8.experiments.rl.task import Sorting
from nemo_fp8.experiments.stories import ByteTokenizer, StoryData

_Sample = dict[str, torch.Tensor]


@cache
def tokenizer() -> ByteTokenizer:
    """Return one tokenizer for all samples: NeMo records how an object is made, which would take most of the time."""
    return ByteTokenizer()


def prompt_ids(problem: str) -> list[int]:
    """Return the tokens of a problem, as the policy reads it."""
    return [ByteTokenizer.bos_id, *tokenizer().text_to_ids(problem)]


class _Rows(Dataset[_Sample]):
    """Samples of one length, and batches of them with the one causal mask that Megatron's local attention needs."""

    def __init__(self, samples: int, seq_length: int) -> None:
        self.samples, self.seq_length = samples, seq_length

    def __len__(self) -> int:
        return self.samples

    def collate_fn(self, samples: list[_Sample]) -> _Sample:
        """Stack samples into a batch."""
        causal = torch.ones(self.seq_length, self.seq_length, dtype=torch.bool).triu(1)
        batch: _Sample = default_collate(samples)
        return batch | {"attention_mask": causal[None, None]}


class Demonstrations(_Rows):
    """Problems with their answers; only the answers count in the loss."""

    def __init__(self, task: Sorting, split: str, samples: int, seq_length: int, seed: int) -> None:
        super().__init__(samples, seq_length)
        self.task, self.split, self.seed = task, split, seed

    def __getitem__(self, index: int) -> _Sample:
        problem = self.task.problem(self.split, self.seed, index)
        answer = [*tokenizer().text_to_ids(self.task.answer(problem)), ByteTokenizer.eos_id]
        tokens, labels, mask = row(prompt_ids(problem), answer, self.seq_length)
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": torch.arange(self.seq_length)}


class DemonstrationData(StoryData):
    """The data module with demonstrations of a task in place of the stories."""

    def __init__(self, digits: int, seq_length: int, batch: int, steps: int, seed: int) -> None:
        super().__init__(
            seq_length, micro_batch_size=batch, global_batch_size=batch, num_train_samples=batch * steps, seed=seed
        )
        self.digits = digits

    def setup(self, stage: str = "") -> None:
        """Make both splits, which share no problem."""
        self._stories: dict[str, Any] = {
            split: Demonstrations(Sorting(self.digits), split, self.samples[split], self.seq_length, self.seed)
            for split in ("train", "validation")
        }


class ExperienceRows(_Rows):
    """The experience of the current step: sample i of a step is row i of its experience."""

    experience: Experience | None = None

    def __getitem__(self, index: int) -> _Sample:
        assert self.experience is not None, "the loop fills it before the step"
        return self.experience.sample(index % len(self.experience))


class ExperienceData(StoryData):
    """The data module with experience in place of the stories. It has no state: each step makes its own."""

    def __init__(self, seq_length: int, micro_batch: int, samples: int, steps: int) -> None:
        super().__init__(seq_length, micro_batch, samples, num_train_samples=samples * steps)
        self.rows = ExperienceRows(samples * steps, seq_length)

    @classmethod
    def of(cls, s: GrpoSettings) -> ExperienceData:
        """Return the data module for a run's settings."""
        return cls(s.seq_length, s.micro_batch, s.samples, s.steps)

    def setup(self, stage: str = "") -> None:
        """Use the step's experience as training and as validation set."""
        self._stories: dict[str, Any] = {"train": self.rows, "validation": self.rows}
