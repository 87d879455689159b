"""Log-probs of one model before its weights change, after, and after with nothing kept of before; see
test_log_probs.py."""

import torch

from nemo_fp8.experiments.corpus import Stories
from nemo_fp8.train.linears import is_linear
from nemo_fp8.train.log_probs import token_log_probs


def before_and_after(trainer, extra):
    stories = Stories("validation", 4, 64, 1)
    samples = [stories[i] for i in range(4)]

    def log_probs():
        return token_log_probs(trainer, samples, stories.collate_fn, 2)

    modules = [m for m in trainer.strategy.megatron_parallel.modules() if is_linear(m)]
    extra["kept"] = sum(bool(m._fp8_workspaces) for m in modules)
    before = log_probs()
    with torch.no_grad():
        for module in modules:
            module.weight.mul_(torch.rand_like(module.weight))
    after = log_probs()
    for module in modules:
        module._fp8_workspaces.clear()
    extra["moved"] = float((after - before).abs().max())
    extra["stale"] = float((after - log_probs()).abs().max())
