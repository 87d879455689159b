"""Packed sequences over ranks of context parallelism: which tokens a rank holds, and how what it computes of them is
put together.

    rank r of n       the r-th of 2 n equal chunks of each sequence, and the r-th from the end: every rank attends to as
                      much
    halves            of what a rank holds of a sequence; ring attention's later steps need only one of them
    lse               log of the sum of exponentials of a query: [heads, tokens] packed, or [sequences, heads, longest]
    correction        lse = log(exp(lse) + exp(lse of a step)),   out += out of a step * exp(lse of the step - lse)

Sequences begin at ``cu_seqlens``. Whole numbers decide everything but the corrections, which are in FP32, rounded once
before the sum.
"""

from __future__ import annotations

import torch


def _sequence_of(tokens: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Return the sequence of each token; one outside all sequences counts to the nearest."""
    return torch.bucketize(tokens, begins[1:].contiguous(), right=True).clamp(max=len(begins) - 2)


def _held(cu_seqlens: torch.Tensor, tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Return where each of a rank's tokens lies in the packed sequences."""
    begins = cu_seqlens.long() // ranks
    own = torch.arange(tokens // ranks)
    sequence = _sequence_of(own, begins)
    half = (begins[sequence + 1] - begins[sequence]) // 2
    chunk = torch.where(own - begins[sequence] < half, rank, 2 * (ranks - 1) - rank)
    return own + begins[sequence] * (ranks - 1) + half * chunk


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """List the tokens of the packed sequences that a rank holds; raises RuntimeError if they are no whole chunks."""
    if not 0 <= rank < world_size or total_tokens <= 0 or total_tokens % (2 * world_size):
        raise RuntimeError(
            f"{total_tokens} tokens cannot be divided into two chunks for each of {world_size} ranks (of rank {rank})."
        )
    return _held(cu_seqlens, total_tokens, world_size, rank).int()


def _order(cu_seqlens: torch.Tensor, ranks: int, tokens: int) -> torch.Tensor:
    return torch.cat([thd_get_partitioned_indices(cu_seqlens, tokens, ranks, rank) for rank in range(ranks)]).long()


@torch.no_grad()
def thd_sequence_order_to_cp_rank_order(
    inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int
) -> torch.Tensor:
    """Return packed sequences as the tokens of the first rank, the second, and so on."""
    return inp[_order(cu_seqlens, cp_size, total_tokens)]


@torch.no_grad()
def thd_cp_rank_order_to_sequence_order(
    inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int
) -> torch.Tensor:
    """Put tokens that lie rank by rank back into the order of their sequences."""
    out = torch.empty_like(inp)
    out[_order(cu_seqlens, cp_size, total_tokens)] = inp
    return out


@torch.no_grad()
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Copy each sequence without its padding; the sequences lie at ``cu_seqlens_padded``, and are as long as
    ``cu_seqlens`` says."""
    tokens = torch.arange(len(inp))
    sequence = _sequence_of(tokens, cu_seqlens_padded)
    place = tokens - cu_seqlens_padded[sequence]
    there = (place >= 0) & (place < (cu_seqlens[1:] - cu_seqlens[:-1])[sequence])
    out[there] = inp[there]


# ---------------------------------------------------------------------- halves


def _half(cu_seqlens: torch.Tensor, second: bool) -> torch.Tensor:
    """Return where the first or second half of each sequence lies, one after the other."""
    begins = cu_seqlens.long() // 2
    tokens = torch.arange(int(begins[-1]))
    return tokens + begins[_sequence_of(tokens, begins) + second]


@torch.no_grad()
def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int) -> torch.Tensor:
    """Return one half of each sequence of [tokens, heads, width], or of two such tensors at once."""
    places = _half(cu_seqlens, bool(half_idx))
    half = tensor.new_zeros(*tensor.shape[:-3], tensor.shape[-3] // 2, *tensor.shape[-2:])
    half[..., : len(places), :, :] = tensor[..., places, :, :]
    return half


_CHANGES = ("none", "copy", "add")


@torch.no_grad()
def thd_grad_correction(
    grad: torch.Tensor, grad_per_step: torch.Tensor, cu_seqlens: torch.Tensor, first_half: str, second_half: str
) -> None:
    """Add a step's gradient, or copy it, into one half of each sequence or each half; a step of one half has no other
    rows. Raises RuntimeError for another pair of words than TE has."""
    halves = (first_half, second_half)
    if set(halves) - set(_CHANGES) or first_half == second_half:
        raise RuntimeError("Unsupported Functor of first half and second_half")
    for second, change in enumerate(halves):
        if change == "none":
            continue
        to = _half(cu_seqlens, bool(second))
        step = grad_per_step[..., : len(to), :, :] if "none" in halves else grad_per_step[..., to, :, :]
        grad[..., to, :, :] = step if change == "copy" else grad[..., to, :, :] + step


# ---------------------------------------------------------------------- sums of exponentials

_Index = tuple[torch.Tensor, ...]


def _by_token(lse: torch.Tensor, packed: bool) -> torch.Tensor:
    """Return a view whose heads come last: [tokens, heads], or [sequences, longest, heads]."""
    return lse.t() if packed else lse.transpose(1, 2)


def _lse_places(cu_seqlens: torch.Tensor, packed: bool, second_half: bool) -> tuple[_Index, _Index, torch.Tensor]:
    """Return, of each token, its place in the whole, its place among a step's tokens, and its row in the whole's
    output."""
    begins = cu_seqlens.long() // (1 + second_half)
    tokens = torch.arange(int(begins[-1]))
    sequence = _sequence_of(tokens, begins)
    rows = tokens + (begins[sequence + 1] if second_half else 0)
    if packed:
        return (rows,), (tokens,), rows
    place = tokens - begins[sequence]
    length = begins[sequence + 1] - begins[sequence]
    return (sequence, place + (length if second_half else 0)), (sequence, place), rows


@torch.no_grad()
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> torch.Tensor:
    """Return the sums of the second halves of the sequences, with zeros behind them."""
    whole, step, _ = _lse_places(cu_seqlens, lse_packed, True)
    half = lse.new_zeros(*lse.shape[:-1], second_half_lse_seqlen)
    _by_token(half, lse_packed)[step] = _by_token(lse, lse_packed)[whole]
    return half


@torch.no_grad()
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool
) -> None:
    """Take a step of the second halves into ``lse``."""
    whole, step, _ = _lse_places(cu_seqlens, lse_packed, True)
    found, more = _by_token(lse, lse_packed)[whole], _by_token(lse_per_step, lse_packed)[step]
    high, low = torch.maximum(found, more), torch.minimum(found, more)
    _by_token(lse, lse_packed)[whole] = high + torch.log1p(torch.exp(low - high))


@torch.no_grad()
def thd_out_correction(
    out: torch.Tensor, out_per_step: torch.Tensor, lse: torch.Tensor, lse_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor, only_second_half: bool, lse_packed: bool,
) -> None:  # fmt: skip
    """Add a step's output, weighted by its share of the sum. A zero stays one, whatever its weight is."""
    whole, step, rows = _lse_places(cu_seqlens, lse_packed, only_second_half)
    weight = torch.exp(_by_token(lse_per_step, lse_packed)[step] - _by_token(lse, lse_packed)[whole])
    values = out_per_step[: len(rows)]
    out[rows] += torch.where(values == 0, 0.0, values.float() * weight[:, :, None]).to(out.dtype)
