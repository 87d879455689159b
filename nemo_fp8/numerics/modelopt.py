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

from typing import NamedTuple

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import nvfp4
from nemo_fp8.numerics.nvfp4_tensor import BLOCK, weight_scale_2

LARGEST = 6.0 * 448.0
INPUT_SCALE = 1.0
"""The scale of a layer's activations where nothing was calibrated, as in a checkpoint: block scales do the rest."""

_AT_ONCE = 1 << 24
"""The elements of a stack that one cast is of."""

__all__ = ["BLOCK", "INPUT_SCALE", "LARGEST", "FourBits", "amax_of", "four_bits", "totals"]


class FourBits(NamedTuple):
    """A weight in ModelOpt's layout, or a stack of weights."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor


def amax_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a matrix, or of each matrix of a stack, in FP32; NaN if one is NaN."""
    if not weight.is_cpu:
        found: torch.Tensor = torch.linalg.vector_norm(weight, torch.inf, (-2, -1), dtype=torch.float32)  # in one pass
        return found
    ends = [torch.aminmax(matrix) for matrix in weight.view(-1, *weight.shape[-2:])]  # which makes no copy
    return torch.stack([torch.maximum(-low, high) for low, high in ends]).view(weight.shape[:-2]).float().abs()


def four_bits(weight: torch.Tensor, operand: Operand, amax: torch.Tensor, out: FourBits | None = None) -> FourBits:
    """Quantize a matrix, or each of a stack, beneath the scale that ``amax`` gives (one for each matrix), into ``out``
    if it is given: into new memory that takes several times as long.

    Raises PrecisionError if 16 does not divide the columns, or if the operand is none of NVFP4's, or row-scaled.
    """
    nvfp4.check(operand)
    if operand.row_scaled:
        raise PrecisionError(
            f"A weight in {operand.words()}.",
            "ModelOpt's layout has one FP32 scale for a matrix, and none for its rows.",
            "Leave row_scaled out: it is for activations.",
        )
    nvfp4.check_source(weight, operand, "row")
    *lead, rows, columns = weight.shape
    if out is None:
        codes = weight.new_empty((*lead, rows, columns // 2), dtype=torch.uint8)
        scales = weight.new_empty((*lead, rows, columns // BLOCK), dtype=torch.float8_e4m3fn)
        out = FourBits(codes, scales, weight.new_empty(lead, dtype=torch.float32))
    out.weight_scale_2.copy_(weight_scale_2(amax.float(), operand.largest_scale).view_as(out.weight_scale_2))
    stack, codes, scales = (t.view(-1, rows, t.shape[-1]) for t in (weight, out.weight, out.weight_scale))
    in_squares = operand.block != (1, BLOCK) and rows % BLOCK  # a square would reach into the next matrix
    together = 1 if in_squares else max(1, _AT_ONCE // max(1, rows * columns))
    for first in range(0, len(stack), together):
        some = slice(first, first + together)
        largest = amax.reshape(-1)[some]
        each = largest if len(largest) == 1 else largest.repeat_interleave(rows)
        there = codes[some].flatten(0, 1), scales[some].flatten(0, 1)
        nvfp4.cast_rows(stack[some].flatten(0, 1), operand, each, out=there)
    return out


def totals(weight: torch.Tensor, held: FourBits) -> torch.Tensor:
    """Sum up what the cast of a matrix, or of each of a stack, did: [matrices, TOTALS]."""
    stack, codes, scales = (t if t.dim() == 3 else t[None] for t in (weight, *held[:2]))
    return nvfp4.totals(stack, codes, scales, held.weight_scale_2.reshape(-1))
