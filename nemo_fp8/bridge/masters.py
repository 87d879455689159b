"""A live Bridge model's weights under Hugging Face's names, out of the FP32 master weights of its FP8 parameters.

``AutoBridge.export_hf_weights`` gives what the FP8 codes stand for, 2.65 % beside the master weights. A rollout that
quantizes it again in other blocks adds its own error to that; and what training has learnt since the last change of a
code is lost. Here the same export sees the masters, rounded once to the compute dtype:

    FP8 parameter         each rank's share of its master, put together over the ranks that share it
    any other parameter   as it is: it was rounded from its master in the last step

The trade-off: FP8 weights exist a second time while the export lasts, one model chunk whole on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("bridge")

import torch

from nemo_fp8.bridge.loading import MEGATRONS
from nemo_fp8.train.measure import share_of, unchained


@torch.no_grad()
def hugging_face_weights(auto_bridge: Any, models: list[Any], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, on the CPU; every rank takes part, to the end.

    ``auto_bridge`` is the ``AutoBridge`` of the model, ``models`` the chunks of it that this rank holds, and
    ``optimizer`` Megatron's, as Bridge's ``setup`` returns them.
    """
    held = []
    for module in (module for model in models for module in model.modules()):
        for name, weight in list(module._parameters.items()):
            if hasattr(weight, "_quantizer"):
                plain = torch.nn.Parameter(_master(weight, optimizer).to(weight.dtype), requires_grad=False)
                plain.__dict__.update({k: v for k, v in vars(weight).items() if k in MEGATRONS})
                module._parameters[name] = plain
                held.append((module, name, weight))
    try:
        yield from auto_bridge.export_hf_weights(models, cpu=True, show_progress=False)
    finally:
        for module, name, weight in held:
            module._parameters[name] = weight


def _master(weight: Any, optimizer: Any) -> torch.Tensor:
    """Return the whole FP32 master weight of an FP8 parameter, on every rank that has the parameter."""
    from megatron.core import parallel_state

    whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
    master, span = getattr(weight, "main_param", None), share_of(weight, unchained([optimizer]))
    if master is not None and span is not None:
        whole[span] = master.float()
    expert = not getattr(weight, "allreduce", True)
    group = (
        parallel_state.get_expert_data_parallel_group()
        if expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    torch.distributed.all_reduce(whole, group=group)  # shares do not overlap, so the sum is exact
    return whole.view(weight.shape)
