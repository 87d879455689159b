"""What every cast asks of a tensor: the matrix that it is, and its amax, over the ranks that share a scale; and how a
kernel writes what TE keeps from step to step.

Quantizers of a group (sequence parallelism gathers shards of one tensor) take one amax for all shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from nemo_fp8.numerics import kernels, scales
from nemo_fp8.numerics.kernels import cpu


def as_matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns, leading dimensions flattened; a scalar is one by one."""
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return rows, (shape[-1] if len(shape) else 1)


def turn(codes: torch.Tensor, into: torch.Tensor) -> None:
    """Write a matrix of codes into memory of its own, turned round."""
    if not cpu.turn(codes, into):
        into.copy_(codes.t())


def overwrite(kept: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into a tensor as a kernel does, which writes memory: torch itself lets nobody change outside of
    inference mode what was made in it, as the scales of a model that runs there first."""
    with torch.inference_mode() if kept.is_inference() else nullcontext():
        kept.copy_(values)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of all elements in FP32, NaNs passed over."""
    found = kernels.amax(x)
    return scales.amax_of(x) if found is None else found


def reduced(quantizer: Any, amax: torch.Tensor) -> torch.Tensor:
    """Return the amax over the quantizer's process group, where it asks for one; ``amax`` itself is overwritten."""
    if getattr(quantizer, "with_amax_reduction", False):
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return amax
