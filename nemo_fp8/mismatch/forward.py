"""Run a decoder in plain torch as the rollout would: log-probs in the compute dtype, or under a contract's FP8.

    log_probs(config, weights, tokens)                       as a trainer or an engine computes them in BF16
    log_probs(config, weights, tokens, Run(precision))       the same with the rollout side of the contract emulated

``config`` is a Hugging Face ``config.json`` (Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE), ``weights`` any
mapping of Hugging Face names to tensors. Tensors are looked up one layer at a time, so the mapping may read a
checkpoint, and never more than one layer is in memory. :mod:`nemo_fp8.models.selection`, the rule of the engine,
decides which linears are in FP8, and :mod:`nemo_fp8.numerics` quantizes them, so codes and scales equal those of the
workers bit for bit.

    activations=True      quantize both operands, x in 1x128 groups, as FP8 kernels on GPUs do
    activations=False     quantize weights alone and decode them to BF16, as vLLM's kernels on CPUs do

Not emulated are the order of a kernel's sums, and BF16 roundings inside of attention. They shift a log-prob by far less
than FP8 does, but not by nothing; the gate leaves room for them. The trade-off is speed: there is no KV cache, and the
whole prompt is computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from nemo_fp8.contract import Operand, Precision, naming
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.mismatch.weights import Weights, reference
from nemo_fp8.models.families import FAMILIES
from nemo_fp8.models.selection import contract_of
from nemo_fp8.numerics import cast, decode, quantize
from nemo_fp8.numerics.bf16 import linear
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.gemm import gemm

# Rows of logits at a time: a vocabulary of 150,000 in FP32 is 0.6 MB a row.
_ROWS = 512


@dataclass(frozen=True)
class Decoder:
    """The sizes and switches of a model that its forward depends on."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    frequencies: torch.Tensor = field(repr=False)
    """The frequencies of the rotary embedding, [head_dim / 2]."""
    tied: bool
    qk_norm: bool
    mlp: str
    names: tuple[str, str, str]
    experts: int = 0
    experts_per_token: int = 0
    normalize: bool = False
    dense_layers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Decoder:
        """Read a ``config.json``; raises PrecisionError for a model that is not emulated, or lacks a size."""
        try:
            return cls._of(config)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, PrecisionError):
                raise
            raise PrecisionError(
                "The model config lacks a size that the forward needs, or holds something else there.",
                f"{type(error).__name__}: {error}.",
                "Give the config.json of the Hugging Face model.",
            ) from error

    @classmethod
    def _of(cls, config: Mapping[str, Any]) -> Decoder:
        kind = config.get("model_type")
        emulated = {name: family for name, family in FAMILIES.items() if family.forward}
        if kind not in emulated:
            raise PrecisionError([unknown("model_type to emulate", kind, emulated)])
        family = emulated[kind]
        _refuse_special(config)
        heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        moe = family.experts
        experts = int(config.get(moe.count) or config["num_local_experts"]) if moe else 0
        step = int(config.get("decoder_sparse_step") or 1)
        dense = (
            {i for i in range(layers) if (i + 1) % step} | set(config.get("mlp_only_layers") or ())
            if experts
            else set(range(layers))
        )
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            epsilon=float(config["rms_norm_eps"]),
            frequencies=_rope(config, head_dim),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family.qk_norm,
            mlp=moe.block if moe else "mlp",
            names=moe.words if moe else ("gate_proj", "up_proj", "down_proj"),
            experts=experts,
            experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
            normalize=bool((moe and moe.normalized) or config.get("norm_topk_prob")),
            dense_layers=frozenset(dense),
        )


@dataclass(frozen=True)
class Run:
    """How a forward is run: in which dtype, and which operands are in FP8."""

    precision: Precision | None = None
    """A contract, or the name of one, which becomes it; None for a run without FP8."""
    side: str = "rollout"
    """The side of the contract whose operands are used: ``rollout`` or ``train``."""
    activations: bool = True
    dtype: torch.dtype | None = None
    """The dtype of everything that is not in FP8; None means that of the weights."""

    def __post_init__(self) -> None:
        if self.precision is not None:
            object.__setattr__(self, "precision", naming.given(self.precision))

    def operand(self, role: str, linear: str = "", experts: int = 0) -> Operand | None:
        """Return how ``input`` or ``weight`` is quantized, of a ``linear`` by the rule for it; None if it is not.

        ``experts`` is the number of routed experts of the model.

        Raises PrecisionError for static activation scales, which only the engine knows.
        """
        if self.precision is None:
            return None
        own = contract_of(self.precision, (linear,), experts, self.side) if linear else self.precision
        found = own.operand(role, self.side)
        if found is not None and found.delayed and self.side == "rollout" and self.activations:
            raise PrecisionError(
                "activation_scheme='static' cannot be emulated from weights.",
                "Its scales were found on calibration data that only the engine has seen.",
                "Set activation_scheme='dynamic' for the prediction.",
            )
        return found and replace(found, delayed=False)

    def cast(self, t: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the dtype of the run; as it is if the run has none."""
        return t if self.dtype is None else t.to(self.dtype)


def log_probs(
    config: Mapping[str, Any],
    weights: Weights,
    tokens: torch.Tensor,
    run: Run | None = None,
    *,
    batch: int = 8,
    progress: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return the log-prob of every token given those before it, [sequences, tokens] in FP32; 0 for the first one.

    ``tokens`` are padded on the right, with any token. ``batch`` sequences go through a layer at a time, and
    ``progress`` is called after each layer.

    Raises PrecisionError if the model is not emulated, a weight is missing, or a token is not in the vocabulary.
    """
    model, run = Decoder.of(config), run or Run()
    require_tokens(tokens)
    with torch.no_grad():
        embedding = _get(weights, "model.embed_tokens.weight")
        _refuse_strange_tokens(tokens, len(embedding))
        hidden = run.cast(F.embedding(tokens, embedding))
        angles = (
            model.frequencies.to(tokens.device)[None] * torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        )
        rope = (angles.cos(), angles.sin())
        for i in range(model.layers):
            layer = _Layer(model, i, weights, run)
            hidden = torch.cat([layer(part, rope) for part in torch.split(hidden, batch)])
            if progress:
                progress()
        hidden = rms_norm(hidden, run.cast(_get(weights, "model.norm.weight")), model.epsilon)
        head = embedding if model.tied else _get(weights, "lm_head.weight")
        return _gather(hidden, run.cast(head), tokens)


def require_tokens(tokens: torch.Tensor) -> None:
    """Raise PrecisionError for what is no [sequences, tokens] of whole numbers."""
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
        about = (
            f"of shape {tuple(tokens.shape)} and type {tokens.dtype}" if isinstance(tokens, torch.Tensor) else tokens
        )
        raise PrecisionError(
            f"Tokens {about}.",
            "They are whole numbers, [sequences, tokens].",
            "Pad the sequences on the right to one length.",
        )


def _refuse_strange_tokens(tokens: torch.Tensor, vocabulary: int) -> None:
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise PrecisionError(
            f"Token ids from {int(tokens.min())} to {int(tokens.max())} for a vocabulary of {vocabulary}.",
            "The model has no embedding for some of them.",
            "Check that tokens and model belong together, and pad with 0.",
        )


def _gather(hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of the logits at each next token, computed a few rows at a time."""
    rows, targets = hidden[:, :-1].reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1).long()
    found = [
        linear(part, head).float().log_softmax(-1).gather(1, target[:, None])[:, 0]
        for part, target in zip(torch.split(rows, _ROWS), torch.split(targets, _ROWS), strict=True)
    ]
    return F.pad(torch.cat(found).view(tokens.shape[0], -1), (1, 0))


class _Layer:
    """One decoder layer with its weights, quantized as the contract says."""

    def __init__(self, model: Decoder, index: int, weights: Weights, run: Run) -> None:
        self.model, self.index, self.run = model, index, run
        self.at = f"model.layers.{index}."
        stored = {name: weights[name] for name in weights if name.startswith(self.at)}
        quantized = (
            dict(reference(stored, run.precision, model.layers, side=run.side))
            if run.precision and run.operand("weight")
            else {}
        )
        self.weights = {name: run.cast(t) for name, t in stored.items() if name not in quantized}
        if not run.activations:
            self.weights |= {name: q.dequantize(run.dtype or stored[name].dtype) for name, q in quantized.items()}
            quantized = {}
        self.quantized = quantized

    def __call__(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self._attention(self._norm("input_layernorm", x), rope)
        return x + self._mlp(self._norm("post_attention_layernorm", x))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, _get(self.weights, f"{self.at}{name}.weight"), self.model.epsilon)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = f"{self.at}{name}.weight", self.weights.get(f"{self.at}{name}.bias")
        q = self.quantized.get(weight)
        if q is None:
            return linear(x, _get(self.weights, weight), bias)
        operand = self.run.operand("input", f"{self.at}{name}", self.model.experts)
        if operand is None:  # weights alone are quantized
            return linear(x, q.dequantize(x.dtype), bias)
        y = gemm(quantize(x.reshape(-1, x.shape[-1]), operand), q, out_dtype=x.dtype, bias=bias)
        return y.view(*x.shape[:-1], -1)

    def _attention(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        m = self.model
        q, k, v = (self._linear(f"self_attn.{part}_proj", x) for part in "qkv")
        q, k, v = (t.view(*t.shape[:-1], -1, m.head_dim) for t in (q, k, v))
        if m.qk_norm:
            q, k = self._norm("self_attn.q_norm", q), self._norm("self_attn.k_norm", k)
        q, k, v = (t.transpose(1, 2) for t in (_rotate(q, rope), _rotate(k, rope), v))
        if self.run.side == "rollout" and self.run.precision and self.run.precision.kv_cache == "fp8":
            k, v = (_cached(t) for t in (k, v))
        groups = m.heads // m.kv_heads
        y = F.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=True
        )
        return self._linear("self_attn.o_proj", y.transpose(1, 2).flatten(2))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        m = self.model
        if self.index in m.dense_layers:
            return self._gated(m.mlp, x)
        flat = x.reshape(-1, x.shape[-1])
        chances = linear(flat, _get(self.weights, f"{self.at}{m.mlp}.gate.weight")).float().softmax(-1)
        share, chosen = chances.topk(m.experts_per_token, -1)
        if m.normalize:
            share = share / share.sum(-1, keepdim=True)
        out = torch.zeros_like(flat, dtype=torch.float32)
        for expert in range(m.experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                out.index_add_(
                    0, token, self._gated(f"{m.mlp}.experts.{expert}", flat[token]).float() * share[token, slot, None]
                )
        return out.to(x.dtype).view(x.shape)

    def _gated(self, at: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (f"{at}.{name}" for name in self.model.names)
        return self._linear(down, F.silu(self._linear(gate, x)) * self._linear(up, x))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / rms(x), computed in FP32 and rounded to the dtype of x, times the weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply the rotary embedding to [sequences, tokens, heads, head_dim]; element i is paired with i + head_dim / 2."""
    cos, sin = (t[None, :, None].to(torch.float32) for t in rope)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _cached(x: torch.Tensor) -> torch.Tensor:
    """Return values as read from an FP8 KV cache with scale 1, which vLLM uses without calibration."""
    return decode(cast(x.float(), FORMATS["e4m3"]), x.dtype)


def _get(weights: Weights, name: str) -> torch.Tensor:
    try:
        return weights[name]
    except KeyError:
        raise PrecisionError(
            f"There is no {name} among the weights.",
            "The forward needs every tensor of the model under its Hugging Face name.",
            "Pass the state dict of the Hugging Face model, or its checkpoint.",
        ) from None


# ---------------------------------------------------------------------- the config


def _refuse_special(config: Mapping[str, Any]) -> None:
    act = config.get("hidden_act", "silu")
    rows = (
        (act != "silu", f"hidden_act={act!r}", "silu"),
        (bool(config.get("use_sliding_window")), "use_sliding_window=True", "full attention"),
        (
            bool(config.get("sliding_window")) and config.get("model_type") in ("mistral", "mixtral"),
            "sliding_window",
            "full attention",
        ),
    )
    for wrong, what, known in rows:
        if wrong:
            raise PrecisionError(
                f"A model with {what}.",
                f"The emulation knows {known} only.",
                "Take log-probs from a BF16 engine instead of predicting them.",
            )


def _rope(config: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Return the frequencies of the rotary embedding.

    transformers 5 writes ``rope_parameters``; older ones write ``rope_theta`` and ``rope_scaling``.
    """
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "linear":
        frequencies = frequencies / given["factor"]
    elif kind == "llama3":
        frequencies = _llama3(frequencies, given)
    elif kind != "default":
        raise PrecisionError([unknown("rope_type to emulate", kind, ("default", "linear", "llama3"))])
    return frequencies.float()


def _llama3(frequencies: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Scale frequencies as Llama 3.1 does: long waves are stretched, short ones not, and those between are blended."""
    names = ("original_max_position_embeddings", "factor", "low_freq_factor", "high_freq_factor")
    old, factor, low, high = (float(given[name]) for name in names)
    turns = old * frequencies / (2 * math.pi)
    blend = torch.clamp((turns - low) / (high - low), 0, 1)
    return frequencies / factor * (1 - blend) + frequencies * blend


def pad(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids of different lengths as one tensor, padded on the right, and the mask of those with a log-prob.

    Raises PrecisionError if a sequence is empty.
    """
    if not sequences or not all(len(s) for s in sequences):
        raise PrecisionError(
            "There is a sequence without tokens.", "Nothing can be predicted from it.", "Leave empty sequences out."
        )
    longest = max(len(s) for s in sequences)
    tokens = torch.tensor([[*s, *([0] * (longest - len(s)))] for s in sequences])
    mask = torch.tensor([[0 < i < len(s) for i in range(longest)] for s in sequences])
    return tokens, mask
