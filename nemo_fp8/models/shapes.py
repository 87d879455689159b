"""A model as its linear layers, from a Hugging Face ``config.json``, and how they are cut over ranks.

For FP8 only the two dimensions of each weight on each rank matter. So a model is a list of linears in Megatron's form
(Q, K and V fused, gate and up fused), each with the rows of its parts, its columns, and the dimension that tensor
parallelism cuts:

    column    rows / TP      linear_qkv, linear_fc1          (output features)
    row       columns / TP   linear_proj, linear_fc2         (input features)
    none      whole          MLA's down projections

Model types are rows of :mod:`nemo_fp8.models.families`. A type without a row is refused, since a wrong guess about a
bias or a shared expert gives a wrong memory estimate. ``Model.parameters`` equals the count of transformers exactly;
tests check it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.models.families import EXPERTS, FAMILIES, Experts, in_hugging_face

COLUMN, ROW, NONE = "column", "row", "none"


@dataclass(frozen=True)
class Linear:
    """One weight ``[sum(parts), columns]`` of a decoder layer, before any split; an MoE layer has ``experts``."""

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
        """The rows of all parts together."""
        return sum(self.parts)

    @property
    def weights(self) -> int:
        """The weight elements of all experts together."""
        return self.rows * self.columns * max(1, self.experts)

    def on_rank(self, ranks: int) -> tuple[tuple[int, ...], int]:
        """Return the rows of each part, and the columns, on one of ``ranks`` tensor-parallel ranks."""
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
        """Read a ``config.json``: its path, the folder that holds it, or its content.

        Raises PrecisionError if it cannot be read, or if its model type is unknown.
        """
        if not isinstance(source, Mapping | str | PathLike):
            raise PrecisionError(
                f"{source!r} is no model.",
                "A model is a config.json: its path, the folder that holds it, or its content.",
                "Give one of these.",
            )
        config = source if isinstance(source, Mapping) else read_config(Path(source))
        text = config.get("text_config") or config
        if not isinstance(text, Mapping):
            raise PrecisionError(
                "text_config of the model config is no mapping.",
                f"It holds {text!r}.",
                "Give the config.json of a Hugging Face model.",
            )
        try:
            return _read(text)
        except TypeError as error:  # words in place of numbers, a number in place of a list
            raise PrecisionError(
                "A value of the model config is of the wrong kind.",
                f"{error}.",
                "Give sizes as whole numbers, as Hugging Face writes them.",
            ) from error

    def linears(self, layer: int) -> tuple[Linear, ...]:
        """Return the linears of one decoder layer."""
        return self.moe if layer in self.moe_layers else self.dense

    def all_linears(self) -> Iterator[tuple[int, Linear]]:
        """Yield (number of its layer, linear) for every linear of the model."""
        return ((layer, linear) for layer in range(self.layers) for linear in self.linears(layer))

    @property
    def embedding(self) -> int:
        """The elements of the token embedding; the output head has as many, unless they share one tensor."""
        return self.vocab * self.hidden

    def unsplit(self, layer: int) -> int:
        """Return the elements of a layer that every tensor-parallel rank holds whole: its norms and its router."""
        return self.norms + (self.hidden * self.experts if layer in self.moe_layers else 0)

    @property
    def parameters(self) -> int:
        """The number of parameters, as Hugging Face counts them."""
        decoder = sum(linear.weights + linear.bias for _, linear in self.all_linears()) + sum(
            map(self.unsplit, range(self.layers))
        )
        return decoder + self.embedding * (1 if self.tied else 2) + self.final_norm + self.positions


# ---------------------------------------------------------------------- reading a config.json


def read_config(path: Path) -> dict[str, Any]:
    """Return the ``config.json`` at a path, or in a folder. Raises PrecisionError if it cannot be read."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise PrecisionError(
            f"There is no model config at {path}.", f"{error}.", "Give a Hugging Face config.json or its folder."
        ) from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise PrecisionError(
            f"{path} is not JSON.", f"{error}.", "Give the config.json of a Hugging Face model."
        ) from error
    if not isinstance(config, dict):
        raise PrecisionError(
            f"{path} holds no mapping.", "A model config is one.", "Give the config.json of a Hugging Face model."
        )
    return config


def _read(config: Mapping[str, Any]) -> Model:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise PrecisionError([unknown("model_type", kind, FAMILIES)])
    family = FAMILIES[kind]

    def size(name: str, default: int | None = None) -> int:
        where = family.keys.get(name, name)
        given = config.get(where)
        value = default if given is None else given
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PrecisionError(
                f"The model config has no {where}.", f"It holds {given!r}.", f"Give {where} as a whole number."
            )
        return value

    def switch(name: Any) -> bool:
        return bool(config.get(name, False)) if isinstance(name, str) else bool(name)

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", hidden // heads)
    biases = {name: switch(value) for name, value in family.biases.items()}
    attention = (
        _mla(config, size, hidden, heads) if family.mla else _attention(hidden, heads, kv_heads, head_dim, biases)
    )
    ffn = size("intermediate_size", 4 * hidden)
    dense = (*attention, *_mlp("mlp.", hidden, ffn, family.gated, biases.get("mlp", False)))
    norm = hidden * (2 if family.layer_norm else 1)
    per_layer = 2 * norm + (2 * head_dim if family.qk_norm else 0)
    if family.mla:
        per_layer += (config.get("q_lora_rank") or 0) + size("kv_lora_rank")
    moe: tuple[Linear, ...] = ()
    moe_layers: tuple[int, ...] = ()
    experts = 0
    if family.experts:
        given = [name for name in (family.experts.count, "num_local_experts") if config.get(name) is not None]
        experts = size(given[0], 1) if given else 1
    if family.experts and experts > 1:
        moe = (*attention, *_experts(config, family.experts, size, hidden, experts))
        moe_layers = tuple(layer for layer in range(layers) if _is_moe(layer, config))
    return Model(
        type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if family.mla else kv_heads,
        head_dim=head_dim,
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        dense=dense,
        moe=moe,
        moe_layers=moe_layers,
        experts=experts if moe else 0,
        mla=family.mla,
        norms=per_layer,
        final_norm=norm,
        positions=size("max_position_embeddings") * hidden if family.positions else 0,
    )


def _is_moe(layer: int, config: Mapping[str, Any]) -> bool:
    """Return whether a layer is MoE: every n-th for Qwen, all but the first few for DeepSeek."""
    sparse = (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    return (
        sparse
        and layer not in (config.get("mlp_only_layers") or ())
        and layer >= (config.get("first_k_dense_replace") or 0)
    )


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int, biases: Mapping[str, bool]) -> tuple[Linear, ...]:
    parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    return (
        _linear("self_attention.linear_qkv", parts, hidden, COLUMN, sum(parts) if biases.get("qkv") else 0),
        _linear("self_attention.linear_proj", (hidden,), heads * head_dim, ROW, hidden if biases.get("proj") else 0),
    )


def _mla(config: Mapping[str, Any], size: Any, hidden: int, heads: int) -> tuple[Linear, ...]:
    """Return the linears of multi-head latent attention: down projections whole on every rank, up projections cut."""
    nope, rope, value, kv_rank = (
        size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    rank, query = config.get("q_lora_rank"), heads * (nope + rope)
    at, down, bias = "self_attention.linear_", kv_rank + rope, bool(config.get("attention_bias", False))
    queries = (
        (
            _linear(at + "q_down_proj", (rank,), hidden, NONE, rank if bias else 0),
            _linear(at + "q_up_proj", (query,), rank, COLUMN),
        )
        if rank
        else (_linear(at + "q_proj", (query,), hidden, COLUMN),)
    )
    return (
        *queries,
        _linear(at + "kv_down_proj", (down,), hidden, NONE, down if bias else 0),
        _linear(at + "kv_up_proj", (heads * (nope + value),), kv_rank, COLUMN),
        _linear(at + "proj", (hidden,), heads * value, ROW, hidden if bias else 0),
    )


def _mlp(
    at: str,
    hidden: int,
    ffn: int,
    gated: bool = True,
    bias: bool = False,
    count: int = 0,
    experts: Experts = EXPERTS[0],
) -> tuple[Linear, ...]:
    parts = (ffn, ffn) if gated else (ffn,)
    return (
        _linear(at + "linear_fc1", parts, hidden, COLUMN, sum(parts) if bias else 0, count, experts),
        _linear(at + "linear_fc2", (hidden,), ffn, ROW, hidden if bias else 0, count, experts),
    )


def _experts(config: Mapping[str, Any], experts: Experts, size: Any, hidden: int, count: int) -> tuple[Linear, ...]:
    ffn = size(experts.ffn)
    shared = (config.get(experts.shared) or 0) if experts.shared else 0
    routed = _mlp("mlp.experts.", hidden, ffn, True, False, count, experts)
    return (*routed, *_mlp("mlp.shared_experts.", hidden, ffn * shared)) if shared else routed


def _linear(
    name: str,
    parts: tuple[int, ...],
    columns: int,
    split: str,
    bias: int = 0,
    count: int = 0,
    experts: Experts = EXPERTS[0],
) -> Linear:
    """Make one of Megatron's linears; an MLP without a gate has its up projection only."""
    return Linear(name, in_hugging_face(name, experts)[-len(parts) :], parts, columns, split, bias, count)
