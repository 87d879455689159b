"""Write pieces of pushed tensors into the layers of a running model: five ways, and ``Plan.way`` chooses.

    blocks     FP8 weights in a known layout: quantized into the live codes and scales as they come (blocks.py)
    four bits  NVFP4 weights, whose last scale is made of all parts: gathered, then quantized in place (four_bits.py)
    scales     the scales of an FP8 KV cache: kept until the end, then set as vLLM sets them at load
    in place   parameters that lie in memory as they were loaded (norms, embeddings, biases): copied
    staged     all others: gathered until the layer is complete, and processed as at load (staged.py)

``blocks`` and ``in place`` need no memory beside the model and keep every address, so CUDA graphs and tied weights stay
valid. ``staged`` holds one layer beside the model. A kernel needs it that packs a whole weight in a layout of its own,
as oneDNN does with BF16 on a CPU. There the first and the fourth way have short cuts that a plan keeps: all tensors
that a message has whole are written by one call (whole.py), and pieces of values that are copied, or of codes that a
trainer has cast, by jobs that are kept for them (arrived.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.moved import renamed
from nemo_fp8.numerics import kernels
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, fingerprint
from nemo_fp8.rollout.refit.manifest import Box, Manifest
from nemo_fp8.rollout.refit.worker.layouts import ONE, Tally
from nemo_fp8.rollout.refit.worker.routes import Route

if not TYPE_CHECKING:  # see nemo_fp8.moved
    _WORKER = "nemo_fp8.rollout.refit.worker"
    __getattr__ = renamed(
        __name__,
        {name: f"{_WORKER}.blocks.{name}" for name in ("Blocks", "ROWS", "STRIP")}
        | {name: f"{_WORKER}.staged.{name}" for name in ("Staged", "release")},
    )


class Sink:
    """Takes the pieces of some routes, writes them into the model, and keeps their facts.

    ``write`` is called for pieces in the order of their rows, then ``finish``, then, if asked for, ``verify``.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally, self.facts = tally, tally.facts
        self.prints: dict[Route, Fingerprint] = defaultdict(Fingerprint)

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        """Write ``values``, the rows of the route's source from ``row`` on. They must not be kept by reference."""
        raise NotImplementedError

    def write_staying(self, route: Route, row: int, values: torch.Tensor) -> None:
        """Do the same for values that stay where they are until the push ends: these may be kept until then."""
        self.write(route, row, values)

    def finish(self) -> None:
        """Write what waited for the end, and complete the facts: all pieces of all routes have come.

        Raises PrecisionError for values that no kernel could use, such as a scale of 0.
        """

    def read(self, route: Route) -> str | None:
        """Return the fingerprint of what lies in the model now; None if it cannot be read."""
        return None

    def seal(self) -> Any:
        """Return what is the same as long as nobody writes what ``read`` cannot read; None if it can read all."""
        return None

    def verify(self) -> None:
        """Compare what lies in the model now with what was written, by fingerprints."""
        for route in self.prints:
            there = self.read(route)
            if there is not None:
                facts = self.facts[route.entry]
                facts.check(there == facts.fingerprints[name_of(route)])

    def _copy(self, route: Route, row: int, values: torch.Tensor, place: torch.Tensor) -> None:
        """Copy values to their place, fingerprint them and note the largest, in one pass where that is possible."""
        into = viewed(place, values.shape) if place.dtype == values.dtype else None
        if into is None:
            place.copy_(values.reshape(place.shape))
        elif into.dim() == 2 and into.stride(0) == 1 and kernels.turn(values, into.t()):
            into = None  # the kernel has put them there; to write columns row by row takes many times as long
        magnitudes = self.prints[route].copy(values, into)
        self.facts[route.entry].see(magnitudes, self._experts(route, row, count_rows(values)))

    def _experts(self, route: Route, row: int, rows: int) -> slice:
        """Return which experts of a stack rows [row, row+rows) of a route's source are; ``ONE`` if it is no stack."""
        if not self.facts[route.entry].experts or not route.source:
            return ONE
        first = route.source[0][0] + row
        return slice(first, first + rows)

    def _tell(self, route: Route, kind: str, fingerprint: str) -> None:
        """Record how a route's part is kept, and its fingerprint."""
        for entry in route.entries:
            self.facts[entry].kind = kind
            self.facts[entry].fingerprints[name_of(route)] = fingerprint


class InPlace(Sink):
    """Copies pieces into a live parameter that lies in memory as it was loaded.

    ``constants`` are the boxes that vLLM's loader fills with a number, such as the padding of a vocabulary.
    """

    def __init__(
        self, tally: Tally, live: torch.Tensor, constants: Iterable[tuple[Box, float]], manifest: Manifest
    ) -> None:
        super().__init__(tally)
        self.parameter, self.live = live, live.data
        self.constants, self.manifest = list(constants), manifest

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        self._copy(route, row, values, inside(self.live, part_of(route, row, count_rows(values))))

    def fill(self) -> None:
        """Write what no tensor brings."""
        for box, value in self.constants:
            inside(self.live, box).fill_(value)

    def finish(self) -> None:
        self.fill()
        for route, print_ in self.prints.items():
            self.facts[route.entry].count_nonfinite(
                inside(self.live, route.to), self._experts(route, 0, rows_of(route))
            )
            self._tell(route, word(self.live.dtype), print_.digest())

    def read(self, route: Route) -> str:
        sizes = route.view[0] if route.source is None else [stop - start for start, stop in route.source]
        dtype = self.manifest[route.entry].torch_dtype if route.made is None else route.target.dtype
        return fingerprint(_narrowed(inside(self.live, route.to).reshape(sizes), dtype))


class KvScales(Sink):
    """Sets the scales of a layer's KV cache, all at once, by vLLM's own method for it."""

    def __init__(self, tally: Tally, layer: Any) -> None:
        super().__init__(tally)
        self.layer, self.values = layer, dict[Route, torch.Tensor]()

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        self.values[route] = values.reshape(()).float().clone()
        self.prints[route].add(values)

    def finish(self) -> None:
        for (route, _), value in zip(self.values.items(), torch.stack([*self.values.values()]).tolist(), strict=True):
            if not 0 < value < math.inf:
                raise PrecisionError(
                    f"The scale {route.target.name} is {value}.",
                    "A KV cache is divided by it.",
                    "Push positive, finite scales; nemo_fp8.rollout.kv_scales calibrates them.",
                )
        self.layer.quant_method.create_weights(self.layer)  # vLLM deletes the parameters once it has read them
        for route, scale in self.values.items():
            getattr(self.layer, route.target.parameter).data.copy_(scale)
            self._tell(route, "kv scale", self.prints[route].digest())
        self.layer.quant_method.process_weights_after_loading(self.layer)

    def seal(self) -> Any:
        return float(self.layer._k_scale), float(self.layer._v_scale)


# ---------------------------------------------------------------------- boxes


def inside(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a tensor that a box describes; the tensor itself if that is all of it."""
    for (start, stop), n in zip(box, tensor.shape, strict=True):
        if start or stop != n:
            return tensor[tuple(slice(*one) for one in box)]
    return tensor


def stacked(box: Box) -> Box:
    """Return a box of one matrix, or of several, as a box of a stack of matrices."""
    return box if len(box) == 3 else ((0, 1), *box)


def count_rows(tensor: torch.Tensor) -> int:
    """Return the number of rows of a tensor; a scalar has one. (To ask ``len`` takes as long as a small copy.)"""
    return tensor.shape[0] if tensor.shape else 1


def viewed(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """Return a view of a tensor in another shape; None if its strides have none."""
    try:
        return tensor if tensor.shape == shape else tensor.view(shape)
    except RuntimeError:
        return None


def part_of(route: Route, row: int, rows: int) -> Box:
    """Return the part of ``route.to`` that rows [row, row + rows) of the route's source go to.

    The first dimension of the source is the first of ``to`` with as many elements. For an expert's matrix of 256 rows
    that goes to ((3, 4), (0, 256), (0, 512)), rows 128:256 go to ((3, 4), (128, 256), (0, 512)).
    """
    whole = rows_of(route)
    if rows == whole:
        return route.to
    i = next(i for i, (start, stop) in enumerate(route.to) if stop - start == whole)
    start = route.to[i][0] + row
    return (*route.to[:i], (start, start + rows), *route.to[i + 1 :])


def rows_of(route: Route) -> int:
    """Return the number of rows of a route's source; a scalar has one."""
    if route.source is None:
        return route.view[0][0] if route.view[0] else 1
    return route.source[0][1] - route.source[0][0] if route.source else 1


def name_of(route: Route) -> str:
    """Return the name of a route's source, such as ``0:128,0:512``; ``whole`` for a scalar, a view if it is no box.

    What a loader computes is named by its target and by the steps. :mod:`nemo_fp8.mismatch.weights` reads these names.
    """
    if route.made is not None:
        box = ",".join(f"{start}:{stop}" for start, stop in route.to)
        return f"{box} of {route.target.name} by {route.made.words} ({route.made.digest})"
    if route.source is None:
        sizes, strides, offset = route.view
        return f"{'x'.join(map(str, sizes))} by {'x'.join(map(str, strides))} from {offset}"
    return ",".join(f"{start}:{stop}" for start, stop in route.source) or "whole"


def word(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _narrowed(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in the dtype in which they were pushed, or unchanged if that would change any of them.

    vLLM keeps some BF16 biases in FP32; both sides fingerprint the BF16 bits.
    """
    narrow = held.to(dtype)
    exact = narrow.dtype == held.dtype or bool(((narrow.to(held.dtype) == held) | held.isnan()).all())
    return narrow if exact else held
