"""Quantize a layer's BF16 weights for its kernel, with the casts of :mod:`nemo_fp8.numerics`.

A weight with one scale has that of the unsharded weight: its amax is reduced over all workers that hold a shard.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import find_scales, quantize, quantize_into
from nemo_fp8.numerics.scales import amax_of
from nemo_fp8.rollout.engine.storage import Storage

ReduceAmax = Callable[[torch.Tensor], torch.Tensor]


def quantize_weight(
    weight: torch.Tensor, storage: Storage, reduce_amax: ReduceAmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and ``scale_inv`` on the kernel's grid, for a weight or a stack of weights (a layer's experts).

    ``reduce_amax`` reduces amaxes over workers. A stack is quantized as one tall matrix: the rows of each weight are
    whole blocks, so no block lies in two weights.
    """
    stack = weight.view(-1, *weight.shape[-2:])
    if storage.weight.block is not None:
        quantized = quantize(weight, storage.weight)
        scales = quantized.scale_inv
        return quantized.data, scales if weight.dim() == 2 else scales.view(stack.shape[0], -1, scales.shape[-1])
    amaxes = reduce_amax(torch.stack([_amax(one) for one in stack]))
    factors, inverses = find_scales(amaxes, format_of("e4m3"), storage.weight.scale)
    codes = torch.empty(stack.shape, dtype=format_of("e4m3").dtype, device=stack.device)
    for one, factor, into in zip(stack, factors, codes, strict=True):
        quantize_into(one, storage.weight, into, torch.empty_like(factor), scale=factor)
    rows, columns = (-(-side // block) for side, block in zip(stack.shape[1:], storage.grid, strict=True))
    scales = inverses.view(-1, 1, 1).expand(-1, rows, columns).contiguous()
    return (codes, scales) if weight.dim() == 3 else (codes[0], scales[0])


def _amax(weight: torch.Tensor) -> torch.Tensor:
    fast = kernels.amax(weight)
    return amax_of(weight) if fast is None else fast
