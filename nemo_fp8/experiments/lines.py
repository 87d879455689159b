"""The file from which a caller follows a run: a line of JSON for each step, and one at the end.

{"loss", "seconds"}                      after each step
{"memory", "statistics", "skipped"}      at the end
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from nemo_fp8 import te_cpu
from nemo_fp8.train.watch import Watch


class Lines:
    """What one rank writes: the one that knows the loss, which calls :meth:`open`; on the others nothing happens."""

    def __init__(self, out: Path | str, watch: Watch | None = None) -> None:
        self.out, self.watch = Path(out), watch
        self.before = _bytes_now()
        self._file: TextIO | None = None
        self._started = 0.0

    def open(self) -> None:
        """Begin the file."""
        self._file = self.out.open("w")

    def begin(self) -> None:
        """Note when the step started."""
        self._started = time.perf_counter()

    def end(self, loss: float) -> None:
        """Write loss and time of the step."""
        self._write(loss=loss, seconds=time.perf_counter() - self._started)

    def close(self) -> None:
        """Write the last line: memory, the monitor's statistics, and the number of skipped steps."""
        self._write(
            memory=_most_bytes() - self.before,
            statistics=[] if self.watch is None else self.watch.rows,
            skipped=0 if self.watch is None else self.watch.skipped,
        )

    def _write(self, **row: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


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
