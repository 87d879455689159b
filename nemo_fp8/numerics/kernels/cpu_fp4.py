"""Cast to NVFP4 and decode it on a CPU with the compiled kernels of `fp4_quantize.c` and `fp4_decode.c`.

As in `cpu.py` one call is one job, divided among torch's own threads, and None is the answer where there is no kernel.
"""

from __future__ import annotations

import ctypes

import torch

from nemo_fp8.numerics.kernels import build
from nemo_fp8.numerics.kernels.cpu import BF16, FP32, SOURCES, parallel, threads

BLOCK = 16


class _Fp4Job(ctypes.Structure):
    """`struct fp4_job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "encode", "parallel")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "stride", "encode_stride")),
        *((name, ctypes.c_int32) for name in ("source", "tile_rows", "vllm", "threads")),
        ("next", ctypes.c_int64),
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


def quantize(
    x: torch.Tensor,
    encode: torch.Tensor,
    tile_rows: int,
    convention: str,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Do what :func:`nemo_fp8.numerics.nvfp4.cast_reference` does for the nearest codes beneath ``encode``; None if
    there is no kernel for it."""
    library = build.library()
    if library is None or x.dtype not in SOURCES or x.numel() == 0 or x.stride(1) != 1 or bool(encode.isnan().any()):
        return None
    rows, cols = x.shape
    encode = encode.contiguous()
    codes, scales = out or (
        torch.empty(rows, cols // 2, dtype=torch.uint8),
        torch.empty(rows, cols // BLOCK, dtype=torch.float8_e4m3fn),
    )
    job = _Fp4Job(
        x=x.data_ptr(), codes=codes.data_ptr(), scales=scales.data_ptr(), encode=encode.data_ptr(),
        rows=rows, cols=cols, stride=x.stride(0), encode_stride=int(encode.numel() > 1), source=SOURCES[x.dtype],
        tile_rows=tile_rows, vllm=convention == "vllm", threads=threads(x), parallel=parallel(),
    )  # fmt: skip
    library.nemo_fp4_quantize(ctypes.byref(job))
    return codes, scales


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
