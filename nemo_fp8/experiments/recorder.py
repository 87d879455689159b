"""Lightning callbacks that record a run: its lines during it, log-probs at its end.

Log-probs are recorded of stories: a rollout engine scores the same tokens, and the two are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import save_file

from nemo_fp8.experiments.corpus import Stories
from nemo_fp8.experiments.lines import Lines
from nemo_fp8.train.log_probs import token_log_probs


class Recorder(Callback):
    """The lines of a run; reading the loss waits for the device."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Open the file, on the rank that knows the loss."""
        if trainer.global_rank == trainer.world_size - 1:
            self.lines.open()

    def on_train_batch_start(self, *_: Any) -> None:
        """Note when the step started."""
        self.lines.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write the step's line."""
        self.lines.end(float(trainer.callback_metrics["reduced_train_loss"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write the last line."""
        self.lines.close()


class ValidationLogProbs(Callback):
    """Write the first validation stories and their log-probs at the end of training, as a safetensors file.

    ``tokens`` [samples, n] and ``log_probs`` [samples, n - 1]: column t of the latter is the log-prob of token t + 1.
    """

    def __init__(self, out: str, samples: int = 16, micro_batch: int = 4) -> None:
        self.out, self.samples, self.micro_batch = out, samples, micro_batch

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Compute on all ranks, write on one."""
        data = trainer.datamodule
        stories = Stories("validation", self.samples, data.seq_length, data.seed)
        samples = [stories[i] for i in range(self.samples)]
        log_probs = token_log_probs(trainer, samples, stories.collate_fn, self.micro_batch)
        if trainer.global_rank == 0:
            tokens = torch.stack([torch.cat([s["tokens"], s["labels"][-1:]]) for s in samples])
            Path(self.out).parent.mkdir(parents=True, exist_ok=True)
            save_file({"tokens": tokens, "log_probs": log_probs}, self.out)
