"""Keep validation and checkpoints from changing the amaxes of delayed scaling, in NeMo's runs.

``amax_histories.py`` says what the first row of a history is. Two things interfere with it:

    validation      adds its amaxes to the row, as if they were of training. The row is restored at its end
    a checkpoint    saves the row of one tensor-parallel rank. The ranks agree on it before the checkpoint is written
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from nemo_fp8.train.amax_histories import agree_among_ranks, amax_histories, hold_rows, restore_rows


class ForgetValidation(Callback):
    """A callback that keeps the amaxes of validation out of the histories."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Copy the rows that are being collected."""
        self._held = hold_rows(_histories(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the rows that were copied before validation."""
        restore_rows(_histories(trainer), self._held)
        self._held = {}


class AgreeBeforeSaving(Callback):
    """A callback that reduces amaxes over TE's group of ranks before a checkpoint is saved."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Take the maximum over the ranks over which TE takes it."""
        agree_among_ranks(_histories(trainer), trainer.strategy.lightning_module.config)


def _histories(trainer: Any) -> list[torch.Tensor]:
    return list(amax_histories(trainer.strategy.model))
