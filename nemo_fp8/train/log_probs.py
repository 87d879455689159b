"""The trainer's own log-probs of given tokens, from the live Megatron model under its precision.

    log p(token[t + 1] | token[0..t])        a GPT that is given labels answers with minus this, over a vocabulary that
                                             is spread over tensor-parallel ranks as well

It is what a rollout's log-probs are held against: the same weights, the trainer's arithmetic. The model is called as it
is in training, so layout and precision are those of training; each data-parallel rank takes its share and gets
everybody's result. NeMo's validation step would do it too, and count the samples as consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from nemo_fp8.errors import PrecisionError

_Sample = dict[str, torch.Tensor]


@torch.no_grad()
def token_log_probs(
    trainer: Any, samples: Sequence[_Sample], collate: Callable[[list[_Sample]], _Sample], micro_batch: int
) -> torch.Tensor:
    """The log-probs of all labels [samples, tokens] on every rank, 0 where ``loss_mask`` is."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        raise PrecisionError(
            "Log-probs over pipeline stages.",
            "Only the last stage has log-probs, and nothing here sends them to the others.",
            "Use tensor and data parallelism.",
        )
    group = parallel_state.get_data_parallel_group()
    if not samples or len(samples) % (group.size() * micro_batch):
        raise PrecisionError(
            f"{len(samples)} samples over {group.size()} data-parallel ranks in micro-batches of {micro_batch}.",
            "Every rank takes the same number of whole micro-batches.",
            f"Give a multiple of {group.size() * micro_batch} samples.",
        )
    share = len(samples) // group.size()
    first = group.rank() * share
    model = trainer.strategy.lightning_module
    training = model.training
    model.eval()
    for chunk in trainer.strategy.megatron_parallel:
        chunk.set_is_first_microbatch()  # weights kept in FP8 for a global batch may be those of the step before
    try:
        parts = []
        for start in range(first, first + share, micro_batch):
            batch = {
                name: value.to(model.device) for name, value in collate([*samples[start : start + micro_batch]]).items()
            }
            parts.append(-model.forward_step(batch).float() * batch["loss_mask"])
    finally:
        model.train(training)
    mine = torch.cat(parts)
    everybodys = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(everybodys, mine.contiguous(), group=group)
    return torch.cat(everybodys).cpu()
