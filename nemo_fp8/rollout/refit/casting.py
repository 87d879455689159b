"""Cast tensors in the trainer, on their way into a buffer: a push brings codes then, half the bytes of BF16.

    engine     says which tensors it keeps in the blocks of the whole tensor, and by which operand (worker/keeping.py)
    trainer    quantizes rows of whole blocks straight into the buffer: their codes, and the scales behind them
    engine     copies both to where its kernels read them, and fingerprints what it has written

A copy into a buffer reads a value and writes it; a cast reads it and writes a code, so it takes the trainer about as
long. The engine, which would have read the value and cast it, reads the code. Both sides cast to the same bits on every
device, so who does it cannot be told from the weights. What the casts did (SNR, underflow ...) is counted where they
are made, so that a receipt has the numbers that it would have had from the engine.

Some tensors go as values still, and the engine casts them: small ones, since it writes all that a message has by one
call (worker/whole.py); those whose blocks a cut of tensor parallelism straddles; and all where the trainer has no
kernel, or where a push compares every cast with the reference. The trade-off: a trainer that pushes to several engines
casts for each of them, as it copied for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.kernels import SOURCES, build
from nemo_fp8.numerics.kernels.cpu import cast_job
from nemo_fp8.numerics.kernels.pieces import CastPieces
from nemo_fp8.numerics.quantize import quantize_into
from nemo_fp8.numerics.statistics import TOTALS
from nemo_fp8.rollout.refit.manifest import Entry, Manifest
from nemo_fp8.rollout.refit.memory import aligned
from nemo_fp8.rollout.refit.patch import grid_of

LEAST = 1 << 21  # bytes: an engine writes smaller tensors several at once
CODES = torch.float8_e4m3fn
_COUNTED = {"signal": float, "noise": float, "saturated": int, "underflow": int, "nonfinite": int, "largest": float}
"""What a receipt calls the numbers of TOTALS, and what they are."""


def scales_type(operand: Operand) -> torch.dtype:
    """Return the type in which an operand's scales are stored."""
    return torch.float8_e8m0fnu if operand.scale == "e8m0" else torch.float32


@dataclass
class Cast:
    """A tensor that goes as codes, and what its casts did."""

    entry: Entry
    operand: Operand
    block: tuple[int, int]
    pieces: CastPieces | None = None
    """Its casts on a CPU, by jobs that are kept from push to push; None if there are none."""
    counted: list[tuple[slice, torch.Tensor | NDArray[np.float64]]] = field(default_factory=list)
    """What was counted in this push, [experts, TOTALS] in FP64, piece by piece; a tensor that is no stack has one
    row."""

    @classmethod
    def of(cls, entry: Entry, operand: Operand) -> Cast:
        """Return the cast of a tensor by the operand that all workers keep it by."""
        assert operand.block is not None
        values = torch.empty(math.prod(entry.shape[:-1]), entry.shape[-1], dtype=entry.torch_dtype, device="meta")
        grid = grid_of(tuple(values.shape), operand.block)
        scales = torch.empty(grid, dtype=scales_type(operand), device="meta")
        codes = torch.empty(values.shape, dtype=CODES, device="meta")
        job = cast_job(values, operand.block, operand.format, operand.scale, scales, codes)
        return cls(entry, operand, operand.block, None if job is None else CastPieces(job))

    def gap(self, rows: int) -> int:
        """Return how many bytes behind the first code of so many rows their scales begin."""
        return aligned(rows * math.prod(self.entry.shape[1:]))

    def bytes(self, rows: int) -> int:
        """Return the bytes of the codes and the scales of so many rows."""
        grid = grid_of((rows, *self.entry.shape[1:]), self.block)
        return self.gap(rows) + math.prod(grid) * scales_type(self.operand).itemsize

    def put(self, row: int, values: torch.Tensor, room: torch.Tensor, offset: int, threads: int | None) -> None:
        """Cast the tensor's rows from ``row`` on into a buffer: codes at the offset, and scales behind them.

        ``threads`` are those of a CPU's kernel; None for as many as torch has.
        """
        rows = values.shape[0]
        experts = slice(row, row + rows) if len(self.entry.shape) == 3 else slice(0, 1)
        parts = experts.stop - experts.start
        if self.pieces is not None and values.is_cpu and values.is_contiguous() and build.library() is not None:
            first, high = room.data_ptr() + offset, rows * math.prod(self.entry.shape[1:-1])
            places = values.data_ptr(), first, first + self.gap(rows)
            self.counted.append((experts, self.pieces.put(row, high, parts, threads, *places)))
            return
        flat = values.detach().reshape(-1, values.shape[-1])
        behind = room[offset + self.gap(rows) : offset + self.bytes(rows)]
        codes = room[offset : offset + flat.numel()].view(CODES).view(flat.shape)
        scales = behind.view(scales_type(self.operand)).view(grid_of(tuple(flat.shape), self.block))
        self.counted.append((experts, self._cast(flat, codes, scales, parts, threads)))

    def _cast(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, parts: int, threads: int | None
    ) -> torch.Tensor:
        """Cast a matrix into codes and scales on the CPU; return what that did to each of its parts."""
        operand, out = self.operand, (codes, scales)
        done = kernels.quantize_summed(
            values, self.block, operand.format, operand.scale, out, parts, threads=threads, with_sums=False
        )
        if done is not None:
            return done.totals
        made = out if values.is_cpu else tuple(one.new_empty(one.shape, device=values.device) for one in out)
        statistics = quantize_into(values, operand, made[0], made[1], statistics=True).statistics
        assert statistics is not None
        for one, there in zip(made, out, strict=True):
            if one is not there:
                there.copy_(one)
        return statistics.totals(parts)

    def totals(self) -> torch.Tensor:
        """Return what was counted in this push, [experts, TOTALS]."""
        count, whole = self.entry.shape[0] if len(self.entry.shape) == 3 else 1, None
        for experts, counted in self.counted:
            totals = torch.from_numpy(counted) if isinstance(counted, np.ndarray) else counted
            whole = totals.new_zeros(count, len(TOTALS)) if whole is None else whole
            rows = whole[experts]
            rows[:, :-1] += totals[:, :-1]
            torch.maximum(rows[:, -1], totals[:, -1], out=rows[:, -1])
        assert whole is not None
        return whole


class Casts:
    """The tensors that a trainer may cast, by what all workers answered to ``begin``, and what a push counts."""

    def __init__(self, manifest: Manifest, castable: Iterable[Iterable[tuple[Any, Iterable[int]]]]) -> None:
        operands: dict[int, set[Operand | None]] = {}
        for of_one in castable:
            for operand, numbers in of_one:
                for i in numbers:
                    operands.setdefault(i, set()).add(None if operand is None else operand_of(operand))
        self._castable = {
            i: Cast.of(manifest[i], operand)
            for i, (operand, *others) in operands.items()
            if operand is not None and operand.block is not None and not others
        }

    def begin(self) -> None:
        """Drop what was counted: another push begins."""
        for cast in self._castable.values():
            cast.counted = []

    def of(self, i: int, tensor: torch.Tensor) -> Cast | None:
        """Return the cast of a tensor by its number; None if it goes as values."""
        cast = self._castable.get(i)
        if cast is None or tensor.dtype not in SOURCES or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        return cast if not tensor.is_neg() and (not tensor.is_cpu or build.library() is not None) else None

    def told(self) -> dict[int, dict[str, NDArray[Any]]]:
        """Return what the casts did to each expert of each tensor, by the tensor's number, as a receipt takes it."""
        return {
            i: {
                name: numbers.astype(kind)
                for (name, kind), numbers in zip(_COUNTED.items(), cast.totals().cpu().numpy().T, strict=True)
            }
            for i, cast in self._castable.items()
            if cast.counted
        }


def operand_of(row: Sequence[Any]) -> Operand:
    """Return an operand of plain values, as ``dataclasses.astuple`` made them."""
    format, block, *rest = row
    return Operand(format, None if block is None else tuple(block), *rest)
