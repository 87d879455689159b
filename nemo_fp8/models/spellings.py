"""List every name that a linear goes by: Megatron's, Hugging Face's and vLLM's, those of its parts and of its experts.

    names.py        model.layers.3.self_attn.k_proj  ->  layer 3, self_attention.linear_qkv
    here            layer 3, self_attention.linear_qkv  ->  model.layers.3.self_attn.q_proj, ...k_proj, ...qkv_proj,
                    decoder.layers.3.self_attention.linear_qkv, ...

A pattern of a contract counts if it matches any of them: trainer, engine and checkpoint each know one naming, and must
answer alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from nemo_fp8.models.families import EXPERTS, WORDS, fused_name, held_as_one, in_hugging_face
from nemo_fp8.models.names import place


def all_names(names: Sequence[str], experts: int = 0) -> tuple[str, ...]:
    """Return names of linears that are stored as one matrix, and behind them every other name of these linears."""
    units = {(p.layer, p.unit) for p in map(place, names) if p.unit and p.layer is not None}
    return (*names, *(name for layer, unit in sorted(units) for name in _names_of(layer, unit, experts)))


def names_in_an_engine(names: Sequence[str], experts: int) -> tuple[str, ...]:
    """Return names of linears that are stored as one matrix, and behind them every name of all that an engine holds as
    one with them."""
    places = [place(name) for name in names]
    units = {(p.layer, together) for p in places if p.layer is not None for together in held_as_one(p.unit)}
    return (*names, *(name for layer, unit in sorted(units) for name in _names_of(layer, unit, experts)))


@lru_cache(maxsize=1 << 12)
def _names_of(layer: int, unit: str, experts: int) -> tuple[str, ...]:
    """Return the names of a unit, of all parts and all experts: Megatron's, Hugging Face's, and vLLM's for the whole.

    ``unit`` is Megatron's name below the layer (``self_attention.linear_qkv``). Since the names of all of its parts are
    tried, a pattern that names K keeps Q and V as well, in training and in rollout.
    """
    megatron, routed = f"decoder.layers.{layer}.", unit.startswith("mlp.experts.")
    names = [megatron + unit]
    for e in range(experts) if routed else (0,):
        if routed:
            names.append(megatron + unit.replace("experts.", f"experts.local_experts.{e}.", 1))
        for words in EXPERTS if routed else EXPERTS[:1]:
            parts = in_hugging_face(unit, words, e)
            names += [f"model.layers.{layer}.{name}" for name in (*parts, *fused_name(parts))]
    if not in_hugging_face(unit):  # one of no table has the same name below its layer everywhere
        names += [f"{stack}.layers.{layer}.{unit}" for stack in ("model", "backbone")]
    elif len(together := held_as_one(unit)) > 1 and not routed:
        whole = fused_name(tuple(name for one in together for name in in_hugging_face(one)))
        names += [f"model.layers.{layer}.{name}" for name in whole]
    if routed:
        names += [megatron + "mlp.experts", *(f"model.layers.{layer}.{words.block}.experts" for words in EXPERTS)]
    return tuple(names)


def outside_names(layers: Iterable[int]) -> Iterator[str]:
    """Yield names of modules that no contract puts in FP8 (head, embedding, routers); patterns may match them."""
    yield from ("lm_head", "output_layer", "embedding", "model.embed_tokens")
    for layer in layers:
        yield from (
            f"decoder.layers.{layer}.mlp.router",
            *(f"model.layers.{layer}.{words.block}.gate" for words in EXPERTS),
        )


def names_what_is_kept_anyway(pattern: str) -> bool:
    """Return whether a pattern of ``keep`` names what no contract quantizes: norms, embeddings, routers, the head.

    A pattern that may name linears, too, does not: ``re:norm|in_proj``, ``*.feed_forward.gate*``.
    """
    ways = pattern.removeprefix("re:").split("|") if pattern.startswith("re:") else [pattern]
    if pattern.endswith("*"):
        begun = pattern.strip("*.").rpartition(".")[2]
        if any(word.startswith(begun) for word in WORDS):
            return False
    return all(place(way.strip("*.()^$")).kept != "" for way in ways)
