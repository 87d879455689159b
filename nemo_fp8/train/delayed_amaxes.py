"""Keep validation and checkpoints from changing the amaxes of delayed scaling.

TransformerEngine collects amaxes in the first row of a history. The next forward that has a backward turns the row
into scales. Two things interfere:

    validation      adds its amaxes to the row, as if they were of training. The row is restored at its end
    a checkpoint    saves the state of one tensor-parallel rank. Between an optimizer step and the next forward the row
                    holds amaxes of FP8 weights that differ by rank. They are reduced before the checkpoint is written

Reducing early changes no result: after the next forward TE takes the same maximum over the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class ForgetValidation(Callback):
    """A callback that keeps the amaxes of validation out of the histories."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Copy the rows that are being collected."""
        self._held = {id(history): history[0].clone() for history in _histories(trainer)}

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the rows; that of a linear which ran for the first time in the validation becomes zero."""
        for history in _histories(trainer):
            before = self._held.get(id(history))
            history[0].copy_(torch.zeros_like(history[0]) if before is None else before)
        self._held = {}


class AgreeBeforeSaving(Callback):
    """A callback that reduces amaxes over TE's group of ranks before a checkpoint is saved."""

    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Take the maximum over the ranks over which TE takes it."""
        from megatron.core import parallel_state

        rows = [history[0] for history in _histories(trainer)]
        if not rows:
            return
        alone = trainer.strategy.lightning_module.config.tp_only_amax_red
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=alone)
        largest = torch.cat(rows)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        for row, agreed in zip(rows, torch.split(largest, [len(row) for row in rows]), strict=True):
            row.copy_(agreed)


def amax_histories(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the amax histories of every FP8 module of TransformerEngine in a model."""
    for module in model.modules():
        meta = getattr(module, "fp8_meta", None) or {}
        for key in ("scaling_fwd", "scaling_bwd"):
            history = getattr(meta.get(key), "amax_history", None)
            if history is not None:
                yield history


def _histories(trainer: Any) -> list[torch.Tensor]:
    return list(amax_histories(trainer.strategy.model))
