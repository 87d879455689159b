"""vLLM's models without vLLM's engine: built, loaded and quantized in this process, in a second.

The same classes as in a worker, with one worker and no forward pass of attention: enough for every question about how
a layer is stored and what it computes by itself. What engines do with it is asked of engines.
"""

import os
from types import SimpleNamespace

import torch

from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize_reference
from nemo_fp8.rollout.refit.control import PREFIX
from nemo_fp8.rollout.refit.memory import Spare
from nemo_fp8.rollout.refit.worker.held import NemoFp8Held
from support.rollout.engines import SMALL, fp8, one_worker
from support.rollout.worker_check import same_bits as same_bits


def build(folder, engine=None, quantized=True, **contract):
    """The model of this checkpoint as a worker holds it under this contract, weights loaded; ``engine`` has more
    arguments for vLLM. Not ``quantized``, it is vLLM's own in BF16."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = {name: value for name, value in SMALL.items() if name != "disable_log_stats"}
    arguments |= fp8(**contract) if quantized else {}
    config = EngineArgs(model=str(folder), **arguments | (engine or {})).create_engine_config()
    one_worker()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    model.vllm_config = config
    return model


def call(model, name, *arguments):
    """What one layer answers, as in a forward pass."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(model.vllm_config), torch.inference_mode():
        out = model.get_submodule(name)(*arguments)
    return out[0] if isinstance(out, tuple) else out


class Worker(NemoFp8Held):
    """A worker's side of a push around such a model, which is a :class:`Control` as well: nobody computes with it
    meanwhile."""

    rank = 0

    def __init__(self, model):
        self.vllm_config, self.model_runner = model.vllm_config, SimpleNamespace(get_model=lambda: model)

    def call(self, method, message):
        return [getattr(self, PREFIX + method)(message)]

    def hold(self, running):
        pass

    def free(self):
        pass

    def refuse(self, why):
        self.refuses = why

    def allow(self):
        self.refuses = ""

    def forget(self):
        return True


class Remote(Worker):
    """Such a worker on another host, as far as a push can tell: it takes the bytes of a message, as a server does."""

    local, carried = False, 0

    def __init__(self, model):
        super().__init__(model)
        self.spare = Spare()

    def carry(self, message, body):
        self.carried += len(body)
        with self.spare.holding(body) as there:
            return self.call("write", message | there)


def reference(weight, block=(128, 128), kind="fp32"):
    """Codes and scales on the kernel's grid, by the specification; a whole-tensor scale stands in every block."""
    codes, scale_inv, _ = quantize_reference(weight, block, format_of("e4m3"), kind)
    if block is None:
        scale_inv = scale_inv.expand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    return codes, scale_inv


assert os.environ.get("VLLM_CPU_KVCACHE_SPACE"), "conftest sets vLLM's environment before anything imports it"
