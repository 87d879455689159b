"""Tokens to their experts and back: the kernels of TE's MoE permutation, in two maps.

    mask map     routing_map [tokens, experts] of 0 and 1; what belongs to one expert lies together, tokens in their
                 order
    index map    indices [tokens, k] of experts; the same order, by a stable sort of the indices

    permute      out[row(t, e)] = x[t]                                  rows are copied, bytes or values
    unpermute    out[t] = sum over e of x[row(t, e)] * prob[t, e]       mask map: summed in FP32, index map: in the
                 tensor's own type
    chunk sort   out[row(t)] = x[t], whole chunks of tokens in another order

The mask map's kernels are Triton's in TE, the index map's CUDA's; the first are replaced under the names of TE's Python
functions that launch them. ``row_id_map`` [tokens, 2 experts + 1] holds of each token its rows, last expert first,
their experts, and their number. Sums run over a token's experts in the kernels' order, all tokens at once. What a
kernel leaves unwritten is zero here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# ---------------------------------------------------------------------- mask map


@torch.no_grad()
def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    """Return, of each token, its rows in the permuted tensor, last expert first, their experts, and how many they
    are."""
    chosen = routing_map.bool()
    rows = chosen.t().flatten().cumsum(0).view(num_experts, num_tokens).t() - 1
    rows, experts = torch.where(chosen, rows, -1).sort(1, descending=True)
    return torch.cat([rows, experts, chosen.sum(1, keepdim=True)], 1).int()


def _routed(row_id_map: torch.Tensor, num_experts: int, pad_offsets: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return token, expert and row of everything that was routed; ``pad_offsets`` moves each expert's rows behind the
    padding before them."""
    there = torch.arange(num_experts) < row_id_map[:, -1:]
    tokens, places = there.nonzero(as_tuple=True)
    return _at(row_id_map, tokens, places, num_experts, pad_offsets)


def _places(
    row_id_map: torch.Tensor, num_experts: int, pad_offsets: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same in parts, one expert of each token's at a time: FP32 values of all would take several times the
    tensor's memory."""
    count = row_id_map[:, -1]
    for place in range(int(count.max()) if count.numel() else 0):
        tokens = (count > place).nonzero().flatten()
        yield _at(row_id_map, tokens, torch.full_like(tokens, place), num_experts, pad_offsets)


def _at(
    row_id_map: torch.Tensor,
    tokens: torch.Tensor,
    places: torch.Tensor,
    num_experts: int,
    pad_offsets: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    rows, experts = row_id_map[tokens, places].long(), row_id_map[tokens, num_experts + places].long()
    return tokens, experts, rows if pad_offsets is None else rows + pad_offsets[experts]


@torch.no_grad()
def permute_with_mask_map(
    inp: torch.Tensor, row_id_map: torch.Tensor, probs: torch.Tensor | None, scale: torch.Tensor | None,
    pad_offsets: torch.Tensor | None, num_tokens: int, num_experts: int, num_out_tokens: int, hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return rows, the scales of their blocks, and their probabilities, permuted. A row of probability zero is padding,
    and holds zeros."""
    tokens, experts, rows = _routed(row_id_map, num_experts, pad_offsets)
    out, out_scale, out_probs = inp.new_zeros(num_out_tokens, hidden_size), None, None
    out[rows] = inp[tokens]
    if scale is not None:
        out_scale = scale.new_zeros(num_out_tokens, scale.shape[1])
        out_scale[rows] = scale[tokens]
    if probs is not None:
        out_probs = probs.new_zeros(num_out_tokens)
        out_probs[rows] = probs[tokens, experts]
        out[rows[out_probs[rows] == 0]] = 0
    return out, out_scale, out_probs


@torch.no_grad()
def unpermute_with_mask_map(
    inp: torch.Tensor, row_id_map: torch.Tensor, merging_probs: torch.Tensor | None,
    permuted_probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None, num_tokens: int, num_experts: int, hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the sum of each token's rows, weighted where ``merging_probs`` says so, and ``permuted_probs`` where they
    came from."""
    total = torch.zeros(num_tokens, hidden_size)
    for tokens, experts, rows in _places(row_id_map, num_experts, pad_offsets):
        values = inp[rows].float()
        if merging_probs is not None:
            values = values * merging_probs[tokens, experts].float()[:, None]
        total.index_add_(0, tokens, values)
    if permuted_probs is None:
        return total.to(inp.dtype), None
    tokens, experts, rows = _routed(row_id_map, num_experts, pad_offsets)
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = permuted_probs[rows]
    return total.to(inp.dtype), probs


@torch.no_grad()
def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: torch.Tensor, row_id_map: torch.Tensor, fwd_input: torch.Tensor, merging_probs: torch.Tensor,
    pad_offsets: torch.Tensor | None, num_tokens: int, num_experts: int, num_out_tokens: int, hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of the permuted rows and of the weights that they were summed with."""
    grad = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    probs_grad = torch.zeros_like(merging_probs)
    for tokens, experts, rows in _places(row_id_map, num_experts, pad_offsets):
        g = fwd_output_grad[tokens].float()
        grad[rows] = (g * merging_probs[tokens, experts].float()[:, None]).to(grad.dtype)
        probs_grad[tokens, experts] = (fwd_input[rows].float() * g).sum(1).to(probs_grad.dtype)
    return grad, probs_grad


# ---------------------------------------------------------------------- chunks


@torch.no_grad()
def make_chunk_sort_map(
    split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
) -> torch.Tensor:
    """Return the row that each token moves to; tokens behind the last chunk stay."""
    sizes, order = split_sizes.long(), sorted_indices.long()
    begins = torch.empty_like(sizes)
    begins[order] = sizes[order].cumsum(0) - sizes[order]
    moves = (begins - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
    rows = torch.arange(num_tokens)
    rows[: moves.numel()] += moves
    return rows.int()


@torch.no_grad()
def sort_chunks_by_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move rows and their probabilities to where the map says, or back."""
    rows = row_id_map.long()
    back = rows if not is_forward else torch.empty_like(rows).scatter_(0, rows, torch.arange(num_tokens))
    return inp[back], None if probs is None else probs[back]


# ---------------------------------------------------------------------- index map


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Return the type that the kernels compute in: the tensor's own, and FP16 for FP8."""
    return torch.float16 if dtype.itemsize == 1 else dtype


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return codes as bytes: torch moves no FP8 rows about."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@torch.no_grad()
def moe_permute_fwd(
    input: torch.Tensor,
    dtype: Any,
    indices: torch.Tensor,
    num_out_tokens: int,
    workspace: list[torch.Tensor],
    max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return [permuted rows, map, workspace]; the map [k, tokens] holds each row's place, -1 where ``num_out_tokens``
    left it out."""
    tokens, k = indices.shape
    order = indices.flatten().sort(stable=True).indices
    places = torch.empty(tokens * k, dtype=torch.int64)
    places[order] = torch.arange(tokens * k)
    kept = num_out_tokens if num_out_tokens > 0 else tokens * k
    out = torch.zeros(kept, input.shape[1], dtype=input.dtype)
    _bytes(out)[: tokens * k] = _bytes(input)[order[:kept] // k]
    return out, torch.where(places < kept, places, -1).view(tokens, k).t().flatten().int(), workspace


@torch.no_grad()
def moe_unpermute_fwd(
    input: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topK: int
) -> torch.Tensor:
    """Return the sum of each token's rows, weighted where there are probabilities; FP8 rows without any are
    averaged."""
    kind = _arithmetic(input.dtype)
    maps = row_id_map.view(topK, num_tokens)
    total = torch.zeros(num_tokens, input.shape[1], dtype=kind)
    for place, rows in enumerate(maps.long()):
        there = rows >= 0
        values = (
            input[rows[there]].to(kind)
            if input.dtype == kind
            else _bytes(input)[rows[there]].view(input.dtype).to(kind)
        )
        if prob.numel():
            values = values * prob[there, place].to(kind)[:, None]
        total[there] += values
    if input.dtype != kind and not prob.numel():
        total /= topK
    return total.to(input.dtype)


moe_permute_bwd = moe_unpermute_fwd


@torch.no_grad()
def moe_unpermute_bwd(
    input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the permuted rows and of the probabilities; without any each token has one row."""
    kind = _arithmetic(input_bwd.dtype)
    tokens, k = prob.shape if prob.numel() else (row_id_map.shape[0], 1)
    grad = torch.zeros(input_fwd.shape[0], input_bwd.shape[1], dtype=input_bwd.dtype)
    prob_grad = torch.zeros(tokens, k)
    for place, rows in enumerate(row_id_map.view(k, tokens).long()):
        there = rows >= 0
        if not prob.numel():
            _bytes(grad)[rows[there]] = _bytes(input_bwd)[there]
            continue
        g = input_bwd.to(kind)[there]
        _bytes(grad)[rows[there]] = _bytes((g * prob[there, place].to(kind)[:, None]).to(grad.dtype))
        prob_grad[there, place] = (g * input_fwd.to(kind)[rows[there]]).float().sum(1)
    return grad, prob_grad
