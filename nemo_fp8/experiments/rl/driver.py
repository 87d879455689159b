"""The driver of a run: start the actors on Ray, wait for them, and restart those that die.

    an engine dies       Ray restarts it, and rank 0 fills it (:mod:`nemo_fp8.experiments.rl.engines`); training
                         continues
    a rank dies          the other ranks are ended, and all of them restart from the last checkpoint; the engines stay
    the driver dies      Ray ends everything; calling again continues from the last checkpoint

An error that a rank *raises* would come again after a restart, so it is raised here. Each kind of actor has its own
Python with what it needs; Ray and nemo_fp8 are installed in both.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("rl")

import ray
from ray.exceptions import RayActorError, RayTaskError

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.experiments.rl import rollout
from nemo_fp8.experiments.rl.record import read_record
from nemo_fp8.experiments.rl.settings import GrpoSettings
from nemo_fp8.experiments.rl.trainer import TrainerRank
from nemo_fp8.preflight.engine import ALLOW_PICKLE
from nemo_fp8.rollout import environment

OnStep = Callable[[dict[str, Any]], None]
# How often Ray restarts a dead engine in a run, and the driver the ranks without a step in between, before the run
# fails.
RESTARTS = 10
# How long to wait for the errors of the other ranks when one has ended, in seconds.
GRACE = 5.0
_TRAINER = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


@contextmanager
def ray_session(actors: int, address: str | None = None) -> Iterator[None]:
    """Start Ray on this machine for as long as the context lasts, or join the cluster at ``address``.

    A Ray of this machine has ``actors`` processors. Raises PrecisionError if no cluster answers at ``address``.
    """
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address is not None:
        _require_cluster(address)
        ray.init(address=address, log_to_driver=False)
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            _node_ip_address="127.0.0.1",
            num_cpus=actors,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=128 * 2**20,
            # Processes that an actor started end with it; one that saves a checkpoint would outlive a killed rank.
            # Actors get the normal priority; Ray would lower it below everything else on the machine.
            _system_config={"process_group_cleanup_enabled": True, "worker_niceness": 0},
        )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has installed its own handler, which ends with exit code 15
    try:
        yield
    finally:
        ray.shutdown()


def _require_cluster(address: str) -> None:
    """Raise if no Ray head answers at ``address``; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise PrecisionError(
            f"There is no Ray cluster at {address!r}.",
            f"{type(error).__name__}: {error}.",
            "Give HOST:PORT as `ray start --head --port PORT` told it, or leave the address out for a Ray of the "
            "run's own.",
        ) from error


def run_grpo(
    settings: GrpoSettings,
    *,
    rollout_python: str | None = None,
    on_step: OnStep | None = None,
    engine: type[rollout.RolloutEngine] = rollout.RolloutEngine,
) -> list[dict[str, Any]]:
    """Run to the last step, inside of a :func:`ray_session`, and return the record.

    ``on_step`` gets the record's lines while the run writes them. Raises the error that a rank raised, or
    PrecisionError if actors die too often or the cluster lacks resources.
    """
    follow = _Follow(settings, on_step or (lambda row: None))
    if not follow.finished:
        run = _Run(settings, engine, rollout_python or find_rollout_python())
        try:
            run.to_the_end(follow)
        except RayTaskError as error:
            raise _cause(error) from error
        finally:
            run.stop()
    follow()
    return follow.rows


def find_rollout_python() -> str:
    """Return the Python of the rollout environment beside this one, which ``make setup`` builds.

    Raises PrecisionError if there is none.
    """
    python = Path(sys.prefix).parent / ".venv-rollout" / "bin" / "python"
    if not python.exists():
        raise PrecisionError(
            f"There is no {python}.",
            "vLLM and NeMo cannot share an environment, and this is where the rollout's is looked for.",
            "Build it with `make setup`, or give the Python of yours (--rollout-python).",
        )
    return str(python)


class _Run:
    """The actors of a run."""

    def __init__(self, settings: GrpoSettings, engine: type[rollout.RolloutEngine], rollout_python: str) -> None:
        self.settings, self.plain = settings, settings.to_dict()
        of_rank, of_engine = _resources(settings)
        env = _environment(sys.executable, _TRAINER, settings.ranks)
        self._rank: Any = ray.remote(TrainerRank).options(runtime_env=env, **of_rank)
        env = _environment(rollout_python, rollout.ENVIRONMENT | environment(settings.precision), settings.engines)
        actor: Any = ray.remote(max_restarts=RESTARTS)(engine).options(runtime_env=env, **of_engine)
        self.engines = [actor.remote(self.plain) for _ in range(settings.engines)]
        self.ranks: list[Any] = []

    def to_the_end(self, follow: _Follow) -> None:
        """Train the base model, then the policy, and restart what dies."""
        base = known_base(self.settings)
        if base is None:
            base = self._through_deaths(1, lambda meeting: [self.ranks[0].base.remote(meeting)], follow)[0]
            _note_of_base(self.settings).write_text(base)
        self._through_deaths(
            self.settings.ranks,
            lambda meeting: [rank.train.remote(meeting, base, self.engines) for rank in self.ranks],
            follow,
        )

    def stop(self) -> None:
        """End all actors."""
        self._stop_ranks()
        for actor in self.engines:
            ray.kill(actor)

    def _through_deaths(self, ranks: int, work: Callable[[tuple[str, int]], list[Any]], follow: _Follow) -> list[Any]:
        deaths = Deaths()
        while True:
            self.ranks = [self._rank.remote(self.plain, rank, ranks) for rank in range(ranks)]
            try:
                return _all_or_error(work(ray.get(self.ranks[0].meeting_point.remote())), follow)
            except RayActorError as error:
                follow()
                deaths.count(len(follow.rows), error)
            finally:
                self._stop_ranks()

    def _stop_ranks(self) -> None:
        for actor in self.ranks:
            ray.kill(actor)
        self.ranks = []


def known_base(s: GrpoSettings) -> str | None:
    """Return the base model's checkpoint if a run has noted it in a file; a search by NeMo takes half a minute."""
    note = _note_of_base(s)
    found = note.read_text() if note.exists() else ""
    return found if found and Path(found).exists() else None


def _note_of_base(s: GrpoSettings) -> Path:
    return Path(s.base, f"trained-{s.base_steps}-steps")


def _environment(python: str, variables: dict[str, str], processes: int) -> dict[str, Any]:
    """Return Ray's runtime environment for one kind of actor.

    Actors of different kinds run in turns, so each kind may use the whole machine. But a waiting thread must sleep:
    OpenMP waits by spinning, and on a machine with other work a step then takes four to ten times as long.
    """
    threads = max(1, (os.cpu_count() or 1) // processes)
    # A trainer resumes from its own checkpoints only, so TransformerEngine may unpickle what is in them.
    ours = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", ALLOW_PICKLE: "1"}
    return {"py_executable": python, "env_vars": ours | variables}


# Resources with a meaning of their own in Ray; any other name is a label of a machine.
_NAMED = {"GPU": "num_gpus", "CPU": "num_cpus"}


def _resources(s: GrpoSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the resources that Ray must find for each rank and for each engine, as arguments for its actors.

    By default the GPUs, if any, are shared out: one for each actor, or one for several. Raises PrecisionError if the
    cluster does not have them.
    """
    there, actors = ray.cluster_resources(), s.ranks + s.engines  # type: ignore[no-untyped-call]
    gpus = int(there.get("GPU", 0))
    dealt = {"GPU": 1 / -(-actors // gpus)} if gpus else {}
    rank, engine = (dealt if asked is None else asked for asked in (s.rank_resources, s.engine_resources))
    needed = {name: rank.get(name, 0) * s.ranks + engine.get(name, 0) * s.engines for name in {**rank, **engine}}
    missing = {name: count for name, count in needed.items() if count > there.get(name, 0)}
    if missing:
        raise PrecisionError(
            Problem(
                f"The run needs {count:g} of {name!r}, and Ray has {there.get(name, 0):g}.",
                "Ray would wait without end, and without a word, for a machine that has it.",
                "Correct rank_resources and engine_resources, or start nodes that have it (ray start --resources).",
            )
            for name, count in missing.items()
        )
    return _options(rank), _options(engine)


def _options(asked: dict[str, float]) -> dict[str, Any]:
    named = {word: asked[name] for name, word in _NAMED.items() if name in asked}
    return {**named, "resources": {name: count for name, count in asked.items() if name not in _NAMED}}


def _all_or_error(answers: Sequence[Any], follow: Callable[[], None]) -> list[Any]:
    """Return the answers of all ranks. If some fail, raise: a death counts as the cause of the others' errors."""
    waiting = list(answers)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=0.5)
        follow()
        if any(_error(answer) for answer in done):
            done += ray.wait(waiting, num_returns=len(waiting), timeout=GRACE)[0] if waiting else []
            errors = [error for answer in done if (error := _error(answer))]
            raise next((error for error in errors if isinstance(error, RayActorError)), errors[0])
    return ray.get(list(answers))


def _error(answer: Any) -> Exception | None:
    try:
        ray.get(answer)
    except (RayActorError, RayTaskError) as error:
        return error
    return None


def _cause(error: RayTaskError) -> Exception:
    """Return the original error of the actor that raised it first."""
    found: Exception = error
    while isinstance(found, RayTaskError):
        found = found.cause
    return found if isinstance(found, PrecisionError) else error


class Deaths:
    """Count deaths of the ranks since the last new step: a long run may see many, a run that is stuck only a few."""

    def __init__(self) -> None:
        self.deaths, self.steps = 0, 0

    def count(self, steps: int, error: BaseException) -> None:
        """Count a death after ``steps`` recorded steps; raise PrecisionError after too many without a new step."""
        self.deaths = 1 if steps > self.steps else self.deaths + 1
        self.steps = max(steps, self.steps)
        if self.deaths > RESTARTS:
            raise PrecisionError(
                f"Ranks of the training died {self.deaths} times without a step between.",
                str(error),
                "Look at their logs in /tmp/ray/session_latest/logs.",
            ) from error


class _Follow:
    """Pass on the lines of a record as they are written."""

    def __init__(self, settings: GrpoSettings, on_step: OnStep) -> None:
        self.path, self.last, self.on_step = settings.record, settings.steps, on_step
        self.rows: list[dict[str, Any]] = []
        self.rows = read_record(self.path)
        self._seen = {row["step"] for row in self.rows}

    @property
    def finished(self) -> bool:
        """Whether the record holds the run's last step."""
        return self.last in self._seen

    def __call__(self) -> None:
        self.rows = read_record(self.path)
        for row in self.rows:
            if row["step"] not in self._seen:
                self._seen.add(row["step"])
                self.on_step(row)
