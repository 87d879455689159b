"""Quantize pieces of pushed tensors into the live codes and scales of FP8 in blocks, and read these again.

A block needs no other block, so whole rows of blocks are quantized as they come, from where they came to where the
layer's kernel reads them: no memory beside the model, and every value is read once. Codes that come, already cast, are
copied there. The trade-off: a matrix in which a cut straddles blocks has to wait for all of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.kernels import Order, build
from nemo_fp8.numerics.kernels.cpu import CastJob, cast_job
from nemo_fp8.numerics.quantize import STRIP, quantize_into, quantize_reference
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, fingerprint, together
from nemo_fp8.rollout.refit.manifest import Box
from nemo_fp8.rollout.refit.patch import blocks_of
from nemo_fp8.rollout.refit.worker.layouts import ONE, Layout, Tally
from nemo_fp8.rollout.refit.worker.routes import Route
from nemo_fp8.rollout.refit.worker.sinks import Sink, inside, part_of, rows_of

ROWS = BLOCK  # a strip has a multiple of so many rows, hence whole blocks, and whole groups of every layout


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
        self.told: set[Route] = set()
        """The routes whose facts are complete."""
        self.tells_at_once = True
        """Whether facts are told when a route's last row has come, unless that would be to wait for a device."""

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
        self.write_staying(route, row, values)
        if values.dtype != self.codes.dtype and not self.straddling:
            self._tell_if_whole(route, row + values.shape[0])

    def write_staying(self, route: Route, row: int, values: torch.Tensor) -> None:
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
        self._tell_if_whole(route, row + codes.shape[0])

    def _close(self, route: Route, rows: int) -> None:
        """Keep no more of a fingerprint than it needs, once all rows have come: the next tensor's sums have its
        memory."""
        if rows == rows_of(route):
            self.prints[route].close()

    def _tell_if_whole(self, route: Route, rows: int) -> None:
        """Tell the facts of a route once all of its rows have come, with their scales: until the next ones come there
        is time. What stays where it lies is told in the end, since all of it is there."""
        if rows == rows_of(route) and self.tells_at_once and self.codes.is_cpu:
            self._tell_of(route)

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
        """Return the cast of a route's whole matrix ``x``, which may have no memory, as a job; None if it is none. A
        stack of experts is a matrix if it lies like that."""
        if self.straddling or x.dtype == self.codes.dtype:
            return None
        codes, scales = self.lying(route)
        if codes is None or scales is None or codes.shape != x.shape:
            return None
        return cast_job(x, self.block, self.operand.format, self.operand.scale, scales, codes, self.layout.order)

    def lying(self, route: Route) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the live codes and scales of all rows of a route, each as one matrix; None if they are no such one."""
        start, stop = route.to[-2]
        return self._live(self._matrices(route), start, stop - start)

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
            if route not in self.told:
                self._tell_of(route)

    def _tell_of(self, route: Route) -> None:
        """Tell the facts of a route, of which everything has come."""
        self.told.add(route)
        scales, facts = self.scales_of(route), self.facts[route.entry]
        self._tell(route, "fp8", together([self.prints[route].digest(), fingerprint(scales)]))
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
