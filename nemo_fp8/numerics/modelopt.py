"""NVFP4 weights in ModelOpt's layout, which vLLM's kernels and its checkpoints share.

    weight          two E2M1 codes a byte, the first in the low half      uint8  [..., N, K / 2]
    weight_scale    one E4M3 scale for 16 values in a row                 e4m3   [..., N, K / 16]
    weight_scale_2  amax / (448 * 6), one for each matrix                 FP32   [...]

    value = code * weight_scale * weight_scale_2

Parts that an engine multiplies as one matrix (q, k and v; gate and up) share the last scale, since its kernels keep
one. So the caller gives the amax: of all parts, and of all shards. The rule is the same for trainer, engine and export,
and :func:`nemo_fp8.models.units.sharing_a_scale` says which parts they are. The arithmetic is that of
:mod:`nemo_fp8.numerics.nvfp4`, in TE's convention, so a trainer's own rowwise codes are these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import nvfp4
from nemo_fp8.numerics.nvfp4_tensor import BLOCK
from nemo_fp8.numerics.statistics import Statistics

LARGEST = 6.0 * 448.0
INPUT_SCALE = 1.0
"""The scale of a layer's activations where nothing was calibrated, as in a checkpoint: block scales do the rest."""

__all__ = ["BLOCK", "INPUT_SCALE", "LARGEST", "FourBits", "amax_of", "four_bits"]


@dataclass(frozen=True)
class FourBits:
    """A weight in ModelOpt's layout, or a stack of weights."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor
    statistics: tuple[Statistics, ...] = ()
    """The statistics of each matrix, if asked for."""


def amax_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a matrix, or of each matrix of a stack, in FP32; NaN if one is NaN."""
    if not weight.is_cpu:
        return weight.abs().amax((-2, -1)).float()
    ends = [torch.aminmax(matrix) for matrix in weight.view(-1, *weight.shape[-2:])]  # which makes no copy
    return torch.stack([torch.maximum(-low, high) for low, high in ends]).view(weight.shape[:-2]).float().abs()


def four_bits(weight: torch.Tensor, operand: Operand, amax: torch.Tensor, statistics: bool = False) -> FourBits:
    """Quantize a matrix, or each of a stack, beneath the scale that ``amax`` gives (one for each matrix)."""
    stack = weight.view(-1, *weight.shape[-2:])
    found = [
        nvfp4.quantize(one, operand, amax=largest, statistics=statistics)
        for one, largest in zip(stack, amax.reshape(-1), strict=True)
    ]
    codes, scales = _stacked([q.data for q in found]), _stacked([q.scale_inv for q in found])
    lead = weight.shape[:-2]
    return FourBits(
        codes.view(*lead, *codes.shape[1:]),
        scales.view(*lead, *scales.shape[1:]),
        torch.stack([q.weight_scale_2 for q in found]).view(lead),
        tuple(q.statistics for q in found if q.statistics is not None),
    )


def _stacked(matrices: list[torch.Tensor]) -> torch.Tensor:
    """Return matrices as a stack; of one matrix no copy is made."""
    return matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)
