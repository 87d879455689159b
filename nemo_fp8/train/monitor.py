"""Log what FP8 does to every layer of a run, every so many steps: a Lightning callback.

    trainer.callbacks = [run.Config(Fp8Monitor, every_n_steps=50)]

The measurements of ``watch.py``, and the number of steps that the optimizer skipped, go to every logger of the Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_fp8.extras import require
from nemo_fp8.moved import renamed

__needs__ = require("train")

from lightning.pytorch.callbacks import Callback

from nemo_fp8.train.measure import unchained
from nemo_fp8.train.watch import Watch

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(
        __name__, {"METRICS": "nemo_fp8.train.watch.METRICS", "linear_names": "nemo_fp8.train.linears.linear_names"}
    )


class Fp8Monitor(Watch, Callback):
    """Log per-layer FP8 statistics every ``every_n_steps`` steps, and warn if a layer crosses a threshold: see
    :class:`Watch`."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Start measuring, if the step that begins is to be monitored."""
        self.begin(trainer.global_step + 1, trainer.model, _optimizers(trainer))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Stop measuring, and log the result."""
        self.skipped += any(
            bool(o.found_inf.item()) for o in _optimizers(trainer) if getattr(o, "found_inf", None) is not None
        )
        metrics = self.end(trainer.global_step, warns=trainer.global_rank == 0)
        for to in trainer.loggers if metrics else ():
            to.log_metrics(metrics, step=trainer.global_step)

    def on_exception(self, *_: Any) -> None:
        """Remove every hook when the training fails."""
        self.abandon()


def _optimizers(trainer: Any) -> list[Any]:
    """Return Megatron's optimizers, unwrapped from NeMo's and from a chain."""
    return unchained(getattr(o, "mcore_optimizer", o) for o in trainer.strategy.optimizers)
