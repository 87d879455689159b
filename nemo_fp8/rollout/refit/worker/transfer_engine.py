"""Take a push through vLLM's weight-transfer API: ``LLM(..., weight_transfer_config={"backend": "nemo_fp8"})``.

The API has four calls: init, start, update (any number) and finish. An update carries one call of a push, with a
message of plain values, and the place for the answer (:mod:`nemo_fp8.rollout.refit.mailbox`):

    {"call": "begin", "message": {"push": ..., "tensors": ...}, "mailbox": {...}}

So the same methods run as for ``Refit(engine).push``, and end with the same facts. An engine started with our worker
extension has them in its worker; both ways then share one state, and a push by one repairs what died by the other. A
framework may have an extension of its own; the methods then belong to an object here.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from nemo_fp8.rollout.refit import mailbox
from nemo_fp8.rollout.refit.control import PREFIX
from nemo_fp8.rollout.refit.worker.held import NemoFp8Held
from nemo_fp8.rollout.refit.worker.session import NemoFp8Refit


@dataclass
class NemoFp8InitInfo(WeightTransferInitInfo):
    """The trainer's mailbox, in which every worker says that it can be reached."""

    mailbox: dict[str, Any]


@dataclass
class NemoFp8UpdateInfo(WeightTransferUpdateInfo):
    """One call of a push."""

    call: str
    message: dict[str, Any]
    mailbox: dict[str, Any]


class _Pushes(NemoFp8Held):
    """The methods of a push for a worker that does not have them."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self.model_runner = SimpleNamespace(model=model, get_model=lambda: model)
        self.vllm_config, self.rank = config, config.parallel_config.rank


class NemoFp8WeightTransferEngine(WeightTransferEngine[NemoFp8InitInfo, NemoFp8UpdateInfo]):
    """vLLM's backend ``nemo_fp8``, in a worker."""

    init_info_cls, update_info_cls = NemoFp8InitInfo, NemoFp8UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.pushes: NemoFp8Refit = _Pushes(model, vllm_config)

    def init_transfer_engine(self, init_info: NemoFp8InitInfo) -> None:
        """Answer the trainer. Raises PrecisionError if its memory cannot be opened here."""
        self._answer(init_info.mailbox, {})

    def start_weight_update(self) -> None:
        """Do nothing: a push begins when its manifest comes."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do one call of a push. vLLM's own method would wait for an accelerator, and a CPU has none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NemoFp8UpdateInfo) -> None:
        """Do one call of a push, and answer. What is wrong with it is an answer, too."""
        call, message = update_info.call, update_info.message
        method = getattr(self.pushes, f"{PREFIX}{call}", None) if isinstance(call, str) else None
        if method is None or not isinstance(message, dict):
            wrong = [f"{str(call)[:40]!r} is no call of a push.", "", "Push with nemo_fp8.rollout.refit.transfer."]
            self._answer(update_info.mailbox, {"problems": [wrong]})
        else:
            self._answer(update_info.mailbox, method(message))

    def finish_weight_update(self) -> None:
        """Give up a push that was not ended: its session holds the sender's memory."""
        self.pushes._refit_give_up()  # and not as its sender does: who paused the engine for it may be gone

    def shutdown(self) -> None:
        """Let go of the sender's memory, too."""
        self.finish_weight_update()

    def _answer(self, address: dict[str, Any], answer: dict[str, Any]) -> None:
        rank = self.parallel_config.rank
        mailbox.write(address, rank, {"rank": rank, "workers": self.parallel_config.world_size} | answer)
