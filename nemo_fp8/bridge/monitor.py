"""``BridgeMonitor``: log what FP8 does to every layer of a run, as a callback of Megatron-Bridge.

    pretrain(config, forward_step, callbacks=[BridgeMonitor(every_n_steps=50)])

The measurements of ``nemo_fp8.train.watch``, and the number of skipped steps, go to the TensorBoard and W&B loggers of
the run. Bridge counts a step after its callbacks, so the number of the step that ended is one more than its state says.
"""

from __future__ import annotations

from typing import Any

from nemo_fp8.extras import require

__needs__ = require("bridge")

import torch
from megatron.bridge.training.callbacks import Callback

from nemo_fp8.train.measure import unchained
from nemo_fp8.train.watch import Watch


class BridgeMonitor(Watch, Callback):
    """Log per-layer FP8 statistics every ``every_n_steps`` steps, and warn if a layer crosses a threshold: see
    :class:`Watch`."""

    def on_train_step_start(self, context: Any) -> None:
        """Start measuring, if the step that begins is to be monitored."""
        self.begin(context.state.train_state.step + 1, context.model, unchained([context.optimizer]))

    def on_train_step_end(self, context: Any) -> None:
        """Stop measuring, and log the result."""
        self.skipped += bool(context.skipped_iter)
        step = context.state.train_state.step + 1
        metrics = self.end(step, warns=torch.distributed.get_rank() == 0)
        if metrics and (board := context.state.tensorboard_logger) is not None:
            for name, value in metrics.items():
                board.add_scalar(name, value, step)
        if metrics and (wandb := context.state.wandb_logger) is not None:
            wandb.log(metrics, step)
