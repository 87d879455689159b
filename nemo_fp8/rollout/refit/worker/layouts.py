"""How vLLM's kernels keep FP8 codes in memory, and the facts that a worker collects about the tensors it writes there.

A layout is a pair of functions, one to store codes and one to load them again, so that a push is verified from the
memory that the next token is computed with. LAYOUTS has only layouts that a test covers. A layer whose kernel is not
there is processed by its own method, as at load: that is right on every kernel, and needs memory for one layer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import decode_e8m0
from nemo_fp8.numerics.kernels import GROUP, Order
from nemo_fp8.numerics.scales import floor_pow2
from nemo_fp8.numerics.statistics import TOTALS
from nemo_fp8.rollout.engine.experts import Quantizing
from nemo_fp8.rollout.refit.fingerprint import fingerprint

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How a matrix of codes [rows, columns] is arranged in memory of the same shape.

    ``store(live, row, codes)`` writes rows from ``row`` on; ``load(live, row, rows)`` returns them in plain order.
    ``row`` and the number of rows are multiples of ``group``. ``where(rows, columns, width)`` returns the rows and
    columns of the memory, of so many columns, at which single codes lie. ``order`` is its name for our own kernels,
    which write and read codes there without these functions.
    """

    store: Callable[[torch.Tensor, int, torch.Tensor], None]
    load: Callable[[torch.Tensor, int, int], torch.Tensor]
    where: Callable[[Places, Places, int], tuple[Places, Places]]
    order: Order
    group: int = 1

    @property
    def plain(self) -> bool:
        """Whether codes lie in plain order, so that they may be written there without ``store``."""
        return self.order == Order.ROWS


def _store_rows(live: torch.Tensor, row: int, codes: torch.Tensor) -> None:
    live[row : row + len(codes)].view(torch.uint8).copy_(codes.view(torch.uint8))


def _load_rows(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    return live[row : row + rows]


def _pairs(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    """View rows of AMX memory as [groups, columns / 2, 32] of 16-bit pairs, as ``Order.AMX`` says."""
    return live.view(torch.int16).view(len(live) // GROUP, -1, GROUP)[row // GROUP : (row + rows) // GROUP]


def _in_groups(codes: torch.Tensor) -> torch.Tensor:
    """View codes in plain order as [groups, 32, columns / 2] of 16-bit pairs."""
    return codes.view(torch.int16).view(len(codes) // GROUP, GROUP, -1)


def _store_amx(live: torch.Tensor, row: int, codes: torch.Tensor) -> None:
    rows, lines = _in_groups(codes), _pairs(live, row, len(codes))
    if not kernels.turn(rows, lines):
        lines.copy_(rows.mT)


def _load_amx(live: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    codes = live.new_empty(rows, live.shape[1])
    lines, into = _pairs(live, row, rows), _in_groups(codes)
    if not kernels.turn(lines, into):
        into.copy_(lines.mT)
    return codes


def _where_amx(rows: Places, columns: Places, width: int) -> tuple[Places, Places]:
    at = ((rows // GROUP * (width // 2) + columns // 2) * GROUP + rows % GROUP) * 2 + columns % 2
    return at // width, at % width


ROWS = Layout(_store_rows, _load_rows, lambda rows, columns, width: (rows, columns), Order.ROWS)
AMX = Layout(_store_amx, _load_amx, _where_amx, Order.AMX, GROUP)
# Keys are class names: of a linear's kernel, or of the method of experts. vLLM's fused kernels for experts have one
# class for all, so their key is the name of their backend. On a GPU, CUTLASS's and Triton's take codes and scales as
# they are quantized; DeepGEMM's (which may keep scales in another order) and others are not here.
LAYOUTS = {
    "CPUFp8BlockScaledMMKernel": AMX, "CPU": AMX, "DecodeKernel": ROWS, "DecodedMoEMethod": ROWS,
    "CutlassFp8BlockScaledMMKernel": ROWS, "TritonFp8BlockScaledMMKernel": ROWS, "TRITON": ROWS,
}  # fmt: skip


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


ONE = slice(0, 1)
SUMS, LARGEST, BAD_SCALES = slice(0, len(TOTALS) - 1), len(TOTALS) - 1, len(TOTALS)
COUNTED: dict[str, type] = {
    "signal": float, "noise": float, "saturated": int, "underflow": int, "nonfinite": int, "largest": float,
    "bad_scales": int,
}  # fmt: skip
"""The columns of ``Facts.counts``, those of ``TOTALS`` first, and what their numbers are."""


@dataclass
class Facts:
    """What one worker knows about one pushed tensor.

    Counts stay on the tensor's device, since reading a number from a GPU waits for all of its work.
    :meth:`Tally.settle` reads all of them at once, and fills in the fields of :data:`COUNTED`. Of a stack of experts
    each of these is a list with one number for each expert, or one number if it is that of all, so that nothing is done
    expert by expert. The methods take ``at``, the experts that came (:data:`ONE` for a tensor that is no stack), and
    values of which each of them has the same number, in order.
    """

    kind: str = ""
    """``fp8``, ``nvfp4``, ``kv scale``, or the dtype in which the tensor is kept."""
    experts: int = 0
    """How many tensors are stacked in this one; 0 if it is no stack."""
    signal: float | list[float] = 0.0
    noise: float | list[float] = 0.0
    largest: float | list[float] = 0.0
    """The largest magnitude, infinite or NaN if such values came. Of codes with scales it is an upper bound."""
    saturated: int | list[int] = 0
    underflow: int | list[int] = 0
    nonfinite: int | list[int] = 0
    """Source values that are infinite or NaN."""
    scales: int = 0
    bad_scales: int | list[int] = 0
    """Scales that are zero, negative, infinite or NaN, or no power of two where the contract wants one."""
    aligned: bool = True
    """Whether the blocks are those of the unsharded tensor."""
    verified: bool | torch.Tensor | None = None
    """Whether all comparisons so far found the right bits; None if there was none."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Fingerprints by the part of the tensor that this worker holds."""
    counts: torch.Tensor | None = None
    """The counts so far, in FP64: a row for each expert, a column for each of :data:`COUNTED`."""
    row: int = 0
    """The first of these rows, once :meth:`Tally.settle` has put those of all tensors one below the other."""
    looked_at: list[tuple[torch.Tensor, str, slice]] = field(default_factory=list)
    """Scales in which :meth:`Tally.settle` looks for bad ones, of all tensors at once: with their kind and experts."""

    def count(self, totals: torch.Tensor, at: slice = ONE) -> None:
        """Add what a quantization did to each expert: [experts, TOTALS], of ``Statistics.totals`` or a kernel."""
        if self.counts is None and len(totals) == max(1, self.experts):
            self.counts = torch.nn.functional.pad(totals.double(), (0, len(COUNTED) - len(TOTALS)))
            return
        rows = self._rows(at, totals.device)
        rows[:, SUMS].add_(totals[:, SUMS])
        _raise_to(rows[:, LARGEST], totals[:, LARGEST])

    def count_scales(self, scales: torch.Tensor, kind: str, at: slice = ONE) -> None:
        """Count scales, and have the bad ones among them counted in the end, as they lie there then.

        ``kind`` is the operand's (``pow2``, ``fp32`` or ``e4m3``), or ``beneath`` for the scale that is made of a whole
        matrix's amax.
        """
        self._rows(at, scales.device)
        self.scales += scales.numel()
        self.looked_at.append((scales, kind, at))

    def see(self, magnitudes: torch.Tensor, at: slice = ONE) -> None:
        """Note the largest of some magnitudes, such as those of rows."""
        _raise_to(self._rows(at, magnitudes.device)[:, LARGEST], _each(magnitudes, at).amax(1))

    def see_codes(self, largest: torch.Tensor, scales: torch.Tensor, at: slice = ONE) -> None:
        """Note an upper bound for codes that came with scales: the largest code times the largest scale."""
        self.see(largest * _each(_decoded(scales), at).amax(1), at)

    def count_nonfinite(self, values: torch.Tensor, at: slice = ONE) -> None:
        """Count infinite values and NaNs, after ``see``.

        It is a slow pass, so on a CPU it is made only if the largest is not finite; to ask a GPU that would be slower.
        """
        rows = self._rows(at, values.device)
        if not values.is_cpu or not math.isfinite(float(rows[:, LARGEST].amax())):
            rows[:, _NONFINITE] += _each(~values.isfinite(), at).sum(1)

    def count_nan_codes(self, codes: torch.Tensor, at: slice = ONE) -> None:
        """Count the NaNs among E4M3 codes: 0x7F, with either sign."""
        self._rows(at, codes.device)[:, _NONFINITE] += _each(_is_nan(codes), at).sum(1)

    def _rows(self, at: slice, device: torch.device) -> torch.Tensor:
        """Return the counts of the experts of ``at``."""
        if self.counts is None:
            self.counts = torch.zeros(max(1, self.experts), len(COUNTED), dtype=torch.float64, device=device)
        return self.counts[at]

    def check(self, good: torch.Tensor | bool) -> None:
        """Add the outcome of a comparison."""
        self.verified = good if self.verified is None else self.verified & good

    def to_plain(self) -> dict[str, Any]:
        """Return the facts as plain values, after they were settled: of a stack, a list for each count."""
        told = vars(self).copy()
        for name in ("counts", "row", "looked_at"):
            del told[name]
        return told


_NONFINITE = [*COUNTED].index("nonfinite")


def _each(values: torch.Tensor, at: slice) -> torch.Tensor:
    """Return values as a matrix with one row for each expert of ``at``."""
    return values.reshape(at.stop - at.start, -1)


def _raise_to(column: torch.Tensor, values: torch.Tensor) -> None:
    """Raise the numbers of a column to larger values; what meets a NaN becomes one."""
    torch.maximum(column, values, out=column)


def _is_nan(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8) & 0x7F == 0x7F


def _bad(scales: torch.Tensor, kind: str) -> torch.Tensor:
    """Return whether each scale is one that no cast makes.

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
        """Fill in every count and answer as a plain one, with one transfer of each from each device."""
        for some in _of_each_device(self.facts.values(), "counts"):
            counts, row = torch.cat([facts.counts for facts in some if facts.counts is not None]), 0
            for facts in some:
                facts.row, row = row, row + max(1, facts.experts)
            _count_bad_scales(counts, some)
            numbers, starts = counts.cpu().numpy().T, [facts.row for facts in some]
            equal = np.minimum.reduceat(numbers, starts, 1) == np.maximum.reduceat(numbers, starts, 1)
            columns = [of_one.astype(kind).tolist() for kind, of_one in zip(COUNTED.values(), numbers, strict=True)]
            for facts, equals in zip(some, equal.T.tolist(), strict=True):
                first, last = facts.row, facts.row + facts.experts
                for name, plain, are_equal in zip(COUNTED, columns, equals, strict=True):
                    setattr(facts, name, plain[first] if are_equal or not facts.experts else plain[first:last])
        for some in _of_each_device(self.facts.values(), "verified"):
            answers = torch.stack([facts.verified for facts in some if isinstance(facts.verified, torch.Tensor)])
            for facts, answer in zip(some, answers.tolist(), strict=True):
                facts.verified = answer


def _of_each_device(all_: Iterable[Facts], name: str) -> Iterable[list[Facts]]:
    """Return the facts in which this is a tensor, those of one device together."""
    devices: dict[torch.device, list[Facts]] = defaultdict(list)
    for facts in all_:
        held = getattr(facts, name)
        if isinstance(held, torch.Tensor):
            devices[held.device].append(facts)
    return devices.values()


def _count_bad_scales(counts: torch.Tensor, some: Iterable[Facts]) -> None:
    """Count the bad scales of tensors of one device: a few operations for all of one kind."""
    kinds: dict[Any, list[tuple[torch.Tensor, int, int]]] = defaultdict(list)
    for facts in some:
        for scales, kind, at in facts.looked_at:
            kinds[kind, scales.dtype].append((scales.reshape(-1), facts.row + at.start, at.stop - at.start))
        facts.looked_at.clear()
    for (kind, _), found in kinds.items():
        scales = torch.cat([one for one, *_ in found])
        if _none_bad(scales):
            continue
        each = np.repeat([one.numel() // n for one, _, n in found], [n for *_, n in found])
        rows = np.concatenate([np.arange(first, first + n) for _, first, n in found])
        lengths, into = (torch.from_numpy(numbers).to(counts.device) for numbers in (each, rows))
        bad = torch.segment_reduce(_bad(scales, kind).double(), "sum", lengths=lengths)
        counts[:, BAD_SCALES].index_add_(0, into, bad)


def _none_bad(scales: torch.Tensor) -> bool:
    """Return whether a look at the extremes shows that none of many scales is bad: of one byte each, on a CPU.

    Those of a byte are as many as a thirty-second or a sixteenth of the values, and bad are NaNs alone: 0x7F with
    either sign in E4M3, 0xFF in E8M0. No cast makes a negative scale. To ask a GPU would be to wait for it.
    """
    if not scales.is_cpu or scales.itemsize > 1:
        return False
    if scales.dtype == torch.float8_e4m3fn:
        least, largest = torch.aminmax(scales.view(torch.int8))
        return bool((least >= 0) & (largest < 0x7F))
    return bool(scales.view(torch.uint8).amax() < 0xFF)
