"""Cast to NVFP4 and decode it on a CPU with the compiled kernels of `fp4_quantize.c`, `fp4_decode.c` and `fp4_count.c`.

As in `cpu.py` one call is one job, divided among torch's own threads, and None is the answer where there is no kernel.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from nemo_fp8.contract.operands import FOUR_BIT_BLOCK as BLOCK
from nemo_fp8.numerics.kernels import FourOverSix, build
from nemo_fp8.numerics.kernels.cpu import BF16, FP32, SOURCES, parallel, threads
from nemo_fp8.numerics.statistics import TOTALS

ERRORS = {"mae": 1, "mse": 2}


class _Fp4Job(ctypes.Structure):
    """`struct fp4_job` of the C source."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "codes", "scales", "encode", "amax", "chance", "signs", "parallel")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "stride", "encode_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("source", "tile_rows", "vllm", "turned", "error", "scaled_errors", "threads")
        ),
        ("largest", ctypes.c_float),
        ("next", ctypes.c_int64),
        ("top", ctypes.c_uint32),
    )


class _Fp4DecodeJob(ctypes.Structure):
    """`struct fp4_decode_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "amax", "out", "parallel")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "amax_stride")),
        *((name, ctypes.c_float) for name in ("reciprocal",)),
        *((name, ctypes.c_int32) for name in ("target", "threads")),
        ("next", ctypes.c_int64),
    )


_COUNTS = {
    **dict.fromkeys(("underflow", "saturated", "nonfinite", "least_code", "largest_code"), torch.uint8),
    **dict.fromkeys(("norm", "error_norm"), torch.float64),
    "amax": torch.float32,
}
"""A field of Statistics -> the dtype in which it is counted for 16 values."""


class _Fp4CountJob(ctypes.Structure):
    """`struct fp4_count_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "decode", *_COUNTS, "parallel")),
        *((name, ctypes.c_int64) for name in ("rows", "cols")),
        *((name, ctypes.c_int32) for name in ("source", "threads")),
        ("saturates_above", ctypes.c_float),
        ("next", ctypes.c_int64),
    )


class _Fp4TotalJob(ctypes.Structure):
    """`struct fp4_total_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "beneath", "totals", "parallel")),
        *((name, ctypes.c_int64) for name in ("parts", "rows", "cols")),
        *((f"{name}_{of}", ctypes.c_int64) for name in ("x", "codes", "scales") for of in ("part", "row")),
        *((name, ctypes.c_int32) for name in ("source", "threads")),
        ("saturates_above", ctypes.c_float),
        ("next", ctypes.c_int64),
        ("of_rows", ctypes.c_void_p),
    )


def quantize(
    x: torch.Tensor,
    encode: torch.Tensor,
    tile_rows: int,
    convention: str,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    signs: tuple[float, ...] | None = None,
    chance: torch.Tensor | None = None,
    four_over_six: FourOverSix | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Do what :func:`nemo_fp8.numerics.nvfp4.cast_reference` does beneath ``encode``; None if there is no kernel for
    it."""
    library = build.library()
    if library is None or not _takes(x, signs) or bool(encode.isnan().any()):
        return None
    rows, cols = x.shape
    encode = encode.contiguous()
    amax = None if four_over_six is None else four_over_six.amax.float().contiguous()
    chance = None if chance is None else chance.contiguous()
    codes, scales = out or (
        torch.empty(rows, cols // 2, dtype=torch.uint8),
        torch.empty(rows, cols // BLOCK, dtype=torch.float8_e4m3fn),
    )
    job = _Fp4Job(
        **_source(x, signs), codes=codes.data_ptr(), scales=scales.data_ptr(), encode=encode.data_ptr(),
        amax=None if amax is None else amax.data_ptr(), chance=None if chance is None else chance.data_ptr(),
        encode_stride=int(encode.numel() > 1), tile_rows=tile_rows, vllm=convention == "vllm",
        error=0 if four_over_six is None else ERRORS[four_over_six.error],
        scaled_errors=four_over_six is not None and four_over_six.scaled,
        largest=0.0 if four_over_six is None else four_over_six.largest,
    )  # fmt: skip
    library.nemo_fp4_quantize(ctypes.byref(job))
    return codes, scales


def transformed_amax(x: torch.Tensor, signs: tuple[float, ...]) -> torch.Tensor | None:
    """Return the largest magnitude that is not NaN of the values that :func:`quantize` casts after their transform;
    None if there is no kernel for it."""
    library = build.library()
    if library is None or not _takes(x, signs):
        return None
    job = _Fp4Job(**_source(x, signs))
    library.nemo_fp4_transformed_top(ctypes.byref(job))
    return torch.tensor(job.top << 16, dtype=torch.int32).view(torch.float32)


def _takes(x: torch.Tensor, signs: tuple[float, ...] | None) -> bool:
    """Return whether there is a kernel for this matrix: one of its dimensions lies in one piece; what is transformed
    lies turned, as GEMMs have it that contract rows."""
    turned = _turned(x)
    straight = x.stride(1) == 1 and signs is None
    return x.dtype in SOURCES and x.numel() > 0 and (straight or turned) and (not signs or x.dtype == torch.bfloat16)


def _turned(x: torch.Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) != 1


def _source(x: torch.Tensor, signs: tuple[float, ...] | None) -> dict[str, Any]:
    """Return what a job says of the matrix that is cast, and of what casts it."""
    turned = _turned(x)
    return {
        "x": x.data_ptr(), "rows": x.shape[0], "cols": x.shape[1], "stride": x.stride(1 if turned else 0),
        "source": SOURCES[x.dtype], "turned": turned, "threads": threads(x), "parallel": parallel(),
        "signs": signs and ctypes.cast(_quarters(signs), ctypes.c_void_p),
    }  # fmt: skip


@functools.cache
def _quarters(signs: tuple[float, ...]) -> Any:
    return (ctypes.c_float * BLOCK)(*(sign / 4 for sign in signs))


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    amax: torch.Tensor | None,
    largest: float,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Compute ``code * (scale * amax * (1 / largest))``, or ``code * scale`` without an amax; None if there is no
    kernel for it."""
    library = build.library()
    if library is None or dtype not in (torch.bfloat16, torch.float32) or codes.numel() == 0:
        return None
    rows, cols = codes.shape[0], codes.shape[1] * 2
    codes, scales = codes.contiguous(), scales.contiguous()
    amax = None if amax is None else amax.to(torch.float32).contiguous()
    out = torch.empty(rows, cols, dtype=dtype) if out is None else out
    job = _Fp4DecodeJob(
        codes=codes.data_ptr(), scales=scales.data_ptr(), amax=None if amax is None else amax.data_ptr(),
        out=out.data_ptr(), rows=rows, cols=cols, amax_stride=int(amax is not None and amax.numel() > 1),
        reciprocal=float(torch.reciprocal(torch.tensor(largest))), target=BF16 if dtype == torch.bfloat16 else FP32,
        threads=threads(out), parallel=parallel(),
    )  # fmt: skip
    library.nemo_fp4_decode(ctypes.byref(job))
    return out


def count(
    x: torch.Tensor, codes: torch.Tensor, decode: torch.Tensor, saturates_above: float
) -> dict[str, torch.Tensor] | None:
    """Count for every 16 values of a matrix in one piece what its cast to ``codes`` did, which ``decode`` multiplies;
    return the fields of Statistics, or None if there is no kernel for it."""
    library = build.library()
    if library is None or x.dtype not in SOURCES or not x.is_contiguous() or x.numel() == 0:
        return None
    codes, decode = codes.contiguous(), decode.contiguous()
    counts = {name: torch.empty(decode.shape, dtype=dtype) for name, dtype in _COUNTS.items()}
    job = _Fp4CountJob(
        x=x.data_ptr(), codes=codes.data_ptr(), decode=decode.data_ptr(), rows=x.shape[0], cols=x.shape[1],
        source=SOURCES[x.dtype], threads=threads(x), parallel=parallel(), saturates_above=saturates_above,
        **{name: counted.data_ptr() for name, counted in counts.items()},
    )  # fmt: skip
    library.nemo_fp4_count(ctypes.byref(job))
    return counts


def total(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, beneath: torch.Tensor, saturates_above: float
) -> torch.Tensor | None:
    """Sum up what the casts of the matrices of a stack did, [matrices, TOTALS]; None if there is no kernel for it."""
    library, all_ = build.library(), {"x": x, "codes": codes, "scales": scales}
    if library is None or x.dtype not in SOURCES or x.numel() == 0 or any(t.stride(2) != 1 for t in all_.values()):
        return None
    totals, beneath = torch.empty(len(x), len(TOTALS), dtype=torch.float64), beneath.float().contiguous()
    parts, rows, cols = x.shape
    job = _Fp4TotalJob(
        parts=parts, rows=rows, cols=cols, beneath=beneath.data_ptr(), totals=totals.data_ptr(),
        **{name: t.data_ptr() for name, t in all_.items()},
        **{f"{name}_part": t.stride(0) for name, t in all_.items()},
        **{f"{name}_row": t.stride(1) for name, t in all_.items()},
        source=SOURCES[x.dtype], threads=threads(x), parallel=parallel(), saturates_above=saturates_above,
    )  # fmt: skip
    return totals if library.nemo_fp4_total(ctypes.byref(job)) else None
