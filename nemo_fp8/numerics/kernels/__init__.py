"""The casts of :mod:`nemo_fp8.numerics.quantize` at memory speed: one interface, one module for each kind of device.

    quantize(x, tile, element_format, scale_kind, convention, statistics, scale, out)
                                                    ->  codes, scale_inv, statistics
    quantize_summed(x, tile, element_format, scale_kind, out, parts, order)
                                                    ->  totals of parts, sums of codes by row and by column
    decode(data, scale_inv, tile, dtype, out)       ->  values
    quantize_fp4(x, encode, tile_rows, convention, out, signs, chance, four_over_six)
                                                    ->  codes two a byte, E4M3 scales
    transformed_amax(x, signs)                      ->  the largest magnitude after the Hadamard transform
    decode_fp4(codes, scales, amax, largest, dtype) ->  values
    count_fp4(x, codes, decode, saturates_above)    ->  statistics of every 16 values
    total_fp4(x, codes, scales, beneath, saturates_above)
                                                    ->  totals of every matrix of a stack
    amax(x)                                         ->  the largest magnitude
    sums(x, into, magnitudes, order)                ->  sums of rows and of columns, largest magnitudes
    sums_of_amx(codes, columns)                     ->  sums of rows and of columns of codes that AMX multiplies

Each returns None if it has no kernel for the device, dtype or tile, and the caller computes in torch. Their codes and
scales equal those of :func:`nemo_fp8.numerics.quantize.quantize_reference`, and of
:func:`nemo_fp8.numerics.nvfp4.cast_reference`, to the bit. Sums in statistics are added in
another order and agree to about six digits.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
import types
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch

from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.kernels.out import check, check_contiguous, rows_of
from nemo_fp8.numerics.statistics import Statistics

PROCESS = os.getpid()  # a forked process has none of the threads
FP4_DEVICES = ("cpu", "cuda")
SOURCES = (torch.bfloat16, torch.float16, torch.float32)
"""The types of values that are quantized."""
Tile = tuple[int, int] | None
Out = tuple[torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, Statistics | None]


class Order(enum.IntEnum):
    """How a matrix of codes lies in memory of its shape, as `fp8_amx.h` numbers it."""

    ROWS = 0
    AMX = 1
    """Groups of 32 rows: the pair (c, c + 1) of row 32 g + r lies at [g, c / 2, r]."""


GROUP = 32
"""Rows of a group."""


class Summed(NamedTuple):
    """What a cast did, summed up while it was done."""

    totals: torch.Tensor
    """What it did to each part of the rows, [parts, TOTALS] in FP64."""
    of_rows: torch.Tensor
    of_columns: torch.Tensor
    """The wrapping sums of the codes as 64-bit words, as :func:`sums` returns them; empty if they were not wanted."""


def quantize(
    x: torch.Tensor,
    tile: Tile,
    element_format: str,
    scale_kind: str,
    convention: str = "te",
    statistics: bool = False,
    scale: torch.Tensor | None = None,
    out: Out | None = None,
) -> Result | None:
    """Quantize ``x``; return codes, scale_inv and statistics, or None if there is no kernel.

    ``scale`` may be given for a whole tensor only (``tile`` None). ``out`` are codes and scale_inv to write to: memory
    that is reused is several times as fast as new memory. Raises PrecisionError if ``out`` does not fit.
    """
    if out is not None:
        check_out(out, x, tile, format_of(element_format).dtype, scale_kind)
    device = _device(x)
    return (
        None
        if device is None
        else device.quantize(x, tile, element_format, scale_kind, convention, statistics, scale, out)
    )


def quantize_summed(
    x: torch.Tensor,
    tile: tuple[int, int],
    element_format: str,
    scale_kind: str,
    out: Out,
    parts: int = 1,
    order: Order = Order.ROWS,
    threads: int | None = None,
    with_sums: bool = True,
) -> Summed | None:
    """Quantize a matrix into codes and scales; return what that did to each of ``parts`` equal parts of its rows, and
    the sums of the codes, if wanted, or None if there is no kernel. Only CPUs have one. ``order`` is how the codes
    shall lie; ``threads`` is how many work, None for as many as torch has.

    A matrix is read once and its codes are written once, where statistics and :func:`sums` after the cast read the
    codes again, and keep numbers of every tile until somebody adds them up. Parts end where tiles end. Raises
    PrecisionError if ``out`` does not fit.
    """
    if x.device.type != "cpu":
        return None
    check_out(out, x, tile, format_of(element_format).dtype, scale_kind)
    found: Summed | None = _module("cpu").quantize_summed(
        x, tile, element_format, scale_kind, out, parts, order, threads, with_sums
    )
    return found


def decode(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Compute ``code * scale_inv`` in FP32, rounded once to ``dtype``; return it, or None if there is no kernel.

    ``out`` is memory for the values, contiguous. Raises PrecisionError if it does not fit.
    """
    if out is not None:
        check_contiguous(out, "out", data.shape, dtype, data)
    device = _device(data)
    return None if device is None else device.decode(data, scale_inv, tile, dtype, out)


@dataclass(frozen=True)
class FourOverSix:
    """How 4 over 6 chooses: by ``mae`` or ``mse``, beneath the tensor's amax (or one for each row), which becomes
    ``largest``; ``scaled`` compares values before they are scaled back."""

    error: str
    amax: torch.Tensor
    largest: float
    scaled: bool = False


def quantize_fp4(
    x: torch.Tensor,
    encode: torch.Tensor,
    tile_rows: int,
    convention: str = "te",
    out: Out | None = None,
    *,
    signs: tuple[float, ...] | None = None,
    chance: torch.Tensor | None = None,
    four_over_six: FourOverSix | None = None,
) -> Out | None:
    """Cast a matrix of whole blocks of 16 columns to NVFP4, beneath one ``encode`` or one for each row; return codes
    [rows, columns / 2] and scales [rows, columns / 16], or None if there is no kernel. ``tile_rows`` is 1 or 16.

    A matrix may lie turned (``x.t()``). With ``signs`` its rows are transformed first, and with ``chance``, a number
    from 0 to 1 for each value, codes are rounded by chance. ``out`` is memory for both, contiguous. Raises
    PrecisionError if it does not fit.
    """
    if out is not None:
        rows, columns = x.shape
        check_contiguous(out[0], "codes", (rows, columns // 2), torch.uint8, x)
        check_contiguous(out[1], "scale_inv", (rows, columns // 16), torch.float8_e4m3fn, x)
    device = _fp4_device(x)
    if device is None:
        return None
    return device.quantize(x, encode, tile_rows, convention, out, signs, chance, four_over_six)


def transformed_amax(x: torch.Tensor, signs: tuple[float, ...]) -> torch.Tensor | None:
    """Return the largest magnitude that is not NaN of what :func:`quantize_fp4` casts with these ``signs``, in FP32;
    None if there is no kernel. Only CPUs have one."""
    if x.device.type != "cpu":
        return None
    found: torch.Tensor | None = _module("cpu_fp4").transformed_amax(x, signs)
    return found


def decode_fp4(
    codes: torch.Tensor,
    scales: torch.Tensor,
    amax: torch.Tensor | None,
    largest: float,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Compute ``code * (scale * amax * (1 / largest))`` in FP32, or ``code * scale`` without an amax, rounded once to
    ``dtype``; return it, or None if there is no kernel. ``out`` is memory for the values, contiguous."""
    if out is not None:
        check_contiguous(out, "out", (codes.shape[0], codes.shape[1] * 2), dtype, codes)
    device = _fp4_device(codes)
    return None if device is None else device.decode(codes, scales, amax, largest, dtype, out)


def count_fp4(
    x: torch.Tensor, codes: torch.Tensor, decode: torch.Tensor, saturates_above: float
) -> dict[str, torch.Tensor] | None:
    """Count for every 16 values of a matrix what its cast to NVFP4 did; return the fields of
    :class:`nemo_fp8.numerics.statistics.Statistics`, or None if there is no kernel. Only CPUs have one.

    ``codes`` are [rows, columns / 2], two a byte, and ``decode`` [rows, columns / 16] what they are multiplied with.
    The amax is that of the 16 values, though they may lie in a square with a scale of its own.
    """
    if x.device.type != "cpu":
        return None
    found: dict[str, torch.Tensor] | None
    found = _module("cpu_fp4").count(x, codes, decode, saturates_above)
    return found


def total_fp4(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, beneath: torch.Tensor, saturates_above: float
) -> torch.Tensor | None:
    """Sum up what the casts of a stack of matrices to NVFP4 did: [matrices, TOTALS] in FP64, or None if there is no
    kernel. Only CPUs have one.

    ``x`` is [matrices, rows, columns], with two codes a byte and E4M3 scales for 16 columns; all three may be views of
    larger stacks. ``beneath`` is one FP32 number for each matrix: a code stands for ``code * (scale * beneath)``.
    """
    if x.device.type != "cpu":
        return None
    found: torch.Tensor | None = _module("cpu_fp4").total(x, codes, scales, beneath, saturates_above)
    return found


def amax(x: torch.Tensor) -> torch.Tensor | None:
    """Return the largest magnitude of all elements that are not NaN, in FP32; None if there is no kernel."""
    device = _device(x)
    return None if device is None else device.amax(x)


def sums(
    x: torch.Tensor, into: torch.Tensor | None = None, magnitudes: bool = True, order: Order = Order.ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Read a matrix once: sum its bytes, as 64-bit words, by row and by column, and copy it ``into`` memory, if given,
    where it shall lie in this ``order``.

    Returns the wrapping sums (int64; a row's last word is filled up with zeros) and the largest magnitude of each row
    of BF16, FP16, FP32 or E4M3 values in FP32, NaN if one is NaN (zeros without ``magnitudes``); None if there is no
    kernel, and then nothing was copied. Only CPUs have one. ``into`` has the shape, dtype and device of ``x`` and must
    not overlap it.
    """
    fits = into is None or (into.shape == x.shape and into.dtype == x.dtype and into.device == x.device)
    if x.device.type != "cpu" or not fits:
        return None
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    found = _module("cpu").sums(x, into, magnitudes, order)
    return found


def sums_of_amx(codes: torch.Tensor, columns: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Sum rows of codes in the order ``Order.AMX``, of which the first begins a group, as :func:`sums` does for plain
    ones: those bytes of each that are in ``columns``, [first, last). None if there is no kernel; only CPUs have one."""
    if codes.device.type != "cpu":
        return None
    found: tuple[torch.Tensor, torch.Tensor] | None = _module("cpu").sums_of_amx(codes, columns)
    return found


def turn(x: torch.Tensor, into: torch.Tensor) -> bool:
    """Write a matrix of bytes or 16-bit values, or each of a stack, ``into`` memory of its columns, as rows; return
    whether there is a kernel for both, and then it is done. Raises ValueError if ``into`` has another shape or
    dtype."""
    device = _device(x) if into.device == x.device else None
    return device is not None and device.turn(x, into)


class _Kernels(Protocol):
    """The interface of a device's module."""

    def quantize(
        self, x: torch.Tensor, tile: Tile, element_format: str, scale_kind: str, convention: str, statistics: bool,
        scale: torch.Tensor | None, out: Out | None,
    ) -> Result | None: ...  # fmt: skip

    def decode(
        self, data: torch.Tensor, scale_inv: torch.Tensor, tile: Tile, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor | None: ...

    def amax(self, x: torch.Tensor) -> torch.Tensor | None: ...

    def turn(self, x: torch.Tensor, into: torch.Tensor) -> bool: ...


class _Fp4Kernels(Protocol):
    """The interface of a device's module for NVFP4."""

    def quantize(
        self, x: torch.Tensor, encode: torch.Tensor, tile_rows: int, convention: str, out: Out | None,
        signs: tuple[float, ...] | None, chance: torch.Tensor | None, four_over_six: FourOverSix | None,
    ) -> Out | None: ...  # fmt: skip

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor | None, largest: float, dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None: ...  # fmt: skip


def _fp4_device(x: torch.Tensor) -> _Fp4Kernels | None:
    """Import and return the module for NVFP4 on the tensor's device; None if there is none."""
    return cast(_Fp4Kernels, _module(f"{x.device.type}_fp4")) if x.device.type in FP4_DEVICES else None


def _device(x: torch.Tensor) -> _Kernels | None:
    """Import and return the module for the tensor's device; None if there is none."""
    return cast(_Kernels, _module(x.device.type)) if x.device.type in ("cpu", "cuda") else None


@functools.cache
def _module(name: str) -> types.ModuleType:
    """Import a module of this package once: to ask the import system takes as long as a cast of a small tensor."""
    return importlib.import_module(f"{__name__}.{name}")


def check_out(out: Out, x: torch.Tensor, tile: Tile, dtype: torch.dtype, scale_kind: str) -> None:
    """Raise PrecisionError for memory that cannot hold the codes and scales of ``x``."""
    codes, scale_inv = out
    check(codes, "codes", x.shape, dtype, x)
    rows_of(codes, "codes")
    shape = tuple(scale_inv.shape) if scale_inv.numel() == 1 else ()  # a single scale may have any shape of one element
    if tile is not None:
        shape = (-(-x.shape[:-1].numel() // tile[0]), -(-x.shape[-1] // tile[1]))
    check(scale_inv, "scale_inv", shape, torch.float8_e8m0fnu if scale_kind == "e8m0" else torch.float32, x)
