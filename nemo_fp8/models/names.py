"""Tell what a tensor is from its name: its decoder layer, its role, and the fused linear that it is a part of.

Hugging Face's and Megatron's names are understood (Llama, Qwen, Mistral, Mixtral, DeepSeek, GPT-2, GPT-NeoX, Falcon and
their successors), since they use the same few dozen words; each word is one row of :mod:`nemo_fp8.models.families`. A
weight matrix with an unknown name counts as a linear and keeps its own name. No model has ten thousand layers.

The *unit* is what can be kept in the compute dtype on its own: Q, K and V are one linear in training and in rollout
(``linear_qkv``), gate and up another (``linear_fc1``), and all routed experts of a layer a third and a fourth.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from nemo_fp8.models.families import OUTSIDE, WORDS
from nemo_fp8.moved import renamed

if not TYPE_CHECKING:  # see nemo_fp8.moved
    _TO_UNITS = {name: f"nemo_fp8.models.units.{name}" for name in ("decoder", "outside")}
    _TO_SPELLINGS = {"names_what_is_kept_anyway": "nemo_fp8.models.spellings.names_what_is_kept_anyway"}
    __getattr__ = renamed(__name__, _TO_UNITS | _TO_SPELLINGS)

_LAYER = re.compile(r"^(?P<container>(?:.*?\.)?(?:layers|h|blocks|block|layer))\.(?P<layer>\d{1,4})\.(?P<tail>.+)$")
_ROUTED = re.compile(r"(^|\.)experts(\.|$)")
# Mamba and linear attention project out by a word that attention has, too.
_MIXER = re.compile(r"(^|\.)(mixer|mamba\w*|linear_attn|ssm)\.out_proj$")
_SHARED = re.compile(r"(^|\.)shared_experts?\.")


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a model."""

    module: str
    """The name of its module: that of the tensor without ``.weight``."""
    role: str
    unit: str = ""
    """Megatron's name, below ``decoder.layers.N``, of its fused linear; the module itself outside of layers."""
    container: str = ""
    layer: int | None = None
    tail: str = ""
    """The module's name below its layer."""
    kept: str = ""
    """Why no contract quantizes it; empty for a linear."""


@lru_cache(maxsize=1 << 17)
def place(tensor: str) -> Place:
    """Return the place of a tensor, by its name alone."""
    module = re.sub(r"\.(weight\d*|input|grad)$", "", tensor)
    found = _LAYER.match(module)
    container, layer, tail = (found["container"], int(found["layer"]), found["tail"]) if found else ("", None, module)
    for role, sign, reason in OUTSIDE:
        if sign.search(tensor.rsplit(".", 1)[-1]) or sign.search(module):
            return Place(module, role, "", container, layer, tail, reason)
    role, unit = _linear(tail) if found else (_linear(tail)[0], module)
    return Place(module, role, unit, container, layer, tail)


def _linear(tail: str) -> tuple[str, str]:
    """Return role and unit of a linear, by its name below its layer."""
    parts = tail.split(".")
    role, unit = WORDS.get(".".join(parts[-2:])) or WORDS.get(parts[-1]) or ("linear", "")
    if parts[-1] == "experts":  # an engine's name of all of them
        return "experts", "mlp.experts.linear_fc1"
    if _ROUTED.search(tail):
        return "experts", f"mlp.experts.{unit}" if unit else re.sub(r"\.\d+(?=\.|$)", "", tail)
    if not unit or _MIXER.search(tail):
        return role, tail
    block = (
        "mlp.shared_experts" if _SHARED.search(tail) else "mlp" if unit.startswith("linear_fc") else "self_attention"
    )
    return role, f"{block}.{unit}"
