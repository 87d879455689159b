"""Find out whether the blocks that a worker quantizes are those of the unsharded weight.

Training scales the blocks of an unsharded weight. vLLM fuses weights (q, k and v in one matrix) and gives each worker
a shard of the result, and the worker's blocks begin where its matrix begins. They are the same blocks if every part
begins at a block edge on both sides, and ends at one or at the weight's own end:

    q_proj, rows 512..1023 of 1024, at row 0 of the worker's matrix       same blocks
    k_proj, rows   64..127 of  128, at row 512                           starts inside a block of the whole k_proj
    v_proj, rows    0..127 of  128, at row 576                           straddles blocks of the worker's matrix

If they are not the same, codes and scales are still correct for the worker's own blocks. But training has other blocks,
so a trainer cannot push its own codes for such a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One worker's part of a dimension of a weight: ``start:stop`` of ``whole``, at ``at`` in the worker's matrix."""

    name: str
    start: int
    stop: int
    whole: int
    at: int = 0


def other_blocks(rows: Sequence[Span], columns: Span, block: tuple[int, int] | None) -> str | None:
    """Return why the worker's blocks are not those of the unsharded weights; None if they are.

    ``rows`` are the spans of all fused parts. ``block`` None means one scale for a weight, which has no blocks.
    """
    if block is None:
        return None  # the amax is taken over all shards
    for span in rows:
        why = _off_grid(span, block[0], "row")
        if why:
            return why
    return _off_grid(columns, block[1], "column")


def _off_grid(span: Span, side: int, what: str) -> str | None:
    of = f" of {span.name}" if span.name else ""
    if span.at % side:
        return f"{what} 0{of} lies at {what} {span.at}, inside a block of {side}"
    if span.start % side:
        return f"the shard begins at {what} {span.start}{of}, inside a block of {side}"
    if span.stop % side and span.stop != span.whole:
        return f"the shard ends at {what} {span.stop}{of}, inside a block of {side}"
    return None


def fused_rows(names: Sequence[str], sizes: Sequence[int], starts: Sequence[int], wholes: Sequence[int]) -> list[Span]:
    """Return the spans of parts that lie one below the other in a worker's matrix."""
    spans, at = [], 0
    for name, size, start, whole in zip(names, sizes, starts, wholes, strict=True):
        spans.append(Span(name, start, start + size, whole, at))
        at += size
    return spans
