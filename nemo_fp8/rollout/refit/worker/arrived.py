"""Write a tensor that arrives as codes by jobs that a plan keeps: a trainer cuts it in the same pieces at every push.

    kept          where each piece and its scales go, as jobs of a kernel (pieces.py)
    filled in     their addresses in the sender's memory
    told          when the last row has come, of the sums that the jobs have left

A kernel that arranges codes leaves little else in the caches, so that a call of Python after it takes many times as
long as in a loop of its own, and a piece that finds its way through a sink takes two hundred of them. The trade-off:
addresses are believed, so this is for a tensor that all goes to one matrix, or to one stack of experts, which lies in
one piece. Any other takes its sink.
"""

from __future__ import annotations

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
from nemo_fp8.rollout.refit.worker.sinks import Sink, name_of

if TYPE_CHECKING:
    from nemo_fp8.rollout.refit.worker.plan import Plan


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


def arrivals(plan: Plan, sinks: dict[Target, Sink]) -> dict[int, Arrived]:
    """Return the ways of a plan's tensors that a trainer may cast and that go to one place, by their numbers. They are
    right as long as the sinks write where they do now."""
    found = {}
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
