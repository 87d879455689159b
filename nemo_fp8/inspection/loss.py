"""Count what a recipe loses of one tensor, or of several together, in plain numbers.

    SNR = 10 log10( sum x**2 / sum (x - quantized x)**2 )        for several tensors the sums are added first

A tensor's SNR does not show what happens to its small values. An outlier so large that all others fall below the
smallest code holds nearly all of the signal, and is stored well: E4M3 with the tensor's own scale stays near 30 dB for
any tensor. So there is a second number, the SNR that 99% of the *blocks* reach. The blocks are the same under every
recipe: 128x128 of a weight, 1x128 of an activation.

Unlike ``numerics.statistics`` this module keeps no tensors, so a checkpoint of a hundred thousand weights becomes a
table of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.numerics.statistics import Statistics

BLOCKS = {"weight": (BLOCK, BLOCK), "input": (1, BLOCK), "grad": (1, BLOCK)}
"""Operand -> the blocks whose SNR is measured, under every recipe."""
WORST = 0.01
"""The share of the blocks that may be below the SNR of the blocks."""
_BAND = 256
"""The number of rows that are compared at once: few enough to stay in the cache."""


@dataclass(frozen=True)
class Loss:
    """Sums and extremes over the elements of one or more tensors."""

    elements: int
    underflow: int
    saturated: int
    nonfinite: int
    signal: float
    noise: float
    amax: float
    scale_min: float
    scale_max: float
    range_used_percent: float
    """The share of the format's dynamic range in use; the widest of several tensors."""
    block_snr_db: float
    """The SNR that 99% of the blocks reach; the lowest of several tensors."""

    @classmethod
    def of(cls, source: torch.Tensor, quantized: Quantized, block: tuple[int, int]) -> Loss:
        """Return the loss of a matrix that was quantized with statistics; ``block`` is that of the blocks' SNR."""
        assert quantized.statistics is not None
        with _one_thread():
            return cls._of(source, quantized, quantized.statistics, block)

    @classmethod
    def _of(cls, source: torch.Tensor, quantized: Quantized, statistics: Statistics, block: tuple[int, int]) -> Loss:
        whole = statistics.total()
        low, high = whole.scale_range
        loss = cls(
            elements=int(whole.elements),
            underflow=int(whole.underflow),
            saturated=int(whole.saturated),
            nonfinite=int(whole.nonfinite),
            signal=float(whole.signal),
            noise=float(whole.noise),
            amax=float(whole.amax),
            scale_min=low,
            scale_max=high,
            range_used_percent=float(whole.range_used_percent),
            block_snr_db=_block_snr(*_by_block(source, quantized, statistics, block)),
        )
        return replace(loss, block_snr_db=loss.snr_db) if loss.is_broken else loss

    @classmethod
    def together(cls, losses: Iterable[Loss]) -> Loss:
        """Return the loss of several tensors as one."""
        parts = list(losses)
        return cls(
            elements=sum(p.elements for p in parts),
            underflow=sum(p.underflow for p in parts),
            saturated=sum(p.saturated for p in parts),
            nonfinite=sum(p.nonfinite for p in parts),
            signal=math.fsum(p.signal for p in parts),
            noise=math.fsum(p.noise for p in parts),
            amax=max(p.amax for p in parts),
            scale_min=min(p.scale_min for p in parts),
            scale_max=max(p.scale_max for p in parts),
            range_used_percent=max(p.range_used_percent for p in parts),
            block_snr_db=min((p.block_snr_db for p in parts if not p.is_broken), default=-math.inf),
        )

    @property
    def snr_db(self) -> float:
        """The signal-to-noise ratio in dB; infinite if nothing was lost, and below all numbers if no value is
        finite."""
        if self.noise == 0:
            return -math.inf if self.is_broken else math.inf
        ratio = self.signal / self.noise  # 0, or no number, where values came back infinite
        return 10 * math.log10(ratio) if ratio > 0 else -math.inf

    @property
    def is_broken(self) -> bool:
        """Whether no value is finite: there is nothing to measure, and nothing that a recipe could mend."""
        return 0 < self.elements == self.nonfinite

    @property
    def floor_db(self) -> float:
        """The SNR that is compared with a threshold: the tensor's or that of its blocks, whichever is lower."""
        return min(self.snr_db, self.block_snr_db)

    @property
    def underflow_percent(self) -> float:
        """The share of elements that became zero, in per cent."""
        return self.underflow * 100 / max(self.elements, 1)

    @property
    def saturation_percent(self) -> float:
        """The share of elements that were clamped to the format's largest value, in per cent."""
        return self.saturated * 100 / max(self.elements, 1)

    @property
    def mse(self) -> float:
        """The mean squared error."""
        return self.noise / max(self.elements - self.nonfinite, 1)

    def to_dict(self) -> dict[str, float | None]:
        """Return plain values for JSON, which has no infinity: the SNR is None if nothing was lost, and :data:`LOST` if
        values came back infinite, or none is finite."""
        return {
            "snr_db": _finite(self.snr_db),
            "block_snr_db": _finite(self.block_snr_db),
            "underflow_percent": self.underflow_percent,
            "saturation_percent": self.saturation_percent,
            "mse": self.mse,
            "amax": _finite(self.amax),
            "scale_inv_min": self.scale_min,
            "scale_inv_max": self.scale_max,
            "range_used_percent": self.range_used_percent,
            "elements": self.elements,
            "nonfinite": self.nonfinite,
        }


LOST = -1000.0
"""The SNR in dB, in JSON, of a tensor that came back infinite, or has no finite value: below what FP32 can lose."""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else LOST if value == -math.inf else None


# ---------------------------------------------------------------------- blocks


def _block_snr(signal: torch.Tensor, noise: torch.Tensor) -> float:
    """Return the SNR in dB that 99% of the blocks reach; blocks of zeros do not count."""
    lost = (noise / signal)[(signal > 0) & noise.isfinite()]
    if lost.numel() == 0:
        return math.inf
    worst = float(lost.kthvalue(lost.numel() - int(WORST * lost.numel())).values)
    return -10 * math.log10(worst) if worst > 0 else math.inf


def _by_block(
    source: torch.Tensor, quantized: Quantized, statistics: Statistics, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return signal and noise of each block.

    They are sums over the tiles inside of a block. If the tile is the whole tensor, they are measured here.
    """
    tile = quantized.block
    if tile is not None:
        tile = (
            (1, tile[1]) if quantized.format.bits == 4 else tile
        )  # whose statistics are of 16 values, also of squares
        inside = (block[0] // tile[0], block[1] // tile[1])
        return _sums(statistics.signal, inside), _sums(statistics.noise, inside)
    # In units of the codes, so that squares stay in the range of FP32 for any magnitude of the tensor.
    scale, unit = torch.reciprocal(quantized.scale_inv), torch.ones_like(quantized.scale_inv)
    finite, parts = int(statistics.nonfinite) == 0, []
    for i in range(0, source.shape[0], _BAND):
        values = source[i : i + _BAND].to(torch.float32, copy=True).mul_(scale)
        error = Quantized(quantized.data[i : i + _BAND], unit).dequantize().sub_(values)
        if not finite:  # values that are not finite count in neither sum
            values, error = (x.nan_to_num_(0.0, 0.0, 0.0) for x in (values, error))
        parts.append((_sums(values.square_(), block), _sums(error.square_(), block)))
    return torch.cat([signal for signal, _ in parts]), torch.cat([noise for _, noise in parts])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread while the context lasts: on a busy machine short operations wait long for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sums(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the sums over the blocks of a matrix; blocks at its edges may be smaller."""
    rows, columns = values.shape
    if rows % block[0] or columns % block[1]:
        values = torch.nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
    # One dimension after the other is several times as fast as both at once.
    high = values.view(-1, block[0], values.shape[1]).sum(1)
    return high.view(high.shape[0], -1, block[1]).sum(2)
