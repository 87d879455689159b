"""Keep a weight that vLLM lets go of, so that a push can write it, and what was made of it can be made again.

On a CPU with AMX latent attention (MLA) packs matrices of its own out of ``kv_b_proj`` at load, and puts an empty
tensor in the place of its weight. The codes stay here: a push writes them as anywhere, and the attention packs them
again. The trade-off: a byte for each element of that weight, which vLLM alone would free.
"""

from __future__ import annotations

from typing import Any

import torch

_KEPT = "nemo_fp8_kept"


def keep(layer: torch.nn.Module) -> None:
    """Keep the weight of a layer that attention takes apart (vLLM marks it); does nothing to any other."""
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):
        setattr(layer, _KEPT, (layer.weight,))  # in a tuple, else it would be a second parameter of the layer


def live(layer: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter of a layer, also one that vLLM has let go of; None if it has none of this name."""
    held = layer._parameters.get(name)
    if name == "weight" and held is not None and held.numel() == 0:
        kept: tuple[torch.Tensor, ...] = vars(layer).get(_KEPT, (held,))
        return kept[0]
    return held


def put_back(attention: Any) -> bool:
    """Put the weight back that an attention layer makes its matrices of; return whether it is there. It is not where
    nobody has kept it and no push has brought another: then the matrices are those of before."""
    source = getattr(attention, "kv_b_proj", None)
    if source is None or source._parameters.get("weight") is None:
        return True
    weight = live(source, "weight")
    assert weight is not None
    if weight is not source.weight:
        source.weight = weight
    return weight.numel() > 0
