"""What a tensor is, from its name: which decoder layer, which role, and which fused linear it is a part of.

A checkpoint only has names. Hugging Face's and Megatron's are understood (Llama, Qwen, Mistral, Mixtral, DeepSeek, GPT-2,
GPT-NeoX, Falcon and what follows them), since they say the same thing in a few dozen words; each word is one row of
``WORDS``. A weight matrix with a name that no row knows is a linear all the same, and keeps its own name.

The *unit* is what can be kept in the compute dtype on its own: Q, K and V are one linear in training and in rollout
(``linear_qkv``), gate and up another (``linear_fc1``), and all routed experts of a layer a third and a fourth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

# What stays in the compute dtype under every contract: role, the sign of it in a name, and the reason.
KEPT = (
    ("bias", re.compile(r"bias"), "biases stay in the compute dtype"),
    ("norm", re.compile(r"norm|(^|\.)ln_"), "norms stay in the compute dtype"),
    ("embedding", re.compile(r"embed(?!_out)|(^|\.)wte$|(^|\.)wpe$"), "embeddings stay in the compute dtype"),
    ("head", re.compile(r"(^|\.)(lm_head|output_layer|embed_out|score)$"), "the output head stays in the compute dtype"),
    (
        "router",
        re.compile(r"(^|\.)(router(\.\w+)?|(mlp|block_sparse_moe|feed_forward|moe)\.gate|gate\.wg|shared_expert_gate)$"),
        "routers stay in the compute dtype",
    ),
)

# The last word or two of a linear's name -> its role, and the linear of Megatron that it is a part of.
WORDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("q_proj", "wq", "query", "q"), ("q", "linear_qkv")),
    **dict.fromkeys(("k_proj", "wk", "key", "k"), ("k", "linear_qkv")),
    **dict.fromkeys(("v_proj", "wv", "value", "v"), ("v", "linear_qkv")),
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "Wqkv", "linear_qkv"), ("qkv", "linear_qkv")),
    **dict.fromkeys(("q_a_proj", "linear_q_down_proj"), ("q", "linear_q_down_proj")),
    **dict.fromkeys(("q_b_proj", "linear_q_up_proj"), ("q", "linear_q_up_proj")),
    **dict.fromkeys(("kv_a_proj_with_mqa", "linear_kv_down_proj"), ("kv", "linear_kv_down_proj")),
    **dict.fromkeys(("kv_b_proj", "linear_kv_up_proj"), ("kv", "linear_kv_up_proj")),
    **dict.fromkeys(
        ("o_proj", "wo", "out_proj", "linear_proj", "attn.c_proj", "attention.dense", "self_attention.dense"), ("o", "linear_proj")
    ),
    **dict.fromkeys(("gate_proj", "w1"), ("gate", "linear_fc1")),
    **dict.fromkeys(("up_proj", "w3", "c_fc", "fc1", "dense_h_to_4h"), ("up", "linear_fc1")),
    **dict.fromkeys(("gate_up_proj", "linear_fc1"), ("gate_up", "linear_fc1")),
    **dict.fromkeys(("down_proj", "w2", "linear_fc2", "mlp.c_proj", "fc2", "dense_4h_to_h"), ("down", "linear_fc2")),
}
ROLES = ("q", "k", "v", "kv", "qkv", "o", "gate", "up", "gate_up", "down", "experts", "linear", *(role for role, _, _ in KEPT))

_LAYER = re.compile(r"^(?P<container>(?:.*?\.)?(?:layers|h|blocks|block|layer))\.(?P<layer>\d+)\.(?P<tail>.+)$")
_ROUTED = re.compile(r"(^|\.)experts(\.|$)")
_SHARED = re.compile(r"(^|\.)shared_experts?\.")


@dataclass(frozen=True)
class Place:
    """Where a tensor sits in a model."""

    module: str
    """The name of its module: the tensor's without ``.weight``."""
    role: str
    unit: str = ""
    """Megatron's name below ``decoder.layers.N`` of the linear that it is a part of; the module itself outside of layers."""
    container: str = ""
    layer: int | None = None
    tail: str = ""
    """The module's name below its layer."""
    kept: str = ""
    """Why no contract quantizes it; empty for a linear."""


@lru_cache(maxsize=1 << 17)
def place(tensor: str) -> Place:
    """The place of a tensor, by its name alone."""
    module = re.sub(r"\.(weight\d*|input|grad)$", "", tensor)
    found = _LAYER.match(module)
    container, layer, tail = (found["container"], int(found["layer"]), found["tail"]) if found else ("", None, module)
    for role, sign, reason in KEPT:
        if sign.search(tensor.rsplit(".", 1)[-1]) or sign.search(module):
            return Place(module, role, "", container, layer, tail, reason)
    role, unit = _linear(tail) if found else (_linear(tail)[0], module)
    return Place(module, role, unit, container, layer, tail)


def _linear(tail: str) -> tuple[str, str]:
    """Role and unit of a linear, by its name below its layer."""
    parts = tail.split(".")
    role, unit = WORDS.get(".".join(parts[-2:])) or WORDS.get(parts[-1]) or ("linear", "")
    if _ROUTED.search(tail):
        return "experts", f"mlp.experts.{unit}" if unit else re.sub(r"\.\d+(?=\.|$)", "", tail)
    if not unit:
        return role, tail
    block = "mlp.shared_experts" if _SHARED.search(tail) else "mlp" if unit.startswith("linear_fc") else "self_attention"
    return role, f"{block}.{unit}"


def decoder(places: Iterable[Place], sizes: Mapping[str, int]) -> str:
    """The container with the most weights: its layers are the decoder's, which first_layers and last_layers count."""
    weights: Counter[str] = Counter()
    for p in places:
        if p.container and not p.kept:
            weights[p.container] += sizes[p.module]
    return weights.most_common(1)[0][0] if weights else ""


def outside(p: Place) -> Place:
    """A place in a stack of layers that is not the decoder's (a vision tower): it has no decoder layer."""
    return p if p.kept else Place(p.module, p.role, p.module, tail=p.module)
