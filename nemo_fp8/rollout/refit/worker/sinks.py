"""Write pieces of pushed tensors into the layers of a running model: five ways, and ``Plan.way`` chooses.

    blocks     FP8 weights in a known layout: quantized strip by strip into the live codes and scales
    four bits  NVFP4 weights, whose last scale is made of all parts: gathered, then quantized in place (four_bits.py)
    scales     the scales of an FP8 KV cache: kept until the end, then set as vLLM sets them at load
    in place   parameters that lie in memory as they were loaded (norms, embeddings, biases): copied
    staged     all others: gathered until the layer is complete, processed by its own method as at load, and copied

``blocks`` and ``in place`` need no memory beside the model and keep every address, so CUDA graphs and tied weights stay
valid. ``staged`` holds one layer beside the model. A kernel needs it that packs a whole weight in a layout of its own,
as oneDNN does with BF16 on a CPU. Small tensors take the first and the fourth way by a table there, all that a message
has in one call (small.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from nemo_fp8.contract import Operand
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.kernels import Order, build
from nemo_fp8.numerics.kernels.cpu import CastJob, cast_job
from nemo_fp8.numerics.quantize import STRIP, quantize_into, quantize_reference
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, fingerprint, together
from nemo_fp8.rollout.refit.manifest import Box, Manifest
from nemo_fp8.rollout.refit.patch import blocks_of
from nemo_fp8.rollout.refit.worker.layouts import ONE, Layout, Tally
from nemo_fp8.rollout.refit.worker.packing import StagingMemory, packed, packs_columns, release
from nemo_fp8.rollout.refit.worker.routes import Route, Target, before_loading

ROWS = BLOCK  # a strip has a multiple of so many rows, hence whole blocks, and whole groups of every layout


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

    def finish(self) -> None:
        for box, value in self.constants:
            inside(self.live, box).fill_(value)
        for route, print_ in self.prints.items():
            self.facts[route.entry].count_nonfinite(
                inside(self.live, route.to), self._experts(route, 0, rows_of(route))
            )
            self._tell(route, word(self.live.dtype), print_.digest())

    def read(self, route: Route) -> str:
        sizes = route.view[0] if route.source is None else [stop - start for start, stop in route.source]
        dtype = self.manifest[route.entry].torch_dtype if route.made is None else route.target.dtype
        return fingerprint(_narrowed(inside(self.live, route.to).reshape(sizes), dtype))


class Blocks(Sink):
    """Quantizes pieces into the live codes and scales of one matrix, or of one for each expert.

    A matrix whose routes all begin and end at blocks is written strip by strip, since no block needs a second piece. If
    any route does not (a cut of tensor parallelism, or of a fused weight, in the middle of a block), the matrix is
    *straddling*: it is gathered in its source dtype, and quantized when the last of its elements has come.

    ``routes`` are all that lead to this parameter. ``against_reference`` compares each cast with the reference's bits.
    """

    def __init__(
        self,
        tally: Tally,
        codes: torch.Tensor,
        scales: torch.Tensor,
        layout: Layout,
        operand: Operand,
        routes: Iterable[Route],
        against_reference: bool,
    ) -> None:
        super().__init__(tally)
        self.against_reference = against_reference
        self.codes = codes.data if codes.dim() == 3 else codes.data[None]
        self.scales = scales.data if scales.dim() == 3 else scales.data[None]
        assert operand.block is not None
        self.layout, self.operand, self.block = layout, operand, operand.block
        self.high, self.wide = self.block
        self.matrix = (self.codes.shape[1], self.codes.shape[2])
        self.routes = list(routes)
        self.straddling = {m for route in self.routes if not self._aligned(route) for m in self._matrices(route)}
        self.gathered: dict[int, torch.Tensor] = {}
        # Elements that each straddling matrix still waits for. A route to several experts has as many for each.
        self.awaited = {
            m: sum(r.elements // len(self._matrices(r)) for r in self.routes if m in self._matrices(r))
            for m in self.straddling
        }
        self.scratch: torch.Tensor | None = None
        self.largest_code: dict[Route, torch.Tensor] = {}
        """The largest magnitude of codes that came with scales, of each expert."""

    def _matrices(self, route: Route) -> range:
        """Return the numbers of the matrices (experts) that a route leads to; 0 where there is only one."""
        return range(*route.to[0]) if len(route.to) == 3 else range(1)

    def _aligned(self, route: Route) -> bool:
        """Return whether a route can be quantized strip by strip.

        Its rows are whole blocks and its columns all columns of the matrix. In the pushed tensor, too, it begins at a
        block, so pieces, which are cut between blocks of that tensor, are whole blocks here.
        """
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
        """Return whether a route's blocks are those of the unsharded tensor: each end is at a block or the tensor's
        end."""
        if route.source is None or not self._aligned(route):
            return False
        ends = zip(route.source[-2:], route.shape[-2:], (self.high, self.wide), strict=True)
        return all(stop % side == 0 or stop == n for (_, stop), n, side in ends)

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        matrices, start, stack = self._as_stack(route, row, values)
        at = self._experts(route, row, values.shape[0])
        if values.dtype == self.codes.dtype:
            self._see_codes(route, self._take_codes(route, matrices, start, stack), at)
            if not values.is_cpu:  # a CPU looks in the end whether there are any; to ask a GPU is slower than to count
                self.facts[route.entry].count_nan_codes(stack, at)
            return
        if not self.straddling:
            self._quantize(route, matrices, start, stack, at)
            self._close(route, row + values.shape[0])
            return
        to = part_of(route, row, values.shape[0])
        for m, matrix in zip(matrices, stack, strict=True):
            one = at if at == ONE else slice(at.start + m - matrices.start, at.start + m - matrices.start + 1)
            if m in self.straddling:
                self._gather(m, to, matrix)
            else:
                self._quantize(route, range(m, m + 1), start, matrix[None], one)

    def write_cast(self, route: Route, row: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write codes from ``row`` on, and their scales, which the sender has cast as this engine does. It has seen the
        values, and counts what became of them."""
        self._take_codes(route, *self._as_stack(route, row, codes), magnitudes=False)
        self.write_scales(route, blocks_of(part_of(route, row, codes.shape[0]), self.block), scales)
        self._close(route, row + codes.shape[0])

    def _close(self, route: Route, rows: int) -> None:
        """Keep no more of a fingerprint than it needs, once all rows have come: the next tensor's sums have its
        memory."""
        if rows == rows_of(route):
            self.prints[route].close()

    def _as_stack(self, route: Route, row: int, values: torch.Tensor) -> tuple[range, int, torch.Tensor]:
        """Return the matrices that rows of a route's source go to, their first row there, and the rows as [matrices,
        rows, columns]."""
        to = part_of(route, row, values.shape[0])
        matrices = range(*to[0]) if len(to) == 3 else range(1)
        (start, stop), (left, right) = to[-2:]
        return matrices, start, values.reshape(len(matrices), stop - start, right - left)

    def _take_codes(
        self, route: Route, matrices: range, row: int, codes: torch.Tensor, magnitudes: bool = True
    ) -> torch.Tensor:
        """Write codes, [matrices, rows, columns], from ``row`` on: all as one matrix if they lie like that. Return the
        largest magnitude of each of their rows, if these are wanted. A kernel of a CPU reads them once."""
        live, _ = self._live(matrices, row, codes.shape[1])
        if live is None:
            each = zip(matrices, codes, strict=True)
            return torch.cat(
                [self._take_codes(route, range(m, m + 1), row, matrix[None], magnitudes) for m, matrix in each]
            )
        flat = codes.reshape(-1, codes.shape[2])
        done = kernels.sums(flat, live, magnitudes, self.layout.order)
        if done is None:
            self.layout.store(live, 0, flat)
            return self.prints[route].copy(flat, None)
        of_rows, of_columns, largest = done
        self.prints[route].add_sums(of_rows, of_columns, flat.shape[1])
        return largest

    def _see_codes(self, route: Route, magnitudes: torch.Tensor, at: slice) -> None:
        """Note the largest magnitude of the codes of each expert; each has as many rows as another."""
        largest = magnitudes.view(at.stop - at.start, -1).amax(1)
        seen = self.largest_code.setdefault(route, largest.new_zeros(max(1, self.facts[route.entry].experts)))
        torch.maximum(seen[at], largest, out=seen[at])

    def write_scales(self, route: Route, to: Box, scales: torch.Tensor) -> None:
        """Write scales that came with codes. ``route`` is that of the codes; ``to`` is in units of blocks."""
        place = self.scales[0 if len(to) == 2 else slice(*to[0])]
        (start, stop), (left, right) = to[-2:]
        place = place[..., start:stop, left:right]
        place.copy_(scales.reshape(place.shape))

    def _quantize(self, route: Route, matrices: range, row: int, values: torch.Tensor, at: slice) -> None:
        """Quantize whole blocks of some matrices, from ``row`` on; ``values`` are [matrices, rows, columns].

        All matrices are quantized as one, whose rows are theirs, if their blocks do not run into one another and they
        lie in memory like that: a stack of experts costs as much as one matrix. Strips are of whole matrices then,
        or of rows that fit the cache. A kernel takes all rows together where nobody reads the codes again: that of a
        CPU reads every value once and writes every code once, and between two calls all threads but one wait; a GPU
        waits between two launches.
        """
        rows, wide = values.shape[1:]
        codes, scales = self._live(matrices, row, rows)
        if codes is None or scales is None:
            if rows % self.high == 0:
                self._quantize_beside(route, matrices, row, values, at)
                return
            for i, m in enumerate(matrices):
                one = at if at == ONE else slice(at.start + i, at.start + i + 1)
                self._quantize(route, range(m, m + 1), row, values[i : i + 1], one)
            return
        flat = values.reshape(-1, wide)
        at_once = not self.against_reference and (not flat.is_cpu or build.library() is not None)
        step = max(ROWS, flat.shape[0] if at_once else STRIP // wide // ROWS * ROWS)
        if len(matrices) > 1:
            step = max(rows, step // rows * rows)  # whole experts
        for first in range(0, flat.shape[0], step):
            strip, above = flat[first : first + step], first // self.high
            high = strip.shape[0]
            into = scales[above : above + -(-high // self.high)]
            there = at
            if len(matrices) > 1 and at != ONE:
                there = slice(at.start + first // rows, at.start + (first + high) // rows)
            self._cast(strip, codes[first : first + high], into, route, there)

    def _quantize_beside(self, route: Route, matrices: range, row: int, values: torch.Tensor, at: slice) -> None:
        """Quantize some rows of each matrix of a stack, as one of several workers has them, and copy the results. Whole
        blocks are whole groups of any layout, so they lie beside the stack as they do in it."""
        rows, wide = values.shape[1:]
        below, step = row + rows, max(1, STRIP // (rows * wide))
        room = self.codes.new_empty(min(step, len(matrices)) * rows, wide)
        for first in range(0, len(matrices), step):
            some = values[first : first + step]
            there = at if at == ONE else slice(at.start + first, at.start + first + len(some))
            made = room[: len(some) * rows]
            scales = self.scales.new_empty((len(some) * rows // self.high, self.scales.shape[2]))
            self._cast(some.reshape(-1, wide), made, scales, route, there)
            live = slice(matrices.start + first, matrices.start + first + len(some))
            place = self.codes[live, row:below]
            place.view(torch.uint8).copy_(made.view(torch.uint8).view(place.shape))
            place = self.scales[live, row // self.high : below // self.high]
            place.copy_(scales.view(place.shape))

    def job(self, route: Route, x: torch.Tensor) -> CastJob | None:
        """Return the cast of a route's whole matrix ``x``, which may have no memory, as a job; None if it is none."""
        matrices, ((start, stop), _) = self._matrices(route), route.to[-2:]
        if self.straddling or len(matrices) > 1 or x.dtype == self.codes.dtype:
            return None
        codes, scales = self._live(matrices, start, stop - start)
        if codes is None or scales is None or codes.shape != x.shape:
            return None
        return cast_job(x, self.block, self.operand.format, self.operand.scale, scales, codes, self.layout.order)

    def _live(self, matrices: range, row: int, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the live codes and scales of some rows of these matrices, as one matrix; None if they are no such one.

        Rows that begin and end with a block are whole groups of any layout.
        """
        below = row + rows
        if len(matrices) == 1:
            codes, scales = self.codes[matrices.start], self.scales[matrices.start]
            return codes[row:below], scales[row // self.high : -(-below // self.high)]
        codes, scales = (x[matrices.start : matrices.stop] for x in (self.codes, self.scales))
        whole = rows == self.matrix[0] and rows % self.high == 0
        if not whole or not codes.is_contiguous() or not scales.is_contiguous():
            return None, None
        return codes.flatten(0, 1), scales.flatten(0, 1)

    def _cast(self, values: torch.Tensor, live: torch.Tensor, scales: torch.Tensor, route: Route, at: slice) -> None:
        """Quantize the rows of some experts into ``live`` codes and scales; add what that did to the route's facts, and
        the codes to its fingerprint. A kernel leaves them in any order, but what is compared has to be in plain one."""
        order, summed = self.layout.order, None
        if self.layout.plain or not self.against_reference:
            summed = kernels.quantize_summed(
                values, self.block, self.operand.format, self.operand.scale, (live, scales), at.stop - at.start, order
            )
        if summed is not None:
            self.prints[route].add_sums(summed.of_rows, summed.of_columns, live.shape[1])
            self.facts[route.entry].count(summed.totals, at)
            self._compare(values, live, scales, [route])
            return
        made = live if self.layout.plain else self._scratch(values.shape[0])
        self._cast_for(values, made, scales, [(route, at)])
        self.prints[route].add(made)
        if made is not live:
            self.layout.store(live, 0, made)

    def _cast_for(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, routes: Sequence[tuple[Route, slice]]
    ) -> None:
        """Quantize ``values``, and add what that did to the facts of all these routes."""
        statistics = quantize_into(values, self.operand, codes, scales, statistics=True).statistics
        assert statistics is not None
        for route, at in routes:
            self.facts[route.entry].count(statistics.totals(at.stop - at.start), at)
        self._compare(values, codes, scales, [route for route, _ in routes])

    def _compare(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, routes: Iterable[Route]
    ) -> None:
        """Note whether codes and scales are bit for bit those of the reference cast, if that is asked for."""
        if self.against_reference:
            good = self._as_reference(values, codes, scales)
            for route in routes:
                self.facts[route.entry].check(good)

    def _as_reference(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        expected, inverse, _ = quantize_reference(
            values, self.operand.block, format_of(self.operand.format), self.operand.scale
        )
        return (codes.view(torch.uint8) == expected.view(torch.uint8)).all() & (scales == inverse).all()

    def _gather(self, m: int, to: Box, values: torch.Tensor) -> None:
        """Add values to straddling matrix ``m``, and quantize it when it is complete."""
        if m not in self.gathered:
            self.gathered[m] = torch.zeros(self.matrix, dtype=values.dtype, device=values.device)
            self.tally.hold(self.gathered[m].nbytes)
        inside(self.gathered[m], to[-2:]).copy_(values)
        self.awaited[m] -= values.numel()
        if self.awaited[m] == 0:
            whole = self.gathered.pop(m)
            self.tally.hold(-whole.nbytes)
            codes = torch.empty(self.matrix, dtype=self.codes.dtype, device=whole.device)
            routes = [route for route in self.routes if m in self._matrices(route)]
            self._cast_for(whole, codes, self.scales[m], [(route, self._expert(route, m)) for route in routes])
            self.layout.store(self.codes[m], 0, codes)
            for route in routes:
                self.prints[route].add(inside(codes, route.to[-2:]))

    def _expert(self, route: Route, m: int) -> slice:
        """Return which expert of a route's tensor matrix ``m`` is; ``ONE`` if it is no stack."""
        return self._experts(route, m - route.to[0][0], 1) if len(route.to) == 3 else ONE

    def _scratch(self, rows: int) -> torch.Tensor:
        """Return memory for the codes of so many rows, in plain order; it is used again for every strip."""
        if self.scratch is None or len(self.scratch) < rows:
            self.scratch = torch.empty((rows, self.matrix[1]), dtype=self.codes.dtype, device=self.codes.device)
        return self.scratch[:rows]

    def finish(self) -> None:
        self.scratch = None
        for route in self.prints:
            scales = self.scales_of(route)
            self._tell(route, "fp8", together([self.prints[route].digest(), fingerprint(scales)]))
            facts = self.facts[route.entry]
            facts.aligned = facts.aligned and self.same_grid(route)
            at = self._experts(route, 0, rows_of(route))
            facts.count_scales(scales, self.operand.scale, at)
            if route in self.largest_code:
                largest = self.largest_code[route][at]
                facts.see_codes(largest, scales, at)
                if largest.is_cpu and largest.isnan().any():
                    facts.count_nan_codes(self._codes_of(route), at)

    def _codes_of(self, route: Route) -> torch.Tensor:
        """Return the live codes of a route's part in plain order, as a stack."""
        (start, stop), (left, right) = route.to[-2:]
        matrices = [self._read(self.codes[m], start, stop)[:, left:right] for m in self._matrices(route)]
        return torch.stack([matrix.view(torch.uint8) for matrix in matrices])

    def scales_of(self, route: Route) -> torch.Tensor:
        """Return the live scales of all blocks that a route touches."""
        (start, stop), (left, right) = route.to[-2:]
        above, below, left, right = start // self.high, -(-stop // self.high), left // self.wide, -(-right // self.wide)
        matrices = self._matrices(route)
        return self.scales[matrices.start : matrices.stop, above:below, left:right]

    def read(self, route: Route, codes: Fingerprint | None = None, row: int = 0) -> str | None:
        """Return the fingerprint of a route's part. ``codes`` has the rows before ``row`` already."""
        codes, ((start, stop), (left, right)), matrices = codes or Fingerprint(), route.to[-2:], self._matrices(route)
        stack = self.codes[matrices.start : matrices.stop]
        if self.layout.plain and len(matrices) > 1:
            codes.add(stack[:, start:stop, left:right])
        elif len(matrices) > 1 and stop - start == self.matrix[0] and stack.is_contiguous():
            self._read_into(codes, stack.flatten(0, 1), (0, len(stack) * stop), (left, right))
        else:
            for matrix in stack:
                self._read_into(codes, matrix, (start + row, stop), (left, right))
        return together([codes.digest(), fingerprint(self.scales_of(route))])

    def read_rows(self, route: Route, first: int, last: int, into: Fingerprint) -> None:
        """Add the codes of rows [first, last) of a route's part, which lies in one matrix, to a fingerprint."""
        (start, _), columns = route.to[-2:]
        self._read_into(into, self.codes[self._matrices(route)[0]], (start + first, start + last), columns)

    def _read_into(
        self, print_: Fingerprint, matrix: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int]
    ) -> None:
        """Add codes of a live matrix to a fingerprint, from the memory that the kernel reads."""
        (first, last), (left, right) = rows, columns
        if first >= last:
            return
        summed = None
        if self.layout.order == Order.AMX and first % self.layout.group == 0:
            summed = kernels.sums_of_amx(matrix[first:last], columns)
        if summed is None:
            print_.add(self._read(matrix, first, last)[:, left:right])
        else:
            print_.add_sums(*summed, right - left)

    def _read(self, matrix: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the codes of rows start:stop of a live matrix in plain order."""
        group = self.layout.group
        first, last = start // group * group, -(-stop // group) * group  # a layout loads whole groups
        return self.layout.load(matrix, first, last - first)[start - first : stop - first]


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


COVERED = {
    "moe_kernel": "where there is a kernel, the method believes the weights to be packed",
    "moe_quant_config": "the method makes another one, of the gathered weights, and kernels hold that of the live ones",
}
"""What a layer's method holds beside its class, and gets back when gathered weights have been processed; and why."""
VIEWS = {"conv1d": ("weight", "conv_weights")}
"""A layer's name -> its parameter, and the view of it that the module around the layer made when it was constructed.

Mamba 2 convolves by the view. Where a CPU packs the parameter (AVX-512 with BF16), the view goes on to hold what was
loaded, and no longer follows the parameter.
"""


class Staged(Sink):
    """Gathers all tensors of a layer, and has the layer's own method process them as at load.

    ``routes`` are all that lead to the layer; ``constants`` are the boxes that vLLM's loader fills with a number.
    ``views`` are tensors beside the layer that hold a parameter as it was before it was processed. ``room`` is the
    memory that all staged layers of a push share.
    """

    def __init__(
        self,
        tally: Tally,
        layer: Any,
        routes: Iterable[Route],
        constants: Iterable[tuple[Target, list[tuple[Box, float]]]],
        views: Mapping[str, torch.Tensor],
        room: StagingMemory,
    ) -> None:
        super().__init__(tally)
        self.layer, self.values, self.views, self.room = layer, dict[str, torch.Tensor](), views, room
        self.constants = list(constants)
        self.awaited = {entry for route in routes for entry in route.entries}

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        name = route.target.parameter
        if name not in self.values:
            self.values[name] = self._empty(name)
        rows = count_rows(values)
        self._copy(route, row, values, inside(self.values[name].data, part_of(route, row, rows)))

    def complete(self, entry: int) -> None:
        """Note that all rows of a tensor have come; process the layer if it was the last one.

        Every worker gets the same rows in the same order, so all process a layer at the same time. They must: a method
        may talk to the other workers, for the amax of a weight that has one scale.
        """
        self.awaited.discard(entry)
        if not self.awaited and self.values:
            size = sum(value.nbytes for value in self.values.values())
            for route in self.prints:
                held = inside(self.values[route.target.parameter].data, route.to)
                self.facts[route.entry].count_nonfinite(held, self._experts(route, 0, rows_of(route)))
            self._process()
            self.tally.hold(-size)

    def _empty(self, name: str) -> torch.Tensor:
        """Return memory for a parameter as it is before loading: with its shape, type and loader."""
        info = get_layerwise_info(self.layer)
        like = before_loading(info.restore_metadata[0][name], self.layer)
        if name == "weight" and packs_columns(self.layer, like, info.restore_device):
            made = self.room.take(like.data.new_empty(like.shape[::-1]), info.restore_device).t()
        else:
            made = self.room.take(like.data, info.restore_device)
        made.__class__, made.__dict__ = like.__class__, vars(like).copy()
        self.tally.hold(made.nbytes)
        return made

    def _process(self) -> None:
        """Put the gathered parameters into the layer, process them as at load, and copy the results to the live ones.

        The live parameters, and the kernels that hold them, are put back in the end, so every address stays the same.
        """
        layer, method = self.layer, self.layer.quant_method
        for target, filled in self.constants:
            for box, value in filled:
                inside(self.values[target.parameter].data, box).fill_(value)
        live, loaded = dict(layer._parameters), {name: value.data for name, value in self.values.items()}
        kernel = {name: getattr(method, name) for name in COVERED if hasattr(method, name)}
        try:
            layer._parameters.clear()
            layer._parameters.update(
                {name: tensor for name, tensor in live.items() if name in SKIP_TENSORS} | self.values
            )
            layer.__dict__.pop("_already_called_process_weights_after_loading", None)
            if "moe_kernel" in kernel:
                method.moe_kernel = None
            release(layer)
            method.process_weights_after_loading(layer)
            if hasattr(layer, "update_param_tp_status"):
                layer.update_param_tp_status()
            for name, tensor in live.items():
                made = layer._parameters.get(name)
                if tensor is None or made is None or made is tensor:
                    continue
                if made.numel() and not tensor.numel():
                    live[name] = made  # until attention has packed it, and lets go of it again
                else:
                    tensor.data.copy_(made.data)
            for name, view in self.views.items():
                view.copy_(loaded[name].view_as(view))
        finally:
            layer._parameters.clear()
            layer._parameters.update(live)
            for name, value in kernel.items():
                setattr(method, name, value)
            self.values.clear()

    def finish(self) -> None:
        for route, print_ in self.prints.items():
            self._tell(route, word(route.target.dtype), print_.digest())

    def seal(self) -> Any:
        """Return the layer's memory as fingerprints, and which function multiplies."""
        held = {name: one for name, one in self.layer._parameters.items() if one is not None and one.numel()}
        return {name: fingerprint(one) for name, one in held.items()}, packed(self.layer)


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
