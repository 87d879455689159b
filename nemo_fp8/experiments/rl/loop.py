"""The loop of GRPO: a Lightning callback that makes each step's experience before NeMo trains on it.

    weights -> engines -> answers -> rewards, advantages -> log-probs of policy and reference -> gate, correction
            -> NeMo's step

Rank 0 communicates with the engines and sends what it gets to all ranks; then every rank computes the same. Each step
is one line of the record: reward, KL to the reference, mismatch under NeMo RL's names, the gate's verdict, the receipts
of the push, and the time of each part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from nemo_fp8.experiments.rl.data import prompt_ids, tokenizer
from nemo_fp8.experiments.rl.engines import Engines, Taken
from nemo_fp8.experiments.rl.experience import Experience
from nemo_fp8.experiments.rl.grpo import group_advantages, kl_divergence
from nemo_fp8.experiments.rl.policy import Reference
from nemo_fp8.experiments.rl.record import Record
from nemo_fp8.experiments.rl.rollout import END, Answers
from nemo_fp8.experiments.rl.settings import GrpoSettings
from nemo_fp8.experiments.rl.task import Sorting
from nemo_fp8.experiments.rl.watch import Watch
from nemo_fp8.mismatch import ImportanceSampling, LogProbs, kind_of, metrics
from nemo_fp8.rollout.refit import Receipt
from nemo_fp8.train.log_probs import token_log_probs
from nemo_fp8.train.to_hugging_face import named_tensors


class GrpoLoop(Callback):
    """Turn a NeMo training into GRPO."""

    def __init__(self, settings: GrpoSettings, base: str, actors: Sequence[Any]) -> None:
        self.settings, self.base, self.actors = settings, base, actors
        self.task = Sorting(settings.digits)
        self.importance = ImportanceSampling.of(settings.correction)
        self._row: dict[str, Any] = {}
        self._started = 0.0

    # ------------------------------------------------------------------ Lightning's hooks

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Set up the engines and the reference once the policy is loaded, from the base model or a checkpoint."""
        s = self.settings
        self.held_out = [self.task.problem("validation", 0, i) for i in range(s.validation)]
        self.reference = Reference(trainer, self.base)
        if trainer.global_rank == 0:
            self.engines = Engines(s, self.actors, self._prompts, [prompt_ids(p) for p in self.held_out])
            self.watch = Watch(s)
            self.record = Record(s.record, trainer.global_step)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Do everything of a step before its training."""
        taken, weights = self._take(trainer)
        started = time.perf_counter()
        trainer.datamodule.rows.experience = self._experience(trainer, taken)
        self._row["seconds"]["log_probs"] = time.perf_counter() - started
        if trainer.global_rank == 0:
            self._judge(trainer.datamodule.rows.experience, taken.age, weights)
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Record the step, before its checkpoint is saved."""
        self._row["seconds"]["train"] = time.perf_counter() - self._started
        self._row["loss"] = float(trainer.callback_metrics["reduced_train_loss"])
        if trainer.global_rank == 0:
            self.record.write(self._row)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Validate the final weights."""
        self._take(trainer)
        if trainer.global_rank == 0:
            self.record.write(self._row)

    # ------------------------------------------------------------------ a step

    def _take(self, trainer: Any) -> tuple[Taken, dict[str, torch.Tensor]]:
        """Return the engines' answers for this step, on all ranks, and the weights under Hugging Face's names."""
        started = time.perf_counter()
        weights = dict(named_tensors(trainer.strategy.megatron_parallel))
        gathered = time.perf_counter() - started
        found: list[Any] = [self.engines.take(trainer.global_step, weights) if trainer.global_rank == 0 else None]
        torch.distributed.broadcast_object_list(found)
        taken: Taken = found[0]
        taken.seconds["push"] += gathered
        self._row = {
            "step": trainer.global_step,
            "age": taken.age,
            "engine_restarts": taken.restarts,
            "seconds": taken.seconds,
            "push": [_short(receipt) for receipt in taken.receipts],
        }
        if taken.greedy is not None:
            self._row["validation_accuracy"] = mean(self._rewards(self.held_out, taken.greedy))
        return taken, weights

    def _experience(self, trainer: Any, taken: Taken) -> Experience:
        s = self.settings
        problems = self._problems(trainer.global_step)
        rewards = torch.tensor(self._rewards(problems, taken.answers)).view(s.problems, s.answers)
        prompts = [prompt_ids(p) for p in problems for _ in range(s.answers)]
        answers = [answer for of_one in taken.answers for answer in of_one]
        experience = Experience.of(prompts, answers, group_advantages(rewards).flatten(), s.seq_length)
        samples, collate = [experience.sample(i) for i in range(len(experience))], trainer.datamodule.rows.collate_fn
        experience.trainer = token_log_probs(trainer, samples, collate, s.micro_batch)
        with self.reference.in_place():
            experience.reference = token_log_probs(trainer, samples, collate, s.micro_batch)
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

    def _judge(self, experience: Experience, age: int, weights: dict[str, torch.Tensor]) -> None:
        verdict = self.watch.judge(experience, age, weights)
        if verdict is None:
            return
        if verdict.fired:  # expensive: every worker hashes all of its tensors
            verdict = self.watch.name_weights(verdict, weights, self.engines.held())
        self._row["gate"] = {
            "fired": verdict.fired,
            "weights": {d.where: kind_of(d) for d in verdict.differences},
            "checks": {
                c.name: {"observed": c.observed, "low": c.band.low, "high": c.band.high} for c in verdict.checks
            },
            "expected": dict(verdict.expected),
        }
        if verdict.fired and self.settings.gate_stops:
            self.record.write(self._row)
            verdict.require()

    # ------------------------------------------------------------------ the task

    def _problems(self, step: int) -> list[str]:
        s = self.settings
        return [self.task.problem("train", s.seed, step * s.problems + i) for i in range(s.problems)]

    def _prompts(self, step: int) -> list[list[int]]:
        return [prompt_ids(p) for p in self._problems(step)]

    def _rewards(self, problems: Sequence[str], answers: Sequence[Answers]) -> list[float]:
        """Return the reward of every answer, problem by problem; 0 for an answer without its end mark."""
        return [
            self.task.reward(problem, tokenizer().ids_to_text(tokens)) if tokens[-1] == END else 0.0
            for problem, of_one in zip(problems, answers, strict=True)
            for tokens, _ in of_one
        ]


def _short(receipt: Receipt) -> dict[str, Any]:
    """Return what the record keeps of a push."""
    return {
        "tensors": len(receipt.tensors),
        "fp8": len(receipt.fp8),
        "bytes": receipt.bytes,
        "lowest_snr_db": receipt.snr_db and receipt.snr_db[0],
        "fingerprint": receipt.fingerprint,
        "delta": receipt.delta and receipt.delta.to_dict(),
    }
