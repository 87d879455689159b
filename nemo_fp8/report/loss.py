"""What a recipe made of one tensor, or of several together, as plain numbers.

    SNR = 10 log10( sum x**2 / sum (x - quantized x)**2 )        of several tensors: the sums are added up first

The difference to ``numerics.statistics`` is that nothing here is a tensor: a checkpoint of a hundred thousand weights
leaves a table of numbers behind and none of its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_fp8.numerics.statistics import Statistics


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
    """Of the format's dynamic range; of several tensors the widest."""

    @classmethod
    def of(cls, statistics: Statistics) -> Loss:
        whole = statistics.total()
        low, high = whole.scale_range
        return cls(
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
        )

    @classmethod
    def together(cls, losses: Iterable[Loss]) -> Loss:
        """Several tensors as if they were one."""
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
        )

    @property
    def snr_db(self) -> float:
        """Infinite where nothing was lost."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 else -math.inf

    @property
    def underflow_percent(self) -> float:
        return self.underflow * 100 / max(self.elements, 1)

    @property
    def saturation_percent(self) -> float:
        return self.saturated * 100 / max(self.elements, 1)

    @property
    def mse(self) -> float:
        return self.noise / max(self.elements - self.nonfinite, 1)

    def to_dict(self) -> dict[str, float | None]:
        """Plain values for JSON, which knows no infinity: an SNR of None is a tensor of which nothing was lost."""
        return {
            "snr_db": self.snr_db if math.isfinite(self.snr_db) else None,
            "underflow_percent": self.underflow_percent,
            "saturation_percent": self.saturation_percent,
            "mse": self.mse,
            "amax": self.amax if math.isfinite(self.amax) else None,
            "scale_inv_min": self.scale_min,
            "scale_inv_max": self.scale_max,
            "range_used_percent": self.range_used_percent,
            "elements": self.elements,
            "nonfinite": self.nonfinite,
        }
