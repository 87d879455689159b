"""Choose one of two equal codings of a tile, so that quantizing a dequantized weight gives the same codes again.

With power-of-two scales a tile whose largest value was rounded down to half of the format's largest (224 of 448) can
also be stored with half the scale and twice every code. The values are the same, and quantizing these values gives the
second form:

    code -> 2 * code,   scale_inv -> scale_inv / 2      where the largest code of a tile is exactly half of the format's

Doubling is exact, also for subnormal codes. So ``canonical(quantize(x))`` has the same values as ``quantize(x)``, and
quantizing those values changes neither a code nor a scale. About one tile in twenty is stored differently from the
operands of training's GEMMs; with FP32 scales none is. The trade-off: codes can be compared with those of
:func:`quantize` only after this step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nemo_fp8.numerics.quantized import Quantized

# The smallest scale_inv that can be halved: smaller ones do not occur, since scales are capped.
_LEAST = torch.finfo(torch.float32).tiny


def canonical(q: Quantized) -> Quantized:
    """Return the same values with the codes and scales that quantizing them gives. For tiles with FP32 scales."""
    if q.block is None or q.scale_inv.dtype != torch.float32:
        return q
    rows, columns = q.block
    codes = q.data.view(torch.uint8).view(-1, q.data.shape[-1])
    magnitude = codes & 0x7F
    magnitude.masked_fill_(magnitude >= q.format.first_nan, 0)
    half = int(torch.tensor(q.format.max / 2).to(q.data.dtype).view(torch.uint8))
    pad = (0, -codes.shape[1] % columns, 0, -codes.shape[0] % rows)
    tiles = torch.nn.functional.pad(magnitude, pad).view(q.scale_inv.shape[0], rows, q.scale_inv.shape[1], columns)
    pow2 = (q.scale_inv.view(torch.int32) & 0x7FFFFF) == 0
    halved = (tiles.amax((1, 3)) == half) & pow2 & (q.scale_inv >= _LEAST)
    if not halved.any():
        return q
    codes = codes.clone()
    for i, j in halved.nonzero().tolist():
        tile = codes[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        tile.copy_(_doubled(tile, q.format.mantissa_bits))
    return replace(
        q,
        data=codes.view(q.data.shape).view(q.data.dtype),
        scale_inv=torch.where(halved, q.scale_inv * 0.5, q.scale_inv),
        statistics=None,
    )


def _doubled(codes: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    """Return the codes of twice the values.

    The exponent grows by one. The mantissa of a subnormal shifts left, and may carry into the exponent.
    """
    magnitude, sign, one = codes & 0x7F, codes & 0x80, 1 << mantissa_bits
    return torch.where(magnitude < one, magnitude << 1, magnitude + one) | sign
