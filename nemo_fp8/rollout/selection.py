"""Which of vLLM's layers stay in the compute dtype: by role, by decoder layer, by the contract's names.

    by role     routers and gates, whose few outputs decide where a token goes; embeddings and the head are no linears to vLLM
    by number   the first and last decoder layers; a vision tower has layers too, and they do not count
    by name     the contract's ``keep`` patterns, matched against vLLM's name and against the names that it was fused from

vLLM fuses ``q_proj``, ``k_proj``, ``v_proj`` into one ``qkv_proj`` with one set of codes. A pattern that keeps some of
them and not the others cannot be meant, and is refused instead of guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError

ROUTERS = ("gate", "router", "shared_expert_gate")
# The names under which a linear of an expert lies in Hugging Face checkpoints.
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# A list of layers, and what stands before it in the decoder of a language model and nowhere else.
_LIST = re.compile(r"^(?:(?P<path>.*)\.)?(?:layers|h|blocks)\.(?P<index>\d+)(?:\.|$)")
_DECODERS = frozenset({"", "model", "language_model", "transformer", "decoder", "backbone", "gpt_neox", "text_model", "llm", "thinker"})
_TOWERS = re.compile(r"visual|vision|image|audio|speech|video|encoder|projector|resampler|mtp|eagle|draft")


def reason_to_keep(precision: Precision, name: str, layers: int, packed: Mapping[str, Sequence[str]], expert: bool = False) -> str | None:
    """Why the layer ``name`` stays in the compute dtype, in a few words; None if it goes to FP8.

    ``layers`` counts the decoder layers of the model, ``packed`` maps a fused name to its parts (``qkv_proj`` to
    ``q_proj, k_proj, v_proj``), and ``expert`` says that ``name`` is the list of a layer's experts.
    """
    if not expert and name.rsplit(".", 1)[-1] in ROUTERS:
        return "a router"
    if precision.first_layers or precision.last_layers:
        index = decoder_layer(name)
        if index is not None and precision.keeps("", index, layers):
            return f"decoder layer {index} of {layers}"
    if precision.keeps(name):
        return "named in keep"
    parts = _parts(name, packed, expert)
    kept = [part for part in parts if precision.keeps(part)]
    if kept and len(kept) < len(parts):
        raise PrecisionError(
            f"keep matches {', '.join(kept)} and not {', '.join(part for part in parts if part not in kept)}.",
            f"vLLM fuses them into {name}, which is in FP8 as a whole or not at all.",
            f"Let keep match all of them ({name!r} names the whole), or none.",
        )
    return "named in keep" if kept else None


def in_every_layer(name: str) -> str:
    """``model.layers.3.mlp`` as ``model.layers.*.mlp``: one line in a log for what is so in every layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def decoder_layer(name: str) -> int | None:
    """The number of the decoder layer that a module lies in; None where it lies in none.

    Asked only where a contract counts layers: a list of layers under an unknown name is an error then, since
    counting the wrong one would change a model's precision in silence.
    """
    found = _LIST.match(name)
    if found is None:
        return None
    path = (found["path"] or "").split(".")
    if any(_TOWERS.search(word) for word in path):
        return None
    if not set(path) <= _DECODERS:
        raise PrecisionError(
            f"Cannot tell whether {name} lies in a decoder layer.",
            "The contract counts decoder layers from the start or the end, and this list of layers has an unknown name.",
            f"Set first_layers=0 and last_layers=0, and name the layers in keep, as in keep=('{found['path']}.*.0.*',).",
        )
    return int(found["index"])


def _parts(name: str, packed: Mapping[str, Sequence[str]], expert: bool) -> list[str]:
    """The names that a checkpoint has for what lies in one layer of vLLM's."""
    if expert:
        return [f"{name}.0.{part}" for part in EXPERT_PARTS[:3]]
    parent, _, last = name.rpartition(".")
    return [f"{parent}.{part}" if parent else part for part in packed.get(last, ())]
