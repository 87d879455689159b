"""Run one training of a recipe in processes of its own, and return its result.

    outcome = run_trial(Trial("tiny_llama", preset("bf16_with_fp8_mixed"), steps=100))

A run gets torchrun and fresh interpreters: Megatron keeps its state in globals, which a second run in one process would
find changed. The last rank holds the last pipeline stage and therefore the loss. It writes one line of JSON for each
step to a file, from which the caller follows the run. A checkpoint is saved only if ``keep`` says so, after the last
step.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_fp8 import lifetime
from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import te_environment
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.extras import NotInstalled, require
from nemo_fp8.preflight.machine import pythons_of
from nemo_fp8.recipes import RECIPES

TRAINABLE = {"tiny_llama": "nemo_fp8.experiments.tiny_llama"} | {name: f"nemo_fp8.recipes.{name}" for name in RECIPES}
"""Recipes for NeMo that go by a short name."""
ON_BRIDGE = {"tiny_llama": "nemo_fp8.experiments.on_bridge.tiny_llama"}
"""Recipes for Megatron-Bridge that do. One takes precision, steps, seed and folder, and returns a ConfigContainer."""
STACKS = {"nemo": ("train", ".venv", TRAINABLE), "bridge": ("bridge", ".venv-bridge", ON_BRIDGE)}
"""What trains -> the extra of its environment, the folder in which ``make setup`` builds that, and its recipes."""


@dataclass(frozen=True)
class Trial:
    """What to train, and for how long. ``recipe`` is the name of one of ours, or ``package.module.function``."""

    recipe: str
    precision: Precision
    steps: int = 300
    seed: int = 1234
    ranks: int = 2
    stack: str = "nemo"
    """What trains: one of :data:`STACKS`."""
    every: int = 0
    """Monitor FP8 every this many steps; 0 never."""
    keep: str | None = None
    """The folder for the last checkpoint, or None. Under NeMo log-probs of stories go to
    ``KEEP.log_probs.safetensors``."""


@dataclass
class Outcome:
    """The result of a trial; lists have one entry for each step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: int = 0
    """The most bytes that the last rank held; on a CPU, beyond what its process held before it built the model."""
    statistics: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the FP8 monitor."""
    skipped: int = 0
    """The number of steps that the optimizer skipped because of an overflow."""


def run_trial(trial: Trial, on_step: Callable[[int, float], None] | None = None) -> Outcome:
    """Train, calling ``on_step(step, loss)`` after each step. Raises with the end of the run's log if it fails."""
    python = python_for(trial.recipe, trial.stack)
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "steps.jsonl"), Path(folder, "log.txt")
        task = json.dumps(asdict(trial) | {"precision": trial.precision.to_dict(), "folder": folder, "out": str(out)})
        launcher = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={trial.ranks}"]
        command = [*launcher, "-m", "nemo_fp8.experiments.trial", task]
        # torchrun leaves its temporary folder behind if it is ended; this one is removed with all that is in it.
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // trial.ranks)),
            **os.environ,
            **te_environment(trial.precision),
            "TMPDIR": folder,
        }
        with (
            log.open("w") as file,
            lifetime.running(command, env=environment, stdout=file, stderr=subprocess.STDOUT) as process,
        ):
            outcome = _follow(process, out, on_step or (lambda step, loss: None))
        if outcome is None:
            raise PrecisionError(
                f"{trial.recipe} under {trial.precision.name} did not train.",
                f"Its processes ended with exit code {process.returncode}. Their last words:\n{_last_words(log)}",
                "Correct what the log names; `nemo-fp8 doctor` says what this machine can run.",
            )
        return outcome


def python_for(recipe: str, stack: str) -> str:
    """Return the Python that trains a recipe with a stack: this one, or that of the environment beside it.

    Raises PrecisionError for an unknown name of either, or a recipe of a package that is not there; and NotInstalled,
    with what is missing here, where neither Python has what the stack needs.
    """
    if stack not in STACKS:
        raise PrecisionError([unknown("stack", stack, STACKS)])
    extra, environment, recipes = STACKS[stack]
    if "." not in recipe and recipe not in recipes:
        raise PrecisionError([unknown("recipe", recipe, recipes)])
    try:
        require(extra)
    except NotInstalled:
        beside = next((python for python in pythons_of(environment)[1:] if python.exists()), None)
        if beside is None:
            raise
        return str(beside)
    package = recipe.partition(".")[0]
    # Ranks have the current folder on their path, and a console script has not.
    if "." in recipe and importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
        raise PrecisionError(
            f"There is no package {package} for the recipe {recipe}.",
            f"It is in no folder of the path, nor in {os.getcwd()}.",
            "Check the name, or put its folder on PYTHONPATH.",
        )
    return sys.executable


def _follow(process: subprocess.Popen[bytes], out: Path, on_step: Callable[[int, float], None]) -> Outcome | None:
    """Read what the run writes until it ends; return None if it ended early."""
    outcome, rest, position = Outcome(), "", 0
    while True:
        ended = process.poll() is not None
        if out.exists():
            with out.open() as file:
                file.seek(position)
                *lines, rest = (rest + file.read()).split("\n")
                position = file.tell()
            for line in lines:
                row = json.loads(line)
                if "loss" not in row:
                    process.wait()
                    return replace(outcome, **row)
                outcome.losses.append(row["loss"])
                outcome.seconds.append(row["seconds"])
                on_step(len(outcome.losses), row["loss"])
        if ended:
            return None
        time.sleep(0.1)


def _last_words(log: Path, characters: int = 3000) -> str:
    """Return the end of the ranks' output, without torchrun's own report."""
    said = log.read_text(errors="replace").partition("torch/distributed/elastic/multiprocessing")[0]
    return said[-characters:]


def _named(trial: Trial) -> Callable[..., Any]:
    """Return the function of a trial's recipe."""
    module, _, name = STACKS[trial.stack][2].get(trial.recipe, trial.recipe).rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _recipe(trial: Trial) -> Any:
    """Return the recipe with the trial's settings."""
    recipe = _named(trial)(precision=trial.precision)
    recipe.trainer.devices, recipe.trainer.max_steps = trial.ranks, trial.steps
    recipe.trainer.strategy.seed = recipe.data.seed = trial.seed
    recipe.trainer.enable_checkpointing = trial.keep is not None
    recipe.trainer.enable_progress_bar = False
    recipe.log.ckpt = recipe.log.tensorboard = recipe.resume = None
    if trial.keep is not None:
        recipe.trainer.callbacks += _keepers(recipe, trial.keep, trial.steps)
    return recipe


def _keepers(recipe: Any, keep: str, steps: int) -> list[Any]:
    """Return callbacks that save after the last step: the checkpoint, and log-probs of validation stories."""
    import nemo_run as run
    from nemo import lightning as nl

    from nemo_fp8.experiments.recorder import ValidationLogProbs
    from nemo_fp8.experiments.stories import StoryData

    folder = Path(keep).absolute()
    saves = {"every_n_train_steps": steps, "save_top_k": 1, "save_last": False, "monitor": "reduced_train_loss"}
    keepers = [run.Config(nl.ModelCheckpoint, dirpath=str(folder.parent), filename=folder.name, **saves)]
    if recipe.data.__fn_or_cls__ is StoryData:
        keepers.append(run.Config(ValidationLogProbs, out=f"{folder}.log_probs.safetensors"))
    return keepers


# ---------------------------------------------------------------------- in the ranks


def main(task: dict[str, Any]) -> None:
    """Run one rank of a trial.

    What imports make stays: millions of objects, in which Python's collector would look for garbage at the import, at
    each of its later rounds and as the process ends.
    """
    lifetime.end_with_parent()  # which is torchrun
    folder, out = task.pop("folder"), Path(task.pop("out"))
    trial = Trial(**task | {"precision": Precision.from_dict(task["precision"])})
    gc.disable()
    train = (_on_bridge if trial.stack == "bridge" else _on_nemo)(trial, folder, out)
    gc.freeze()
    gc.enable()
    train()
    gc.freeze()


def _on_bridge(trial: Trial, folder: str, out: Path) -> Callable[[], Any]:
    """Return what trains under Megatron-Bridge, its imports done."""
    from nemo_fp8.experiments import on_bridge

    settings = {"precision": trial.precision, "steps": trial.steps, "seed": trial.seed, "folder": trial.keep}
    return partial(on_bridge.run, _named(trial), out, trial.every, **settings)


def _on_nemo(trial: Trial, folder: str, out: Path) -> Callable[[], Any]:
    """Return what trains under NeMo, its imports done."""
    recipe = _recipe(trial)  # before heavy imports, so that a recipe that cannot be built fails at once

    import fiddle as fdl

    from nemo_fp8.experiments.lines import Lines
    from nemo_fp8.experiments.recorder import Recorder
    from nemo_fp8.train.monitor import Fp8Monitor

    recipe.log.log_dir = folder
    train: partial[Any] = fdl.build(recipe)
    monitor = Fp8Monitor(every_n_steps=trial.every) if trial.every else None
    train.keywords["trainer"].callbacks += [*([monitor] if monitor else []), Recorder(Lines(out, monitor))]
    return train


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
