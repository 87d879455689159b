"""Cross entropy of logits whose vocabulary is spread over ranks, in place of TE's Triton kernels.

    loss = log(sum(exp(x))) - x[y]      with label smoothing s:  (1 - s) loss + s (log(sum(exp(x))) - mean(x))
    dx   = (softmax(x) - s / V - (1 - s) at y) * grad

In FP32 whatever the logits are. Ranks exchange four numbers a token (largest logit, sum of exponentials, target's
logit, sum of logits); of the forward pass only the first two are kept, and backward makes the probabilities again of
the saved logits, which it overwrites. A token whose target is ``ignore_idx`` has no loss and no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def _own(target: torch.Tensor, rank: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens have their target on this rank, and the target's column here."""
    columns = target - rank * width
    tokens = ((columns >= 0) & (columns < width)).nonzero().flatten()
    return tokens, columns[tokens]


@torch.no_grad()
def cross_entropy_forward(
    _input: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduce_loss: bool, dist_process_group: Any,
    ignore_idx: int, overwrite_input: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]:  # fmt: skip
    """Return [loss, saved logits, (largest, sum of exponentials) of each token, target, tokens that count, rank, world
    size]."""
    rank = 0 if dist_process_group is None else dist.get_rank(dist_process_group)
    world = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    width, y = _input.shape[-1], target.contiguous().flatten()
    x = _input.reshape(-1, width).float()
    local = torch.stack([x.amax(1), torch.zeros(len(x)), torch.full((len(x),), float("-inf")), x.sum(1)], 1)
    local[:, 1] = (x - local[:, :1]).exp_().sum(1)
    tokens, columns = _own(y, rank, width)
    local[tokens, 2] = x[tokens, columns]
    parts = local[None]
    if world > 1:
        parts = local.new_empty(world, *local.shape)
        dist.all_gather_into_tensor(parts.view(-1, 4), local, group=dist_process_group)
    largest = parts[:, :, 0].amax(0)
    exponentials = (parts[:, :, 1] * (parts[:, :, 0] - largest).exp()).sum(0)
    whole = largest + exponentials.log()
    loss = whole - parts[:, :, 2].amax(0)
    if label_smoothing > 0:
        loss = loss * (1 - label_smoothing) + label_smoothing * (whole - parts[:, :, 3].sum(0) / (width * world))
    counts = y != ignore_idx
    loss = torch.where(counts, loss, 0.0)
    saved = _input if overwrite_input else _input.contiguous().clone()
    stats = torch.stack([largest, exponentials], 1)
    if not reduce_loss:
        return loss.view(_input.shape[:2]), saved, stats, target.contiguous(), None, rank, world
    count = counts.sum().clamp_(min=1).reshape(1)
    return loss.sum() / count, saved, stats, target.contiguous(), count, rank, world


@torch.no_grad()
def cross_entropy_backward(
    saved_input: torch.Tensor, stats: torch.Tensor, target: torch.Tensor, n_non_ignore: torch.Tensor | None,
    grad_output: torch.Tensor, label_smoothing: float, reduce_loss: bool, rank: int, world_size: int, ignore_idx: int,
) -> torch.Tensor:  # fmt: skip
    """Return the logits' gradient, in the memory of the saved logits."""
    width, y = saved_input.shape[-1], target.flatten()
    x = saved_input.reshape(-1, width).float()
    grad = (x - stats[:, :1]).exp_().div_(stats[:, 1:]).sub_(label_smoothing / (width * world_size))
    tokens, columns = _own(y, rank, width)
    grad[tokens, columns] -= 1 - label_smoothing
    outer = grad_output.float().reshape(-1, 1)
    if n_non_ignore is not None:
        outer = outer / n_non_ignore
    grad = torch.where((y == ignore_idx)[:, None], 0.0, grad.mul_(outer))
    return saved_input.copy_(grad.view(saved_input.shape))
