"""Model families: one row each says what a ``config.json`` leaves out and what a family's linears are called.

    FAMILIES    model_type -> its row: switches, config keys under other names, experts, the classes that build it
    OUTSIDE     what stays in the compute dtype under every contract, by its name
    WORDS       the last word or two of a linear's name -> its role, and the Megatron linear that it is a part of
    FUSED       linears of one module that an engine holds as one matrix

A new family is one row of ``FAMILIES``; new words are rows of the other tables. All code that reads a model uses these
tables: shapes and memory, the selection of linears, export from Megatron, the mismatch forward. The trade-off: if sizes
matter, a family without a row is refused, since a wrong guess about a bias or a shared expert gives a wrong answer. If
only names matter, many more families are understood.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Experts:
    """The MoE layer of a family: its keys in config.json, and its words in Hugging Face's names."""

    count: str
    """The key that holds the number of routed experts; transformers 5 writes ``num_local_experts`` for every family."""
    ffn: str
    """The key that holds their inner width."""
    shared: str = ""
    """The key that holds the number of shared experts."""
    block: str = "mlp"
    """The module below a layer that holds the router (``gate``) and the experts."""
    words: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    normalized: bool = False
    """The router's weights of the chosen experts always sum to one; other families have a switch for it."""


def _nothing(megatron: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular about one ``model_type``."""

    architecture: str = ""
    """The class of transformers for an exported config.json; empty if it cannot be exported."""
    nemo: str = ""
    """NeMo's class of the model."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Usual config key -> this family's name for it."""
    biases: Mapping[str, bool | str] = field(default_factory=dict)
    """``qkv``, ``proj``, ``mlp`` -> whether these linears have a bias, or the config's switch for it."""
    gated: bool = True
    """The MLP has a gate beside its up projection."""
    qk_norm: bool = False
    layer_norm: bool = False
    """Norms have a bias, as LayerNorm's do."""
    tied: bool = False
    """Embedding and output head are one tensor unless the config says otherwise."""
    positions: bool = False
    """Positions are learned."""
    mla: bool = False
    """Attention is latent (low-rank down and up projections)."""
    experts: Experts | None = None
    forward: bool = False
    """The plain forward of ``mismatch`` supports it."""
    config: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    """What an exported config.json says beyond every other's, from Megatron's config."""


def _llama3_rope(megatron: Mapping[str, Any]) -> dict[str, Any]:
    if megatron.get("scale_factor") is None or megatron.get("old_context_len") is None:
        return {}
    words = {"factor": "scale_factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
    scaling = {theirs: megatron[ours] for theirs, ours in words.items()}
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "original_max_position_embeddings": megatron["old_context_len"],
            **scaling,
        }
    }


def _window(megatron: Mapping[str, Any]) -> dict[str, Any]:
    window = megatron.get("window_size")
    return {"sliding_window": window[0] if isinstance(window, Sequence) and window[0] > 0 else None}


def _no_window(megatron: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3_experts(megatron: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": megatron["num_moe_experts"],
        "num_experts_per_tok": megatron["moe_router_topk"],
        "moe_intermediate_size": megatron["moe_ffn_hidden_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _mixtral_experts(megatron: Mapping[str, Any]) -> dict[str, Any]:
    if not megatron.get("num_moe_experts"):
        return {}
    return {
        "num_local_experts": megatron["num_moe_experts"],
        "num_experts_per_tok": megatron["moe_router_topk"],
        **_window(megatron),
    }


_SWITCHED = {"qkv": "attention_bias", "proj": "attention_bias"}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        nemo="LlamaModel",
        biases=_SWITCHED | {"mlp": "mlp_bias"},
        forward=True,
        config=_llama3_rope,
    ),
    "mistral": Family(architecture="MistralForCausalLM", nemo="MistralModel", forward=True, config=_window),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", nemo="Qwen2Model", biases={"qkv": True}, forward=True, config=_no_window
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        nemo="Qwen3Model",
        biases=_SWITCHED,
        qk_norm=True,
        forward=True,
        config=_no_window,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        nemo="Qwen3Model",
        biases=_SWITCHED,
        qk_norm=True,
        experts=Experts("num_experts", "moe_intermediate_size"),
        forward=True,
        config=_qwen3_experts,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        nemo="MixtralModel",
        experts=Experts(
            "num_local_experts",
            "intermediate_size",
            block="block_sparse_moe",
            words=("w1", "w3", "w2"),
            normalized=True,
        ),
        forward=True,
        config=_mixtral_experts,
    ),
    "deepseek_v3": Family(
        mla=True, experts=Experts("n_routed_experts", "moe_intermediate_size", shared="n_shared_experts")
    ),
    "gpt2": Family(
        keys=_GPT2_KEYS,
        biases={"qkv": True, "proj": True, "mlp": True},
        gated=False,
        layer_norm=True,
        tied=True,
        positions=True,
    ),
}


def of_nemo(model: str, experts: bool) -> tuple[str, Family] | None:
    """Return the ``model_type`` and row of a NeMo model class, with or without experts; None if no row names it."""
    rows = [(kind, family) for kind, family in FAMILIES.items() if family.nemo == model]
    return next((row for row in rows if (row[1].experts is not None) == experts), rows[0] if rows else None)


def nemo_classes() -> list[str]:
    """List every NeMo model class that a row names."""
    return list(dict.fromkeys(family.nemo for family in FAMILIES.values() if family.nemo))


# ---------------------------------------------------------------------- words

EXPERTS: tuple[Experts, ...] = tuple({(e.block, e.words): e for f in FAMILIES.values() if (e := f.experts)}.values())
"""The ways to name experts, each once."""

_BLOCKS = "|".join(dict.fromkeys(["mlp", *(e.block for e in EXPERTS), "feed_forward", "moe"]))

# (role, a pattern of names, the reason in words)
OUTSIDE = (
    ("bias", re.compile(r"bias"), "biases stay in the compute dtype"),
    ("norm", re.compile(r"norm|(^|\.)ln_"), "norms stay in the compute dtype"),
    ("embedding", re.compile(r"embed(?!_out)|(^|\.)wte$|(^|\.)wpe$"), "embeddings stay in the compute dtype"),
    (
        "head",
        re.compile(r"(^|\.)(lm_head|output_layer|embed_out|score)$"),
        "the output head stays in the compute dtype",
    ),
    (
        "router",
        re.compile(rf"(^|\.)(router(\.\w+)?|({_BLOCKS})\.gate|gate\.wg|shared_expert_gate)$"),
        "routers stay in the compute dtype",
    ),
)

WORDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("q_proj", "wq", "query", "q"), ("q", "linear_qkv")),
    **dict.fromkeys(("k_proj", "wk", "key", "k"), ("k", "linear_qkv")),
    **dict.fromkeys(("v_proj", "wv", "value", "v"), ("v", "linear_qkv")),
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "Wqkv", "linear_qkv"), ("qkv", "linear_qkv")),
    **dict.fromkeys(("q_a_proj", "linear_q_down_proj", "fused_qkv_a_proj"), ("q", "linear_q_down_proj")),
    **dict.fromkeys(("q_b_proj", "linear_q_up_proj"), ("q", "linear_q_up_proj")),
    **dict.fromkeys(("kv_a_proj_with_mqa", "linear_kv_down_proj"), ("kv", "linear_kv_down_proj")),
    **dict.fromkeys(("kv_b_proj", "linear_kv_up_proj"), ("kv", "linear_kv_up_proj")),
    **dict.fromkeys(
        ("o_proj", "wo", "out_proj", "linear_proj", "attn.c_proj", "attention.dense", "self_attention.dense"),
        ("o", "linear_proj"),
    ),
    **dict.fromkeys(("gate_proj", "w1"), ("gate", "linear_fc1")),
    **dict.fromkeys(("up_proj", "w3", "c_fc", "fc1", "dense_h_to_4h"), ("up", "linear_fc1")),
    **dict.fromkeys(("gate_up_proj", "linear_fc1"), ("gate_up", "linear_fc1")),
    **dict.fromkeys(("down_proj", "w2", "linear_fc2", "mlp.c_proj", "fc2", "dense_4h_to_h"), ("down", "linear_fc2")),
}
ROLES = (
    "q",
    "k",
    "v",
    "kv",
    "qkv",
    "o",
    "gate",
    "up",
    "gate_up",
    "down",
    "experts",
    "linear",
    *(role for role, _, _ in OUTSIDE),
)

# Megatron's linear below a layer -> the Hugging Face linears in it, in the order of its rows. {block}, {e} and the
# words of an expert come from a row of EXPERTS.
HUGGING_FACE: dict[str, tuple[str, ...]] = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_q_proj": ("self_attn.q_proj",),
    "self_attention.linear_q_down_proj": ("self_attn.q_a_proj",),
    "self_attention.linear_q_up_proj": ("self_attn.q_b_proj",),
    "self_attention.linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attention.linear_kv_up_proj": ("self_attn.kv_b_proj",),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared_experts.down_proj",),
    "mlp.experts.linear_fc1": ("{block}.experts.{e}.{gate}", "{block}.experts.{e}.{up}"),
    "mlp.experts.linear_fc2": ("{block}.experts.{e}.{down}",),
}


def held_as_one(unit: str) -> tuple[str, ...]:
    """Return the Megatron linears that an engine holds as one with ``unit``, itself among them: the routed experts of a
    layer, and DeepSeek's two down projections."""
    down = ("self_attention.linear_q_down_proj", "self_attention.linear_kv_down_proj")
    routed = tuple(name for name in HUGGING_FACE if name.startswith("mlp.experts."))
    return next((together for together in (routed, down) if unit in together), (unit,))


def in_hugging_face(unit: str, experts: Experts = EXPERTS[0], e: int | str = "*") -> tuple[str, ...]:
    """Return Hugging Face's names below a layer of a Megatron linear; none if unknown. ``e`` is an expert's number."""
    gate, up, down = experts.words
    return tuple(
        name.format(block=experts.block, e=e, gate=gate, up=up, down=down) for name in HUGGING_FACE.get(unit, ())
    )


# (vLLM's name, linears): linears that engines hold as one matrix, in the order of its rows; "" if vLLM has no name
# for it.
FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("", ("wq", "wk", "wv")),
    ("", ("query", "key", "value")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)


def fused_name(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return vLLM's name of the matrix that it makes of these linears (Hugging Face's names); none if they are none."""
    paths, words = {name.rpartition(".")[0] for name in parts}, tuple(name.rpartition(".")[2] for name in parts)
    return tuple(f"{path}.{name}" for path in paths for name, linears in FUSED if name and linears == words)
