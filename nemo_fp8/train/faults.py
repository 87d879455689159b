"""Say what ended a run: at which step, why, and from which checkpoint it continues.

A run that ends by a fault ends with the error of the part that noticed it: gloo reports a closed connection, Megatron
a norm that is NaN, a writer a full disk. None of them knows the step, the folder, or what can be resumed from. The
Lightning callback :class:`Faults` does, and adds a note to the error, which a traceback shows below it. The error
itself is not changed.

It also does three things that nothing else does:

    BF16    ends the run at a loss or gradient norm that is not finite, before the next checkpoint is written
    FP16    logs skipped steps, and ends the run after too many bad losses in a row, which no loss scale can mend
    hangs   ``timeout`` bounds how long a rank waits for another: torch's own bound is 30 minutes for gloo, 10 for NCCL
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("train")

from lightning.pytorch.callbacks import Callback
from nemo.lightning.io.mixin import IOMixin
from nemo.lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.train.checkpoints import newest_usable

logger = logging.getLogger("nemo_fp8")

PATIENCE = 10

_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    "NCCL",
)
_NOT_FINITE = ("found NaN in local grad norm", "found Inf in local grad norm")


class Faults(Callback, IOMixin):
    """Explain what ended a run, and end a run that cannot continue.

    ``timeout``: how long a rank waits for another, in seconds; None keeps torch's bound.
    ``patience``: FP16 only: end the run after this many losses in a row that are not finite.
    """

    def __init__(self, timeout: float | None = None, patience: int = PATIENCE) -> None:
        self.timeout, self.patience = timeout, patience
        self._lost = 0

    def io_init(self, **given: Any) -> Any:
        """Record every argument for NeMo: a record of a single one would be read back as a file name."""
        return super().io_init(**{"timeout": None, "patience": PATIENCE} | given)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Set the timeout of every process group of Megatron."""
        if self.timeout is not None:
            from megatron.core import parallel_state

            parallel_state.update_pg_timeout(timedelta(seconds=self.timeout))

    def on_train_batch_end(self, trainer: Any, module: Any, *batch: Any) -> None:
        """Raise after a step whose loss or gradient norm is not finite, before a checkpoint of it is saved."""
        values = {name: float(trainer.callback_metrics.get(name, 0.0)) for name in ("reduced_train_loss", "grad_norm")}
        wrong = [f"{name} is {value}" for name, value in values.items() if not isfinite(value)]
        scales = _loss_scales(trainer)
        if not scales:
            if wrong:
                raise _not_finite(trainer, " and ".join(wrong))
            return
        if any(skipped for _, skipped in scales):
            logger.warning(
                "Step %d was skipped: gradients overflowed. The loss scale is now %g.", _step(trainer), scales[0][0]
            )
        self._lost = self._lost + 1 if not isfinite(values["reduced_train_loss"]) else 0
        if self._lost >= self.patience:
            raise _not_finite(
                trainer, f"the loss was not finite in {self._lost} steps in a row, which no loss scale mends"
            )

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Add the step, the cause and the checkpoint to resume from, as a note, to the error that ends the run."""
        for explains, problem in _TABLE:
            if any(explains(trainer, error) for error in _chain(exception)):
                _add_note(exception, problem(trainer))
                return


def _add_note(exception: BaseException, problem: Problem) -> None:
    if sys.version_info >= (3, 11):
        exception.add_note(f"\n{problem}")
    else:
        logger.error("%s", problem)


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    while exception is not None:
        yield exception
        exception = exception.__cause__ or exception.__context__


def _says(*words: str) -> Callable[[Any, BaseException], bool]:
    return lambda trainer, error: any(word in str(error) for word in words)


def _in_save(trainer: Any, error: BaseException) -> bool:
    """Return whether the run was writing a checkpoint. NeMo's marker tells; the errors of a full disk have no common
    type."""
    folder = _folder(trainer)
    return folder is not None and any(folder.glob(f"*{ModelCheckpoint.UNFINISHED_CHECKPOINT_SUFFIX}"))


def _step(trainer: Any) -> int:
    """Return the step that runs or has just run, counted from 0 as in the names of NeMo's checkpoints."""
    return int(trainer.fit_loop.epoch_loop.batch_idx)


def _loss_scales(trainer: Any) -> list[tuple[float, bool]]:
    """Return, for every optimizer with a dynamic loss scale, the scale and whether it skipped its last step."""
    outer = getattr(trainer.optimizers[0], "mcore_optimizer", None)
    inner = [outer, *getattr(outer, "chained_optimizers", ())]
    return [
        (float(o.grad_scaler.scale), bool(o.found_inf)) for o in inner if getattr(o, "grad_scaler", None) is not None
    ]


def _folder(trainer: Any) -> Path | None:
    dirpath = getattr(trainer.checkpoint_callback, "dirpath", None)
    return Path(dirpath) if dirpath else None


def _go_on(trainer: Any) -> str:
    """Say from which checkpoint a run that ends now continues."""
    folder = _folder(trainer)
    usable = newest_usable(folder) if folder and folder.is_dir() else None
    if usable:
        return f"The run goes on from {usable.folder} (after {usable.step():.0f} steps), which is complete."
    return "There is no complete checkpoint to go on from."


def _not_finite(trainer: Any, what: str) -> PrecisionError:
    problem = _problem_not_finite(trainer)
    return PrecisionError(f"Step {_step(trainer)}: {what}.", problem.why, problem.remedy)


def _problem_not_finite(trainer: Any) -> Problem:
    return Problem(
        f"Step {_step(trainer)}: the gradients are not finite.",
        "NaN or infinity came in with a sample or grew out of the weights. A step with them would ruin every weight, "
        "so the run ends.",
        f"{_go_on(trainer)} If it ends at the same step again, look at the samples of that step; if at another, lower "
        "the learning rate.",
    )


def _problem_lost(trainer: Any) -> Problem:
    return Problem(
        f"Step {_step(trainer)}: another rank ended, or has not answered in time.",
        "This rank only waited for it. The cause is in the log of the rank that ended first, or in the system's if it "
        "was killed.",
        f"{_go_on(trainer)} Start the same command again.",
    )


def _problem_save(trainer: Any) -> Problem:
    folder = _folder(trainer) or Path()
    disk = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    free = f"{_size(disk.free)} of {_size(disk.total)}"
    return Problem(
        f"Step {_step(trainer)}: the checkpoint could not be written to {folder}, where {free} are free.",
        "A save needs room for whole checkpoints beside those that are kept; NeMo deletes an old one only when the "
        "new one is complete.",
        f"Make room there, lower save_top_k, or set another log_dir. {_go_on(trainer)} "
        "NeMo deletes the half-written one when the run starts again.",
    )


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


# (which errors, what to say of them); the first row that matches counts. If another rank ended during a save, the
# cause is that rank and not the save.
_TABLE: tuple[tuple[Callable[[Any, BaseException], bool], Callable[[Any], Problem]], ...] = (
    (_says(*_NOT_FINITE), _problem_not_finite),
    (_says(*_LOST), _problem_lost),
    (_in_save, _problem_save),
)
