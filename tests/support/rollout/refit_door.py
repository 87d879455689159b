"""A weight transfer backend that brings tensors from a file, behind the door that NCCL's and CUDA IPC's stand behind
too.

It runs in vLLM's workers, under vLLM's own sequence of calls, and uses one buffer for everything it brings, as they do.
"""

from contextlib import suppress
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from nemo_fp8.rollout.engine.worker import NemoFp8Worker
from nemo_fp8.rollout.refit.worker.transfer import _Pushing


@dataclass
class Init(WeightTransferInitInfo):
    pass


@dataclass
class Update(WeightTransferUpdateInfo):
    path: str = ""
    names: list = field(default_factory=list)
    dtype_names: list = field(default_factory=list)
    shapes: list = field(default_factory=list)


class Files(WeightTransferEngine):
    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        tensors = load_file(update_info.path)
        buffer = torch.empty(max(t.numel() for t in tensors.values()), dtype=torch.bfloat16)
        for name in update_info.names:
            view = buffer[: tensors[name].numel()].view(tensors[name].shape)
            self.model.load_weights([(name, view.copy_(tensors[name]))])

    def update_weights(self, update_info):
        self.receive_weights(
            self.parse_update_info(update_info)
        )  # vLLM's own waits for an accelerator, and here is none

    def finish_weight_update(self):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass


class PushedFiles(_Pushing, Files):
    pass


with suppress(ValueError):
    WeightTransferEngineFactory.register_engine("nemo_fp8_files", PushedFiles)


class DoorWorker(NemoFp8Worker):
    """Importing this module in a worker makes the backend known there."""
