"""Quantize, decode and turn on a GPU: which kernel is launched, on rectangles of which size.

A :class:`Launch` is a kernel with its arguments. Triton compiles one program for each set of compile-time constants and
argument types. ``variants`` lists them all, through the two functions that also make the launches, so that
``tests/numerics/test_kernels_compiled.py`` can compile every one without a GPU. For the list to be complete, only the
tables here may choose a program: Triton's own specialization (on arguments that are 1, on multiples of 16) is switched
off, and ``_aligned`` replaces it.

Triton is imported when the first CUDA tensor comes. Without Triton, and for tiles that are not in ``TILES``, the
functions return None and log it once, and the caller computes in torch, in several passes.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nemo_fp8.numerics.formats import FORMATS, Format, format_of
from nemo_fp8.numerics.kernels import SOURCES, Out, Result, Tile
from nemo_fp8.numerics.kernels.out import rows_of
from nemo_fp8.numerics.statistics import Statistics

TILES = ((128, 128), (1, 128), (128, 1), (1, 32), (32, 1))
# A scale rule as kernel arguments: is it E8M0; is the quotient scale_inv; what is added to its bits, which of them are
# kept.
RULES = {
    ("te", "fp32"): (0, 0, 0, -1),
    ("te", "pow2"): (0, 0, 0, 0x7F800000),
    ("deepgemm", "fp32"): (0, 1, 0, -1),
    ("deepgemm", "pow2"): (0, 1, 0x7FFFFF, 0x7F800000),
    ("te", "e8m0"): (1, 0, 0, -1),
}
WHOLE = (32, 256)  # the tiles into which a whole tensor is cut
# Elements of a program: enough loads in flight to use the memory's bandwidth.
ELEMENTS, COLUMNS, DECODED = 8192, 256, 4096
# Values that a thread holds at once, few enough for its registers: statistics need six sums for each, unaligned rows
# an address, and decoding by columns the address of a scale.
VALUES, VALUES_DECODED, VALUES_COUNTED = 64, 32, 16
FEW = VALUES_COUNTED * 8 * 32  # elements of a program, or of its strip, where a thread has VALUES_COUNTED
# By the bytes of an element: the type that is moved, and the side of the square that a program turns.
TURNED = {1: (torch.uint8, 128), 2: (torch.int16, 64)}
HARDWARE_SINCE = (8, 9)  # the compute capability from which on a GPU converts FP8 itself
STRAIGHT_SINCE = (3, 6)  # Triton's version from which on a compiled program takes every argument of its kernel
SHARED = 32  # columns of a tile that share one scale; in other tiles each has its own

log = logging.getLogger(__name__)


@functools.cache
def available() -> bool:
    """Return whether Triton is installed; log it once if not."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        log.warning("FP8 casts run in torch on this GPU, with the same bits but more slowly: triton is not installed")
    return found


def quantize(
    x: torch.Tensor, tile: Tile, element_format: str, scale_kind: str, convention: str, statistics: bool,
    scale: torch.Tensor | None, out: Out | None,
) -> Result | None:  # fmt: skip
    """Do what :func:`nemo_fp8.numerics.quantize.quantize_reference` does; None if there is no kernel for it."""
    rule = RULES.get((convention, scale_kind))
    if rule is None or x.dtype not in SOURCES or x.numel() == 0 or not _takes(tile) or not available():
        return None
    x, format = x.detach(), format_of(element_format)
    matrix = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    grid = _grid(matrix, tile or WHOLE)
    codes = torch.empty(x.shape, dtype=format.dtype, device=x.device) if out is None else out[0]
    found = _empty(grid, x.device) if statistics else {}
    if tile is None:
        from nemo_fp8.numerics.quantize import find_scales

        if scale is None:
            largest = amax(x)
            assert largest is not None
            scale, scale_inv = find_scales(largest, format, scale_kind, convention)
        else:
            scale = scale.detach().to(x.device, torch.float32).reshape(())
            scale_inv = torch.reciprocal(scale)
        if out is not None:
            scale_inv = out[1].copy_(scale_inv.reshape(out[1].shape))
        _start(cast(matrix, WHOLE, format, None, codes=codes, given=scale, **found))
    else:
        scale_type = torch.float8_e8m0fnu if scale_kind == "e8m0" else torch.float32
        scale_inv = torch.empty(grid, dtype=scale_type, device=x.device) if out is None else out[1]
        _start(cast(matrix, tile, format, rule, codes=codes, scale_inv=scale_inv, **found))
    return codes, scale_inv, _statistics(x, tile, format, found, scale_inv) if statistics else None


def amax(x: torch.Tensor) -> torch.Tensor | None:
    """Return the largest magnitude that is not NaN, in FP32 (0-dim); None if there is no kernel for it."""
    if x.dtype not in SOURCES or x.numel() == 0 or not available():
        return None
    matrix = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    found = torch.empty(_grid(matrix, WHOLE), dtype=torch.float32, device=x.device)
    _start(cast(matrix, WHOLE, FORMATS["e4m3"], None, amax=found))
    return found.amax()


def decode(
    data: torch.Tensor, scale_inv: torch.Tensor, tile: Tile, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor | None:
    """Compute ``code * scale_inv``; None if there is no kernel for it."""
    if dtype not in SOURCES or data.numel() == 0 or not available():
        return None
    out = torch.empty(data.shape, dtype=dtype, device=data.device) if out is None else out
    codes = data.reshape(-1, data.shape[-1]) if data.dim() else data.reshape(1, 1)
    _start(back(codes.contiguous(), scale_inv, tile, out))
    return out


def turn(x: torch.Tensor, into: torch.Tensor) -> bool:
    """Write a matrix of bytes or 16-bit values, turned; return False, and write nothing, if there is no kernel for it.

    Raises ValueError if shapes or dtypes do not fit.
    """
    has_rows = x.dim() == 2 and x.stride(1) == into.stride(1) == 1
    if x.itemsize not in TURNED or x.numel() == 0 or not has_rows or not available():
        return False
    if into.shape != x.shape[::-1] or into.dtype != x.dtype:
        raise ValueError(f"{tuple(x.shape)} of {x.dtype} turned into memory of {tuple(into.shape)} of {into.dtype}.")
    _start(turning(x, into))
    return True


# ---------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: the number of programs, its arguments and its compile-time constants."""

    kernel: str
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    module: str = "triton_kernels"


def cast(
    matrix: torch.Tensor, tile: tuple[int, int], format: Format, rule: tuple[int, ...] | None, **arrays: torch.Tensor
) -> Launch:
    """Return the launch that casts a matrix into ``codes`` or, without ``codes``, finds its ``amax``.

    ``rule`` is the row of the scale rule; None if the scale is given.
    """
    statistics = "counts" in arrays
    (rows, cols), (grid_rows, grid_cols) = matrix.shape, _grid(matrix, tile)
    codes, scale_inv = arrays.get("codes"), arrays.get("scale_inv")
    bf16 = matrix.dtype == torch.bfloat16
    codes = None if codes is None else rows_of(codes, "codes").view(torch.uint8)
    aligned = _aligned(matrix, codes)
    high, wide, strips, warps = _rectangle(tile, statistics, aligned)
    return Launch(
        "quantize_kernel",
        -(-grid_rows // high) * -(-grid_cols // wide),
        (
            matrix.view(torch.int16) if bf16 else matrix, codes, _plain(scale_inv),
            *(arrays.get(name) for name in ("given", "amax", "signal", "noise", "counts")),
            rows, cols, matrix.stride(0), 0 if codes is None else codes.stride(0),
            *((0, 0) if scale_inv is None else scale_inv.stride()), grid_rows, grid_cols,
            *(rule or RULES["te", "fp32"]), format.max, 1.0 / format.max, torch.finfo(matrix.dtype).max,
            format.saturates_above,
        ),
        {
            "GIVEN": rule is None and codes is not None, **_constants(format, matrix.device),
            "HIGH": high, "TILE_ROWS": tile[0], "WIDE": wide, "TILE_COLS": tile[1], "STRIPS": strips,
            "BF16": bf16, "CAST": codes is not None, "STATISTICS": statistics, "ALIGNED": aligned,
        },
        warps,
    )  # fmt: skip


def back(codes: torch.Tensor, scale_inv: torch.Tensor, tile: Tile, out: torch.Tensor) -> Launch:
    """Return the launch that decodes contiguous codes, [rows, columns], into ``out``."""
    rows, cols = codes.shape
    strides = (0, 0) if tile is None else scale_inv.stride()
    tile = tile or WHOLE
    shared = 1 if tile[1] % SHARED else SHARED
    high, wide = DECODED // COLUMNS, COLUMNS
    constants = _constants(format_of(codes.dtype), codes.device)
    codes = codes.view(torch.uint8)
    return Launch(
        "decode_kernel",
        -(-rows // high) * -(-cols // wide),
        (codes, _plain(scale_inv), out, rows, cols, *strides, *tile, int(scale_inv.dtype != torch.float32)),
        {
            **constants, "ROWS": high, "COLS": wide, "SHARED": shared,
            "ALIGNED": _aligned(codes, out.reshape(codes.shape)),
        },
        DECODED // (VALUES_COUNTED if shared == 1 else VALUES_DECODED) // 32,
    )  # fmt: skip


def turning(x: torch.Tensor, into: torch.Tensor) -> Launch:
    """Return the launch that writes a matrix into memory of its columns, as rows."""
    (rows, cols), (words, side), aligned = x.shape, TURNED[x.itemsize], _aligned(x, into)
    return Launch(
        "turn_kernel",
        -(-rows // side) * -(-cols // side),
        (x.view(words), into.view(words), rows, cols, x.stride(0), into.stride(0)),
        {"ROWS": side, "COLS": side, "ALIGNED": aligned},
        side * side // (VALUES if aligned else VALUES_COUNTED) // 32,
        "triton_turn",
    )


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every program that this file can ask Triton for, with its name, on small tensors of the CPU."""
    formats = [FORMATS[name] for name in ("e4m3", "e5m2")]
    for dtype, aligned in itertools.product(SOURCES, (True, False)):
        x = torch.empty(128, 160, dtype=dtype)[:, : None if aligned else 130]
        x = x if aligned else x[:, 1:]
        named = f"{str(dtype).removeprefix('torch.')}{'' if aligned else ', unaligned'}"
        yield f"amax of {named}", cast(x, WHOLE, formats[0], None, amax=torch.empty(_grid(x, WHOLE)))
        for format, tile, statistics in itertools.product(formats, (*TILES, None), (False, True)):
            grid = _grid(x, tile or WHOLE)
            arrays = {
                "codes": torch.empty(x.shape, dtype=format.dtype),
                **(_empty(grid, x.device) if statistics else {}),
            }
            arrays["given" if tile is None else "scale_inv"] = torch.empty(() if tile is None else grid)
            shown = "a given scale" if tile is None else "{}x{}".format(*tile)
            launch = cast(x, tile or WHOLE, format, None if tile is None else RULES["te", "fp32"], **arrays)
            yield f"{named} to {format.name}, {shown}{', statistics' if statistics else ''}", launch
        for format, tile in itertools.product(formats, ((1, SHARED), (1, 1))):
            codes, values = torch.empty(x.shape, dtype=format.dtype), torch.empty(x.shape, dtype=dtype)
            shown = "tiles of rows" if tile[1] == SHARED else "tiles of columns"
            yield f"{format.name} to {named}, {shown}", back(codes, torch.empty(_grid(x, tile)), tile, values)
    for (words, side), aligned in itertools.product(TURNED.values(), (True, False)):
        x = torch.empty(side, side if aligned else side - 1, dtype=words)
        yield f"{words.itemsize} bytes turned{'' if aligned else ', unaligned'}", turning(x, x.new_empty(x.shape[::-1]))


def _start(launch: Launch) -> None:
    """Start a kernel, the first time through Triton, which finds the program and compiles it; later the program
    itself, which takes a third of the time that Triton takes to find it again."""
    kernel, straight, names = _kernel(launch.module, launch.kernel)
    programs = (launch.programs, 1, 1)
    if not straight:
        kernel[programs](*launch.arguments, **launch.constants, num_warps=launch.warps)
        return
    key = (kernel, *_told_apart_by(launch))
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[programs](*launch.arguments, **launch.constants, num_warps=launch.warps)
    else:
        compiled[programs](*launch.arguments, *(launch.constants[name] for name in names))


_COMPILED: dict[tuple[Any, ...], Any] = {}
"""The programs that were launched by now."""


def _told_apart_by(launch: Launch) -> tuple[Any, ...]:
    """Return what decides which program a launch of a kernel is: constants, types of arguments, warps, the device."""
    from triton.runtime import driver

    kinds = (a.dtype if isinstance(a, torch.Tensor) else type(a) for a in launch.arguments)
    return (driver.active.get_current_device(), launch.warps, *launch.constants.values(), *kinds)


@functools.cache
def _kernel(module: str, name: str) -> tuple[Any, bool, list[str]]:
    """Return a kernel, whether its compiled programs can be launched themselves, and its constants in their order."""
    import triton

    kernel = getattr(importlib.import_module(f"nemo_fp8.numerics.kernels.{module}"), name)
    compiles = isinstance(kernel, triton.JITFunction)  # and does not interpret
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    constants = [kernel.arg_names[number] for number in kernel.constexprs] if compiles else []
    return kernel, compiles and version >= STRAIGHT_SINCE, constants


def _constants(format: Format, device: torch.device) -> dict[str, Any]:
    """Return the compile-time constants of a format on a device."""
    special = format.infinity or format.first_nan
    return {
        "MANTISSA": format.mantissa_bits,
        "BIAS": format.bias,
        "SPECIAL": special,
        "HARDWARE": in_hardware(device, HARDWARE_SINCE),
    }


def _plain(scale_inv: torch.Tensor | None) -> torch.Tensor | None:
    """Return scales in a dtype that Triton knows."""
    return scale_inv if scale_inv is None or scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)


def _aligned(*matrices: torch.Tensor | None) -> bool:
    """Return whether 16 elements of a row, from any multiple of 16 on, can be moved as 128 bits: addresses and lengths
    fit."""
    there = [m for m in matrices if m is not None]
    return all(m.shape[1] % 16 == 0 and m.data_ptr() % 16 == 0 and m.stride(0) * m.itemsize % 16 == 0 for m in there)


@functools.cache
def _rectangle(tile: tuple[int, int], statistics: bool, aligned: bool) -> tuple[int, int, int, int]:
    """Return a program's tiles down and across, the number of strips that their rows are cut into, and its warps."""
    few = statistics or not aligned
    values = VALUES_COUNTED if few else VALUES
    elements, area = FEW if few else ELEMENTS, tile[0] * tile[1]
    wide = COLUMNS // tile[1]
    if not few:
        wide = min(wide, elements // area)
    elif area > elements:  # cut into strips, and alone
        wide = 1
    wide = max(1, wide)
    high = max(1, elements // (area * wide))
    strips = max(1, area * wide // elements) if few else 1
    return high, wide, strips, high * area * wide // strips // values // 32


def _takes(tile: Tile) -> bool:
    """Return whether there is a program for the tile; log it once for each tile if not."""
    if tile is None or tile in TILES:
        return True
    _left_to_torch(tile)
    return False


@functools.cache
def _left_to_torch(tile: tuple[int, int]) -> None:
    log.warning(
        "FP8 casts in tiles of %dx%d run in torch on this GPU, with the same bits but more slowly: no kernel has them",
        *tile,
    )


def _grid(matrix: torch.Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-matrix.shape[0] // tile[0]), -(-matrix.shape[1] // tile[1])


@functools.cache
def in_hardware(device: torch.device, since: tuple[int, int]) -> bool:
    """Return whether this is an NVIDIA GPU of that compute capability or a later one."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= since


def _empty(grid: tuple[int, int], device: torch.device) -> dict[str, torch.Tensor]:
    floats = {name: torch.empty(grid, dtype=torch.float32, device=device) for name in ("amax", "signal", "noise")}
    return {**floats, "counts": torch.empty((5, *grid), dtype=torch.int32, device=device)}


def _statistics(
    x: torch.Tensor, tile: Tile, format: Format, found: dict[str, torch.Tensor], scale_inv: torch.Tensor
) -> Statistics:
    from nemo_fp8.numerics.kernels.results import statistics_of

    underflow, saturated, nonfinite, least, largest = found["counts"]
    fields: dict[str, Any] = {
        "amax": found["amax"], "norm": found["signal"].sqrt_(), "error_norm": found["noise"].sqrt_(),
        "underflow": underflow, "saturated": saturated, "nonfinite": nonfinite,
        "least_code": least.to(torch.uint8), "largest_code": largest.to(torch.uint8),
    }  # fmt: skip
    return statistics_of(x, tile, format, scale_inv, fields)
