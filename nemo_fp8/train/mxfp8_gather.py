"""Write MXFP8 weights into the gather buffer before each gather reads it, when gathers overlap with the forward.

Megatron gathers MXFP8 weights in BF16 through the gradient buffer (``reuse_grad_buf_for_mxfp8_param_ag``):

    optimizer step -> main weights into the buffer -> gather -> quantized into the weights -> buffer zeroed

If the gather overlaps with the forward, Megatron leaves it to the training loop to write the buffer in time for the
gather, and NeMo 2.7.3's loop does not do it:

    every step              NeMo zeroes the buffer and gathers zeros: the weights are destroyed
    a checkpoint is saved   NeMo forces a gather of whatever the buffer holds: the saved weights are those of the step
                            before, and the next step, whose gather counts as done, trains on them
    validation              its gather counts as the next step's, whose gradients are then added to the weights

``Mxfp8Gather`` writes and gathers at the three points at which Megatron's own training loop does; ``Mxfp8Start`` does
so once, at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class Mxfp8Gather(Callback):
    """Write the buffer and gather. A callback of the Trainer and, once it exists, of NeMo's ``MegatronParallel``."""

    def on_megatron_step_start(self, step: Any) -> Any:
        """Write the weights into the buffer, after NeMo has zeroed it and before this step's gather reads it."""
        for group in _groups(step.trainer):
            group.param_gather_dispatched = False
        _write(step.trainer)
        return step

    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Gather the weights of the last optimizer step, so that the checkpoint holds these."""
        _cast(trainer)


class Mxfp8Start(Callback):
    """Cast the weights of a run from its master weights, also after both were loaded from a checkpoint.

    A checkpoint holds the values of the codes along rows. The codes along columns, which backward reads, do not follow
    from these, so a resumed run would continue with other codes than those of the run that was saved.
    """

    @torch.no_grad()
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Cast after the checkpoint is loaded, before the first step."""
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
