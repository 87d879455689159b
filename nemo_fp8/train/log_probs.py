"""Compute the trainer's log-probs of given tokens, with the live Megatron model under its precision.

    log p(token[t + 1] | token[0..t])        given labels, a GPT returns minus this, also when its vocabulary is spread
                                             over tensor-parallel ranks

The rollout's log-probs of the same weights are compared with these. The model is called as in training, so layout and
precision are those of training. Each data-parallel rank computes a share, and every rank gets the whole result. NeMo's
validation step would compute them too, but count the samples as consumed.
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
    """Return the log-probs of all labels, [samples, tokens], on every rank; 0 where ``loss_mask`` is 0.

    ``collate`` makes a batch of ``micro_batch`` samples. Raises PrecisionError over pipeline stages, and unless every
    rank has the same number of whole micro-batches.
    """
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
        chunk.set_is_first_microbatch()  # FP8 weights cached for a global batch may be the last step's
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
