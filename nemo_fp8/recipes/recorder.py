"""A Lightning callback that writes a run's losses and step times into a file as they come, and the rest at its end."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch.callbacks import Callback

from nemo_fp8 import te_cpu
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
        """A step is done: reading its loss waits for the device."""
        loss = float(trainer.callback_metrics["reduced_train_loss"])
        self._write(loss=loss, seconds=time.perf_counter() - self._started)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write the run's last line: memory, the monitor's statistics, and the steps that it skipped."""
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


def _bytes_now() -> int:
    """What this process holds: 0 on a GPU, whose memory holds nothing yet."""
    if te_cpu.has_gpu():
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _most_bytes() -> int:
    """Bytes of the most memory that this process ever held."""
    import resource

    if te_cpu.has_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
