"""Sequences of different lengths: packed one after the other, padded to the longest, and kept in a cache of keys and
values.

    thd     [tokens, heads, width], sequence i at cu_seqlens[i]      bshd    [batch, longest, heads, width], zeros
            behind the end
    cache   [pages, page size, heads, width]; token t of a sequence lies in its page t / size, at t % size

Unfused attention computes on padded sequences, and generation appends to the cache. No arithmetic: the copies are
exact. The last functions bring queries, keys and values into the order that fused kernels read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _there(cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Return which places of the padded sequences hold a token."""
    return torch.arange(longest) < (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]


@torch.no_grad()
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """Pad packed sequences to the longest. Raises ValueError if the lengths tell of more tokens than there are."""
    there = _there(cu_seqlens[: b + 1], max_seq_len)
    out = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    told = int(there.sum())
    if told > len(tensor):
        raise ValueError(
            f"convert_thd_to_bshd: cu_seqlens tells of {told} tokens, and the tensor has {len(tensor)}. A GPU would "
            "read what lies behind them: give lengths that end where the tensor does."
        )
    out[there] = tensor[:told]
    return out


@torch.no_grad()
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """Pack padded sequences into ``t`` rows."""
    rows = tensor[_there(cu_seqlens[: len(tensor) + 1], tensor.shape[1])]
    out = tensor.new_zeros(t, *tensor.shape[2:])
    out[: len(rows)] = rows
    return out


@torch.no_grad()
def copy_to_kv_cache(
    new_k: torch.Tensor, new_v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    cu_new_lens: torch.Tensor, cu_cached_lens: torch.Tensor, qkv_format: object, b: int, max_ctx_len: int,
    max_seq_len: int, max_pages_per_seq: int, is_non_paged: bool,
) -> None:  # fmt: skip
    """Append new keys and values to the ``b`` sequences of the batch; the lengths may be those of more. Without pages a
    sequence has a row, and moves to that of its place in the batch."""
    new_lens, lens = ((cu[1 : b + 1] - cu[:b]).tolist() for cu in (cu_new_lens, cu_cached_lens))
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
    """Close the gaps that finished sequences left: row ``rows[i]`` moves to row i, in order, which is never
    overtaken."""
    for i, row in enumerate(rows):
        if i and row < rows[i - 1]:  # the table ends here
            break
        if row != i:
            for cache in (k_cache, v_cache):
                cache[i, : lens[i]] = cache[row, : lens[i]].clone()


# ---------------------------------------------------------------------- what fused kernels read


@torch.no_grad()
def fa_prepare_fwd(qkvi: torch.Tensor) -> torch.Tensor:
    """Return [3, b, s, heads, width] from the queries [s, b, heads, width] of a buffer in which each head's three lie
    together. Raises RuntimeError if they do not."""
    s, b, heads, width = qkvi.shape
    if qkvi.stride() != (3 * width * heads * b, 3 * width * heads, 3 * width, 1):
        raise RuntimeError(f"Wrong stride: {qkvi.stride()} are not those of queries beside their keys and values.")
    packed = qkvi.as_strided((s, b, heads, 3, width), (*qkvi.stride()[:3], width, 1))
    return packed.permute(3, 1, 0, 2, 4).contiguous()


@torch.no_grad()
def fa_prepare_bwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return [s, b, heads, 3 width] from three of [b, s, heads, width]: the way back of :func:`fa_prepare_fwd`, for
    gradients."""
    return torch.cat((q, k, v), -1).transpose(0, 1).contiguous()


_HEADS_BEFORE_TOKENS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}


@torch.no_grad()
def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[torch.Tensor | None], original_format: str, outputs: Sequence[torch.Tensor | None] = ()
) -> list[torch.Tensor | None]:
    """Move heads before tokens, in every tensor that is there; zeros stand where an output is wider.

    Raises RuntimeError for another order than TE knows.
    """
    if original_format not in _HEADS_BEFORE_TOKENS:
        raise RuntimeError(
            f"multi_tensor_transpose_to_bhsd: only BSHD/SBHD -> BHSD is currently supported (got {original_format})."
        )
    found: list[torch.Tensor | None] = []
    for x, out in zip(inputs, outputs or [None] * len(inputs), strict=True):
        turned = None if x is None else x.permute(_HEADS_BEFORE_TOKENS[original_format]).contiguous()
        if turned is not None and out is not None:
            turned = out.copy_(torch.nn.functional.pad(turned, (0, out.shape[-1] - turned.shape[-1])))
        found.append(turned)
    return found


@torch.no_grad()
def multi_tensor_pad_last_dim(inputs: Sequence[torch.Tensor], alignment: int) -> list[torch.Tensor]:
    """Return matrices with zeros behind their rows, up to a multiple of ``alignment``."""
    return [torch.nn.functional.pad(x.contiguous(), (0, -x.shape[1] % alignment)) for x in inputs]
