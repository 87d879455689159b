"""Quantizing and decoding on a GPU: what is launched, on rectangles of which size.

Triton is imported when a CUDA tensor comes. Without it (or for tiles that a program's registers cannot hold) the
answer is None, which is said once, and torch does the same in several passes.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch

from nemo_fp8.numerics.formats import FORMATS, Format, format_of
from nemo_fp8.numerics.kernels.out import rows_of
from nemo_fp8.numerics.statistics import Statistics

Tile = tuple[int, int] | None
Out = tuple[torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, Statistics | None]

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = {("te", "fp32"): 1, ("te", "pow2"): 2, ("deepgemm", "fp32"): 3, ("deepgemm", "pow2"): 4, ("te", "e8m0"): 5}
GIVEN = 0
WHOLE = (32, 256)  # how a whole tensor is cut up
# A program's share: 64 values a thread are few enough for its registers, and enough loads in flight to fill the memory's pipe.
ELEMENTS, COLUMNS, VALUES_PER_THREAD = 8192, 256, 64

log = logging.getLogger(__name__)


@functools.cache
def available() -> bool:
    """Whether Triton is there; said once if not."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        log.warning("FP8 casts run in torch on this GPU, with the same bits but more slowly: triton is not installed")
    return found


def quantize(
    x: torch.Tensor, tile: Tile, element_format: str, scale_kind: str, convention: str, statistics: bool,
    scale: torch.Tensor | None, out: Out | None,
) -> Result | None:  # fmt: skip
    """As :func:`nemo_fp8.numerics.quantize.quantize_reference`, or None."""
    scaling = SCALINGS.get((convention, scale_kind))
    if scaling is None or x.dtype not in SOURCES or x.numel() == 0 or not _takes(tile) or not available():
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
        _launch(matrix, WHOLE, format, GIVEN, codes=codes, given=scale, **found)
    else:
        scale_type = torch.float8_e8m0fnu if scale_kind == "e8m0" else torch.float32
        scale_inv = torch.empty(grid, dtype=scale_type, device=x.device) if out is None else out[1]
        _launch(matrix, tile, format, scaling, codes=codes, scale_inv=scale_inv, **found)
    return codes, scale_inv, _statistics(x, tile, format, found, scale_inv) if statistics else None


def amax(x: torch.Tensor) -> torch.Tensor | None:
    """The largest magnitude that is not NaN, in FP32 (0-dim), or None."""
    if x.dtype not in SOURCES or x.numel() == 0 or not available():
        return None
    matrix = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    found = torch.empty(_grid(matrix, WHOLE), dtype=torch.float32, device=x.device)
    _launch(matrix, WHOLE, FORMATS["e4m3"], SCALINGS["te", "fp32"], amax=found)
    return found.amax()


def decode(data: torch.Tensor, scale_inv: torch.Tensor, tile: Tile, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor | None:
    """``code * scale_inv``, or None."""
    if dtype not in SOURCES or data.numel() == 0 or not available():
        return None
    from nemo_fp8.numerics.kernels import triton_kernels

    format = format_of(data.dtype)
    codes = data.reshape(-1, data.shape[-1]) if data.dim() else data.reshape(1, 1)
    codes = codes.contiguous().view(torch.uint8)
    rows, cols = codes.shape
    out = torch.empty(data.shape, dtype=dtype, device=data.device) if out is None else out
    bytes_ = scale_inv.dtype != torch.float32
    strides = (0, 0) if tile is None else scale_inv.stride()
    high, wide = ELEMENTS // COLUMNS, COLUMNS
    triton_kernels.decode_kernel[(-(-rows // high) * -(-cols // wide),)](
        codes, scale_inv.view(torch.uint8) if bytes_ else scale_inv, out, rows, cols, *strides, *(tile or (1, 1)),
        MANTISSA=format.mantissa_bits, BIAS=format.bias, SPECIAL=_special(format), BYTES=bytes_, ROWS=high, COLS=wide, num_warps=4,
    )  # fmt: skip
    return out


def _launch(matrix: torch.Tensor, tile: tuple[int, int], format: Format, scaling: int, **arrays: torch.Tensor) -> None:
    from nemo_fp8.numerics.kernels import triton_kernels

    high, wide = _rectangle(tile)
    (rows, cols), (grid_rows, grid_cols) = matrix.shape, _grid(matrix, tile)
    codes, counts = arrays.get("codes"), arrays.get("counts")
    scale_inv = arrays.get("scale_inv")
    if scale_inv is not None and scale_inv.dtype != torch.float32:
        scale_inv = scale_inv.view(torch.uint8)
    bf16 = matrix.dtype == torch.bfloat16
    source = matrix.view(torch.int16) if bf16 else matrix
    codes_stride = 0 if codes is None else rows_of(codes, "codes").stride(0)
    scale_strides = (0, 0) if scale_inv is None else scale_inv.stride()
    none = matrix  # a pointer that the kernel does not touch
    triton_kernels.quantize_kernel[(-(-grid_rows // high) * -(-grid_cols // wide),)](
        source, none if codes is None else codes.view(torch.uint8), none if scale_inv is None else scale_inv,
        *(arrays.get(name, none) for name in ("given", "amax", "signal", "noise", "counts")),
        rows, cols, matrix.stride(0), codes_stride, *scale_strides, grid_rows, grid_cols,
        format.max, 1.0 / format.max, torch.finfo(matrix.dtype).max, format.saturates_above,
        SCALING=scaling, MANTISSA=format.mantissa_bits, BIAS=format.bias, SPECIAL=_special(format),
        HIGH=high, TILE_ROWS=tile[0], WIDE=wide, TILE_COLS=tile[1],
        BF16=bf16, CAST=codes is not None, STATISTICS=counts is not None, HARDWARE=_rounds_in_hardware(matrix.device),
        num_warps=_warps(high * tile[0] * wide * tile[1], statistics=counts is not None),
    )  # fmt: skip


def _rectangle(tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles a program takes, down and across: about ELEMENTS values, in rows of COLUMNS where tiles allow it."""
    wide = max(1, COLUMNS // tile[1]) if tile[0] * COLUMNS <= ELEMENTS else max(1, ELEMENTS // (tile[0] * tile[1]))
    return max(1, ELEMENTS // (tile[0] * tile[1] * wide)), wide


def _warps(elements: int, statistics: bool) -> int:
    """Counting needs twice the registers for each value."""
    return max(1, elements // VALUES_PER_THREAD // 32) * (2 if statistics else 1)


def _takes(tile: Tile) -> bool:
    """Powers of two, and no more values than a program's registers hold."""
    return tile is None or (tile[0] * tile[1] <= 2 * ELEMENTS and all(n & (n - 1) == 0 for n in tile))


def _grid(matrix: torch.Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-matrix.shape[0] // tile[0]), -(-matrix.shape[1] // tile[1])


def _special(format: Format) -> int:
    return format.infinity or format.first_nan


def _rounds_in_hardware(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _empty(grid: tuple[int, int], device: torch.device) -> dict[str, torch.Tensor]:
    floats = {name: torch.empty(grid, dtype=torch.float32, device=device) for name in ("amax", "signal", "noise")}
    return {**floats, "counts": torch.empty((5, *grid), dtype=torch.int32, device=device)}


def _statistics(x: torch.Tensor, tile: Tile, format: Format, found: dict[str, torch.Tensor], scale_inv: torch.Tensor) -> Statistics:
    from nemo_fp8.numerics.kernels.results import statistics_of

    underflow, saturated, nonfinite, least, largest = found["counts"]
    fields: dict[str, Any] = {
        "amax": found["amax"], "norm": found["signal"].sqrt_(), "error_norm": found["noise"].sqrt_(),
        "underflow": underflow, "saturated": saturated, "nonfinite": nonfinite,
        "least_code": least.to(torch.uint8), "largest_code": largest.to(torch.uint8),
    }  # fmt: skip
    return statistics_of(x, tile, format, scale_inv, fields)
