"""The Llama of :mod:`nemo_fp8.experiments.tiny` in Megatron-Bridge: the same sizes, stories, batches and optimizer.

    pretrain(tiny_llama("bf16_with_fp8_blockwise_mixed", steps=100), forward_step)

It trains on a GPU over NCCL and on a CPU over gloo, in as many processes as were started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("bridge")

import torch
from megatron.bridge.models.llama.llama_provider import LlamaModelProvider
from megatron.bridge.training import config as c
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from nemo_fp8 import te_cpu
from nemo_fp8.bridge import BridgeMonitor, bridge_config
from nemo_fp8.contract import Precision
from nemo_fp8.experiments.corpus import VOCABULARY, Stories
from nemo_fp8.experiments.lines import Lines

LENGTH = 128


@dataclass
class StoryDataset(c.DatasetProvider):
    """The stories as Bridge asks for data."""

    seq_length: int = LENGTH
    seed: int = 1234

    def build_datasets(self, context: Any) -> tuple[Stories, Stories, Stories]:
        """Return as many stories for training, validation and test as the run consumes."""
        return (
            Stories("train", context.train_samples, self.seq_length, self.seed),
            Stories("validation", context.valid_samples, self.seq_length, self.seed),
            Stories("test", context.test_samples, self.seq_length, self.seed),
        )


def tiny_llama(
    precision: Precision | str = "bf16_with_fp8_blockwise_mixed",
    steps: int = 300,
    seed: int = 1234,
    folder: str | None = None,
) -> c.ConfigContainer:
    """Return the run: six layers, 5 million parameters. A last checkpoint is written to ``folder``, if given."""
    return c.ConfigContainer(
        model=LlamaModelProvider(
            num_layers=6,
            hidden_size=256,
            ffn_hidden_size=768,
            num_attention_heads=4,
            num_query_groups=2,
            seq_length=LENGTH,
            vocab_size=VOCABULARY,
            apply_rope_fusion=te_cpu.has_gpu(),
        ),
        mixed_precision=bridge_config(precision),
        train=c.TrainingConfig(
            train_iters=steps, micro_batch_size=4, global_batch_size=8, eval_iters=0, eval_interval=steps + 1
        ),
        optimizer=c.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-5,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        scheduler=c.SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=20,
            lr_decay_iters=max(steps, 100),  # Bridge refuses a warm-up that is longer
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
            override_opt_param_scheduler=True,
        ),
        ddp=c.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, check_for_nan_in_grad=True
        ),
        dataset=StoryDataset(seed=seed, num_workers=0, dataloader_type="single"),
        tokenizer=c.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),  # and one for the end
        logger=c.LoggerConfig(log_interval=10, log_timers_to_tensorboard=False),
        checkpoint=c.CheckpointConfig(save=folder, save_interval=steps if folder else None, ckpt_format="torch_dist"),
        dist=c.DistributedInitConfig(distributed_backend="nccl" if te_cpu.has_gpu() else "gloo"),
        rng=c.RNGConfig(seed=seed),
    )


def mean_loss(context: Any) -> float:
    """Return the loss of a step from a callback's context; Bridge gives a sum and a count, or their quotient."""
    loss = context.loss_dict["lm loss"]
    return float(loss[0] / loss[1] if loss.numel() == 2 else loss)


class Recorder(Callback):
    """Writes one line for each step of a run, with its loss and duration."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def on_train_start(self, context: Any) -> None:
        """Open the file, on the rank that knows the loss."""
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            self.lines.open()

    def on_train_step_start(self, context: Any) -> None:
        """Note when the step started."""
        self.lines.begin()

    def on_train_step_end(self, context: Any) -> None:
        """Write the step's line."""
        self.lines.end(mean_loss(context))

    def on_train_end(self, context: Any) -> None:
        """Write the last line."""
        self.lines.close()


def run(recipe: Callable[..., c.ConfigContainer], out: Path, every: int, **settings: Any) -> None:
    """Train what ``recipe(**settings)`` says, write its lines to ``out``, and monitor each ``every`` steps."""
    monitor = BridgeMonitor(every_n_steps=every) if every else None
    callbacks = [*([monitor] if monitor else []), Recorder(Lines(out, monitor))]
    pretrain(recipe(**settings), forward_step, callbacks=callbacks)
