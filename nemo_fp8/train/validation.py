"""Delayed scaling that does not depend on how often a run is validated: amaxes of a validation are forgotten at its end.

TransformerEngine collects every forward's amaxes in the first row of a history, and makes scales of it after the next forward that has a
backward. So what a validation saw counts as training's. Its forward uses the scales that training has; only what it collected goes.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class ForgetValidation(Callback):
    """For ``trainer.callbacks``."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember the rows that are being collected."""
        self._held = {id(history): history[0].clone() for history in _histories(trainer)}

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Put them back; a linear that first ran in the validation has collected nothing."""
        for history in _histories(trainer):
            before = self._held.get(id(history))
            history[0].copy_(torch.zeros_like(history[0]) if before is None else before)
        self._held = {}


def _histories(trainer: Any) -> list[torch.Tensor]:
    from nemo_fp8.train.repairs import amax_histories

    return list(amax_histories(trainer.strategy.model))
