"""Find delayed scaling's amax histories, agree on them over ranks for a checkpoint, and undo what validation adds.

TransformerEngine collects amaxes in the first row of a history. The next forward that has a backward takes the maximum
over ranks and turns the row into scales. Between an optimizer step and that forward the row holds the amaxes of FP8
weights, which differ by tensor-parallel rank, and Megatron saves the state of one of these ranks. So

    before a checkpoint      row = max over the ranks over which TE takes it

Taking the maximum early changes no result: after the next forward TE takes the same maximum over the same ranks. A
forward of validation has no backward: it adds its amaxes to the row and takes no scales of it. So

    after a validation       row = row before the validation
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def amax_histories(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the amax histories of every FP8 module of TransformerEngine in a model."""
    for module in model.modules():
        meta = getattr(module, "fp8_meta", None) or {}
        for key in ("scaling_fwd", "scaling_bwd"):
            history = getattr(meta.get(key), "amax_history", None)
            if history is not None:
                yield history


@torch.no_grad()
def agree_among_ranks(histories: Sequence[torch.Tensor], config: Any) -> None:
    """Take the maximum of the first rows over the ranks over which TE takes it; every rank of these calls it.

    ``config`` is Megatron's of the model, which says whether these are the tensor-parallel ranks alone.
    """
    from megatron.core import parallel_state

    rows = [history[0] for history in histories]
    if not rows:
        return
    group = parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
    )
    largest = torch.cat(rows)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    for row, agreed in zip(rows, torch.split(largest, [len(row) for row in rows]), strict=True):
        row.copy_(agreed)


@torch.no_grad()
def hold_rows(histories: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies of the rows that are being collected, for :func:`restore_rows`."""
    return {id(history): history[0].clone() for history in histories}


@torch.no_grad()
def restore_rows(histories: Iterable[torch.Tensor], held: Mapping[int, torch.Tensor]) -> None:
    """Restore the rows; that of a linear which ran for the first time since they were held becomes zero."""
    for history in histories:
        before = held.get(id(history))
        history[0].copy_(torch.zeros_like(history[0]) if before is None else before)
