"""What a model in this process holds, bit by bit, and what it ought to hold after a push."""

import torch

from nemo_fp8.rollout import Refit
from support.rollout.in_process import Worker, build
from support.rollout.models import weights_of


def held(model):
    """Every bit that a model holds: its parameters and buffers, and what a kernel packed beside them, by what it
    answers."""
    tensors = model.state_dict() | dict(model.named_buffers())  # those that no checkpoint has, too
    found = {name: tensor.detach().clone().reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    draws = torch.Generator().manual_seed(0)
    for name, layer in model.named_modules():
        for key, packed in vars(getattr(layer, "impl", None) or object).items():  # what MLA makes of kv_b_proj for AMX
            if key in ("_w_uk_packed", "_w_uv_packed", "_w_scale") and packed is not None:
                found[f"{name} {key}"] = packed.clone().reshape(-1).view(torch.uint8)
        if "cpu_linear" in vars(layer) and not getattr(layer, "_cpu_skip_gemm_dispatch", False):
            columns = next(
                vars(layer)[key]
                for key in ("input_size_per_partition", "input_size", "embedding_dim")
                if key in vars(layer)
            )
            x = torch.randn(3, columns, generator=draws).to(getattr(layer, "params_dtype", torch.bfloat16))
            found[f"{name} answers"] = layer.quant_method.apply(layer, x).reshape(-1).view(torch.uint8)
    return found


def held_by(worker):
    return held(worker.model_runner.get_model())


def differing(a, b):
    """The names of what is not the same in both."""
    return sorted(
        name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])
    )


def fresh(folder, tensors, **contract):
    """The receipt of a push of everything into a new model, and what that holds then."""
    worker = Worker(build(folder, **contract))
    return Refit(worker).push(tensors), held_by(worker)


def pushed_once(checkpoint):
    """A worker, a Refit whose ledger is of it, and the tensors that both hold."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20)
    refit.push(tensors, delta=True).require()
    return worker, refit, tensors
