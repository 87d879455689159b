"""Write NVFP4 weights: gathered, and quantized in place beneath the amax of all that shares a scale.

The FP32 scale beneath the block scales is made of the largest magnitude of all parts of a matrix, on all workers: no
block can be quantized before the last part has come. So a matrix is gathered in its source dtype, or the experts of a
layer, unless its parts stay where they are, in the trainer's shared memory. Then it is quantized as at load, into the
memory that the kernel reads. A part has the fingerprint of its rows of codes and block scales and of the scale beneath,
which a trainer can compute: :func:`nemo_fp8.rollout.refit.fingerprint.fingerprint` of the three.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import kernels, nvfp4
from nemo_fp8.numerics.modelopt import BLOCK, FourBits, amax_of, four_bits, totals
from nemo_fp8.numerics.nvfp4_tensor import weight_scale_2
from nemo_fp8.rollout.engine.four_bit_experts import Nvfp4MoEMethod
from nemo_fp8.rollout.engine.four_bits import Nvfp4LinearMethod
from nemo_fp8.rollout.refit.fingerprint import as_matrix, fingerprint
from nemo_fp8.rollout.refit.manifest import Box
from nemo_fp8.rollout.refit.worker.layouts import ONE, Tally
from nemo_fp8.rollout.refit.worker.packing import StagingMemory
from nemo_fp8.rollout.refit.worker.routes import Route, Target
from nemo_fp8.rollout.refit.worker.sinks import count_rows, name_of, part_of, rows_of, viewed
from nemo_fp8.rollout.refit.worker.staged import Staged

KIND = "nvfp4"


def in_place(layer: Any) -> bool:
    """Return whether a layer's kernel reads codes and scales as they were made; others pack them, and are staged."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, Nvfp4MoEMethod):
        return True
    return isinstance(method, Nvfp4LinearMethod) and isinstance(method.fp8_linear, EmulationNvFp4LinearKernel)


class FourBitWeights(Staged):
    """Takes all parts of one NVFP4 parameter: of a linear, or of a layer's experts.

    ``against_reference`` compares each cast with the reference's bits.
    """

    def __init__(
        self,
        tally: Tally,
        layer: Any,
        target: Target,
        routes: Iterable[Route],
        constants: Iterable[tuple[Box, float]],
        room: StagingMemory,
        against_reference: bool,
    ) -> None:
        self.routes = list(routes)
        super().__init__(tally, layer, self.routes, [(target, [*constants])], {}, room)
        self.name, self.against_reference = target.parameter, against_reference
        live = layer.quant_method.live(layer, self.name)
        self.live = FourBits(*(tensor.data for tensor in live))
        self.lead = self.live.weight.shape[:-2]
        self.made: dict[Route, str] = {}
        self.kept: dict[Route, torch.Tensor] = {}
        """What stays where it is, and is quantized from there."""
        self.largest: torch.Tensor | None = None
        """The largest magnitude of each matrix so far; None if not all that came was looked at on its way."""

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        kept, self.kept = self.kept, {}
        for other, stayed in kept.items():
            self._gather(other, 0, stayed)
        self._gather(route, row, values)

    def write_staying(self, route: Route, row: int, values: torch.Tensor) -> None:
        """Note the magnitudes, and leave values where they are until all parts have come; gather them as others if they
        cannot be quantized by themselves, or not all parts stay."""
        read = None
        if self.name not in self.values and self._stands_alone(route, values):
            read = kernels.sums(as_matrix(values.detach()))
        if read is None:
            self.write(route, row, values)
            return
        if not self.kept:
            self.largest = values.new_zeros(self.lead.numel(), dtype=torch.float32)
        self.kept[route] = values
        self._see(route.to, read[2])

    def _stands_alone(self, route: Route, values: torch.Tensor) -> bool:
        """Return whether no block, and no row of codes, is of these values and of others."""
        *matrices, (start, stop), columns = route.to
        rows, wide = self.live.weight.shape[-2], 2 * self.live.weight.shape[-1]
        high = self.layer.quant_method.operand.block[0]
        whole = values.is_cpu and not self.constants[0][1] and count_rows(values) == rows_of(route)
        in_one_piece = stop - start == rows or all(last - first == 1 for first, last in matrices)
        at_blocks = start % high == 0 and (stop % high == 0 or stop == rows)
        return whole and in_one_piece and at_blocks and columns == (0, wide)

    def _gather(self, route: Route, row: int, values: torch.Tensor) -> None:
        if self.name not in self.values:
            self.values[self.name] = self._empty(self.name)
            on_the_way = values.is_cpu and not self.constants[0][1]
            self.largest = torch.zeros(self.lead.numel()) if on_the_way else None
        box, rows = part_of(route, row, len(values)), as_matrix(values.detach())
        place = self.values[self.name].data[_slices(box)]
        into = viewed(place, rows.shape)
        read = None if into is None else kernels.sums(rows, into)  # which copies, too, and looks at magnitudes
        if read is None:
            place.copy_(values.reshape(place.shape))
            self.largest = None
        else:
            self._see(box, read[2])

    def _see(self, box: Box, of_rows: torch.Tensor) -> None:
        """Note the largest magnitudes of rows that come to a box."""
        if self.largest is not None:
            seen = self.largest[slice(*_box(box)[0])]
            torch.maximum(seen, of_rows.view(len(seen), -1).amax(1), out=seen)

    def complete(self, entry: int) -> None:
        """Note that all rows of a tensor have come; quantize the matrix if it was the last one."""
        self.awaited.discard(entry)
        if self.awaited or not (self.values or self.kept):
            return
        gathered, method = self.values.pop(self.name, None), self.layer.quant_method
        if gathered is None:
            parts = [([route], route.to, _in(values, route.to)) for route, values in self.kept.items()]
        else:
            for _, filled in self.constants:
                for box, value in filled:
                    gathered.data[_slices(box)].fill_(value)
            parts = [(self.routes, tuple((0, n) for n in gathered.shape), _stack(gathered.data))]
        largest = amax_of(parts[0][2]) if self.largest is None else self.largest
        amax = method.amax(largest.view(self.lead)).reshape(-1)
        for routes, box, values in parts:
            held, of = FourBits(*cut(self.live, box)), amax[slice(*_box(box)[0])]
            four_bits(values, method.operand, of, held)
            good = as_reference(values, method.operand, of, held) if self.against_reference else None
            for route in routes:
                self._count(route, values if route.to == box else values[_slices(_box(route.to))])
                if good is not None:
                    self.facts[route.entry].check(good)
        method.follow(self.layer)
        self.kept.clear()
        if gathered is not None:
            self.tally.hold(-gathered.nbytes)

    def _count(self, route: Route, values: torch.Tensor) -> None:
        """Add what the quantization did to a route's values, a stack, to its facts."""
        held = FourBits(*cut(self.live, route.to))
        self.made[route] = fingerprint(*held)
        experts = self._experts(route, 0, rows_of(route))
        of_matrices = totals(values, held)
        for some in [of_matrices] if experts != ONE else of_matrices[:, None]:
            self.facts[route.entry].count(some, experts)

    def finish(self) -> None:
        for route in self.routes:
            self._tell(route, KIND, self.made[route])
            facts = self.facts[route.entry]
            _, scales, scale_2 = cut(self.live, route.to)
            at = self._experts(route, 0, rows_of(route))
            facts.count_scales(scales, "e4m3", at)
            facts.count_scales(scale_2, "beneath", at)

    def read(self, route: Route) -> str:
        return fingerprint(*cut(self.live, route.to))

    def seal(self) -> Any:
        return None  # all of it can be read

    def verify(self) -> None:
        for route, made in self.made.items():
            self.facts[route.entry].check(
                self.read(route) == made == self.facts[route.entry].fingerprints[name_of(route)]
            )


def as_reference(weight: torch.Tensor, operand: Operand, amax: torch.Tensor, held: FourBits) -> torch.Tensor:
    """Return whether codes and scales are bit for bit those of the reference cast, some rows at a time."""
    step = max(BLOCK, _AT_ONCE // weight.shape[-1] // BLOCK * BLOCK)  # whole squares
    same = [_same(held.weight_scale_2.view(-1), weight_scale_2(amax.float(), operand.largest_scale).view(-1))]
    for matrix, largest, codes, scales in zip(
        _stack(weight), amax.view(-1), _stack(held.weight), _stack(held.weight_scale), strict=True
    ):
        for first in range(0, len(matrix), step):
            some = slice(first, first + step)
            expected = nvfp4.cast_reference(matrix[some], operand, largest)
            same += map(_same, (codes[some], scales[some]), expected)
    return torch.stack(same).all()


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.view(torch.uint8) == other.view(torch.uint8)).all()


_AT_ONCE = 1 << 20
"""The elements that the reference casts at a time: it needs a few dozen bytes for each."""


def cut(held: FourBits, box: Box) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes, the block scales, and the scales beneath, of a part of a weight or of a stack."""
    (first, last), (start, stop), (left, right) = _box(box)
    codes = _stack(held.weight)[first:last, start:stop, left // 2 : right // 2]
    scales = _stack(held.weight_scale)[first:last, start:stop, left // BLOCK : right // BLOCK]
    return codes, scales, held.weight_scale_2.view(-1)[first:last]


def _stack(tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix as a stack of one."""
    return tensor if tensor.dim() == 3 else tensor[None]


def _in(values: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the values of a box as a stack."""
    return values.reshape([stop - start for start, stop in _box(box)])


def _box(box: Box) -> Box:
    return box if len(box) == 3 else ((0, 1), *box)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in box)
