"""Cast to NVFP4 and decode it on a GPU: launches of the kernels of `triton_fp4.py`, as `cuda.py` makes them for FP8.

``variants`` lists every program that this file can ask Triton for; only what is here may choose one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from nemo_fp8.contract.operands import FOUR_BIT_BLOCK as BLOCK
from nemo_fp8.numerics.kernels import SOURCES, FourOverSix
from nemo_fp8.numerics.kernels.cuda import Launch, _aligned, _start, available, in_hardware

ELEMENTS, COLUMNS, VALUES = 4096, 256, 64  # of a program; of its rows; of a thread
HARDWARE_SINCE = (10, 0)  # the compute capability from which on a GPU converts E2M1 itself
FEW = 8  # values of a thread where each has an address of its own


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
    """Do what :func:`nemo_fp8.numerics.nvfp4.cast_reference` does for the nearest codes beneath ``encode``; None if
    there is no kernel for it."""
    if any(asked is not None for asked in (signs, chance, four_over_six)):
        return None
    if x.dtype not in SOURCES or x.numel() == 0 or x.stride(1) != 1 or not available():
        return None
    rows, cols = x.shape
    codes, scales = out or (
        torch.empty(rows, cols // 2, dtype=torch.uint8, device=x.device),
        torch.empty(rows, cols // BLOCK, dtype=torch.float8_e4m3fn, device=x.device),
    )
    _start(cast(x, encode.contiguous(), tile_rows, convention, codes, scales))
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
    if dtype not in SOURCES or codes.numel() == 0 or not available():
        return None
    out = torch.empty(codes.shape[0], codes.shape[1] * 2, dtype=dtype, device=codes.device) if out is None else out
    amax = None if amax is None else amax.float().contiguous()
    _start(back(codes.contiguous(), scales.contiguous(), amax, largest, out))
    return out


def cast(
    x: torch.Tensor, encode: torch.Tensor, tile_rows: int, convention: str, codes: torch.Tensor, scales: torch.Tensor
) -> Launch:
    """Return the launch that casts a matrix."""
    rows, cols = x.shape
    vllm, bf16, aligned = convention == "vllm", x.dtype == torch.bfloat16, _aligned(x, codes)
    high = ELEMENTS // COLUMNS // tile_rows
    return Launch(
        "quantize_fp4_kernel",
        -(-rows // (high * tile_rows)) * -(-cols // COLUMNS),
        (
            x.view(torch.int16) if bf16 else x, codes, scales.view(torch.uint8), encode,
            rows, cols, x.stride(0), int(encode.numel() > 1), 1 / 6, 1e8 if vllm else 0.0,
        ),
        {
            "VLLM": vllm, "HIGH": high, "TILE_ROWS": tile_rows, "WIDE": COLUMNS // BLOCK, "TILE_COLS": BLOCK,
            "BF16": bf16, "ALIGNED": aligned, "HARDWARE": in_hardware(x.device, HARDWARE_SINCE),
        },
        ELEMENTS // (VALUES if aligned else FEW) // 32,
        "triton_fp4",
    )  # fmt: skip


def back(
    codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor | None, largest: float, out: torch.Tensor
) -> Launch:
    """Return the launch that decodes contiguous codes into ``out``."""
    rows, cols = out.shape
    high, aligned = ELEMENTS // COLUMNS, _aligned(codes, out)
    return Launch(
        "decode_fp4_kernel",
        -(-rows // high) * -(-cols // COLUMNS),
        (
            codes, scales.view(torch.uint8), amax, out, rows, cols, int(amax is not None and amax.numel() > 1),
            float(torch.reciprocal(torch.tensor(largest))),
        ),
        {"ROWS": high, "COLS": COLUMNS, "TILE_COLS": BLOCK, "AMAX": amax is not None, "ALIGNED": aligned},
        ELEMENTS // (VALUES if aligned else FEW) // 32,
        "triton_fp4",
    )  # fmt: skip


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every program that this file can ask Triton for, with its name, on small tensors of the CPU."""
    one = torch.ones(1)
    for dtype, cols in itertools.product(SOURCES, (64, 48)):
        x = torch.empty(32, cols, dtype=dtype)
        codes, scales = torch.empty(32, cols // 2, dtype=torch.uint8), torch.empty(32, cols // 16, dtype=torch.uint8)
        named = f"{str(dtype).removeprefix('torch.')}{'' if cols == 64 else ', unaligned'}"
        for tile_rows, convention in itertools.product((1, BLOCK), ("te", "vllm")):
            shown = f"{named} to e2m1, {tile_rows}x16{', vLLM' if convention == 'vllm' else ''}"
            yield shown, cast(x, one, tile_rows, convention, codes, scales)
        for amax in (one, None):
            yield f"e2m1 to {named}{', scales alone' if amax is None else ''}", back(codes, scales, amax, 2688.0, x)
