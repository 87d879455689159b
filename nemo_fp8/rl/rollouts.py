"""What all ranks of a training do with the rollout engines in a step.

    synchronous     push W_k,  sample from W_k,  train on that                                             -> W_k+1
    one step off    take what W_k-1 sampled,  push W_k,  let W_k sample for step k+1 meanwhile,  train     -> W_k+1

Rank 0 speaks with the engines, and what it learns goes to all ranks. Weights are gathered by all ranks together, so an engine that
dies is a turn for all of them: push again, ask again. The first step after a resume has nothing that was sampled a step ago, and
samples anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nemo_fp8.rl.engines import EngineDied, Engines, Pending
from nemo_fp8.rl.rollout import Answers
from nemo_fp8.rl.settings import GrpoSettings
from nemo_fp8.rollout.refit import Receipt

# Seeds of two steps never meet: no step has so many answers.
_SEEDS_A_STEP = 1 << 20
GREEDY = 0.0


@dataclass
class Taken:
    """What a step got from the engines."""

    answers: list[Answers]
    """To each of the step's prompts."""
    age: int
    """How many steps older than the policy the weights are that sampled them."""
    greedy: list[Answers] | None
    """To the validation prompts, where they were asked."""
    receipts: list[Receipt]
    restarts: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Rollouts:
    """The engines as all ranks see them. ``weights()`` gives the policy's, all ranks together; ``prompts(step)`` are a step's."""

    def __init__(
        self,
        settings: GrpoSettings,
        engines: Engines,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        prompts: Callable[[int], list[list[int]]],
        held_out: list[list[int]],
    ) -> None:
        self.settings, self.engines, self.weights, self.prompts, self.held_out = settings, engines, weights, prompts, held_out
        self.manifest = {name: tensor.to("meta") for name, tensor in weights()}
        self.rank = torch.distributed.get_rank()
        self._pending: Pending | None = None
        self._seconds: dict[str, float] = {}

    def take(self, step: int) -> Taken:
        """This step's answers; the engines then hold this step's weights. All ranks call it together."""
        self._seconds = {}
        restarts = 0
        old = self._on_rank_0(self._collect) if self.settings.one_step_off else None
        while True:
            receipts = self._push(step)
            found = self._on_rank_0(lambda: self._work(step, old)) if receipts is not None else None
            if found is not None:
                answers, greedy = found
                return Taken(answers, 0 if old is None else 1, greedy, receipts, restarts, self._seconds)
            restarts += 1

    # ------------------------------------------------------------------ on rank 0

    def _work(self, step: int, old: list[Answers] | None) -> tuple[list[Answers], list[Answers] | None]:
        greedy, answers, last = None, old, step >= self.settings.steps
        if last or step % self.settings.validate_every == 0:
            with self._clock("validation"):
                greedy = self.engines.answers(self.engines.ask(self.held_out, step, answers=1, temperature=GREEDY, seed=0))
        if last:
            return [], greedy
        if answers is None:
            with self._clock("rollout"):
                answers = self.engines.answers(self._ask(step, step))
        if self.settings.one_step_off and step + 1 < self.settings.steps:
            self._pending = self._ask(step + 1, step)
        return answers, greedy

    def _ask(self, step: int, version: int) -> Pending:
        s = self.settings
        seed = (s.seed * 1_000_003 + step) * _SEEDS_A_STEP % 2**62
        return self.engines.ask(self.prompts(step), version, answers=s.answers, temperature=s.temperature, seed=seed)

    def _collect(self) -> list[Answers] | None:
        if self._pending is None:
            return None
        with self._clock("rollout"):
            found, self._pending = self.engines.answers(self._pending), None
        return found

    # ------------------------------------------------------------------ on all ranks

    def _push(self, step: int) -> list[Receipt] | None:
        """The weights to every engine, and its receipts; None where one of them died."""
        receipts: list[Receipt] = []
        with self._clock("push"):
            self._on_rank_0(self.engines.wait)
            for i in range(self.settings.engines):
                stream = iter(self.weights())
                push = partial(self.engines.push, i, stream, self.manifest, step)
                receipt = self._on_rank_0(push, stream)
                if receipt is None:
                    return None
                receipts.append(receipt)
        return receipts

    def _on_rank_0(self, work: Callable[[], Any], stream: Iterable[Any] = ()) -> Any:
        """What rank 0 finds; None where an engine died. The others go through ``stream`` meanwhile, which they gather together."""
        found: list[Any] = [None]
        if self.rank == 0:
            try:
                found = [work()]
            except EngineDied:
                self._pending = None
        for _ in stream:
            pass
        torch.distributed.broadcast_object_list(found)
        return found[0]

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started


def flat(answers: Sequence[Answers]) -> list[tuple[list[int], list[float]]]:
    """The answers to all prompts, one after the other."""
    return [answer for of_one in answers for answer in of_one]
