"""Write a tensor that arrives in pieces by jobs that a plan keeps: a trainer cuts it in the same ones at every push.

    kept          where each piece goes, as the job of a kernel (pieces.py); of codes that arrive, its scales, too
    filled in     its address in the sender's memory
    told          when the last row has come, of the sums that the jobs have left

A kernel that copies, or arranges codes, leaves little else in the caches, so that a call of Python after it takes many
times as long as in a loop of its own, and a piece that finds its way through a sink takes two hundred of them. The
trade-off: addresses are believed, so this is for a tensor that all goes to one matrix, or to one stack of experts,
which lies in one piece. Any other takes its sink.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemo_fp8.numerics.kernels import Order
from nemo_fp8.numerics.kernels.pieces import SummedPieces
from nemo_fp8.rollout.refit import casting
from nemo_fp8.rollout.refit.fingerprint import digest_of, together
from nemo_fp8.rollout.refit.memory import Opened
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.layouts import Facts
from nemo_fp8.rollout.refit.worker.routes import Target
from nemo_fp8.rollout.refit.worker.sinks import InPlace, Sink, name_of, word
from nemo_fp8.rollout.refit.worker.whole import place_of, values_of

if TYPE_CHECKING:
    from nemo_fp8.rollout.refit.worker.plan import Plan


@dataclass(frozen=True)
class Copied:
    """The way of one tensor whose values arrive as they are kept."""

    name: str
    """The name of the tensor's part, which is all of it."""
    values: SummedPieces
    live: torch.Tensor
    """The values as the engine reads them."""
    unit: int
    """How many rows of the matrix of values a row of the tensor has."""

    def write(self, row: int, rows: int, values: int) -> None:
        """Write rows from ``row`` on, which lie at this address."""
        self.values.put(row * self.unit, rows * self.unit, values)

    def tell(self, facts: Facts) -> None:
        """Tell a push's facts of the tensor, of which every row has come."""
        facts.kind = word(self.live.dtype)
        largest = self.values.largest()
        facts.see(torch.tensor([largest], dtype=torch.float64))
        if not math.isfinite(largest):
            facts.count_nonfinite(self.live)
        facts.fingerprints[self.name] = digest_of(*self.values.size, self.values.taken())


@dataclass(frozen=True)
class Arrived:
    """The way of one tensor whose codes arrive, as one matrix of bytes, and their scales, as another one."""

    name: str
    """The name of the tensor's part, which is all of it."""
    codes: SummedPieces
    scales: SummedPieces
    live: torch.Tensor
    """The scales of all of its blocks as the engine reads them."""
    kind: str
    """Their kind."""
    unit: int
    """How many rows of codes a row of the tensor has: those of an expert, else one."""
    high: int
    """How many rows of codes a row of scales stands for."""
    experts: slice
    """All of its experts, as facts count them."""

    def places(self, memory: Opened, rows: int, codes_at: int, scales_at: int) -> tuple[int, int]:
        """Return the addresses of so many rows of codes and of their scales, at offsets in the sender's memory. Raises
        PrecisionError if they do not lie inside."""
        codes = memory.address(codes_at, rows * self.unit * self.codes.size[1], 1)
        return codes, memory.address(scales_at, self._scales_of(rows) * self.scales.size[1], self.live.itemsize)

    def write(self, row: int, rows: int, codes: int, scales: int) -> None:
        """Write rows from ``row`` on, whose codes and scales lie at these addresses."""
        self.codes.put(row * self.unit, rows * self.unit, codes)
        self.scales.put(self._scales_of(row), self._scales_of(rows), scales)

    def tell(self, facts: Facts) -> None:
        """Tell a push's facts of the tensor, of which every row has come."""
        facts.kind, facts.aligned = "fp8", True
        both = [digest_of(*one.size, one.taken()) for one in (self.codes, self.scales)]
        facts.fingerprints[self.name] = together(both)
        facts.count_scales(self.live, self.kind, self.experts)

    def _scales_of(self, rows: int) -> int:
        """Return how many rows of scales so many rows of the tensor have; all pieces but the last are whole blocks."""
        return -(-rows * self.unit // self.high)


def arrivals(plan: Plan, sinks: dict[Target, Sink]) -> dict[int, Arrived | Copied]:
    """Return the ways of a plan's tensors that go to one place, by their numbers: of those that a trainer may cast, and
    of those that are copied. They are right as long as the sinks write where they do now."""
    return _copied(plan, sinks) | _cast(plan, sinks)


def _copied(plan: Plan, sinks: dict[Target, Sink]) -> dict[int, Arrived | Copied]:
    found: dict[int, Arrived | Copied] = {}
    for i, (route, *others) in plan.routes.by_entry.items():
        sink, shape = sinks[route.target], plan.manifest[i].shape
        if others or i in plan.stacks or not isinstance(sink, InPlace) or route.source != tuple((0, n) for n in shape):
            continue
        values = values_of(route, plan.manifest)
        into = None if values is None else place_of(sink, route, values)
        if into is not None and SummedPieces.takes(into, Order.ROWS, 1):
            found[i] = Copied(name_of(route), SummedPieces(into, Order.ROWS), into, into.shape[0] // shape[0])
    return found


def _cast(plan: Plan, sinks: dict[Target, Sink]) -> dict[int, Arrived | Copied]:
    found: dict[int, Arrived | Copied] = {}
    for i, operand in plan.castable(sinks).items():
        route, *others = plan.routes.by_entry[i]
        sink, shape = sinks[route.target], plan.manifest[i].shape
        if others or operand is None or not isinstance(sink, Blocks) or not sink.same_grid(route):
            continue
        codes, scales = sink.lying(route)
        if codes is None or scales is None or route.source != tuple((0, n) for n in shape):
            continue
        if codes.dtype != casting.CODES or scales.dtype != casting.scales_type(operand) or not scales.is_contiguous():
            continue
        bytes_of_scales, order = scales.view(torch.uint8), sink.layout.order
        unit = codes.shape[0] // shape[0]
        step = unit * plan.manifest[i].step
        if SummedPieces.takes(codes, order, step) and SummedPieces.takes(bytes_of_scales, Order.ROWS, step):
            pieces = SummedPieces(codes, order), SummedPieces(bytes_of_scales, Order.ROWS)
            experts = slice(0, shape[0] if i in plan.stacks else 1)
            found[i] = Arrived(name_of(route), *pieces, scales, operand.scale, unit, sink.high, experts)
    return found
