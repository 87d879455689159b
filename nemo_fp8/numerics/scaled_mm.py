"""Run the real FP8 GEMM if the GPU and torch have one for these operands; else return None, and the caller emulates it.

``torch.nn.functional.scaled_mm`` takes row-major times column-major, K and N in multiples of 16, and scales in its own
layouts. What it supports depends on the recipe:

    one FP32 scale a tensor      sm89 and later
    1x128 times 128x128, or      sm90, with the cuBLASLt of CUDA 12.9 or later; E4M3 times E4M3 only; rows a multiple
    1x128 times 1x128            of 4, since scales of 1x128 tiles are stored by columns, each of which begins at a
                                 multiple of 16 bytes

No GPU multiplies E5M2 with E5M2, and none adds a bias to an FP32 result. The sums are FP32, in the device's own order.
"""

from __future__ import annotations

import torch

from nemo_fp8.numerics.quantized import Quantized, as_matrix, turned

_CONTRACTED = {(1, 128): "BlockWise1x128", (128, 128): "BlockWise128x128"}


def scaled_mm(a: Quantized, b: Quantized, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Compute ``op(a) @ op(b).T + bias`` on FP8 tensor cores; None if they do not support these operands."""
    if (
        a.device.type != "cuda"
        or not hasattr(torch.nn.functional, "scaled_mm")
        or out_dtype not in (torch.bfloat16, torch.float32)
    ):
        return None
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        return None
    left, right = _contracting_columns(a), _contracting_columns(b)
    if left is None or right is None or left.shape[1] % 16 or right.shape[0] % 16:
        return None
    recipes = _recipes(left, right)
    if recipes is None:
        return None
    if bias is not None and (bias.dtype != out_dtype or out_dtype == torch.float32):
        return None
    from torch.nn.functional import ScalingType

    return torch.nn.functional.scaled_mm(
        left.data,
        right.data.t(),
        _scales(left),
        getattr(ScalingType, recipes[0]),
        _scales(right),
        getattr(ScalingType, recipes[1]),
        bias=bias,
        output_dtype=out_dtype,
    )


def _contracting_columns(q: Quantized) -> Quantized | None:
    """Return the operand as a matrix whose columns are contracted, transposing the codes if need be."""
    tile = q.block if q.block is None or q.usage == "row" else (q.block[1], q.block[0])
    if tile is not None and tile not in _CONTRACTED:
        return None
    if q.usage == "row":
        return Quantized(as_matrix(q.data), q.scale_inv, tile)
    scale_inv = q.scale_inv if tile is None else q.scale_inv.t().contiguous()
    return Quantized(turned(as_matrix(q.data)), scale_inv, tile)


def _recipes(left: Quantized, right: Quantized) -> tuple[str, str] | None:
    capability = torch.cuda.get_device_capability(left.device)
    if left.block is None and right.block is None:
        return ("TensorWise", "TensorWise") if capability >= (8, 9) else None
    if left.block is None or right.block is None or left.block == right.block == (128, 128):
        return None
    if torch.float8_e5m2 in (left.data.dtype, right.data.dtype):
        return None
    if capability != (9, 0) or _cuda_version() < (12, 9) or _ragged(left) or _ragged(right):
        return None
    return _CONTRACTED[left.block], _CONTRACTED[right.block]


def _ragged(q: Quantized) -> bool:
    rows, columns = q.block or (1, 1)
    return bool(q.shape[0] % max(rows, 4) or q.shape[1] % columns)


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])


def _scales(q: Quantized) -> torch.Tensor:
    """Return scales in cuBLAS's layouts: those of 1x128 tiles by columns, those of 128x128 by rows padded to four."""
    scale = q.scale_inv.float()
    if q.block is None:
        return scale.reshape(1)
    if q.block == (1, 128):
        return scale.t().contiguous().t()
    rows, columns = scale.shape
    padded = scale.new_zeros(rows, -(-columns // 4) * 4)
    padded[:, :columns] = scale
    return padded.t()
