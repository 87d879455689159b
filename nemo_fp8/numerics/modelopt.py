"""NVFP4 weights in ModelOpt's layout, which vLLM's kernels and its checkpoints share.

    weight          two E2M1 codes a byte, the first in the low half      uint8  [..., N, K / 2]
    weight_scale    one E4M3 scale for 16 values in a row                 e4m3   [..., N, K / 16]
    weight_scale_2  amax / (448 * 6), one for each matrix                 FP32   [...]

    value = code * weight_scale * weight_scale_2

Parts that an engine multiplies as one matrix (q, k and v; gate and up) share the last scale, as its kernels keep one.
So the caller gives the amax: of all parts, and of all shards. That is a rule for trainer, engine and export alike,
and :func:`nemo_fp8.models.selection.shared_scale` says which parts they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_fp8.numerics.formats import cast, format_of

BLOCK = 16
LARGEST = 6.0 * 448.0
INPUT_SCALE = 1.0
"""The scale of a layer's activations where nothing was calibrated, as in a checkpoint: block scales do the rest."""


@dataclass(frozen=True)
class FourBits:
    """A weight in ModelOpt's layout, or a stack of weights."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values; they are computed in FP32, as vLLM's emulation does."""
        low_high = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(-2)
        values = _VALUES.to(self.weight.device)[low_high.long()]
        scales = self.weight_scale.float() * self.weight_scale_2[..., None, None]
        blocks = values.view(*scales.shape, BLOCK) * scales[..., None]
        return blocks.view(values.shape).to(dtype)


_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], dtype=torch.float32)  # vLLM loads under BF16


def amax_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a matrix, or of each matrix of a stack, in FP32."""
    return weight.abs().amax((-2, -1)).float()


def four_bits(weight: torch.Tensor, amax: torch.Tensor) -> FourBits:
    """Quantize a matrix, or each of a stack, beneath the scale that ``amax`` gives (one for each matrix)."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # vLLM loads weights under BF16, and 1/6 would be rounded to it
    try:
        return _four_bits(weight, amax)
    finally:
        torch.set_default_dtype(usual)


def _four_bits(weight: torch.Tensor, amax: torch.Tensor) -> FourBits:
    from nemo_fp8.te_cpu import nvfp4

    *stack, rows, columns = weight.shape
    blocks = weight.float().view(*stack, rows, columns // BLOCK, BLOCK)
    encode = nvfp4.encode_scale(amax)[..., None, None]
    scales = cast(nvfp4.block_scale(blocks.abs().amax(-1), encode), format_of("e4m3"))
    codes = nvfp4.nearest(blocks * nvfp4.factor(scales.float(), encode)[..., None])
    packed = nvfp4.pack(codes.view(-1, columns)).view(*stack, rows, columns // 2)
    return FourBits(packed, scales, amax.float() / LARGEST)
