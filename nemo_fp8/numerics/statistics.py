"""Count what a quantization did to its values, during the cast: for each tile, and summed over the tensor.

    underflow    a finite value other than zero that became zero
    saturation   a value more than half a step above the format's largest, so that the clamp cost more than rounding
    SNR          10 log10( sum x**2 / sum (x - x_dequantized)**2 )      in dB, over finite values
    MSE          mean (x - x_dequantized)**2
    range used   log2 of the largest over the smallest non-zero code, as a share of the format's range

Only sums and extremes of tiles are stored; the numbers of a tile, a tensor or several tensors follow from them. The
trade-off: a few more reductions over values that are in registers or cache anyway, and no second pass. There may be
one tile for every 32 elements, so the fields of a tile are narrow: roots of sums of squares, for which FP32 has the
range, counters as wide as a tile needs, and scales as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from nemo_fp8.numerics.formats import Format, decode_e8m0

TOTALS = ("signal", "noise", "saturated", "underflow", "nonfinite", "amax")
"""What :meth:`Statistics.totals` returns, in this order: five sums, and the largest magnitude."""
_SUMMED = {"norm": 2, "error_norm": 2, "saturated": 1, "underflow": 1, "nonfinite": 1}
"""The fields that the sums are of, in that order, and the power of a tile's number that is added up."""
_AT_A_TIME = 1 << 14
"""Tiles whose numbers are in FP64 at a time: 128 KiB, which stay in a cache, are used again, and need one thread."""


@dataclass(frozen=True)
class Statistics:
    """Sums and extremes by tile. Every tensor has the shape of the scales (0-dim for a whole tensor)."""

    format: Format
    elements: torch.Tensor
    """How many elements of the source lie in the tile; padding is not counted."""
    underflow: torch.Tensor
    saturated: torch.Tensor
    nonfinite: torch.Tensor
    norm: torch.Tensor
    """The root of sum x**2 over finite values."""
    error_norm: torch.Tensor
    """The root of sum (x - dequantized)**2 over finite values."""
    amax: torch.Tensor
    scale_inv: torch.Tensor
    """The scales as they are stored: FP32 or E8M0."""
    least_code: torch.Tensor
    """The smallest non-zero magnitude code (int), 0 where every code is zero."""
    largest_code: torch.Tensor

    @property
    def signal(self) -> torch.Tensor:
        """sum x**2 over finite values, in FP64."""
        return self.norm.double().square()

    @property
    def noise(self) -> torch.Tensor:
        """sum (x - dequantized)**2 over finite values, in FP64."""
        return self.error_norm.double().square()

    @property
    def underflow_percent(self) -> torch.Tensor:
        """Underflows as a percentage of the elements."""
        return self.underflow * 100.0 / self.elements.clamp_min(1)

    @property
    def saturation_percent(self) -> torch.Tensor:
        """Saturated values as a percentage of the elements."""
        return self.saturated * 100.0 / self.elements.clamp_min(1)

    @property
    def mse(self) -> torch.Tensor:
        """The mean squared error."""
        return self.noise / (self.elements - self.nonfinite).clamp_min(1)

    @property
    def snr_db(self) -> torch.Tensor:
        """The signal-to-noise ratio in dB; infinite if nothing was lost, and -infinite if no value is finite."""
        noise = self.noise
        exact = torch.where((self.nonfinite == self.elements) & (self.elements > 0), 0.0, float("inf"))
        return 10.0 * torch.log10(torch.where(noise == 0, exact, self.signal / noise))

    @property
    def scale_range(self) -> tuple[float, float]:
        """Return the smallest and the largest scale_inv."""
        if self.scale_inv.numel() == 0:
            return (1.0, 1.0)
        low, high = torch.aminmax(_values_of(self.scale_inv))
        return (float(low), float(high))

    @property
    def range_used_percent(self) -> torch.Tensor:
        """The binades between the smallest and the largest code in use, as a share of the format's."""
        values = self.format.magnitudes.to(self.least_code.device)
        values[0] = self.format.smallest
        used = torch.log2(values[self.largest_code.long()] / values[self.least_code.long()])
        return used * 100.0 / self.format.binades

    def total(self) -> Statistics:
        """Sum up the tiles: the statistics of the whole tensor."""
        if self.elements.dim() == 0:
            return self
        zero = self.least_code == 0
        least = torch.where(zero, 255, self.least_code).amin() if zero.numel() else self.least_code.new_tensor(255)
        return Statistics(
            format=self.format,
            **{f: getattr(self, f).sum() for f in ("elements", "underflow", "saturated", "nonfinite")},
            norm=self.signal.sum().sqrt(),
            error_norm=self.noise.sum().sqrt(),
            amax=_most(self.amax),
            scale_inv=self.scale_inv,
            least_code=torch.where(least == 255, 0, least),
            largest_code=_most(self.largest_code),
        )

    def totals(self, parts: int = 1) -> torch.Tensor:
        """Sum up the tiles of each of ``parts`` equal parts of the rows: [parts, TOTALS] in FP64.

        The numbers stay on the tensor's device.
        """
        found = [self._sums(getattr(self, field).reshape(parts, -1), power) for field, power in _SUMMED.items()]
        return torch.stack([*found, self.amax.reshape(parts, -1).amax(1).double()], dim=1)

    def _sums(self, of_tiles: torch.Tensor, power: int) -> torch.Tensor:
        """Return the sums of the rows' numbers in FP64, squared for a ``power`` of 2.

        On a CPU some tiles come after the others: memory for the numbers of all in FP64 would have to be found first,
        which takes several times as long as adding them up.
        """
        total = of_tiles.new_zeros(len(of_tiles), dtype=torch.float64)
        for some in torch.split(of_tiles, _AT_A_TIME if of_tiles.is_cpu else of_tiles.shape[1] or 1, dim=1):
            numbers = some.double()
            total += (numbers.square() if power == 2 else numbers).sum(1)
        return total

    def whole(self) -> Statistics:
        """Return the only tile as 0-dim tensors."""
        return Statistics(self.format, *(getattr(self, f.name).reshape(()) for f in fields(self)[1:]))

    def summary(self) -> dict[str, float]:
        """Return the tensor's numbers as plain floats, for a table or JSON."""
        whole = self.total()
        low, high = self.scale_range
        return {
            "elements": float(whole.elements),
            "underflow_percent": float(whole.underflow_percent),
            "saturation_percent": float(whole.saturation_percent),
            "nonfinite": float(whole.nonfinite),
            "snr_db": float(whole.snr_db),
            "mse": float(whole.mse),
            "amax": float(whole.amax),
            "scale_inv_min": low,
            "scale_inv_max": high,
            "range_used_percent": float(whole.range_used_percent),
        }


def _values_of(scale_inv: torch.Tensor) -> torch.Tensor:
    return scale_inv if scale_inv.dtype == torch.float32 else decode_e8m0(scale_inv)


def _most(x: torch.Tensor) -> torch.Tensor:
    return x.amax() if x.numel() else x.new_zeros(())


def measure(
    source: torch.Tensor,
    scaled: torch.Tensor,
    codes: torch.Tensor,
    decoded: torch.Tensor,
    amax: torch.Tensor,
    scale_inv: torch.Tensor,
    elements: torch.Tensor,
    format: Format,
) -> Statistics:
    """Compute statistics by tile.

    ``source``, ``scaled`` (before the cast), ``codes`` (without their signs) and ``decoded`` (what the signed codes
    stand for, in FP32) are [tile rows, rows, tile columns, columns], the others [tile rows, tile columns]. The padding
    is zeros, which add nothing to a sum.
    """
    source = source.float()
    finite = source.isfinite()
    values = decoded * _values_of(scale_inv)[:, None, :, None]
    error = torch.where(finite, source - values, 0.0)
    source = torch.where(finite, source, 0.0)
    whole = (1, 3)
    some = source.numel() > 0
    return Statistics(
        format=format,
        elements=elements,
        underflow=((codes == 0) & (source != 0)).sum(whole),
        saturated=(scaled.abs() > format.saturates_above).sum(whole),
        nonfinite=(~finite).sum(whole),
        norm=source.double().square_().sum(whole).sqrt_(),
        error_norm=error.double().square_().sum(whole).sqrt_(),
        amax=amax,
        scale_inv=scale_inv,
        # 0 - 1 wraps to 255, so that zero codes are never the smallest
        least_code=((codes - 1).amin(whole) + 1) if some else torch.zeros_like(amax, dtype=torch.uint8),
        largest_code=torch.where(codes < format.first_nan, codes, 0).amax(whole)
        if some
        else torch.zeros_like(amax, dtype=torch.uint8),
    )
