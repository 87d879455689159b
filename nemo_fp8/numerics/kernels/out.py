"""Check the memory that a caller gives for a result, before anything is written to it.

Each row of the codes must be contiguous; rows may lie apart, so that one shard of a fused weight can be written in
place. Scales may have any strides. Neither may overlap the source, whose tiles are read twice.
"""

from __future__ import annotations

import torch

from nemo_fp8.errors import PrecisionError


def check(out: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, source: torch.Tensor) -> None:
    """Raise PrecisionError if memory cannot hold the result, overlaps the source, or overlaps itself."""
    problem = None
    if out.shape != shape or out.dtype != dtype or out.device != source.device:
        problem = f"is {out.dtype} of shape {tuple(out.shape)} on {out.device}"
    elif out.requires_grad:
        problem = "requires grad"
    elif _overlap(out, source):
        problem = "overlaps its source"
    elif _written_twice(out):
        problem = f"has strides {out.stride()}, so that elements share memory"
    if problem:
        raise PrecisionError(
            f"{name}= {problem}.",
            f"The result is {dtype} of shape {tuple(shape)} on {source.device}, in memory of its own.",
            f"Give torch.empty({tuple(shape)}, dtype={dtype}, device={str(source.device)!r}) or a slice of such a "
            "tensor.",
        )


def check_contiguous(
    out: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, source: torch.Tensor
) -> None:
    """Raise PrecisionError if memory does not lie in one piece, or as :func:`check` does."""
    check(out, name, shape, dtype, source)
    if not out.is_contiguous():
        raise PrecisionError(
            f"{name}= is not contiguous.",
            "It is written in one piece.",
            f"Give torch.empty({tuple(shape)}, dtype={dtype}).",
        )


def rows_of(out: torch.Tensor, name: str) -> torch.Tensor:
    """Return the memory as a matrix with contiguous rows. Raises PrecisionError if its strides do not allow that."""
    try:
        matrix = out if out.dim() == 2 else out.view(-1, out.shape[-1]) if out.dim() else out.view(1, 1)
    except RuntimeError:
        matrix = None
    if matrix is None or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise PrecisionError(
            f"{name}= of shape {tuple(out.shape)} has strides {out.stride()}.",
            "Codes are written row by row, with the leading dimensions flattened.",
            "Give a tensor, or a slice of rows or columns of one, whose last dimension lies in one piece.",
        )
    return matrix


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    a0, b0 = a.data_ptr(), b.data_ptr()
    return a0 < b0 + _reach(b) and b0 < a0 + _reach(a) and a.numel() > 0 and b.numel() > 0


def _reach(t: torch.Tensor) -> int:
    """Return how many bytes lie from a tensor's first element to the end of its last one."""
    if t.is_contiguous():
        return t.nbytes
    return (sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize


def _written_twice(t: torch.Tensor) -> bool:
    """Return whether elements share memory: from the shortest stride up, each dimension must step over all shorter
    ones."""
    if t.is_contiguous():
        return False
    covered = 1
    for stride, n in sorted((stride, n) for stride, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride < covered:
            return True
        covered = stride * (n - 1) + covered
    return False
