"""How vLLM's kernels keep FP8 codes, and what a worker can tell of the tensors that it wrote there.

A layout is two functions, one each way, so that what was written can be read again: a push is verified from the memory
that the next token is computed with. Only layouts that a test covers are rows of LAYOUTS; a layer whose kernel is not
there is processed by its own method, as at load, which is right on every kernel and needs one layer of memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_fp8.numerics.formats import decode_e8m0
from nemo_fp8.numerics.scales import floor_pow2
from nemo_fp8.numerics.statistics import Statistics
from nemo_fp8.rollout.in_vllm.experts import Quantizing


@dataclass(frozen=True)
class Layout:
    """Where a matrix of codes [rows, columns] lies in memory of the same shape; rows move in groups of ``group``."""

    store: Callable[[torch.Tensor, int, torch.Tensor], None]
    load: Callable[[torch.Tensor, int, int], torch.Tensor]
    group: int = 1


def _store_rows(live: torch.Tensor, row: int, codes: torch.Tensor) -> None:
    live[row : row + len(codes)].view(torch.uint8).copy_(codes.view(torch.uint8))


def _load_rows(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    return live[row : row + rows]


def _pairs(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    """AMX reads 32 rows at a time, two neighbours of a row as one: [rows / 32, columns / 2, 32] of pairs."""
    return live.view(torch.int16).view(len(live) // 32, -1, 32)[row // 32 : (row + rows) // 32]


def _store_amx(live: torch.Tensor, row: int, codes: torch.Tensor) -> None:
    _pairs(live, row, len(codes)).copy_(codes.view(torch.int16).view(len(codes) // 32, 32, -1).transpose(1, 2))


def _load_amx(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    return _pairs(live, row, rows).transpose(1, 2).contiguous().view(live.dtype).view(rows, live.shape[1])


ROWS, AMX = Layout(_store_rows, _load_rows), Layout(_store_amx, _load_amx, 32)
# By the class of the kernel of a linear, or the method of experts; vLLM's fused kernels for those by their backend's name.
LAYOUTS = {"CPUFp8BlockScaledMMKernel": AMX, "CPU": AMX, "DecodeKernel": ROWS, "DecodedMoEMethod": ROWS}


def layout_of(layer: Any) -> Layout | None:
    """The layout of an FP8 layer's codes, if it is known and every scale is that of a block."""
    method = layer.quant_method
    if method.operand.block is None:  # a whole weight's scale waits for all shards of all workers
        return None
    if isinstance(method, Quantizing):
        backend = getattr(method, "fp8_backend", None)
        return LAYOUTS.get(type(method).__name__ if backend is None else str(backend.value))
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):  # MLA takes this weight apart, and vLLM leaves it in rows
        return ROWS
    return LAYOUTS.get(type(method.fp8_linear).__name__)


@dataclass
class Facts:
    """What one worker can tell of one pushed tensor."""

    kind: str = ""
    """``fp8``, or the dtype that it is kept in."""
    signal: float = 0.0
    noise: float = 0.0
    saturated: int = 0
    underflow: int = 0
    nonfinite: int = 0
    """Source values that are infinite or NaN."""
    scales: int = 0
    bad_scales: int = 0
    """Scales that are zero, negative, infinite or NaN; under a contract of powers of two, those that are none."""
    aligned: bool = True
    """Whether the blocks are those of the unsharded tensor."""
    verified: bool | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    """By the part of the tensor that this worker holds."""

    def count(self, statistics: Statistics) -> None:
        whole = statistics.total()
        self.signal, self.noise = self.signal + float(whole.signal), self.noise + float(whole.noise)
        self.saturated, self.underflow = self.saturated + int(whole.saturated), self.underflow + int(whole.underflow)
        self.nonfinite += int(whole.nonfinite)

    def count_scales(self, scales: torch.Tensor, kind: str) -> None:
        scales = scales if scales.dtype == torch.float32 else decode_e8m0(scales)
        good = scales.isfinite() & (scales > 0)
        if kind == "pow2":
            good &= floor_pow2(scales) == scales
        self.scales += scales.numel()
        self.bad_scales += scales.numel() - int(good.sum())

    def count_nonfinite(self, values: torch.Tensor) -> None:
        """Of values that are kept as they are: counted only where the least or the largest tells that there are some."""
        if not bool(torch.stack(torch.aminmax(values)).isfinite().all()):
            self.nonfinite += int((~values.isfinite()).sum())

    def count_nan_codes(self, codes: torch.Tensor) -> None:
        self.nonfinite += int((codes.view(torch.uint8) & 0x7F == 0x7F).sum())

    def check(self, good: bool) -> None:
        self.verified = good and self.verified is not False

    def to_plain(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Ledger:
    """What one worker can tell of one push."""

    facts: dict[int, Facts] = field(default_factory=lambda: defaultdict(Facts))
    """By the number of the tensor."""
    held: int = 0
    most_held: int = 0
    """Bytes that wait beside the model for the rest of their layer or of their blocks."""

    def hold(self, size: int) -> None:
        """So many more, or fewer."""
        self.held += size
        self.most_held = max(self.most_held, self.held)
