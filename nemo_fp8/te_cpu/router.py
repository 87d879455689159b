"""The router of a mixture of experts: TE's fused scores, choice of experts, and balancing losses.

    scores     softmax(x) before or after the choice, sigmoid(x), or sqrt(softplus(x))
    choice     the k largest of score + bias; with groups, of the best groups, a group being worth the sum of its k /
               groups largest
    probs      the chosen scores, for sigmoid and sqrtsoftplus divided by their sum where k > 1, times
               ``scaling_factor``; zero elsewhere
    aux loss   coeff * experts / (k * tokens^2) * sum over e of tokens_per_expert[e] * sum over t of probs[t, e]

In FP32 whatever the logits are; of equal scores the first expert is chosen. A routing map is a byte or a bit an expert,
least bit first, or the indices themselves where the caller gives memory for them. ``intermediate_output`` is what
backward reads: the scores, and the logits for sqrtsoftplus. Quantile balancing chooses one expert more, takes its
biased score for the token's cutoff, and counts of every expert in which of ``bins`` its distance to the cutoff falls.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_fp8.te_cpu.enumerations import ENUMERATIONS

_BITMAP = ENUMERATIONS["NVTERoutingMapFormat"]["BITMAP_U8"]
_LEAST = 1e-20  # added to sums before they divide
_LINEAR_FROM = 20.0  # softplus(x) is x from here on
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def _check(score_function: str, topk: int, experts: int) -> None:
    """Refuse what the extension refuses, in its words."""
    if score_function not in _SCORES:
        raise RuntimeError(
            f"score_function must be softmax, sigmoid or sqrtsoftplus for router fusion, got {score_function}"
        )
    if not 0 < topk <= experts:
        raise RuntimeError(f"topk must be in [1, num_experts], got topk={topk} num_experts={experts}")


# ---------------------------------------------------------------------- scores


def _score(x: torch.Tensor, score_function: str) -> torch.Tensor:
    if score_function == "softmax":
        return torch.softmax(x, -1)
    if score_function == "sigmoid":
        return torch.sigmoid(x)
    return torch.where(x > _LINEAR_FROM, x, torch.log1p(x.exp())).sqrt()


def _score_of_saved(saved: torch.Tensor, score_function: str) -> torch.Tensor:
    return _score(saved, score_function) if score_function == "sqrtsoftplus" else saved


def _score_backward(grad: torch.Tensor, saved: torch.Tensor, score: torch.Tensor, score_function: str) -> torch.Tensor:
    """Return the gradient of the logits of sigmoid and sqrtsoftplus."""
    if score_function == "sigmoid":
        return grad * score * (1 - score)
    return grad * torch.where(saved > _LINEAR_FROM, 1.0, torch.sigmoid(saved)) / (2 * score + _LEAST)


def _normalized_backward(grad: torch.Tensor, score: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Return the gradient of scores that were divided by their sum, over the chosen ones where only those were
    summed."""
    if counted is not None:
        grad, score = grad * counted, score * counted
    total = score.sum(-1, keepdim=True) + _LEAST
    back = grad / total - (grad * score).sum(-1, keepdim=True) / (total * total)
    return back if counted is None else back * counted


# ---------------------------------------------------------------------- choice


def _largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest, of equal ones the first; ``torch.topk`` promises no order among those."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _choose(scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> torch.Tensor:
    if not group_topk or group_topk < 0:
        return _largest(scores, topk)
    assert num_groups is not None
    tokens, experts = scores.shape
    if topk % group_topk or experts % num_groups:
        raise RuntimeError(f"topk ({topk}) and num_experts ({experts}) must be divisible by group_topk and num_groups")
    worth = scores.view(tokens, num_groups, -1).topk(topk // group_topk, -1).values.sum(-1)
    kept = torch.zeros(tokens, num_groups, dtype=torch.bool).scatter_(1, _largest(worth, group_topk), True)
    return _largest(scores.masked_fill(~kept.repeat_interleave(experts // num_groups, 1), float("-inf")), topk)


def _as_map(chosen: torch.Tensor, experts: int, leading: Any, routing_map_format: int) -> torch.Tensor:
    mask = torch.zeros(chosen.shape[0], experts, dtype=torch.bool).scatter_(1, chosen, True)
    if routing_map_format != _BITMAP:
        return mask.view(*leading, experts)
    bits = torch.nn.functional.pad(mask, (0, -experts % 8)).view(-1, -(-experts // 8), 8)
    return (bits.to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8).view(*leading, -1)


def _mask_of(routing_map: torch.Tensor, experts: int, use_dense_indices: bool, routing_map_format: int) -> torch.Tensor:
    rows = routing_map.reshape(-1, routing_map.shape[-1])
    if use_dense_indices:
        return torch.zeros(len(rows), experts, dtype=torch.bool).scatter_(1, rows.long(), True)
    if routing_map_format != _BITMAP:
        return rows.bool()
    bits = (rows[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1)[:, :experts].bool()


def _probabilities(
    x: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    topk: int,
    after: bool,
    normalize: bool,
    factor: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [probabilities, softmax of the chosen ones alone with -inf elsewhere]. ``after``: the softmax comes after
    the choice."""
    kept = (x if after else scores).gather(1, chosen)
    if after:
        kept = torch.softmax(kept, -1)
    found = torch.full_like(x, float("-inf")).scatter_(1, chosen, kept)
    if normalize and topk > 1:
        kept = kept / (kept.sum(-1, keepdim=True) + _LEAST)
    return torch.zeros_like(x).scatter_(1, chosen, kept * (1.0 if factor is None else factor)), found


@torch.no_grad()
def fused_topk_with_score_function_fwd(
    logits: torch.Tensor, topk: int, use_pre_softmax: bool, num_groups: int | None, group_topk: int | None,
    scaling_factor: float | None, score_function: str, expert_bias: torch.Tensor | None, routing_map_format: int = 0,
    topk_indices: torch.Tensor | None = None, ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return [probabilities, routing map or indices, what backward reads].

    Raises RuntimeError for a score function or a ``topk`` that cannot be, and for a bias beside a softmax.
    """
    experts, leading = logits.shape[-1], logits.shape[:-1]
    _check(score_function, topk, experts)
    softmax = score_function == "softmax"
    if expert_bias is not None and softmax:
        raise RuntimeError("score_function must be sigmoid or sqrtsoftplus when expert_bias is not None")
    x = logits.reshape(-1, experts).float()
    after = softmax and not use_pre_softmax
    scores = x if after else _score(x, score_function)
    chosen = _choose(scores if expert_bias is None else scores + expert_bias.float(), topk, num_groups, group_topk)
    probs, softmax_of_chosen = _probabilities(x, scores, chosen, topk, after, not softmax, scaling_factor)
    saved = softmax_of_chosen if after else x if score_function == "sqrtsoftplus" else scores
    routed = _routing_output(chosen, experts, leading, routing_map_format, topk_indices)
    return probs.to(logits.dtype).view(logits.shape), routed, saved.reshape(logits.shape).clone()


def _routing_output(
    chosen: torch.Tensor, experts: int, leading: Any, routing_map_format: int, indices: Any
) -> torch.Tensor:
    if indices is None:
        return _as_map(chosen, experts, leading, routing_map_format)
    found: torch.Tensor = indices.copy_(chosen.view(indices.shape))
    return found


@torch.no_grad()
def fused_topk_with_score_function_bwd(
    routing_map: torch.Tensor, intermediate_output: torch.Tensor, grad_probs: torch.Tensor, grad_logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool, scaling_factor: float | None, score_function: str, use_dense_indices: bool = False,
    routing_map_format: int = 0,
) -> None:  # fmt: skip
    """Write the gradient of the logits to ``grad_logits``."""
    experts = grad_probs.shape[-1]
    _check(score_function, topk, experts)
    mask = _mask_of(routing_map, experts, use_dense_indices, routing_map_format)
    g = grad_probs.reshape(-1, experts).float() * (1.0 if scaling_factor is None else scaling_factor) * mask
    saved = intermediate_output.reshape(-1, experts)
    score = _score_of_saved(saved, score_function)
    if score_function == "softmax":
        score = score if use_pre_softmax else score.masked_fill(~mask, 0.0)
        back = score * (g - (g * score).sum(-1, keepdim=True))
    else:
        back = _score_backward(_normalized_backward(g, score, mask) if topk > 1 else g, saved, score, score_function)
    grad_logits.copy_(back.view(grad_logits.shape))


# ---------------------------------------------------------------------- quantile balancing


@torch.no_grad()
def fused_topk_with_score_function_qb_fwd(
    logits: torch.Tensor, topk: int, scaling_factor: float | None, expert_bias: torch.Tensor, routing_map_format: int,
    topk_indices: torch.Tensor | None, histogram: torch.Tensor, bin_bounds: torch.Tensor, histogram_mode: int,
    bin_bounds_validated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return [probabilities, routing map or indices, what backward reads, cutoffs, histogram], of sigmoid scores.

    Raises RuntimeError for a ``topk`` or for bounds of the histogram that cannot be.
    """
    experts = logits.shape[-1]
    if not 0 < topk < experts:
        raise RuntimeError(f"QB topk must be in [1, num_experts), got topk={topk} num_experts={experts}")
    lower, upper = bin_bounds.tolist()
    if not bin_bounds_validated and not (bool(bin_bounds.isfinite().all()) and lower < upper):
        raise RuntimeError(f"QB bin_bounds values must be finite with lower < upper, got [{lower}, {upper}]")
    x = logits.reshape(-1, experts).float()
    scores = torch.sigmoid(x)
    biased = scores + expert_bias.float()
    best = _largest(biased, topk + 1)
    chosen, cutoff = best[:, :topk], biased.gather(1, best[:, topk:]).flatten()
    probs, _ = _probabilities(x, scores, chosen, topk, False, True, scaling_factor)
    bins = histogram.shape[1]
    distance = (cutoff[:, None] - scores - bin_bounds[0]) * (
        torch.tensor(float(bins)) / (bin_bounds[1] - bin_bounds[0])
    )
    found = distance.floor().clamp_(0, bins - 1).long() + torch.arange(experts) * bins
    histogram += torch.bincount(found.flatten(), minlength=histogram.numel()).view(histogram.shape).to(histogram.dtype)
    routed = _routing_output(chosen, experts, logits.shape[:-1], routing_map_format, topk_indices)
    return probs.to(logits.dtype).view(logits.shape), routed, scores.view(logits.shape), cutoff, histogram


# ---------------------------------------------------------------------- balancing losses


@torch.no_grad()
def fused_score_for_moe_aux_loss_fwd(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [scores of all experts, in FP32 and of sum one, routing map, what backward reads]."""
    experts = logits.shape[-1]
    _check(score_function, topk, experts)
    x = logits.reshape(-1, experts).float()
    scores = _score(x, score_function)
    saved = x if score_function == "sqrtsoftplus" else scores
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + _LEAST)
    routed = _as_map(_largest(scores, topk), experts, logits.shape[:-1], routing_map_format)
    return scores.reshape(logits.shape), routed, saved.reshape(logits.shape).clone()


@torch.no_grad()
def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    score_function: str,
) -> None:
    """Write the gradient of the logits to ``grad_logits``."""
    g, saved = grad_scores.float(), intermediate_output
    score = _score_of_saved(saved, score_function)
    if score_function == "softmax":
        grad_logits.copy_(score * (g - (g * score).sum(-1, keepdim=True)))
    else:
        grad_logits.copy_(_score_backward(_normalized_backward(g, score), saved, score, score_function))


@torch.no_grad()
def fused_moe_aux_loss_fwd(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: int | torch.Tensor, num_experts: int,
    num_rows: int, num_cols: int, topk: int, coeff: float, ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return [loss, (coefficient, loss in FP32)]. Columns may be several sequences' experts, one after the other.

    Raises RuntimeError if their number is no multiple of ``num_experts``.
    """
    if num_cols % num_experts:
        raise RuntimeError(
            f"Number of input columns ({num_cols}) must be a multiple of number of experts ({num_experts})."
        )
    tokens = float(total_num_tokens)
    coefficient = torch.tensor(num_experts * coeff) / topk / tokens / tokens
    loss = (probs.float().sum(0) * tokens_per_expert.float()).sum() * coefficient
    return loss.to(probs.dtype), torch.stack([coefficient, loss])


fused_moe_aux_loss_fwd_graph_safe = fused_moe_aux_loss_fwd


@torch.no_grad()
def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int, num_cols: int, grad_aux_loss: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the probabilities: one value for all tokens of an expert."""
    row = Const_buf[0] * tokens_per_expert.float() * grad_aux_loss.float()
    return row.to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()
