"""Lightning callbacks that record a run: its losses and step times during it, the rest at its end.

Log-probs are recorded of stories: a rollout engine scores the same tokens, and the two are compared.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import save_file

from nemo_fp8 import te_cpu
from nemo_fp8.experiments.stories import Stories
from nemo_fp8.train.log_probs import token_log_probs
from nemo_fp8.train.monitor import Fp8Monitor


class Recorder(Callback):
    """Lines of JSON: ``{"loss", "seconds"}`` after each step, ``{"memory", "statistics", "skipped"}`` at the end."""

    def __init__(self, out: Path | str, monitor: Fp8Monitor | None = None) -> None:
        self.out, self.monitor = Path(out), monitor
        self.before = _bytes_now()
        self._file: TextIO | None = None
        self._started = 0.0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Open the file, on the rank that knows the loss."""
        if trainer.global_rank == trainer.world_size - 1:
            self._file = self.out.open("w")

    def on_train_batch_start(self, *_: Any) -> None:
        """Note when the step started."""
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write loss and time of the step; reading the loss waits for the device."""
        loss = float(trainer.callback_metrics["reduced_train_loss"])
        self._write(loss=loss, seconds=time.perf_counter() - self._started)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write the last line: memory, the monitor's statistics, and the number of skipped steps."""
        monitor = self.monitor
        self._write(
            memory=_most_bytes() - self.before,
            statistics=[] if monitor is None else monitor.rows,
            skipped=0 if monitor is None else monitor.skipped,
        )

    def _write(self, **row: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


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


def _bytes_now() -> int:
    """Return the memory of this process in bytes; 0 on a GPU, which holds nothing yet."""
    if te_cpu.has_gpu():
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _most_bytes() -> int:
    """Return the most memory that this process ever held, in bytes."""
    import resource

    if te_cpu.has_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
