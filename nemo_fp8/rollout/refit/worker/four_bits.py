"""Write NVFP4 weights: gathered, quantized beneath the amax of all that shares a scale, and copied in place.

The FP32 scale beneath the block scales is made of the largest magnitude of all parts of a matrix, on all workers: no
block can be quantized before the last part has come. So a matrix is gathered in its source dtype, or the experts of a
layer; then it is quantized as at load, and codes and scales go to the memory that the kernel reads, at the same
addresses. A part has the fingerprint of its rows of codes and block scales and of the scale beneath, which a trainer
can compute: :func:`nemo_fp8.rollout.refit.fingerprint.fingerprint` of the three.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel

from nemo_fp8.numerics.modelopt import BLOCK, FourBits
from nemo_fp8.numerics.statistics import Statistics
from nemo_fp8.rollout.engine.four_bit_experts import Nvfp4MoEMethod
from nemo_fp8.rollout.engine.four_bits import Nvfp4LinearMethod
from nemo_fp8.rollout.refit.fingerprint import fingerprint
from nemo_fp8.rollout.refit.manifest import Box
from nemo_fp8.rollout.refit.worker.layouts import ONE, Tally
from nemo_fp8.rollout.refit.worker.routes import Route, Target
from nemo_fp8.rollout.refit.worker.sinks import Staged, StagingMemory, name_of, part_of, rows_of

KIND = "nvfp4"


def in_place(layer: Any) -> bool:
    """Return whether a layer's kernel reads codes and scales as they were made; others pack them, and are staged."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, Nvfp4MoEMethod):
        return True
    return isinstance(method, Nvfp4LinearMethod) and isinstance(method.fp8_linear, EmulationNvFp4LinearKernel)


class FourBitWeights(Staged):
    """Takes all parts of one NVFP4 parameter: of a linear, or of a layer's experts."""

    def __init__(
        self,
        tally: Tally,
        layer: Any,
        target: Target,
        routes: Iterable[Route],
        constants: Iterable[tuple[Box, float]],
        room: StagingMemory,
    ) -> None:
        self.routes = list(routes)
        super().__init__(tally, layer, self.routes, [(target, [*constants])], {}, room)
        self.name = target.parameter
        live = layer.quant_method.live(layer, self.name)
        self.live = FourBits(*(tensor.data for tensor in live))
        self.made: dict[Route, str] = {}

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        if self.name not in self.values:
            self.values[self.name] = self._empty(self.name)
        place = self.values[self.name].data[_slices(part_of(route, row, len(values)))]
        place.copy_(values.reshape(place.shape))

    def complete(self, entry: int) -> None:
        """Note that all rows of a tensor have come; quantize the matrix if it was the last one."""
        self.awaited.discard(entry)
        if not self.awaited and self.values:
            weight = self.values.pop(self.name).data
            for _, filled in self.constants:
                for box, value in filled:
                    weight[_slices(box)].fill_(value)
            found = self.layer.quant_method.quantized(self.layer, weight, statistics=True)
            for live, made in zip(_tensors(self.live), _tensors(found), strict=True):
                live.copy_(made)
            self.layer.quant_method.follow(self.layer)
            for route in self.routes:
                self._count(route, found)
            self.tally.hold(-weight.nbytes)

    def _count(self, route: Route, found: FourBits) -> None:
        """Add what the quantization did to a route's part to its facts."""
        self.made[route] = fingerprint(*cut(found, route.to))
        facts, experts = self.facts[route.entry], self._experts(route, 0, rows_of(route))
        matrices, (start, stop), (left, right) = _box(route.to)
        for i, m in enumerate(range(*matrices)):
            at = experts if experts == ONE else slice(experts.start + i, experts.start + i + 1)
            part = _part(found.statistics[m], slice(start, stop), slice(left // BLOCK, right // BLOCK))
            facts.count(part.totals(), at)

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


def cut(held: FourBits, box: Box) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes, the block scales, and the scales beneath, of a part of a weight or of a stack."""
    (first, last), (start, stop), (left, right) = _box(box)
    stack = held.weight.dim() == 3
    weight, scale = (t if stack else t[None] for t in (held.weight, held.weight_scale))
    codes = weight[first:last, start:stop, left // 2 : right // 2]
    return (
        codes,
        scale[first:last, start:stop, left // BLOCK : right // BLOCK],
        held.weight_scale_2.view(-1)[first:last],
    )


def _box(box: Box) -> Box:
    return box if len(box) == 3 else ((0, 1), *box)


def _part(statistics: Statistics, rows: slice, columns: slice) -> Statistics:
    tensors = {f.name: getattr(statistics, f.name)[rows, columns] for f in fields(statistics) if f.name != "format"}
    return replace(statistics, **tensors)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in box)


def _tensors(held: FourBits) -> tuple[torch.Tensor, ...]:
    return held.weight, held.weight_scale, held.weight_scale_2
