"""One training run of a recipe in processes of its own, and what came of it.

    outcome = run_trial(Trial("tiny_llama", preset("bf16_with_fp8_mixed"), steps=100))

A run gets torchrun and fresh interpreters: Megatron keeps its state in globals, and two runs in one process would not
be two runs. The last rank, which holds the last pipeline stage and with it the loss, writes one line of JSON for each
step into a file, from which the caller learns how far it is. A trial saves a checkpoint only where ``keep`` says so,
after its last step.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_fp8 import lifetime
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.extras import require
from nemo_fp8.recipes import RECIPES

TRAINABLE = {"tiny_llama": "nemo_fp8.experiments.tiny_llama"} | {name: f"nemo_fp8.recipes.{name}" for name in RECIPES}
"""Recipes that go by a short name."""


@dataclass(frozen=True)
class Trial:
    """What to train, and for how long. ``recipe`` is the name of one of ours, or ``package.module.function`` of
    another."""

    recipe: str
    precision: Precision
    steps: int = 300
    seed: int = 1234
    ranks: int = 2
    every: int = 0
    """Monitor FP8 every so many steps; 0 is never."""
    keep: str | None = None
    """The folder that its last checkpoint goes to; None saves none. Of stories, log-probs go to
    ``KEEP.log_probs.safetensors``."""


@dataclass
class Outcome:
    """What came of a trial; one entry for each step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: int = 0
    """Bytes: the most that the last rank held; on a CPU of the process, beyond what it held before it built the
    model."""
    statistics: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the FP8 monitor."""
    skipped: int = 0
    """Steps that the optimizer skipped for an overflow."""


def run_trial(trial: Trial, on_step: Callable[[int, float], None] | None = None) -> Outcome:
    """Train, calling ``on_step(step, loss)`` as steps are done. Raises with the end of the run's log where it fails."""
    if "." not in trial.recipe and trial.recipe not in TRAINABLE:
        raise PrecisionError([unknown("recipe", trial.recipe, TRAINABLE)])
    require("train")
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "steps.jsonl"), Path(folder, "log.txt")
        task = json.dumps(asdict(trial) | {"precision": trial.precision.to_dict(), "folder": folder, "out": str(out)})
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={trial.ranks}"]
        command = [*launcher, "-m", "nemo_fp8.experiments.trial", task]
        # Torchrun leaves a temporary folder behind where it is ended: ours is removed, whatever lies in it.
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // trial.ranks)),
            **os.environ,
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


def _follow(process: subprocess.Popen[bytes], out: Path, on_step: Callable[[int, float], None]) -> Outcome | None:
    """Read what the run writes until it ends; None where it ended early."""
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
    """The end of what the ranks said, without torchrun's own report on them."""
    said = log.read_text(errors="replace").partition("torch/distributed/elastic/multiprocessing")[0]
    return said[-characters:]


def _recipe(trial: Trial) -> Any:
    """The recipe as the trial runs it."""
    module, _, name = TRAINABLE.get(trial.recipe, trial.recipe).rpartition(".")
    recipe = getattr(importlib.import_module(module), name)(precision=trial.precision)
    recipe.trainer.devices, recipe.trainer.max_steps = trial.ranks, trial.steps
    recipe.trainer.strategy.seed = recipe.data.seed = trial.seed
    recipe.trainer.enable_checkpointing = trial.keep is not None
    recipe.trainer.enable_progress_bar = False
    recipe.log.ckpt = recipe.log.tensorboard = recipe.resume = None
    if trial.keep is not None:
        recipe.trainer.callbacks += _keepers(recipe, trial.keep, trial.steps)
    return recipe


def _keepers(recipe: Any, keep: str, steps: int) -> list[Any]:
    """What saves once, after the last step: NeMo's callback the checkpoint, ours what the trainer thinks of validation
    stories."""
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
    """One rank of a trial."""
    lifetime.end_with_parent()  # which is torchrun
    folder, out = task.pop("folder"), Path(task.pop("out"))
    trial = Trial(**task | {"precision": Precision.from_dict(task["precision"])})
    recipe = _recipe(trial)  # before anything heavy is imported: a recipe that cannot be built says so at once

    import fiddle as fdl

    from nemo_fp8.experiments.recorder import Recorder
    from nemo_fp8.train.monitor import Fp8Monitor

    recipe.log.log_dir = folder
    train = fdl.build(recipe)
    monitor = Fp8Monitor(every_n_steps=trial.every) if trial.every else None
    trainer = train.keywords["trainer"]
    trainer.callbacks += [Recorder(out, monitor)] if monitor is None else [monitor, Recorder(out, monitor)]
    train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
