"""Amaxes of delayed scaling that depend on the training alone: not on how often it is validated, nor on where it was
saved.

TransformerEngine collects amaxes in the first row of a history, and makes scales of it after the next forward that has
a backward:

    validation      what it saw would count as training's: the row is put back at its end
    a checkpoint    between an optimizer step and the next forward the row holds amaxes of FP8 weights that no other
                    rank has seen yet, and a checkpoint keeps the state of one tensor-parallel rank: the ranks agree
                    before it is written

Agreeing early changes nothing: TE takes the same maximum over the same ranks after the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class ForgetValidation(Callback):
    """A callback that runs validation without its amaxes entering the histories."""

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


class AgreeBeforeSaving(Callback):
    """A callback that reduces amaxes over TE's group of ranks before a checkpoint is saved."""

    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Take the maximum over the ranks that TE takes it over."""
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
    """The amax histories of every FP8 module of TransformerEngine's."""
    for module in model.modules():
        meta = getattr(module, "fp8_meta", None) or {}
        for key in ("scaling_fwd", "scaling_bwd"):
            history = getattr(meta.get(key), "amax_history", None)
            if history is not None:
                yield history


def _histories(trainer: Any) -> list[torch.Tensor]:
    return list(amax_histories(trainer.strategy.model))
