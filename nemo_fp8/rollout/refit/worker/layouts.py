"""How vLLM's kernels keep FP8 codes in memory, and the facts that a worker collects about the tensors it writes there.

A layout is a pair of functions, one to store codes and one to load them again, so that a push is verified from the
memory that the next token is computed with. LAYOUTS has only layouts that a test covers. A layer whose kernel is not
there is processed by its own method, as at load: that is right on every kernel, and needs memory for one layer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.numerics.formats import decode_e8m0
from nemo_fp8.numerics.scales import floor_pow2
from nemo_fp8.numerics.statistics import Statistics
from nemo_fp8.rollout.engine.experts import Quantizing
from nemo_fp8.rollout.refit.fingerprint import fingerprint

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How a matrix of codes [rows, columns] is arranged in memory of the same shape.

    ``store(live, row, codes)`` writes rows from ``row`` on; ``load(live, row, rows)`` returns them in plain order.
    ``row`` and the number of rows are multiples of ``group``. ``where(rows, columns, width)`` returns the rows and
    columns of the memory, of so many columns, at which single codes lie. ``plain`` says that codes lie in plain order,
    so that they may be written there without ``store``.
    """

    store: Callable[[torch.Tensor, int, torch.Tensor], None]
    load: Callable[[torch.Tensor, int, int], torch.Tensor]
    where: Callable[[Places, Places, int], tuple[Places, Places]]
    group: int = 1
    plain: bool = False


def _store_rows(live: torch.Tensor, row: int, codes: torch.Tensor) -> None:
    live[row : row + len(codes)].view(torch.uint8).copy_(codes.view(torch.uint8))


def _load_rows(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    return live[row : row + rows]


def _pairs(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    """View rows of AMX memory as [rows / 32, columns / 2, 32] of 16-bit pairs.

    AMX reads 32 rows at a time, and two neighbours of a row as one unit: the pair (c, c + 1) of row 32 g + r lies at
    [g, c / 2, r].
    """
    return live.view(torch.int16).view(len(live) // 32, -1, 32)[row // 32 : (row + rows) // 32]


def _store_amx(live: torch.Tensor, row: int, codes: torch.Tensor) -> None:
    _pairs(live, row, len(codes)).copy_(codes.view(torch.int16).view(len(codes) // 32, 32, -1).transpose(1, 2))


def _load_amx(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    return _pairs(live, row, rows).transpose(1, 2).contiguous().view(live.dtype).view(rows, live.shape[1])


def _where_amx(rows: Places, columns: Places, width: int) -> tuple[Places, Places]:
    at = ((rows // 32 * (width // 2) + columns // 2) * 32 + rows % 32) * 2 + columns % 2
    return at // width, at % width


ROWS = Layout(_store_rows, _load_rows, lambda rows, columns, width: (rows, columns), plain=True)
AMX = Layout(_store_amx, _load_amx, _where_amx, 32)
# Keys are class names: of a linear's kernel, or of the method of experts. vLLM's fused kernels for experts have one
# class for all, so their key is the name of their backend.
LAYOUTS = {"CPUFp8BlockScaledMMKernel": AMX, "CPU": AMX, "DecodeKernel": ROWS, "DecodedMoEMethod": ROWS}


def layout_of(layer: Any) -> Layout | None:
    """Return the layout of an FP8 layer's codes; None if it is unknown, or if the weight has one scale."""
    method = layer.quant_method
    if method.operand.block is None:  # one scale for the weight depends on all shards of all workers
        return None
    if isinstance(method, Quantizing):
        backend = getattr(method, "fp8_backend", None)
        return LAYOUTS.get(type(method).__name__ if backend is None else str(backend.value))
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):  # MLA splits this weight up, so vLLM leaves it unpacked
        return ROWS
    return LAYOUTS.get(type(method.fp8_linear).__name__)


Count = float | torch.Tensor
ONE = slice(0, 1)


@dataclass
class Facts:
    """What one worker knows about one pushed tensor.

    Counts stay on the tensor's device, since reading a number from a GPU waits for all of its work.
    :meth:`Tally.settle` reads all of them at once. Of a stack of experts every count is a vector with one number for
    each expert, so that nothing is done expert by expert. The methods take ``at``, the experts that came
    (:data:`ONE` for a tensor that is no stack), and values of which each of them has the same number, in order.
    """

    kind: str = ""
    """``fp8``, ``nvfp4``, ``kv scale``, or the dtype in which the tensor is kept."""
    experts: int = 0
    """How many tensors are stacked in this one; 0 if it is no stack."""
    signal: Count = 0.0
    noise: Count = 0.0
    largest: Count = 0.0
    """The largest magnitude, infinite or NaN if such values came. Of codes with scales it is an upper bound."""
    saturated: Count = 0
    underflow: Count = 0
    nonfinite: Count = 0
    """Source values that are infinite or NaN."""
    scales: int = 0
    bad_scales: Count = 0
    """Scales that are zero, negative, infinite or NaN, or no power of two where the contract wants one."""
    aligned: bool = True
    """Whether the blocks are those of the unsharded tensor."""
    verified: bool | torch.Tensor | None = None
    """Whether all comparisons so far found the right bits; None if there was none."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Fingerprints by the part of the tensor that this worker holds."""
    tiles: dict[tuple[int, int], list[Statistics]] = field(default_factory=dict)
    """Statistics that are not summed up yet, by the experts that they are of."""

    def count(self, statistics: Statistics, at: slice = ONE) -> None:
        """Add the statistics of a quantization in this worker. They are summed up in the end, all at once."""
        self.tiles.setdefault((at.start, at.stop), []).append(statistics)

    def count_scales(self, scales: torch.Tensor, kind: str, at: slice = ONE) -> None:
        """Count scales, and the bad ones among them. ``kind`` is the operand's (``pow2``, ``fp32`` or ``e4m3``), or
        ``beneath`` for the scale that is made of a whole matrix's amax."""
        self.scales += scales.numel()
        self._add("bad_scales", _each(_bad(scales, kind), at).sum(1), at)

    def see(self, magnitudes: torch.Tensor, at: slice = ONE) -> None:
        """Note the largest of some magnitudes, such as those of rows."""
        self._raise(_each(magnitudes, at).amax(1).float(), at)

    def see_codes(self, largest: torch.Tensor, scales: torch.Tensor, at: slice = ONE) -> None:
        """Note an upper bound for codes that came with scales: the largest code times the largest scale."""
        self.see(largest.float() * _each(_decoded(scales), at).amax(1), at)

    def count_nonfinite(self, values: torch.Tensor, at: slice = ONE) -> None:
        """Count infinite values and NaNs, after ``see``.

        It is a slow pass, so on a CPU it is made only if the largest is not finite; to ask a GPU that would be slower.
        """
        if values.is_cpu and math.isfinite(float(self._most())):
            return
        self._add("nonfinite", _each(~values.isfinite(), at).sum(1), at)

    def count_nan_codes(self, codes: torch.Tensor, at: slice = ONE) -> None:
        """Count the NaNs among E4M3 codes: 0x7F, with either sign."""
        self._add("nonfinite", _each(_is_nan(codes), at).sum(1), at)

    def _most(self) -> Count:
        return self.largest.amax() if torch.is_tensor(self.largest) else self.largest  # amax of a NaN is a NaN

    def _raise(self, found: torch.Tensor, at: slice) -> None:
        """Raise the largest magnitudes of the experts of ``at`` to what was found."""
        if not isinstance(self.largest, torch.Tensor):
            self.largest = found.new_zeros(max(1, self.experts))
        self.largest[at] = torch.maximum(self.largest[at], found)

    def _add(self, name: str, counted: torch.Tensor, at: slice) -> None:
        held = getattr(self, name)
        if isinstance(held, torch.Tensor):
            held[at] += counted
        elif counted.shape[0] == max(1, self.experts):
            setattr(self, name, counted)
        else:
            held = counted.new_zeros(max(1, self.experts))
            held[at] = counted
            setattr(self, name, held)

    def check(self, good: torch.Tensor | bool) -> None:
        """Add the outcome of a comparison."""
        self.verified = good if self.verified is None else self.verified & good

    def to_plain(self) -> dict[str, Any]:
        """Return the facts as plain values, after they were settled: of a stack, a list for each count."""
        return {name: value for name, value in vars(self).items() if name != "tiles"}


def _each(values: torch.Tensor, at: slice) -> torch.Tensor:
    """Return values as a matrix with one row for each expert of ``at``."""
    return values.reshape(at.stop - at.start, -1)


def _is_nan(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8) & 0x7F == 0x7F


def _bad(scales: torch.Tensor, kind: str) -> torch.Tensor:
    """Whether each scale is one that no cast makes.

    An E4M3 scale of 16 small values is zero where others of their tensor are a million times as large, and the scale
    beneath is where all are zero.
    """
    if kind == "e4m3":
        return _is_nan(scales)
    scales = _decoded(scales)
    good = scales.isfinite() & ((scales > 0) | (kind == "beneath"))
    if kind == "pow2":
        good &= floor_pow2(scales) == scales
    return ~good


def _decoded(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in FP32; some kernels keep exponents (E8M0), or E4M3."""
    return scales.float() if scales.dtype in (torch.float32, torch.float8_e4m3fn) else decode_e8m0(scales)


@dataclass
class Tally:
    """What one worker knows about one push."""

    facts: dict[int, Facts] = field(default_factory=lambda: defaultdict(Facts))
    """The facts of every tensor, by its number in the manifest."""
    held: int = 0
    """Bytes that wait beside the model now, for the rest of their layer or of their blocks."""
    most_held: int = 0
    """The peak of ``held``."""

    def hold(self, size: int) -> None:
        """Add ``size`` bytes (negative: release) to what is staged, and keep the peak."""
        self.held += size
        self.most_held = max(self.most_held, self.held)

    def take(self, i: int, tensor: torch.Tensor) -> None:
        """Note a tensor that came whole, and of which a loader makes other values."""
        whole = ",".join(f"0:{n}" for n in tensor.shape) or "whole"
        self.facts[i].fingerprints.setdefault(whole, fingerprint(tensor))
        self.facts[i].see(tensor)

    def settle(self) -> None:
        """Replace every count on a device by plain numbers, with one transfer from each device."""
        self._sum_up()
        counted = [
            (facts, name, value)
            for name in _COUNTED
            for facts in self.facts.values()
            if isinstance(value := getattr(facts, name), torch.Tensor)
        ]
        for device in {value.device for *_, value in counted}:
            here = [row for row in counted if row[2].device == device]
            numbers = torch.cat([value.double().reshape(-1) for *_, value in here]).cpu()
            sizes = [sum(value.numel() for _, named, value in here if named == name) for name in _COUNTED]
            parts = zip(torch.split(numbers, sizes), _COUNTED.values(), strict=True)
            plain = [number for part, kind in parts for number in part.to(kind).tolist()]
            end = 0
            for facts, name, value in here:  # of a stack a count is a vector
                start, end = end, end + value.numel()
                setattr(facts, name, plain[start:end] if facts.experts and value.dim() else plain[start])

    def _sum_up(self) -> None:
        """Add the statistics of all tiles to the facts that they belong to: a few operations for all tensors."""
        some = [
            (facts, slice(*at), s) for facts in self.facts.values() for at, all_ in facts.tiles.items() for s in all_
        ]
        if not some:
            return
        # A segment is the tiles of one expert, or of a piece of a tensor that is no stack.
        lengths = [n for _, at, s in some for n in [s.norm.numel() // (at.stop - at.start)] * (at.stop - at.start)]
        segments = torch.tensor(lengths, device=some[0][2].norm.device)

        def reduced(name: str, how: str) -> torch.Tensor:
            values = torch.cat([getattr(s, name).reshape(-1) for *_, s in some]).double()
            return torch.segment_reduce(values.square_() if "norm" in name else values, how, lengths=segments)

        sums = {name: reduced(field, "sum") for name, field in _SUMS.items()}
        amax = reduced("amax", "max").float()
        first = 0
        for facts, at, _ in some:
            last = first + at.stop - at.start
            for name, values in sums.items():
                facts._add(name, values[first:last], at)
            facts._raise(amax[first:last], at)
            facts.tiles.clear()
            first = last


_SUMS = {
    "signal": "norm",
    "noise": "error_norm",
    "saturated": "saturated",
    "underflow": "underflow",
    "nonfinite": "nonfinite",
}
"""Facts that are sums over tiles, by the statistic that is summed up."""
_COUNTED = {
    "signal": torch.float64,
    "noise": torch.float64,
    "largest": torch.float64,
    "saturated": torch.int64,
    "underflow": torch.int64,
    "nonfinite": torch.int64,
    "bad_scales": torch.int64,
    "verified": torch.bool,
}
"""Facts that may lie on a device, and the dtype whose plain numbers they become."""
