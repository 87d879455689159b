"""Sequences of different lengths: packed one after the other, padded to the longest, and kept in a cache of keys and values.

    thd     [tokens, heads, width], sequence i at cu_seqlens[i]      bshd    [batch, longest, heads, width], zeros behind the end
    cache   [pages, page size, heads, width]; token t of a sequence lies in its page t / size, at t % size

Unfused attention computes on padded sequences, and generation appends to the cache. No arithmetic: the copies are exact.
"""

from __future__ import annotations

import torch


def _there(cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Which places of the padded sequences hold a token."""
    return torch.arange(longest) < (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]


@torch.no_grad()
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """Packed sequences, padded."""
    there = _there(cu_seqlens[: b + 1], max_seq_len)
    out = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    out[there] = tensor[: int(there.sum())]
    return out


@torch.no_grad()
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """Padded sequences, packed into ``t`` rows."""
    rows = tensor[_there(cu_seqlens[: len(tensor) + 1], tensor.shape[1])]
    out = tensor.new_zeros(t, *tensor.shape[2:])
    out[: len(rows)] = rows
    return out


@torch.no_grad()
def copy_to_kv_cache(
    new_k: torch.Tensor, new_v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    cu_new_lens: torch.Tensor, cu_cached_lens: torch.Tensor, qkv_format: object, b: int, max_ctx_len: int, max_seq_len: int,
    max_pages_per_seq: int, is_non_paged: bool,
) -> None:  # fmt: skip
    """Append new keys and values to their sequences. Without pages a sequence has a row, and moves to that of its place in the batch."""
    new_lens, lens = ((cu[1:] - cu[:-1]).tolist() for cu in (cu_new_lens, cu_cached_lens))
    table, page_size = page_table.view(-1, max_pages_per_seq).long(), max_seq_len // max_pages_per_seq
    if is_non_paged:
        old_lens = [now - new for now, new in zip(lens, new_lens, strict=True)]
        _gather_rows(k_cache, v_cache, table.flatten().tolist()[:b], old_lens)
    name = getattr(qkv_format, "name", str(qkv_format))
    for i, (now, new_len) in enumerate(zip(lens, new_lens, strict=True)):
        places = torch.arange(now - new_len, now)
        pages = torch.full_like(places, i) if is_non_paged else table[i, places // page_size]
        slots = pages * page_size + places % page_size
        for new, cache in ((new_k, k_cache), (new_v, v_cache)):
            rows = new[int(cu_new_lens[i]) :] if "THD" in name else new[i] if "BSHD" in name else new[:, i]
            cache.view(-1, *cache.shape[2:])[slots] = rows[:new_len]


def _gather_rows(k_cache: torch.Tensor, v_cache: torch.Tensor, rows: list[int], lens: list[int]) -> None:
    """Close the gaps that finished sequences left: row ``rows[i]`` moves to row i, in order, which is never overtaken."""
    for i, row in enumerate(rows):
        if i and row < rows[i - 1]:  # the table ends here
            break
        if row != i:
            for cache in (k_cache, v_cache):
                cache[i, : lens[i]] = cache[row, : lens[i]].clone()
