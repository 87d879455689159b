"""How vLLM's kernels keep FP8 codes, and what a worker can tell of the tensors that it wrote there.

A layout is two functions, one each way, so that what was written can be read again: a push is verified from the memory
that the next token is computed with. Only layouts that a test covers are rows of LAYOUTS; a layer whose kernel is not
there is processed by its own method, as at load, which is right on every kernel and needs one layer of memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_fp8.numerics.formats import decode_e8m0
from nemo_fp8.numerics.scales import floor_pow2
from nemo_fp8.numerics.statistics import Statistics
from nemo_fp8.rollout.engine.experts import Quantizing


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
# By the class of the kernel of a linear, or the method of experts; vLLM's fused kernels for those by their backend's
# name.
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


Count = float | torch.Tensor


@dataclass
class Facts:
    """What one worker can tell of one pushed tensor.

    What is counted is counted where the tensor lies: to ask a GPU for a number is to wait for it. :meth:`Ledger.settle`
    asks once.
    """

    kind: str = ""
    """``fp8``, or the dtype that it is kept in."""
    signal: Count = 0.0
    noise: Count = 0.0
    largest: Count = 0.0
    """The largest magnitude; of codes that came with scales, no magnitude is larger. Infinite or NaN if such values
    came."""
    saturated: Count = 0
    underflow: Count = 0
    nonfinite: Count = 0
    """Source values that are infinite or NaN."""
    scales: int = 0
    bad_scales: Count = 0
    """Scales that are zero, negative, infinite or NaN; under a contract of powers of two, those that are none."""
    aligned: bool = True
    """Whether the blocks are those of the unsharded tensor."""
    verified: bool | torch.Tensor | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    """By the part of the tensor that this worker holds."""

    def count(self, statistics: Statistics) -> None:
        whole = statistics.total()
        self.signal, self.noise = self.signal + whole.signal, self.noise + whole.noise
        self.saturated, self.underflow = self.saturated + whole.saturated, self.underflow + whole.underflow
        self.nonfinite = self.nonfinite + whole.nonfinite
        self._see(whole.amax)

    def count_scales(self, scales: torch.Tensor, kind: str) -> None:
        scales = _decoded(scales)
        good = scales.isfinite() & (scales > 0)
        if kind == "pow2":
            good &= floor_pow2(scales) == scales
        self.scales += scales.numel()
        self.bad_scales = self.bad_scales + (scales.numel() - good.sum())

    def see(self, values: torch.Tensor) -> None:
        """Of values that are kept as they are, the largest; it tells whether :meth:`count_nonfinite` is needed."""
        low, high = torch.aminmax(values)
        self._see(torch.maximum(-low, high))

    def see_codes(self, largest: torch.Tensor, scales: torch.Tensor) -> None:
        """The same of codes, given the largest of them."""
        self._see(largest.float() * _decoded(scales).amax())

    def _see(self, magnitude: torch.Tensor) -> None:
        magnitude = magnitude.float()
        self.largest = magnitude if isinstance(self.largest, float) else torch.maximum(self.largest, magnitude)

    def count_nonfinite(self, values: torch.Tensor) -> None:
        """Of values that have all been seen. It is a slow pass over them, made only where the largest is no finite
        number."""
        if not math.isfinite(float(self.largest)):
            self.nonfinite = self.nonfinite + (~values.isfinite()).sum()

    def count_nan_codes(self, codes: torch.Tensor) -> None:
        self.nonfinite = self.nonfinite + (codes.view(torch.uint8) & 0x7F == 0x7F).sum()

    def check(self, good: torch.Tensor | bool) -> None:
        self.verified = good if self.verified is None else self.verified & good

    def to_plain(self) -> dict[str, Any]:
        return dict(vars(self))


def _decoded(scales: torch.Tensor) -> torch.Tensor:
    return scales if scales.dtype == torch.float32 else decode_e8m0(scales)


@dataclass
class Ledger:
    """What one worker can tell of one push."""

    facts: dict[int, Facts] = field(default_factory=lambda: defaultdict(Facts))
    """By the number of the tensor."""
    held: int = 0
    most_held: int = 0
    """Bytes that wait beside the model for the rest of their layer or of their blocks."""

    def hold(self, size: int) -> None:
        """Add ``size`` bytes (negative: release) to what is staged, and keep the peak."""
        self.held += size
        self.most_held = max(self.most_held, self.held)

    def settle(self) -> None:
        """Fetch everything that was counted, as plain numbers: once from each device."""
        counted = [
            (facts, name, value)
            for facts in self.facts.values()
            for name, value in vars(facts).items()
            if torch.is_tensor(value)
        ]
        for device in {value.device for *_, value in counted}:
            here = [row for row in counted if row[2].device == device]
            numbers = torch.stack([value.double() for *_, value in here]).tolist()
            for (facts, name, value), number in zip(here, numbers, strict=True):
                plain = (
                    bool(number) if value.dtype == torch.bool else number if value.is_floating_point() else int(number)
                )
                setattr(facts, name, plain)
