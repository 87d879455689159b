"""The rollout engines as rank 0 of a training speaks with them: fill them, ask them, and notice when one has died.

Ray starts a dead engine again; it comes back empty, and the next push fills it. So whoever gets :class:`EngineDied` pushes and asks
again. An engine that dies more often than Ray was told to start it again ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rl.rollout import Answers
from nemo_fp8.rollout.refit import Receipt, Refit

Pending = list[Any]
CONTROL = ("call", "hold", "free", "refuse", "allow", "forget")


class EngineDied(Exception):
    """An engine ended while it was asked; it comes back empty."""


class Engines:
    """All engines of a run. ``actors`` are handles of :class:`~nemo_fp8.rl.rollout.RolloutEngine`."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = list(actors)

    def wait(self) -> None:
        """Until all of them have started."""
        try:
            ray.get([actor.ready.remote() for actor in self.actors])
        except ActorDiedError as error:
            raise PrecisionError(
                "A rollout engine does not start.",
                str(error),
                "Its own words are in the folder of Ray's session, /tmp/ray/session_latest/logs.",
            ) from error

    def push(self, i: int, tensors: Iterable[tuple[str, Any]], manifest: Mapping[str, Any], version: int) -> Receipt:
        """These weights to an engine."""
        with _alive():
            receipt = Refit(_Remote(self.actors[i])).push(tensors, manifest=manifest)
            ray.get(self.actors[i].pushed.remote(version))
        return receipt.require()

    def ask(self, prompts: Sequence[list[int]], version: int, *, answers: int, temperature: float, seed: int) -> Pending:
        """Start to generate; each engine answers its share of the prompts."""
        share = -(-len(prompts) // len(self.actors))
        return [
            actor.generate.remote(
                prompts[i * share : (i + 1) * share],
                version,
                answers=answers,
                temperature=temperature,
                seed=seed + i * share * answers,
            )
            for i, actor in enumerate(self.actors)
        ]

    def answers(self, pending: Pending) -> list[Answers]:
        """What :meth:`ask` started, in the order of the prompts."""
        with _alive():
            return [answers for part in ray.get(pending) for answers in part]


class _Remote:
    """How a push speaks to an engine that is an actor: :class:`nemo_fp8.rollout.refit.Control`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, what: str) -> Any:
        if what not in CONTROL:
            raise AttributeError(what)
        return lambda *args: ray.get(self.actor.control.remote(what, *args))


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except RayActorError as error:
        raise EngineDied(str(error)) from error
