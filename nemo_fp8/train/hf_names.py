"""Translate Megatron's tensors to Hugging Face's: the architecture, the names, and how fused weights are split.

Megatron fuses what Hugging Face keeps apart, and both keep the same rows:

    linear_qkv   [groups, heads of the group + K + V, head_dim, hidden]  ->  q_proj, k_proj, v_proj
    linear_fc1   [gate; up]                                              ->  gate_proj, up_proj
    vocabulary   padded to a multiple of 128 x TP                        ->  as many rows as the tokenizer has tokens

Each row of ``LAYER`` and ``OUTER`` is one tensor of Megatron's. The names of linears, and a family's own words for
experts, are those of :mod:`nemo_fp8.models.families`. A tensor that no row knows is refused: a checkpoint that lacks a
bias would be another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.models.families import HUGGING_FACE, Family, nemo_classes, of_nemo


def _linear(unit: str, split: str, kind: str = "weight") -> tuple[str, tuple[str, ...]]:
    """Return the row of a linear's weight or bias; its names are those of :data:`HUGGING_FACE`."""
    return split, tuple(f"{name}.{kind}" for name in HUGGING_FACE[unit])


# Megatron's name below a layer -> how it is split, and Hugging Face's names. {block}, {e} and an expert's words are the
# family's.
LAYER: dict[str, tuple[str, tuple[str, ...]]] = {
    "self_attention.linear_qkv.weight": _linear("self_attention.linear_qkv", "qkv"),
    "self_attention.linear_qkv.bias": _linear("self_attention.linear_qkv", "qkv", "bias"),
    "self_attention.linear_proj.weight": _linear("self_attention.linear_proj", "whole"),
    "self_attention.q_layernorm.weight": ("whole", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("whole", ("self_attn.k_norm.weight",)),
    # A norm before a linear is a part of TransformerEngine's linear, and a module of its own without TE.
    "self_attention.linear_qkv.layer_norm_weight": ("whole", ("input_layernorm.weight",)),
    "input_layernorm.weight": ("whole", ("input_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": ("whole", ("post_attention_layernorm.weight",)),
    "pre_mlp_layernorm.weight": ("whole", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": _linear("mlp.linear_fc1", "gate_up"),
    "mlp.linear_fc2.weight": _linear("mlp.linear_fc2", "whole"),
    "mlp.router.weight": ("whole", ("{block}.gate.weight",)),
    "mlp.experts.{e}.linear_fc1.weight": _linear("mlp.experts.linear_fc1", "gate_up"),
    "mlp.experts.{e}.linear_fc2.weight": _linear("mlp.experts.linear_fc2", "whole"),
}
OUTER: dict[str, tuple[str, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("whole", ("model.norm.weight",)),
    "output_layer.weight": ("vocabulary", ("lm_head.weight",)),
}
# Names of state that a model keeps beside its weights.
_STATE = re.compile(r"_extra_state|rotary_pos_emb\.inv_freq$|\.expert_bias$|local_tokens_per_expert$")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor: a part of one of Megatron's."""

    name: str
    megatron: str
    split: str
    index: int


@dataclass(frozen=True)
class Names:
    """The names of one model's tensors, and how its fused tensors are split."""

    type: str
    """The ``model_type`` of Hugging Face's config.json."""
    family: Family
    heads: int
    groups: int
    head_dim: int
    vocabulary: int | None
    """The number of tokens; None if the padding is unknown, and is exported."""

    @classmethod
    def of(cls, model: str, config: Mapping[str, Any], vocabulary: int | None) -> Names:
        """Make the names for NeMo's model class of this name with this config.

        Raises PrecisionError if no family is known for it, or if it computes something that its family does not.
        """
        found = of_nemo(model, experts=bool(config.get("num_moe_experts")))
        if found is None:
            raise PrecisionError([unknown("model class", model, nemo_classes())])
        _require_plain(model, config, *found)
        heads = int(config["num_attention_heads"])
        return cls(
            *found,
            heads,
            int(config.get("num_query_groups") or heads),
            int(config.get("kv_channels") or config["hidden_size"] // heads),
            vocabulary,
        )

    def parts(self, megatron: str) -> Iterator[Part]:
        """Yield the Hugging Face tensors that a tensor of Megatron's is split into; nothing if it is no weight.

        Raises PrecisionError for a weight that no row of the tables names.
        """
        if _STATE.search(megatron):
            return
        layer = _LAYER.match(megatron)
        below = layer[2] if layer else ""
        expert = _EXPERT.match(below)
        key = _EXPERT.sub("mlp.experts.{e}.", below)
        row = LAYER.get(key) if layer else OUTER.get(megatron)
        if row is None:
            raise PrecisionError(
                [unknown("tensor of Megatron", megatron, [*OUTER, *(f"decoder.layers.N.{name}" for name in LAYER)])]
            )
        words = {"e": expert[1] if expert else "", **self._experts()}
        split, names = row
        for i, name in enumerate(names):
            yield Part((f"model.layers.{layer[1]}." if layer else "") + name.format(**words), megatron, split, i)

    def _experts(self) -> dict[str, str]:
        experts = self.family.experts
        return (
            {"block": experts.block, **dict(zip(("gate", "up", "down"), experts.words, strict=True))} if experts else {}
        )

    def take(self, part: Part, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of a part of Megatron's tensor."""
        return whole[self.rows(part, whole.shape[0])] if part.split != "qkv" else self._qkv(whole)[part.index]

    def shape(self, part: Part, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part of a tensor of shape ``whole``."""
        if part.split == "qkv":
            return ((self.heads if part.index == 0 else self.groups) * self.head_dim, *whole[1:])
        rows = range(whole[0])[self.rows(part, whole[0])] if whole else ()
        return (len(rows), *whole[1:]) if whole else ()

    def rows(self, part: Part, count: int) -> slice:
        """Return the slice of a part among the ``count`` rows of the whole."""
        if part.split == "gate_up":
            return slice(part.index * (count // 2), (part.index + 1) * (count // 2))
        return slice(0, min(count, self.vocabulary or count) if part.split == "vocabulary" else count)

    def _qkv(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        each = self.heads // self.groups
        grouped = whole.view(self.groups, each + 2, self.head_dim, *whole.shape[1:])
        parts = (grouped[:, :each], grouped[:, each : each + 1], grouped[:, each + 1 :])
        return tuple(part.reshape(-1, *whole.shape[1:]) for part in parts)

    def config(self, c: Mapping[str, Any], dtype: str, tokens: Mapping[str, int | None]) -> dict[str, Any]:
        """Return the model's config.json."""
        return {
            "architectures": [self.family.architecture],
            "model_type": self.type,
            "hidden_size": c["hidden_size"],
            "intermediate_size": c["ffn_hidden_size"],
            "num_hidden_layers": c["num_layers"],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocabulary,
            "max_position_embeddings": c.get("max_position_embeddings") or c["seq_length"],
            "rms_norm_eps": c["layernorm_epsilon"],
            "rope_theta": float(c["rotary_base"]),
            "initializer_range": c.get("init_method_std", 0.02),
            "tie_word_embeddings": bool(c.get("share_embeddings_and_output_weights", False)),
            "attention_bias": bool(c.get("add_qkv_bias", False)),
            "torch_dtype": dtype,
            **{name: value for name, value in tokens.items() if value is not None},
            **self.family.config(c),
        }


def in_order(megatron: str) -> tuple[int, ...]:
    """Return a sort key for Megatron's tensors: the embedding, then layer by layer as in ``LAYER``, then the rest."""
    layer = _LAYER.match(megatron)
    if layer is None:
        return (0,) if megatron.startswith("embedding") else (2, [*OUTER].index(megatron) if megatron in OUTER else 0)
    expert = _EXPERT.match(layer[2])
    key = _EXPERT.sub("mlp.experts.{e}.", layer[2])
    place = [*LAYER].index(key) if key in LAYER else len(LAYER)
    return (1, int(layer[1]), int(expert is not None), int(expert[1]) if expert else 0, place)


def plain_config(config: Any) -> dict[str, Any]:
    """Return a live model's config under the keys that it has in a checkpoint."""
    found = {
        name: getattr(config, name)
        for name in dir(config)
        if not name.startswith("_") and not callable(getattr(config, name, None))
    }
    activation = getattr(config, "activation_func", None)
    return found | {
        "activation_func": {
            "_target_": f"{getattr(activation, '__module__', '')}.{getattr(activation, '__name__', '')}"
        }
    }


def _require_plain(model: str, c: Mapping[str, Any], kind: str, family: Family) -> None:
    """Raise PrecisionError for a model that computes something else than its Hugging Face family does."""
    activation = c.get("activation_func")
    named = activation.get("_target_", "") if isinstance(activation, Mapping) else str(activation or "")
    rows = (
        (c.get("normalization") != "RMSNorm", f"normalization={c.get('normalization')!r}"),
        (bool(c.get("layernorm_zero_centered_gamma")), "layernorm_zero_centered_gamma=True"),
        (not c.get("gated_linear_unit"), "gated_linear_unit=False"),
        (bool(named) and not named.endswith("silu"), f"activation_func={named}"),
        (
            c.get("position_embedding_type", "rope") != "rope",
            f"position_embedding_type={c.get('position_embedding_type')!r}",
        ),
        (float(c.get("rotary_percent") or 1.0) != 1.0, f"rotary_percent={c.get('rotary_percent')}"),
        (bool(c.get("rotary_interleaved")), "rotary_interleaved=True"),
        (
            bool(c.get("seq_len_interpolation_factor")),
            f"seq_len_interpolation_factor={c.get('seq_len_interpolation_factor')}",
        ),
        (bool(c.get("add_bias_linear")), "add_bias_linear=True"),
        (bool(c.get("num_moe_experts")) and family.experts is None, f"num_moe_experts={c.get('num_moe_experts')}"),
        (bool(c.get("moe_shared_expert_intermediate_size")), "shared experts"),
        (c.get("moe_layer_freq", 1) != 1, f"moe_layer_freq={c.get('moe_layer_freq')}"),
        (bool(c.get("qk_layernorm")) and not family.qk_norm, "qk_layernorm=True"),
    )
    wrong = [words for is_wrong, words in rows if is_wrong]
    if wrong:
        raise PrecisionError(
            Problem(
                f"A {model} with {words} as {family.architecture}.",
                "Hugging Face's model of that name computes something else.",
                "Export it with NeMo's own llm.export_ckpt, if NeMo has an exporter for it.",
            )
            for words in wrong
        )
