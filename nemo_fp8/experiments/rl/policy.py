"""The policy: any of NeMo's GPT models with GRPO's loss, and the reference that the KL term compares it with.

NeMo asks a model for two parts of a step: the loss, and what to read of a batch. :class:`Grpo` provides both, as a
mixin of a model class; forward pass, parallelism, precision, optimizer and checkpoints stay NeMo's.

    class GrpoLlama(Grpo, llm.LlamaModel): ...

Given labels, a Megatron GPT returns ``-log p(label)`` of every token, also when its vocabulary is spread over
tensor-parallel ranks: log-probs before the step and the loss of the step come from the same forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from nemo.collections import llm
from nemo.lightning._strategy_lib import load_model_state_dict
from nemo.lightning.megatron_parallel import MegatronLossReduction

from nemo_fp8.experiments.rl.grpo import GrpoLoss

_Batch = dict[str, torch.Tensor]


def whole_batch(batches: Iterator[Any]) -> _Batch:
    """Pass on every tensor of a batch; NeMo's own data step drops those that a language model does not know."""
    batch = next(batches)
    batch = batch[0] if isinstance(batch, tuple) else batch
    return {name: value.cuda(non_blocking=True) for name, value in batch.items()}


class Grpo:
    """A mixin that gives a NeMo model GRPO's loss."""

    grpo_loss = GrpoLoss()
    _training_loss_reduction: Any

    def data_step(self, batches: Iterator[Any]) -> _Batch:
        """Return the tensors of a batch that a step reads."""
        return whole_batch(batches)

    @property
    def training_loss_reduction(self) -> GrpoReduction:
        """Return the loss of a micro-batch, and how the loss of a step follows from its micro-batches."""
        if self._training_loss_reduction is None:
            self._training_loss_reduction = GrpoReduction(self.grpo_loss)
        found: GrpoReduction = self._training_loss_reduction
        return found


class GrpoLlama(Grpo, llm.LlamaModel):
    """NeMo's Llama as a policy."""


class GrpoReduction(MegatronLossReduction):
    """GRPO's loss: the mean over all tokens of a step, whichever ranks and micro-batches hold them."""

    def __init__(self, loss: GrpoLoss) -> None:
        super().__init__()
        self.of_tokens = loss

    def forward(self, batch: _Batch, forward_out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch; ``forward_out`` is minus the log-probs."""
        new = -forward_out.float() * batch["loss_mask"]
        tokens = self.of_tokens(new, batch["trainer"], batch["reference"], batch["advantages"], batch["importance"])
        loss = (tokens * batch["weights"]).sum(1).mean()
        return loss, {"loss": loss.detach()}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return the loss of the step."""
        return _mean_over_ranks(torch.stack([row["loss"] for row in losses_reduced_per_micro_batch]).mean())


def _mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    group = parallel_state.get_data_parallel_group()
    torch.distributed.all_reduce(value, group=group)
    return value / float(group.size())


class Reference:
    """The base model's weights beside the policy's, on each rank its shard; they can be swapped in."""

    def __init__(self, trainer: Any, base: str) -> None:
        strategy = trainer.strategy
        self.parameters = list(strategy.megatron_parallel.parameters())
        mine = self._copies()
        # The strategy's own method would also copy them into the optimizer's master weights.
        load_model_state_dict(strategy.megatron_parallel, strategy.load_checkpoint(base, selective_restore=True))
        self.values = self._copies()
        self._put(mine)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the reference's weights into the model until the context closes."""
        mine = self._copies()
        self._put(self.values)
        try:
            yield
        finally:
            self._put(mine)

    @torch.no_grad()
    def _copies(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
