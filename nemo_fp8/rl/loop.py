"""The loop of GRPO: a Lightning callback that makes each step's experience before NeMo trains on it.

    take answers  ->  rewards, advantages  ->  log-probs of policy and reference  ->  mismatch, correction  ->  NeMo's step

What came of the step is one line of the record: reward, KL to the reference, mismatch under NeMo RL's names, the receipts of the
push, and how long each part took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from nemo_fp8.rl.data import prompt_ids
from nemo_fp8.rl.engines import Engines
from nemo_fp8.rl.experience import Experience
from nemo_fp8.rl.grpo import group_advantages, kl_divergence
from nemo_fp8.rl.policy import Reference, log_probs
from nemo_fp8.rl.record import Record
from nemo_fp8.rl.rollout import Answers
from nemo_fp8.rl.rollouts import Rollouts, Taken, flat
from nemo_fp8.rl.settings import GrpoSettings
from nemo_fp8.rl.task import Sorting
from nemo_fp8.rollout.mismatch import ImportanceSampling, LogProbs, metrics
from nemo_fp8.rollout.refit import Receipt
from nemo_fp8.train.data import ByteTokenizer
from nemo_fp8.train.to_hugging_face import named_tensors


class GrpoLoop(Callback):
    """Turns a NeMo training into GRPO."""

    def __init__(self, settings: GrpoSettings, base: str, engines: Engines) -> None:
        self.settings, self.base, self.engines = settings, base, engines
        self.task = Sorting(settings.digits)
        self.tokenizer = ByteTokenizer()
        self.importance = ImportanceSampling.of(settings.correction)
        self._row: dict[str, Any] = {}
        self._started = 0.0

    # ------------------------------------------------------------------ Lightning's hooks

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """The policy is there, from the base model or from a checkpoint."""
        s = self.settings
        self.held_out = [self.task.problem("validation", 0, i) for i in range(s.validation)]
        held_out = [prompt_ids(p) for p in self.held_out]
        self.rollouts = Rollouts(s, self.engines, lambda: named_tensors(trainer.strategy.megatron_parallel), self._prompts, held_out)
        self.reference = Reference(trainer, self.base)
        self.record = Record(s.record, trainer.global_step) if trainer.global_rank == 0 else None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """All of a step but its training."""
        taken = self._take(trainer)
        started = time.perf_counter()
        trainer.datamodule.rows.experience = self._experience(trainer, taken)
        self._started = time.perf_counter()
        self._row["seconds"]["log_probs"] = self._started - started

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """The step is done, and not yet saved."""
        self._row["seconds"]["train"] = time.perf_counter() - self._started
        self._row["loss"] = float(trainer.callback_metrics["reduced_train_loss"])
        self._write()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """What the last weights are worth."""
        self._take(trainer)
        self._write()

    # ------------------------------------------------------------------ a step

    def _take(self, trainer: Any) -> Taken:
        taken = self.rollouts.take(trainer.global_step)
        self._row = {
            "step": trainer.global_step,
            "age": taken.age,
            "engine_restarts": taken.restarts,
            "seconds": taken.seconds,
            "push": [_short(receipt) for receipt in taken.receipts],
        }
        if taken.greedy is not None:
            self._row["validation_accuracy"] = mean(self._rewards(self.held_out, taken.greedy))
        return taken

    def _experience(self, trainer: Any, taken: Taken) -> Experience:
        s = self.settings
        problems = self._problems(trainer.global_step)
        rewards = torch.tensor(self._rewards(problems, taken.answers)).view(s.problems, s.answers)
        prompts = [prompt_ids(p) for p in problems for _ in range(s.answers)]
        experience = Experience.of(prompts, flat(taken.answers), group_advantages(rewards).flatten(), s.seq_length)
        experience.trainer = log_probs(trainer, experience, s.micro_batch)
        with self.reference.in_place():
            experience.reference = log_probs(trainer, experience, s.micro_batch)
        pair = LogProbs(experience.trainer, experience.rollout, experience.mask)
        experience.importance = self.importance.weights(pair).values
        tokens = experience.mask.sum()
        kl = (kl_divergence(experience.trainer, experience.reference) * experience.mask).sum() / tokens
        self._row |= {
            "reward": float(rewards.mean()),
            "solved": float(rewards.any(1).float().mean()),
            "kl": float(kl),
            "tokens": int(tokens),
            "mean_log_prob": float(experience.trainer.sum() / tokens),
            "mismatch": metrics(pair, self.importance),
        }
        return experience

    def _problems(self, step: int) -> list[str]:
        s = self.settings
        return [self.task.problem("train", s.seed, step * s.problems + i) for i in range(s.problems)]

    def _prompts(self, step: int) -> list[list[int]]:
        return [prompt_ids(p) for p in self._problems(step)]

    def _rewards(self, problems: Sequence[str], answers: Sequence[Answers]) -> list[float]:
        """The reward of every answer, one problem after the other. An answer without its end mark is none."""
        end = ByteTokenizer.eos_id
        return [
            self.task.reward(problem, self.tokenizer.ids_to_text(tokens)) if tokens[-1] == end else 0.0
            for problem, of_one in zip(problems, answers, strict=True)
            for tokens, _ in of_one
        ]

    def _write(self) -> None:
        if self.record is not None:
            self.record.write(self._row)


def _short(receipt: Receipt) -> dict[str, Any]:
    """What a record keeps of a push."""
    return {
        "tensors": len(receipt.tensors),
        "fp8": len(receipt.fp8),
        "bytes": receipt.bytes,
        "lowest_snr_db": receipt.snr_db and receipt.snr_db[0],
        "fingerprint": receipt.fingerprint,
    }
