"""Quantize and decode on a CPU with the compiled kernels of `fp8_quantize.c`.

One call is one job: pointers, shape, tile, format and scale rule, divided among torch's own threads (ctypes releases
the GIL). A whole tensor is two jobs, its amax and then the cast. For tensors that the kernels do not support (odd tiles
or strides) the functions return None, and the caller computes in torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Any

import torch

from nemo_fp8.numerics.formats import Format, format_of
from nemo_fp8.numerics.kernels import GROUP, PROCESS, Order, Out, Result, Summed, Tile, build
from nemo_fp8.numerics.kernels.out import rows_of
from nemo_fp8.numerics.kernels.results import statistics_of
from nemo_fp8.numerics.statistics import TOTALS, Statistics

STRIP = 2048
WHOLE = (128, STRIP)  # the tiles into which a whole tensor is cut; any will do, since all of them have one scale
BF16, FP16, FP32, PAIR = range(4)
SOURCES = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
MAGNITUDES = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
GIVEN = 0
SCALINGS = {("te", "fp32"): 1, ("te", "pow2"): 2, ("deepgemm", "fp32"): 3, ("deepgemm", "pow2"): 4, ("te", "e8m0"): 5}
WIDEST_GROUP = 64  # columns of a product that are multiplied at once
ELEMENTS_FOR_THREADS = 1 << 17  # one thread finishes fewer elements than this before the others wake up
BYTES_FOR_THREADS = 1 << 21  # likewise of bytes that are only added up

_COUNTS = {
    "norm": torch.float32, "error_norm": torch.float32, "amax": torch.float32, "underflow": torch.int32, "saturated":
    torch.int32, "nonfinite": torch.int32, "least": torch.uint8, "largest": torch.uint8, }  # fmt: skip
_RARE = ("saturated", "nonfinite")  # nothing saturates a scale that comes from its own tile, but for infinities and NaN


class CastJob(ctypes.Structure):
    """`struct job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scale_inv", *_COUNTS)),
        *((name, ctypes.c_void_p) for name in ("totals", "of_rows", "of_columns", "parallel")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "stride", "codes_stride", "scale_stride")),
        *((name, ctypes.c_int64) for name in ("tile_rows", "tile_cols", "rows_of_total")),
        *((name, ctypes.c_int32) for name in ("source", "scaling", "mantissa_bits", "bias", "count_bytes", "threads")),
        *((name, ctypes.c_float) for name in ("format_max", "saturates_above", "given", "scale_if_tiny")),
        *((name, ctypes.c_int64) for name in ("next", "wild", "failed")),
        *((name, ctypes.c_void_p) for name in ("of_strips", "ahead")),
        ("order", ctypes.c_int64),
    )


class _DecodeJob(ctypes.Structure):
    """`struct decode_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale_inv", "out", "parallel")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "tile_rows", "tile_cols")),
        *((name, ctypes.c_int32) for name in ("target", "e8m0", "mantissa_bits", "threads")),
        ("next", ctypes.c_int64),
    )


class _MultiplyJob(ctypes.Structure):
    """`struct multiply_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "room", "codes", "scale_inv", "bias", "y", "parallel")),
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "cols", "tile_rows", "tile_cols", "stride")),
        *((name, ctypes.c_int32) for name in ("x_type", "y_type", "e8m0", "threads")),
        ("next", ctypes.c_int64),
    )


class _RowsJob(ctypes.Structure):
    """`struct rows_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "room", "bias", "y", "parallel")),
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "cols")),
        *((name, ctypes.c_int32) for name in ("y_type", "threads")),
        ("next", ctypes.c_int64),
    )


class _AccumulateJob(ctypes.Structure):
    """`struct accumulate_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "partial", "of_rows", "of_columns", "parallel")),
        *((name, ctypes.c_int64) for name in ("rows", "cols")),
        *((name, ctypes.c_int32) for name in ("columns_first", "exact", "threads")),
        ("next", ctypes.c_int64),
    )


class _TurnJob(ctypes.Structure):
    """`struct turn_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "to", "parallel")),
        *((name, ctypes.c_int64) for name in ("parts", "rows", "cols", "part", "stride", "to_part", "to_stride")),
        *((name, ctypes.c_int32) for name in ("size", "threads")),
        ("next", ctypes.c_int64),
    )


class SumsJob(ctypes.Structure):
    """`struct sums_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "to", "of_rows", "of_columns", "largest", "parallel")),
        *((name, ctypes.c_int64) for name in ("rows", "bytes", "stride", "to_stride")),
        *((name, ctypes.c_int32) for name in ("magnitudes", "threads")),
        *((name, ctypes.c_int64) for name in ("next", "failed", "order")),
    )


def quantize(
    x: torch.Tensor,
    tile: Tile,
    element_format: str,
    scale_kind: str,
    convention: str,
    statistics: bool,
    scale: torch.Tensor | None,
    out: Out | None,
) -> Result | None:
    """Do what :func:`nemo_fp8.numerics.quantize.quantize_reference` does; None if there is no kernel for it."""
    library = build.library()
    scaling = SCALINGS.get((convention, scale_kind))
    if library is None or scaling is None or x.dtype not in SOURCES or x.numel() == 0 or not _takes(tile):
        return None
    x, format = x.detach(), format_of(element_format)
    if tile is None:
        return _quantize_whole(library, x, format, scale_kind, convention, statistics, scale, out)
    matrix = _as_rows(x)
    grid = _grid(matrix, tile)
    scale_type = torch.float8_e8m0fnu if scale_kind == "e8m0" else torch.float32
    codes, scale_inv = out or (torch.empty(x.shape, dtype=format.dtype), torch.empty(grid, dtype=scale_type))
    found = scale_inv if scale_inv.stride(1) == 1 or grid[1] == 1 else torch.empty(grid, dtype=scale_type)
    tiny = torch.finfo(x.dtype).max  # what TE takes for the scale of a tile if it overflows
    more: dict[str, Any] = {"scale_inv": found, "scale_stride": found.stride(0), "scale_if_tiny": tiny}
    counts = _empty_counts(grid, tile, left_out=_RARE) if statistics else {}
    wild = _run(library, matrix, tile, format, codes, scaling=scaling, **more, **counts)
    if statistics and wild:
        counts = _empty_counts(grid, tile)
        _run(library, matrix, tile, format, codes, scaling=scaling, **more, **counts)
    elif statistics:
        counts |= dict.fromkeys(_RARE, torch.zeros((), dtype=_counter(tile)).expand(grid))
    if found is not scale_inv:
        scale_inv.copy_(found)
    return codes, scale_inv, _statistics(x, tile, format, counts, scale_inv) if statistics else None


def quantize_summed(
    x: torch.Tensor,
    tile: tuple[int, int],
    element_format: str,
    scale_kind: str,
    out: Out,
    parts: int,
    order: Order,
    team: int | None,
    with_sums: bool,
) -> Summed | None:
    """Do what :func:`quantize` does, into memory that fits, and sum up what it did; None if there is no kernel for it.

    What is summed up lies in one piece of new memory: every allocation takes as long as a cast of a small matrix.
    """
    library = build.library()
    scaling = SCALINGS.get(("te", scale_kind))
    if library is None or scaling is None or x.dtype not in SOURCES or x.numel() == 0 or not _takes(tile):
        return None
    codes, scale_inv = out
    rows, columns = x.shape
    if x.stride(1) != 1 or not has_rows(scale_inv) or rows % parts or (parts > 1 and rows // parts % tile[0]):
        return None
    if not _can_lie(codes, tile, order):
        return None
    counted, summed, words = len(TOTALS) * parts, rows * with_sums, -(-columns // 8) * with_sums
    memory = torch.empty(counted + summed + words, dtype=torch.int64)
    of_parts, of_rows, of_columns = memory[:counted], memory[counted : counted + summed], memory[counted + summed :]
    _run(
        library, x, tile, format_of(element_format), codes, scaling=scaling, scale_inv=scale_inv,
        scale_stride=scale_inv.stride(0), scale_if_tiny=torch.finfo(x.dtype).max, totals=of_parts,
        of_rows=of_rows if with_sums else None, of_columns=of_columns if with_sums else None,
        rows_of_total=rows // parts, order=order, threads=team or threads(x),
    )  # fmt: skip
    return Summed(of_parts.view(torch.float64).view(parts, len(TOTALS)), of_rows, of_columns)


def _can_lie(codes: torch.Tensor, tile: tuple[int, int], order: Order) -> bool:
    """Return whether a cast with these tiles can leave codes in an order: that of AMX in one piece, in whole groups of
    rows and pairs of columns."""
    rows, columns = codes.shape
    return order == Order.ROWS or (codes.is_contiguous() and not (rows % GROUP or tile[0] % GROUP or columns % 2))


def cast_job(
    x: torch.Tensor,
    tile: tuple[int, int],
    element_format: str,
    scale_kind: str,
    scale_inv: torch.Tensor,
    codes: torch.Tensor | None = None,
    order: Order = Order.ROWS,
) -> CastJob | None:
    """Return the cast of a matrix as a job for another kernel, which may say where ``codes`` go; None if there is none.

    The job knows where ``x`` and ``scale_inv`` lie, and does not keep them; where ``x`` is on the meta device it is
    told later.
    """
    scaling = SCALINGS.get(("te", scale_kind))
    if scaling is None or not (x.is_cpu or x.is_meta) or x.dtype not in SOURCES or not _takes(tile):
        return None
    if not has_rows(x) or not has_rows(scale_inv) or (codes is not None and not _can_lie(codes, tile, order)):
        return None
    return _job(
        x, tile, format_of(element_format), codes, scaling=scaling, scale_inv=scale_inv,
        scale_stride=scale_inv.stride(0), scale_if_tiny=torch.finfo(x.dtype).max, order=order,
    )  # fmt: skip


def amax(x: torch.Tensor) -> torch.Tensor | None:
    """Return the largest magnitude that is not NaN, in FP32 (0-dim); None if there is no kernel for it."""
    library = build.library()
    if library is None or x.dtype not in SOURCES or x.numel() == 0:
        return None
    matrix = _as_wide_rows(x.detach())
    found = torch.empty(_grid(matrix, WHOLE), dtype=torch.float32)
    _run(library, matrix, WHOLE, format_of("e4m3"), scaling=1, amax=found)
    return found.amax()


def decode(
    data: torch.Tensor, scale_inv: torch.Tensor, tile: Tile, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor | None:
    """Compute ``code * scale_inv`` in BF16 or FP32; None if there is no kernel for it."""
    library = build.library()
    if library is None or dtype not in (torch.bfloat16, torch.float32) or data.numel() == 0 or not _takes(tile):
        return None
    format = format_of(data.dtype)
    matrix = _as_wide_rows(data) if tile is None else _as_rows(data).contiguous()
    if tile is None:
        tile = WHOLE
        scale_inv = scale_inv.reshape(1, 1).expand(_grid(matrix, tile))
    scale_inv, out = scale_inv.contiguous(), torch.empty(data.shape, dtype=dtype) if out is None else out
    job = _DecodeJob(
        codes=matrix.data_ptr(), scale_inv=scale_inv.data_ptr(), out=out.data_ptr(),
        rows=matrix.shape[0], cols=matrix.shape[1], tile_rows=tile[0], tile_cols=tile[1],
        target=PAIR if dtype == torch.bfloat16 and tile[1] > 1 else SOURCES[dtype],
        e8m0=scale_inv.dtype != torch.float32,
        mantissa_bits=format.mantissa_bits, threads=threads(matrix), parallel=parallel(),
    )  # fmt: skip
    library.nemo_fp8_decode(ctypes.byref(job))
    return out


def multiply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    tile: tuple[int, int],
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor | None:
    """Compute ``x @ (code * scale_inv).T + bias`` from E4M3 codes, as `fp8_multiply.c` says; ``x`` is a matrix.

    Sums are FP32, and rounded once if ``dtype`` is BF16. None if there is no kernel for it. It is meant for a few rows
    of ``x``, and correct for any number of them. Raises ValueError if the shapes do not fit.
    """
    library = build.library()
    if library is None or codes.dtype != torch.float8_e4m3fn or not codes.is_contiguous() or not codes.numel():
        return None
    tokens, (rows, cols) = x.shape[0], codes.shape
    if x.dim() != 2 or x.shape[1] != cols or scale_inv.shape != _grid(codes, tile):
        raise ValueError(f"{tuple(x.shape)} times {tuple(codes.shape)} codes, {tuple(scale_inv.shape)} scales.")
    x = (x if x.dtype == torch.bfloat16 else x.to(torch.float32)).contiguous()
    scale_inv = scale_inv.contiguous()
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    stride = -(-cols // WIDEST_GROUP) * WIDEST_GROUP
    room = torch.empty(tokens * (stride + 1), dtype=torch.float32)
    y = torch.empty((tokens, rows), dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    job = _MultiplyJob(
        x.data_ptr(), room.data_ptr(), codes.data_ptr(), scale_inv.data_ptr(),
        None if bias is None else bias.data_ptr(), y.data_ptr(), parallel(), tokens, rows, cols, *tile, stride,
        SOURCES[x.dtype], SOURCES[y.dtype], scale_inv.dtype != torch.float32, threads(codes),
    )  # fmt: skip
    return y.to(dtype) if library.nemo_fp8_multiply(ctypes.byref(job)) else None


def multiply_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor | None:
    """Compute ``x @ weight.T + bias`` of BF16 matrices from the weight as it lies, as `bf16_multiply.c` says.

    Sums are FP32, and rounded once if ``dtype`` is BF16. None if there is no kernel for it. It is meant for a few rows
    of ``x``, and correct for any number of them. Raises ValueError if the shapes do not fit.
    """
    library = build.library()
    if library is None or not x.dtype == weight.dtype == torch.bfloat16 or not weight.is_contiguous():
        return None
    tokens, (rows, cols) = x.shape[0], weight.shape
    if x.dim() != 2 or x.shape[1] != cols:
        raise ValueError(f"{tuple(x.shape)} times a weight of {tuple(weight.shape)}.")
    x, bias = x.contiguous(), None if bias is None else bias.to(torch.float32).contiguous()
    room = torch.empty(tokens * cols, dtype=torch.float32)
    y = torch.empty((tokens, rows), dtype=dtype)
    job = _RowsJob(
        x.data_ptr(), weight.data_ptr(), room.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        parallel(), tokens, rows, cols, SOURCES[dtype], threads(weight),
    )  # fmt: skip
    return y if library.nemo_fp8_multiply_rows(ctypes.byref(job)) else None


def accumulate(
    y: torch.Tensor,
    partial: torch.Tensor,
    of_rows: torch.Tensor,
    of_columns: torch.Tensor,
    *,
    columns_first: bool,
    exact: bool,
) -> bool:
    """Add ``(partial * first) * last`` to ``y`` in place, as `fp8_accumulate.c` says, for FP32 tensors that lie in one
    piece; return False, and write nothing, where that cannot be. Raises ValueError if the shapes do not fit."""
    library = build.library()
    if library is None or not all(
        t.dtype == torch.float32 and t.is_contiguous() for t in (y, partial, of_rows, of_columns)
    ):
        return False
    if not (y.shape == partial.shape == (len(of_rows), len(of_columns))):
        raise ValueError(
            f"Factors of {len(of_rows)} rows and {len(of_columns)} columns for {tuple(partial.shape)} onto "
            f"{tuple(y.shape)}."
        )
    job = _AccumulateJob(
        y=y.data_ptr(), partial=partial.data_ptr(), of_rows=of_rows.data_ptr(), of_columns=of_columns.data_ptr(),
        rows=y.shape[0],
        cols=y.shape[1], columns_first=columns_first, exact=exact, threads=threads(y), parallel=parallel(),
    )  # fmt: skip
    library.nemo_fp8_accumulate(ctypes.byref(job))
    return True


def turn(x: torch.Tensor, into: torch.Tensor) -> bool:
    """Write a matrix of bytes or 16-bit values, turned, or each of a stack, as `fp8_turn.c` does.

    Return False, and write nothing, where there is no kernel for it. Raises ValueError if shapes or dtypes do not fit.
    """
    library, size = build.library(), x.itemsize
    if into.shape != x.mT.shape or into.dtype != x.dtype:
        raise ValueError(f"{tuple(x.shape)} of {x.dtype} turned into memory of {tuple(into.shape)} of {into.dtype}.")
    stack, turned = (one if one.dim() == 3 else one[None] for one in (x, into))
    if library is None or size not in (1, 2) or not all(has_rows(one[0]) for one in (stack, turned)):
        return False
    (parts, rows, cols), (part, stride, _), (to_part, to_stride, _) = stack.shape, stack.stride(), turned.stride()
    job = _TurnJob(
        x=x.data_ptr(), to=into.data_ptr(), parallel=parallel(), parts=parts, rows=rows, cols=cols, part=part * size,
        stride=stride * size, to_part=to_part * size, to_stride=to_stride * size, size=size, threads=threads(x),
    )  # fmt: skip
    library.nemo_fp8_turn(ctypes.byref(job))
    return True


def sums(
    x: torch.Tensor, into: torch.Tensor | None, magnitudes: bool, order: Order = Order.ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Sum a matrix's 64-bit words by row and by column as `fp8_sums.c` says, copy it in an order, and find largest
    magnitudes.

    Return both sums and the largest magnitude of each row; None, and copy nothing, where there is no kernel for it.
    Raises MemoryError if there is none for the threads' sums.
    """
    library = build.library()
    if library is None or x.numel() == 0 or not all(has_rows(m) for m in (x, into) if m is not None):
        return None
    if order != Order.ROWS and (into is None or into.itemsize > 1 or not _can_lie(into, (GROUP, 1), order)):
        return None
    height, width = x.shape[0], x.shape[1] * x.itemsize
    rows, columns = torch.empty(height, dtype=torch.int64), torch.zeros(-(-width // 8), dtype=torch.int64)
    kind = MAGNITUDES.get(x.dtype, 0) if magnitudes else 0
    largest = torch.empty(height, dtype=torch.int32) if kind else torch.zeros(height)
    job = sums_job(
        x, into, kind, of_rows=rows.data_ptr(), of_columns=columns.data_ptr(), largest=largest.data_ptr(),
        threads=1 if x.nbytes <= BYTES_FOR_THREADS else threads(x), parallel=parallel(), order=order,
    )  # fmt: skip
    if not library.nemo_fp8_sums(ctypes.byref(job)):
        raise MemoryError("no memory for the sums of a matrix's columns")
    if not kind:
        return rows, columns, largest
    return rows, columns, largest.view(x.dtype).view(height, -1)[:, 0].float()


def sums_of_amx(codes: torch.Tensor, columns: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Sum some bytes of rows in the order of AMX, by row and by column, as `fp8_amx.h` says; None if that cannot be.

    Raises MemoryError as :func:`sums` does.
    """
    library, (left, right) = build.library(), columns
    if library is None or codes.numel() == 0 or not codes.is_contiguous() or codes.itemsize > 1 or (left | right) % 2:
        return None
    rows = torch.empty(codes.shape[0], dtype=torch.int64)
    of_columns = torch.zeros(-(-(right - left) // 8), dtype=torch.int64)
    job = SumsJob(
        x=codes.data_ptr() + left * GROUP, rows=codes.shape[0], bytes=right - left, stride=codes.stride(0),
        of_rows=rows.data_ptr(), of_columns=of_columns.data_ptr(),
        threads=1 if codes.nbytes <= BYTES_FOR_THREADS else threads(codes), parallel=parallel(), order=Order.AMX,
    )  # fmt: skip
    if not library.nemo_fp8_sums(ctypes.byref(job)):
        raise MemoryError("no memory for the sums of a matrix's columns")
    return rows, of_columns


def sums_job(x: torch.Tensor, into: torch.Tensor | None, magnitudes: int, **more: Any) -> SumsJob:
    """Return the sums of a matrix as a job, which says where they go in ``more``."""
    return SumsJob(
        x=x.data_ptr(), rows=x.shape[0], bytes=x.shape[1] * x.itemsize, stride=x.stride(0) * x.itemsize,
        magnitudes=magnitudes, to=None if into is None else into.data_ptr(),
        to_stride=0 if into is None else into.stride(0) * x.itemsize, **more,
    )  # fmt: skip


def has_rows(matrix: torch.Tensor) -> bool:
    """Return whether the rows of a matrix lie in one piece each."""
    return matrix.stride(1) == 1 or matrix.shape[1] == 1


def _quantize_whole(
    library: ctypes.CDLL,
    x: torch.Tensor,
    format: Format,
    scale_kind: str,
    convention: str,
    statistics: bool,
    scale: torch.Tensor | None,
    out: Out | None,
) -> Result | None:
    from nemo_fp8.numerics.quantize import find_scales

    codes = torch.empty(x.shape, dtype=format.dtype) if out is None else out[0]
    matrix = _as_wide_rows(x) if codes.is_contiguous() else _as_rows(x)
    if scale is None:
        found = amax(matrix)
        assert found is not None
        scale, scale_inv = find_scales(found, format, scale_kind, convention)
    else:
        scale = scale.detach().to("cpu", torch.float32).reshape(())
        if not scale > 0:
            return None
        scale_inv = torch.reciprocal(scale)
    if out is not None:
        scale_inv = out[1].copy_(scale_inv.reshape(out[1].shape))
    counts = _empty_counts(_grid(matrix, WHOLE), WHOLE) if statistics else {}
    _run(library, matrix, WHOLE, format, scaling=GIVEN, given=float(scale), codes=codes, **counts)
    return codes, scale_inv, _statistics(x, None, format, counts, scale_inv) if statistics else None


def _run(
    library: ctypes.CDLL,
    matrix: torch.Tensor,
    tile: tuple[int, int],
    format: Format,
    codes: torch.Tensor | None = None,
    **more: Any,
) -> bool:
    """Run one job; return whether it met a value that is infinite, NaN or too large for its scale."""
    job = _job(matrix, tile, format, codes, **more)
    if not library.nemo_fp8_quantize(ctypes.byref(job)):
        raise MemoryError("no memory for the sums of a cast")
    return bool(job.wild)


def _job(
    matrix: torch.Tensor, tile: tuple[int, int], format: Format, codes: torch.Tensor | None = None, **more: Any
) -> CastJob:
    """Return a job that is ready to run. Tensors are passed as their addresses."""
    source = SOURCES[matrix.dtype]
    if codes is not None:
        more |= {
            "codes": codes,
            "codes_stride": matrix.shape[1] if codes.is_contiguous() else rows_of(codes, "codes").stride(0),
        }
    more.setdefault("threads", threads(matrix))
    return CastJob(
        x=matrix.data_ptr(), rows=matrix.shape[0], cols=matrix.shape[1], stride=matrix.stride(0), tile_rows=tile[0],
        tile_cols=tile[1],
        source=PAIR if source == BF16 and tile[1] > 1 else source, mantissa_bits=format.mantissa_bits, bias=format.bias,
        count_bytes=_counter(tile).itemsize, parallel=parallel(), format_max=format.max,
        saturates_above=format.saturates_above,
        **{name: value.data_ptr() if isinstance(value, torch.Tensor) else value for name, value in more.items()},
    )  # fmt: skip


def _takes(tile: Tile) -> bool:
    """Return whether tiles divide a strip, and a byte can count their rows."""
    return tile is None or (tile[0] <= 255 and tile[1] <= STRIP and tile[1] & (tile[1] - 1) == 0)


def threads(matrix: torch.Tensor) -> int:
    """Return the number of threads: all or one. OpenMP would end those that a smaller team leaves out."""
    return 1 if matrix.numel() < ELEMENTS_FOR_THREADS else torch.get_num_threads()


@functools.cache
def parallel() -> int | None:
    """Return the address of ``GOMP_parallel`` as torch finds it: in the process, or among torch's own libraries. None
    in a forked process, which lacks the threads."""
    if os.getpid() == PROCESS:
        for library in (None, torch._C.__file__):
            with contextlib.suppress(OSError, AttributeError):
                return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value
    return None


os.register_at_fork(after_in_child=parallel.cache_clear)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a matrix with contiguous rows, copied only if need be."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _as_wide_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a matrix whose rows are about a strip long, which is the fastest shape."""
    if x.is_contiguous() and x.numel() % STRIP == 0:
        return x.view(-1, STRIP)
    return _as_rows(x.reshape(-1) if x.dim() == 0 else x).contiguous()


def _grid(matrix: torch.Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-matrix.shape[0] // tile[0]), -(-matrix.shape[1] // tile[1])


def _counter(tile: tuple[int, int]) -> torch.dtype:
    """Return the dtype that counts a tile's elements, as narrow as it may be: writing counts costs memory bandwidth."""
    return torch.uint8 if tile[0] * tile[1] <= 255 else torch.int32


def _empty_counts(
    grid: tuple[int, int], tile: tuple[int, int], left_out: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Return memory for the counts, in one allocation, which the allocator is more likely to have ready."""
    tiles, counter = grid[0] * grid[1], _counter(tile)
    types = {
        name: counter if dtype == torch.int32 else dtype for name, dtype in _COUNTS.items() if name not in left_out
    }
    block = torch.empty(tiles * sum(dtype.itemsize for dtype in types.values()), dtype=torch.uint8)
    pieces = torch.split(block, [tiles * dtype.itemsize for dtype in types.values()])
    return {name: piece.view(dtype).view(grid) for (name, dtype), piece in zip(types.items(), pieces, strict=True)}


def _statistics(
    x: torch.Tensor, tile: Tile, format: Format, counts: dict[str, torch.Tensor], scale_inv: torch.Tensor
) -> Statistics:
    renamed = {"least": "least_code", "largest": "largest_code"}
    return statistics_of(x, tile, format, scale_inv, {renamed.get(name, name): found for name, found in counts.items()})
