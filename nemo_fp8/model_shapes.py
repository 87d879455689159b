"""A model as its linear layers, from a Hugging Face ``config.json``, and how they are cut over ranks.

FP8 cares about one thing of a model: the two sides of each weight on each rank. So a model is a list of linears in
Megatron's form (Q, K and V fused, gate and up fused), each with its rows by part, its columns, and the side that tensor
parallelism cuts:

    column    rows / TP      linear_qkv, linear_fc1          (output features)
    row       columns / TP   linear_proj, linear_fc2         (input features)
    none      whole          MLA's down projections

Model types are rows of ``TYPES``; a type that is not there is refused, since a guess about a bias or a shared expert
is a wrong memory estimate. ``Model.parameters`` equals what transformers builds, to the last one; tests hold it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8.errors import PrecisionError, unknown

COLUMN, ROW, NONE = "column", "row", "none"


@dataclass(frozen=True)
class Linear:
    """One weight ``[sum(parts), columns]`` of a decoder layer, before any split; ``experts`` of them in an MoE layer."""

    name: str
    """Megatron's name below ``decoder.layers.N``."""
    hugging_face: tuple[str, ...]
    """Its parts' names below ``model.layers.N``; ``*`` stands for an expert's number."""
    parts: tuple[int, ...]
    columns: int
    split: str
    bias: int = 0
    """Bias elements."""
    experts: int = 0

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def weights(self) -> int:
        """Weight elements, of all experts together."""
        return self.rows * self.columns * max(1, self.experts)

    def on_rank(self, ranks: int) -> tuple[tuple[int, ...], int]:
        """Rows by part, and columns, on one of ``ranks`` tensor-parallel ranks."""
        parts = tuple(part // ranks for part in self.parts) if self.split == COLUMN else self.parts
        return parts, self.columns // ranks if self.split == ROW else self.columns


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes that decide shapes and memory."""

    type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    dense: tuple[Linear, ...]
    """The linears of a layer with a dense MLP; empty where every layer is MoE."""
    moe: tuple[Linear, ...] = ()
    """The linears of an MoE layer."""
    moe_layers: tuple[int, ...] = ()
    experts: int = 0
    mla: bool = False
    norms: int = 0
    """Elements of the norms of one decoder layer."""
    final_norm: int = 0
    positions: int = 0
    """Elements of learned positions."""

    @classmethod
    def read(cls, source: Mapping[str, Any] | str | Path) -> Model:
        """From a ``config.json``: its path, the folder that holds it, or its content."""
        config = source if isinstance(source, Mapping) else _load(Path(source))
        return _read(config.get("text_config") or config)

    def linears(self, layer: int) -> tuple[Linear, ...]:
        """The linears of one decoder layer."""
        return self.moe if layer in self.moe_layers else self.dense

    def all_linears(self) -> Iterator[tuple[int, Linear]]:
        """Every linear of the model with the number of its layer."""
        return ((layer, linear) for layer in range(self.layers) for linear in self.linears(layer))

    @property
    def embedding(self) -> int:
        """Elements of the token embedding; the output head has as many, unless they are one."""
        return self.vocab * self.hidden

    def unsplit(self, layer: int) -> int:
        """Elements of a decoder layer that every tensor-parallel rank holds whole: its norms and its router."""
        return self.norms + (self.hidden * self.experts if layer in self.moe_layers else 0)

    @property
    def parameters(self) -> int:
        """Every parameter, as Hugging Face counts them."""
        decoder = sum(linear.weights + linear.bias for _, linear in self.all_linears()) + sum(map(self.unsplit, range(self.layers)))
        return decoder + self.embedding * (1 if self.tied else 2) + self.final_norm + self.positions


# ---------------------------------------------------------------------- reading a config.json

# model_type -> what its config.json does not say. biases: the linears that have one, always or by a switch in the config.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"biases": {"qkv": "attention_bias", "proj": "attention_bias", "mlp": "mlp_bias"}},
    "mistral": {},
    "qwen2": {"biases": {"qkv": True}},
    "qwen3": {"biases": {"qkv": "attention_bias", "proj": "attention_bias"}, "qk_norm": True},
    "mixtral": {
        "experts": "num_local_experts",
        "moe_ffn": "intermediate_size",
        "expert_names": ("w1", "w3", "w2"),
        "moe": "block_sparse_moe",
    },
    "qwen3_moe": {
        "biases": {"qkv": "attention_bias", "proj": "attention_bias"},
        "qk_norm": True,
        "experts": "num_experts",
        "moe_ffn": "moe_intermediate_size",
    },
    "deepseek_v3": {"mla": True, "experts": "n_routed_experts", "moe_ffn": "moe_intermediate_size", "shared": "n_shared_experts"},
    "gpt2": {
        "names": {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
        },
        "biases": {"qkv": True, "proj": True, "mlp": True},
        "gated": False,
        "layer_norm": True,
        "tied": True,
        "positions": True,
    },
}


def _load(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise PrecisionError(
            f"There is no model config at {path}.", f"{error}.", "Give a Hugging Face config.json or its folder."
        ) from error
    except json.JSONDecodeError as error:
        raise PrecisionError(f"{path} is not JSON.", f"{error}.", "Give the config.json of a Hugging Face model.") from error
    if not isinstance(config, Mapping):
        raise PrecisionError(f"{path} holds no mapping.", "A model config is one.", "Give the config.json of a Hugging Face model.")
    return config


def _read(config: Mapping[str, Any]) -> Model:
    kind = config.get("model_type")
    if kind not in TYPES:
        raise PrecisionError([unknown("model_type", kind, TYPES)])
    traits = TYPES[kind]
    names = traits.get("names", {})

    def size(name: str, default: int | None = None) -> int:
        given = config.get(names.get(name, name))
        value = default if given is None else given
        if not isinstance(value, int) or value < 1:
            where = names.get(name, name)
            raise PrecisionError(f"The model config has no {where}.", f"It holds {given!r}.", f"Give {where} as a whole number.")
        return value

    def switch(name: Any) -> bool:
        return bool(config.get(name, False)) if isinstance(name, str) else bool(name)

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", hidden // heads)
    biases = {name: switch(value) for name, value in traits.get("biases", {}).items()}
    attention = _mla(config, size, hidden, heads) if traits.get("mla") else _attention(hidden, heads, kv_heads, head_dim, biases)
    ffn = size("intermediate_size", 4 * hidden)
    gated = traits.get("gated", True)
    dense = (*attention, *_mlp("mlp.", ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), hidden, ffn, gated, biases.get("mlp", False)))
    norm = hidden * (2 if traits.get("layer_norm") else 1)
    per_layer = 2 * norm + (2 * head_dim if traits.get("qk_norm") else 0)
    if traits.get("mla"):
        per_layer += (config.get("q_lora_rank") or 0) + size("kv_lora_rank")
    moe: tuple[Linear, ...] = ()
    moe_layers: tuple[int, ...] = ()
    experts = 0
    if "experts" in traits:
        # transformers 5 writes the second name for every family.
        names_of_count = [name for name in (traits["experts"], "num_local_experts") if config.get(name) is not None]
        experts = size(names_of_count[0], 1) if names_of_count else 1
    if experts > 1:
        moe = (*attention, *_experts(config, traits, size, hidden, experts))
        moe_layers = tuple(layer for layer in range(layers) if _is_moe(layer, config))
    return Model(
        type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if traits.get("mla") else kv_heads,
        head_dim=head_dim,
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", traits.get("tied", False))),
        dense=dense,
        moe=moe,
        moe_layers=moe_layers,
        experts=experts if moe else 0,
        mla=bool(traits.get("mla")),
        norms=per_layer,
        final_norm=norm,
        positions=size("max_position_embeddings") * hidden if traits.get("positions") else 0,
    )


def _is_moe(layer: int, config: Mapping[str, Any]) -> bool:
    """Qwen takes every n-th layer without a list of exceptions; DeepSeek starts after the first few."""
    sparse = (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    return sparse and layer not in (config.get("mlp_only_layers") or ()) and layer >= (config.get("first_k_dense_replace") or 0)


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int, biases: Mapping[str, bool]) -> tuple[Linear, ...]:
    parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        Linear("self_attention.linear_qkv", qkv, parts, hidden, COLUMN, sum(parts) if biases.get("qkv") else 0),
        Linear("self_attention.linear_proj", ("self_attn.o_proj",), (hidden,), heads * head_dim, ROW, hidden if biases.get("proj") else 0),
    )


def _mla(config: Mapping[str, Any], size: Any, hidden: int, heads: int) -> tuple[Linear, ...]:
    """Multi-head latent attention: low-rank down projections on every rank, up projections cut by heads."""
    nope, rope, value, kv_rank = (size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    rank, query = config.get("q_lora_rank"), heads * (nope + rope)
    at, hf = "self_attention.linear_", "self_attn."
    bias = bool(config.get("attention_bias", False))
    down = kv_rank + rope
    queries = (
        (
            Linear(at + "q_down_proj", (hf + "q_a_proj",), (rank,), hidden, NONE, rank if bias else 0),
            Linear(at + "q_up_proj", (hf + "q_b_proj",), (query,), rank, COLUMN),
        )
        if rank
        else (Linear(at + "q_proj", (hf + "q_proj",), (query,), hidden, COLUMN),)
    )
    return (
        *queries,
        Linear(at + "kv_down_proj", (hf + "kv_a_proj_with_mqa",), (down,), hidden, NONE, down if bias else 0),
        Linear(at + "kv_up_proj", (hf + "kv_b_proj",), (heads * (nope + value),), kv_rank, COLUMN),
        Linear(at + "proj", (hf + "o_proj",), (hidden,), heads * value, ROW, hidden if bias else 0),
    )


def _mlp(at: str, names: tuple[str, str, str], hidden: int, ffn: int, gated: bool, bias: bool, experts: int = 0) -> tuple[Linear, ...]:
    parts = (ffn, ffn) if gated else (ffn,)
    gate, up, down = names
    return (
        Linear(at + "linear_fc1", (gate, up) if gated else (up,), parts, hidden, COLUMN, sum(parts) if bias else 0, experts),
        Linear(at + "linear_fc2", (down,), (hidden,), ffn, ROW, hidden if bias else 0, experts),
    )


def _experts(config: Mapping[str, Any], traits: Mapping[str, Any], size: Any, hidden: int, experts: int) -> tuple[Linear, ...]:
    ffn, moe = size(traits["moe_ffn"]), traits.get("moe", "mlp")
    gate, up, down = traits.get("expert_names", ("gate_proj", "up_proj", "down_proj"))
    at = f"{moe}.experts.*."
    routed = _mlp("mlp.experts.", (at + gate, at + up, at + down), hidden, ffn, True, False, experts)
    shared = config.get(traits.get("shared", "")) or 0
    if not shared:
        return routed
    names = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")
    return (*routed, *_mlp("mlp.shared_experts.", names, hidden, ffn * shared, True, False))
