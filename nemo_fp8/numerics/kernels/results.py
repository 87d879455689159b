"""Make :class:`Statistics` of a kernel's counts: by tile, or summed up if the tiles only divided a whole tensor."""

from __future__ import annotations

from dataclasses import replace

import torch

from nemo_fp8.numerics.formats import Format
from nemo_fp8.numerics.statistics import Statistics


def statistics_of(
    x: torch.Tensor,
    tile: tuple[int, int] | None,
    format: Format,
    scale_inv: torch.Tensor,
    counted: dict[str, torch.Tensor],
) -> Statistics:
    """Return the statistics of ``x`` in tiles, from the fields that a kernel counted."""
    from nemo_fp8.numerics.quantize import _elements

    elements = _elements(x, tile)
    if tile is not None:
        return Statistics(format=format, elements=elements, scale_inv=scale_inv, **counted)
    cut = Statistics(format=format, elements=torch.zeros_like(counted["underflow"]), scale_inv=scale_inv, **counted)
    return replace(cut.total(), elements=elements.reshape(()))
