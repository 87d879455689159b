"""The trainer's own log-probs of given tokens, from the live Megatron model under its precision.

    log p(token[t + 1] | token[0..t])        a GPT that is given labels answers with minus this, over a vocabulary that is
                                             spread over tensor-parallel ranks as well

It is what a rollout's log-probs are held against: the same weights, the trainer's arithmetic. The model is called as it is in
training, so layout and precision are those of training; each data-parallel rank takes its share and gets everybody's result. NeMo's
validation step would do it too, and count the samples as consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from megatron.core import parallel_state
from safetensors.torch import save_file

from nemo_fp8.errors import PrecisionError
from nemo_fp8.train.data import Stories

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
            batch = {name: value.to(model.device) for name, value in collate([*samples[start : start + micro_batch]]).items()}
            parts.append(-model.forward_step(batch).float() * batch["loss_mask"])
    finally:
        model.train(training)
    mine = torch.cat(parts)
    everybodys = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(everybodys, mine.contiguous(), group=group)
    return torch.cat(everybodys).cpu()


class ValidationLogProbs(Callback):
    """At the end of training, the first validation stories and their log-probs, as a safetensors file.

    ``tokens`` [samples, n] and ``log_probs`` [samples, n - 1]: column t of the latter is the log-prob of token t + 1.
    """

    def __init__(self, out: str, samples: int = 16, micro_batch: int = 4) -> None:
        self.out, self.samples, self.micro_batch = out, samples, micro_batch

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Compute on all ranks, write on one."""
        data = trainer.datamodule
        stories = Stories("validation", self.samples, data.seq_length, data.seed)
        samples = [stories[i] for i in range(self.samples)]
        log_probs = token_log_probs(trainer, samples, stories.collate_fn, self.micro_batch)
        if trainer.global_rank == 0:
            tokens = torch.stack([torch.cat([s["tokens"], s["labels"][-1:]]) for s in samples])
            Path(self.out).parent.mkdir(parents=True, exist_ok=True)
            save_file({"tokens": tokens, "log_probs": log_probs}, self.out)
