"""The rollout engines, seen from rank 0 of the training: fill them, query them, and start over if one dies.

    synchronous     push W_k,  sample from W_k,  train on that                                             -> W_k+1
    one step off    take what W_k-1 sampled,  push W_k,  let W_k sample for step k+1 meanwhile,  train     -> W_k+1

Ray restarts a dead engine. It comes back empty, and refuses to answer until it is filled, so after a death the step
pushes and asks again. The run ends if an engine dies more often than Ray may restart it. The first step after a resume
has no samples of the step before, and samples anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError, RayActorError

from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.rl.rollout import Answers
from nemo_fp8.experiments.rl.settings import GrpoSettings
from nemo_fp8.mismatch.engine import read_back
from nemo_fp8.mismatch.weights import Held
from nemo_fp8.rollout.refit import Receipt, Refit

Weights = Mapping[str, torch.Tensor]
Prompts = list[list[int]]
# The distance between the seeds of two steps: no step has so many answers.
_SEEDS_A_STEP = 1 << 20
GREEDY = 0.0


@dataclass
class Taken:
    """What a step gets from the engines."""

    answers: list[Answers]
    """The answers to each of the step's prompts; none after the last step."""
    age: int
    """By how many steps the weights that sampled them are older than the policy."""
    greedy: list[Answers] | None
    """The answers to the held-out prompts, if this step validates."""
    receipts: list[Receipt]
    restarts: int
    seconds: dict[str, float]


@dataclass
class Engines:
    """All engines of a run. ``actors`` are handles of :class:`~nemo_fp8.experiments.rl.rollout.RolloutEngine`."""

    settings: GrpoSettings
    actors: Sequence[Any]
    prompts: Callable[[int], Prompts]
    """Returns the prompts of a step."""
    held_out: Prompts
    _pending: list[Any] | None = None
    _processes: list[tuple[str, int]] = field(default_factory=list)
    _refits: dict[tuple[str, int], Refit] = field(default_factory=dict)
    """By the engine's process: what a Refit knows of an engine dies with it."""
    _restarts: int = 0
    _seconds: dict[str, float] = field(default_factory=dict)

    def take(self, step: int, weights: Weights) -> Taken:
        """Return the answers for a step. Afterwards the engines hold this step's weights."""
        self._seconds, self._restarts = {}, 0
        old = None
        while True:
            try:
                old = old or self._pending_answers()
                receipts = self._push(step, weights)
                greedy = self._validate(step)
                answers = old or self._sample(step)
                self._sample_ahead(step)
                return Taken(answers, int(old is not None), greedy, receipts, self._restarts, self._seconds)
            except RayActorError:
                self._pending = None

    def held(self) -> list[Mapping[str, Held]]:
        """Return the fingerprints of the tensors that each engine computes with now."""
        return [read_back(control) for control in self._controls()]

    # ------------------------------------------------------------------ the parts of a step

    def _push(self, step: int, weights: Weights) -> list[Receipt]:
        with self._clock("push"):
            self._wait()
            self._refits = {
                process: self._refits.get(process) or Refit(control)
                for process, control in zip(self._processes, self._controls(), strict=True)
            }
            receipts = [refit.push(weights, delta=self.settings.delta).require() for refit in self._refits.values()]
            ray.get([actor.pushed.remote(step) for actor in self.actors])
            return receipts

    def _wait(self) -> None:
        """Wait until all engines have started. One that died between two steps is another process now."""
        try:
            processes = ray.get([actor.ready.remote() for actor in self.actors])
        except ActorDiedError as error:
            raise PrecisionError(
                "A rollout engine does not start.",
                str(error),
                "Its own words are in the folder of Ray's session, /tmp/ray/session_latest/logs.",
            ) from error
        self._restarts += sum(before != now for before, now in zip(self._processes, processes, strict=False))
        self._processes = processes

    def _validate(self, step: int) -> list[Answers] | None:
        if step % self.settings.validate_every and step < self.settings.steps:
            return None
        with self._clock("validation"):
            return self._answers(self._ask(self.held_out, step, answers=1, temperature=GREEDY, seed=0))

    def _sample(self, step: int) -> list[Answers]:
        if step >= self.settings.steps:
            return []
        with self._clock("rollout"):
            return self._answers(self._ask_for(step, step))

    def _sample_ahead(self, step: int) -> None:
        if self.settings.one_step_off and step + 1 < self.settings.steps:
            self._pending = self._ask_for(step + 1, step)

    def _pending_answers(self) -> list[Answers] | None:
        if self._pending is None:
            return None
        with self._clock("rollout"):
            found, self._pending = self._answers(self._pending), None
            return found

    def _controls(self) -> list[_Control]:
        here = ray.get_runtime_context().get_node_id()
        return [_Control(actor, node == here) for actor, (node, _) in zip(self.actors, self._processes, strict=True)]

    # ------------------------------------------------------------------ prompts and answers

    def _ask_for(self, step: int, version: int) -> list[Any]:
        s = self.settings
        seed = (s.seed * 1_000_003 + step) * _SEEDS_A_STEP % 2**62
        return self._ask(self.prompts(step), version, answers=s.answers, temperature=s.temperature, seed=seed)

    def _ask(self, prompts: Prompts, version: int, *, answers: int, temperature: float, seed: int) -> list[Any]:
        """Give every engine its share of the prompts, and return all answers."""
        share = -(-len(prompts) // len(self.actors))
        return [
            actor.generate.remote(
                prompts[first : first + share],
                version,
                answers=answers,
                temperature=temperature,
                seed=seed + first * answers,
            )
            for first, actor in zip(range(0, len(prompts), share), self.actors, strict=False)
        ]

    def _answers(self, asked: list[Any]) -> list[Answers]:
        return [answers for part in ray.get(asked) for answers in part]

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started


class _Control:
    """The channel of a push to an engine that is an actor, here or on another machine.

    It is a :class:`nemo_fp8.rollout.refit.control.Carrier`.
    """

    def __init__(self, actor: Any, local: bool) -> None:
        self.actor, self.local = actor, local

    def carry(self, message: dict[str, Any], body: memoryview) -> list[dict[str, Any]]:
        import numpy  # Ray passes numpy arrays on without a copy

        found: list[dict[str, Any]] = ray.get(self.actor.carry.remote(message, numpy.frombuffer(body, numpy.uint8)))
        return found

    def __getattr__(self, what: str) -> Any:
        if what not in ("call", "hold", "free", "refuse", "allow", "forget"):
            raise AttributeError(what)
        return lambda *args: ray.get(self.actor.control.remote(what, *args))
