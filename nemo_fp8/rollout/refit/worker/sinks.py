"""How a piece of a pushed tensor gets into a layer that is alive: four ways, the first that fits.

    blocks     FP8 weights in a layout that is known: quantized strip by strip into the live codes and scales
    scales     the scales of an FP8 KV cache: kept until the end, then set as vLLM sets them at load
    in place   what lies in memory as it was loaded (norms, embeddings, biases): copied
    staged     all else: gathered until the layer is whole, processed by its own method as at load, and copied

The first and the third need no memory and keep every address, so CUDA graphs and tied weights stay good. The fourth
holds one layer beside the model: it is what a kernel needs that packs a whole weight in a way of its own, as oneDNN
does with BF16 on a CPU. vLLM's method for BF16 experts packs at its first call only, and is made to do so again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_meta_tensor

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize_into, quantize_reference
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, fingerprint, together
from nemo_fp8.rollout.refit.manifest import Manifest
from nemo_fp8.rollout.refit.worker.layouts import Layout, Ledger
from nemo_fp8.rollout.refit.worker.routes import Box, Route, Target, before_loading

ROWS = 128  # of every block, and of every group that a layout moves, a multiple
STRIP = 1 << 22  # codes that are quantized, counted and packed while they lie in the cache


class Sink:
    """Where the pieces of some routes go."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.facts = ledger, ledger.facts
        self.prints: dict[Route, Fingerprint] = defaultdict(Fingerprint)

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        """``values`` are the rows of the route's source from ``row`` on."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the tensor: all of its pieces have come."""

    def read(self, route: Route) -> str | None:
        """The fingerprint of what lies in the model now; None where it cannot be read."""
        return None

    def verify(self) -> None:
        """Compare what lies in the model with what was written."""
        for route in self.prints:
            there = self.read(route)
            if there is not None:
                facts = self.facts[route.entry]
                facts.check(there == facts.fingerprints[name_of(route)])

    def _note(self, route: Route, values: torch.Tensor) -> None:
        """Values that go where they go as they are."""
        self.prints[route].add(values)
        self.facts[route.entry].see(values)

    def _tell(self, route: Route, kind: str, fingerprint: str) -> None:
        self.facts[route.entry].kind = kind
        self.facts[route.entry].fingerprints[name_of(route)] = fingerprint


class InPlace(Sink):
    """Copies pieces of a tensor straight into the engine's live parameter."""

    def __init__(
        self, ledger: Ledger, live: torch.Tensor, constants: Iterable[tuple[Box, float]], manifest: Manifest
    ) -> None:
        super().__init__(ledger)
        self.parameter, self.live = live, live.data
        self.constants, self.manifest = list(constants), manifest

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        place = _at(self.live, part_of(route, row, len(values) if values.dim() else 1))
        place.copy_(values.reshape(place.shape))
        self._note(route, values)

    def finish(self) -> None:
        for box, value in self.constants:
            _at(self.live, box).fill_(value)
        for route, print_ in self.prints.items():
            self.facts[route.entry].count_nonfinite(_at(self.live, route.to))
            self._tell(route, word(self.live.dtype), print_.digest())

    def read(self, route: Route) -> str:
        sizes = route.view[0] if route.source is None else [stop - start for start, stop in route.source]
        return fingerprint(_narrowed(_at(self.live, route.to).reshape(sizes), self.manifest[route.entry].torch_dtype))


class Blocks(Sink):
    """Quantizes into live codes and scales: of one matrix, or of one for each expert."""

    def __init__(
        self,
        ledger: Ledger,
        codes: torch.Tensor,
        scales: torch.Tensor,
        layout: Layout,
        operand: Operand,
        routes: Iterable[Route],
        against_reference: bool,
    ) -> None:
        super().__init__(ledger)
        self.against_reference = against_reference
        self.codes = codes.data if codes.dim() == 3 else codes.data[None]
        self.scales = scales.data if scales.dim() == 3 else scales.data[None]
        assert operand.block is not None
        self.layout, self.operand, (self.high, self.wide) = layout, operand, operand.block
        self.matrix = (self.codes.shape[1], self.codes.shape[2])
        self.routes = list(routes)
        self.straddling = {m for route in self.routes if not self._aligned(route) for m in self._matrices(route)}
        self.gathered: dict[int, torch.Tensor] = {}
        self.awaited = {
            m: sum(r.elements // len(self._matrices(r)) for r in self.routes if m in self._matrices(r))
            for m in self.straddling
        }
        self.scratch: torch.Tensor | None = None
        self.largest_code: dict[Route, torch.Tensor] = {}
        """Of codes that came with scales, without its sign."""

    def _matrices(self, route: Route) -> range:
        return range(*route.to[0]) if len(route.to) == 3 else range(1)

    def _aligned(self, route: Route) -> bool:
        """Whether its rows are whole blocks, here and in the tensor that they come from, and the columns all there
        are."""
        (start, stop), columns = route.to[-2:]
        if (
            route.source is None
            or columns != (0, self.matrix[1])
            or start % self.high
            or (stop % self.high and stop != self.matrix[0])
        ):
            return False
        return all(
            first % side == 0 for (first, _), side in zip(route.source[-2:], (self.high, self.wide), strict=True)
        )

    def same_grid(self, route: Route) -> bool:
        """Whether its blocks are those of the whole tensor: cut at blocks, or where the tensor itself ends."""
        if route.source is None or not self._aligned(route):
            return False
        ends = zip(route.source[-2:], route.shape[-2:], (self.high, self.wide), strict=True)
        return all(stop % side == 0 or stop == n for (_, stop), n, side in ends)

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        to = part_of(route, row, len(values))
        matrices = range(*to[0]) if len(to) == 3 else range(1)
        (start, stop), (left, right) = to[-2:]
        for m, matrix in zip(matrices, values.reshape(len(matrices), stop - start, right - left), strict=True):
            if m in self.straddling:
                self._gather(m, to, matrix)
            elif values.dtype == self.codes.dtype:
                self.layout.store(self.codes[m], start, matrix)
                self.prints[route].add(matrix)
                self.facts[route.entry].count_nan_codes(matrix)
                largest = (matrix.view(torch.uint8) & 0x7F).amax()
                self.largest_code[route] = torch.maximum(self.largest_code.get(route, largest), largest)
            else:
                self._quantize(route, m, start, matrix)

    def write_scales(self, route: Route, to: Box, scales: torch.Tensor) -> None:
        """Scales that came with codes; ``route`` is that of the codes."""
        place = self.scales[0 if len(to) == 2 else slice(*to[0])]
        (start, stop), (left, right) = to[-2:]
        place = place[..., start:stop, left:right]
        place.copy_(scales.reshape(place.shape))

    def _quantize(self, route: Route, m: int, row: int, values: torch.Tensor) -> None:
        step = max(ROWS, STRIP // self.matrix[1] // ROWS * ROWS)
        for first in range(0, len(values), step):
            strip = values[first : first + step]
            codes = self._scratch(len(strip))
            above = (row + first) // self.high
            scales = self.scales[m, above : above + -(-len(strip) // self.high)]
            self._cast(strip, codes, scales, [route])
            self.layout.store(self.codes[m], row + first, codes)
            self.prints[route].add(codes)

    def _cast(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, routes: Iterable[Route]) -> None:
        quantized = quantize_into(values, self.operand, codes, scales, statistics=True)
        assert quantized.statistics is not None
        good = self._as_reference(values, codes, scales) if self.against_reference else None
        for route in routes:
            facts = self.facts[route.entry]
            facts.count(quantized.statistics)
            if good is not None:
                facts.check(good)

    def _as_reference(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        expected, inverse, _ = quantize_reference(
            values, self.operand.block, format_of(self.operand.format), self.operand.scale
        )
        return (codes.view(torch.uint8) == expected.view(torch.uint8)).all() & (scales == inverse).all()

    def _gather(self, m: int, to: Box, values: torch.Tensor) -> None:
        """Blocks that lie in two tensors wait for both."""
        if m not in self.gathered:
            self.gathered[m] = torch.zeros(self.matrix, dtype=values.dtype, device=values.device)
            self.ledger.hold(self.gathered[m].nbytes)
        _at(self.gathered[m], to[-2:]).copy_(values)
        self.awaited[m] -= values.numel()
        if self.awaited[m] == 0:
            whole = self.gathered.pop(m)
            self.ledger.hold(-whole.nbytes)
            codes = torch.empty(self.matrix, dtype=self.codes.dtype, device=whole.device)
            routes = [route for route in self.routes if m in self._matrices(route)]
            self._cast(whole, codes, self.scales[m], routes)
            self.layout.store(self.codes[m], 0, codes)
            for route in routes:
                self.prints[route].add(_at(codes, route.to[-2:]))

    def _scratch(self, rows: int) -> torch.Tensor:
        if self.scratch is None or len(self.scratch) < rows:
            self.scratch = torch.empty((rows, self.matrix[1]), dtype=self.codes.dtype, device=self.codes.device)
        return self.scratch[:rows]

    def finish(self) -> None:
        self.scratch = None
        for route in self.routes:
            scales = self._scales(route)
            self._tell(route, "fp8", together([self.prints[route].digest(), fingerprint(scales)]))
            facts = self.facts[route.entry]
            facts.aligned = facts.aligned and self.same_grid(route)
            facts.count_scales(scales, self.operand.scale)
            if route in self.largest_code:
                facts.see_codes(self.largest_code[route].view(self.codes.dtype), scales)

    def _scales(self, route: Route) -> torch.Tensor:
        """The live scales of the blocks that a tensor's rows lie in."""
        (start, stop), (left, right) = route.to[-2:]
        above, below, left, right = start // self.high, -(-stop // self.high), left // self.wide, -(-right // self.wide)
        return self.scales[list(self._matrices(route)), above:below, left:right]

    def read(self, route: Route) -> str | None:
        (start, stop), (left, right) = route.to[-2:]
        codes = Fingerprint()
        for m in self._matrices(route):
            codes.add(self._read(m, start, stop)[:, left:right])
        return together([codes.digest(), fingerprint(self._scales(route))])

    def _read(self, m: int, start: int, stop: int) -> torch.Tensor:
        """The codes of these rows, from the memory that the kernel reads."""
        group = self.layout.group
        first, last = start // group * group, -(-stop // group) * group
        return self.layout.load(self.codes[m], first, last - first)[start - first : stop - first]


class KvScales(Sink):
    """Sets the scales of a KV cache, all of a layer at once."""

    def __init__(self, ledger: Ledger, layer: Any) -> None:
        super().__init__(ledger)
        self.layer, self.values = layer, dict[Route, torch.Tensor]()

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        value = values.reshape(()).float().clone()
        if not (bool(value.isfinite()) and float(value) > 0):
            raise PrecisionError(
                f"The scale {route.target.name} is {float(value)}.",
                "A KV cache is divided by it.",
                "Push positive, finite scales; nemo_fp8.rollout.kv_scales calibrates them.",
            )
        self.values[route] = value
        self.prints[route].add(values)

    def finish(self) -> None:
        self.layer.quant_method.create_weights(self.layer)
        for route, value in self.values.items():
            getattr(self.layer, route.target.parameter).data.copy_(value)
            self._tell(route, "kv scale", self.prints[route].digest())
        self.layer.quant_method.process_weights_after_loading(self.layer)


class Staged(Sink):
    """Gathers a layer's tensors, and has its own method process them as at load."""

    def __init__(
        self,
        ledger: Ledger,
        layer: Any,
        routes: Iterable[Route],
        constants: Iterable[tuple[Target, list[tuple[Box, float]]]],
    ) -> None:
        super().__init__(ledger)
        self.layer, self.values = layer, dict[str, torch.Tensor]()
        self.constants = list(constants)
        self.awaited = {route.entry for route in routes}

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        name = route.target.parameter
        if name not in self.values:
            self.values[name] = self._empty(name)
        place = _at(self.values[name].data, part_of(route, row, len(values) if values.dim() else 1))
        place.copy_(values.reshape(place.shape))
        self._note(route, values)

    def complete(self, entry: int) -> None:
        """All of a tensor has come, to every worker: with the last one, all of them process the layer at once.

        They must, since a method may ask the others (for the amax of a weight that has one scale).
        """
        self.awaited.discard(entry)
        if not self.awaited and self.values:
            size = sum(value.nbytes for value in self.values.values())
            for route in self.prints:
                self.facts[route.entry].count_nonfinite(_at(self.values[route.target.parameter].data, route.to))
            self._process()
            self.ledger.hold(-size)

    def _empty(self, name: str) -> torch.Tensor:
        before, _ = get_layerwise_info(self.layer).restore_metadata
        with get_layerwise_info(self.layer).restore_device:
            made: torch.Tensor = materialize_meta_tensor(before_loading(before[name], self.layer))
        self.ledger.hold(made.nbytes)
        return made

    def _process(self) -> None:
        layer, method = self.layer, self.layer.quant_method
        for target, filled in self.constants:
            for box, value in filled:
                _at(self.values[target.parameter].data, box).fill_(value)
        live = dict(layer._parameters)
        kernel = {name: getattr(method, name) for name in ("moe_kernel", "moe_quant_config") if hasattr(method, name)}
        try:
            layer._parameters.clear()
            layer._parameters.update(
                {name: tensor for name, tensor in live.items() if name in SKIP_TENSORS} | self.values
            )
            layer.__dict__.pop("_already_called_process_weights_after_loading", None)
            if "moe_kernel" in kernel:
                method.moe_kernel = None  # with a kernel there, the method takes the weights for packed
            release(layer)
            method.process_weights_after_loading(layer)
            if hasattr(layer, "update_param_tp_status"):
                layer.update_param_tp_status()
            for name, tensor in live.items():
                made = layer._parameters.get(name)
                if tensor is not None and made is not None and made is not tensor:
                    tensor.data.copy_(made.data)
        finally:
            layer._parameters.clear()
            layer._parameters.update(live)
            for name, value in kernel.items():
                setattr(method, name, value)
            self.values.clear()

    def finish(self) -> None:
        for route, print_ in self.prints.items():
            self._tell(route, word(route.target.dtype), print_.digest())


# ---------------------------------------------------------------------- boxes


def _at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(*one) for one in box)]


def part_of(route: Route, row: int, rows: int) -> Box:
    """Where some rows of a route's source go: its first dimension is the first of the target's that is longer than
    one."""
    whole = rows_of(route)
    if rows == whole:
        return route.to
    i = next(i for i, (start, stop) in enumerate(route.to) if stop - start == whole)
    start = route.to[i][0] + row
    return (*route.to[:i], (start, start + rows), *route.to[i + 1 :])


def rows_of(route: Route) -> int:
    """Count the rows of the tensor that a parameter's rows come from."""
    if route.source is None:
        return route.view[0][0]
    return route.source[0][1] - route.source[0][0] if route.source else 1


def name_of(route: Route) -> str:
    """The part of its tensor, as :mod:`nemo_fp8.mismatch.weights` reads it: a box, or a view that is none (a
    transpose)."""
    if route.source is None:
        sizes, strides, offset = route.view
        return f"{'x'.join(map(str, sizes))} by {'x'.join(map(str, strides))} from {offset}"
    return ",".join(f"{start}:{stop}" for start, stop in route.source) or "whole"


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrowed(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is held, in the type in which it was pushed; as it is if it has bits that this type has not."""
    narrow = held.to(dtype)
    exact = narrow.dtype == held.dtype or bool(((narrow.to(held.dtype) == held) | held.isnan()).all())
    return narrow if exact else held


def release(layer: Any) -> None:
    """Let go of the weight that a CPU kernel packed into memory of its own, before another is packed."""
    if "cpu_linear" in vars(layer) and isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
        layer.cpu_linear = None
