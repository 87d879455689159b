"""MXFP8 weights under an overlapped all-gather: written where the gather reads, each time before it reads.

Megatron gathers MXFP8 weights in BF16 through the gradient buffer, which it reuses
(``reuse_grad_buf_for_mxfp8_param_ag``):

    optimizer step -> main weights into the buffer -> gather -> quantized into the weights -> buffer zeroed for
    gradients

When the gather overlaps with the forward, the second arrow is left to the training loop, and NeMo 2.7.3's has none of
it:

    every step            NeMo zeroes the buffer and gathers zeros: the weights are destroyed
    a checkpoint is saved NeMo forces a gather of whatever lies there, so the weights that are saved are those of the
    step
                          before, and the next step, whose gather counts as done, trains on them
    validation            its gather counts as the next step's, whose gradients are then added to weights in the buffer

``Mxfp8Gather`` writes and gathers at the three points where Megatron's own training loop does; ``Mxfp8Start`` once at
the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class Mxfp8Gather(Callback):
    """For ``trainer.callbacks``, and for the callbacks of NeMo's ``MegatronParallel`` where that exists already."""

    def on_megatron_step_start(self, step: Any) -> Any:
        """After NeMo has zeroed the buffer: the coming gather is one of its own, and reads the weights."""
        for group in _groups(step.trainer):
            group.param_gather_dispatched = False
        _write(step.trainer)
        return step

    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """The weights of the last optimizer step go into the checkpoint."""
        _cast(trainer)


class Mxfp8Start(Callback):
    """A run begins with weights that are cast from its master weights, also where both come from a checkpoint.

    A checkpoint holds the values of the codes along rows. The codes along columns, which backward reads, do not follow
    from these: a resumed run would go on with others than the run that was saved.
    """

    @torch.no_grad()
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """After the checkpoint is loaded, before the first step."""
        _cast(trainer)


def _groups(trainer: Any) -> Iterator[Any]:
    for chunk in trainer.strategy.megatron_parallel:
        yield from chunk.module.bucket_groups + chunk.module.expert_parallel_bucket_groups


def _cast(trainer: Any) -> None:
    """Gather the master weights and quantize them into the weights, as an optimizer step ends."""
    _write(trainer)
    for group in _groups(trainer):
        group.start_param_sync(force_sync=True)
        for bucket in group.buckets:
            for param in bucket.params:
                start, end = bucket.param_to_index[param]
                param.data.copy_(bucket.param_data.view(-1)[start:end].view(param.shape))
            bucket.param_data.zero_()


def _write(trainer: Any) -> None:
    optimizer = trainer.strategy.optimizers[0].mcore_optimizer
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        each._copy_main_params_to_param_buffer()
