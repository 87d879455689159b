"""What a program that knows one naming of modules alone makes of a contract's patterns, where it is something else.

A pattern of ``keep`` or ``modules`` counts if it matches any name of any linear that is stored as one matrix. Megatron
knows its own names, stock vLLM its own, and both try each name by itself. So a contract can be written for them only if
every name of theirs, alone, leads to the answer that all names together lead to:

    *.linear_qkv    Megatron: the same    vLLM: nothing matches
    *.k_proj        Megatron: nothing     vLLM: K alone
    *.self_attn.*   Megatron: nothing     vLLM: the same
    *.mlp.*         Megatron: the same    vLLM: not Mixtral's experts, whose block has another name

Layers are told apart where patterns match linears of some and not of others. A pattern for linears of no table (mixers,
linear attention) does not do if it begins with the other naming's first word. The trade-off: no model is asked, so a
pattern that would do in one family and not in another does not do. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nemo_fp8.contract import Precision
from nemo_fp8.models.families import EXPERTS, HUGGING_FACE, fused_name, held_as_one, in_hugging_face
from nemo_fp8.models.governed import layers_told_apart
from nemo_fp8.models.spellings import all_names, names_what_is_kept_anyway

_ROUTED = tuple(unit for unit in HUGGING_FACE if unit.startswith("mlp.experts."))


def apart_in_vllm(precision: Precision) -> Iterator[str]:
    """Yield the linears, by Megatron's names, that stock vLLM would store otherwise than the contract says."""
    yield from _begun(precision, r"(decoder|backbone)\b")
    for number in _numbers(precision):
        theirs = f"model.layers.{number}."
        for together in dict.fromkeys(map(held_as_one, HUGGING_FACE)):
            if together[0] in _ROUTED:
                continue
            parts = tuple(name for unit in together for name in in_hugging_face(unit))
            # vLLM's name of the whole, and those of the parts, which a model may hold apart.
            own = [theirs + name for name in (*parts, *fused_name(parts))]
            yield from _apart(precision, own, _every_name(number, together))
        for words in EXPERTS:  # vLLM asks once for all experts of a layer
            yield from _apart(precision, [f"{theirs}{words.block}.experts"], _every_name(number, _ROUTED))


def apart_in_megatron(precision: Precision) -> Iterator[str]:
    """Yield the linears, by Megatron's names, that Megatron's file of recipes would run otherwise."""
    yield from _begun(precision, r"(model|backbone)\b")
    for number in _numbers(precision):
        at = f"decoder.layers.{number}."
        for unit in HUGGING_FACE:
            theirs = [at + unit]
            if unit in _ROUTED:
                theirs.append(at + unit.replace("experts.", "experts.local_experts.0.", 1))
            yield from _apart(precision, theirs, _every_name(number, (unit,)))


def _every_name(number: int, units: Sequence[str]) -> tuple[str, ...]:
    """Return every name of Megatron's linears in a layer, the last of which is Megatron's of one of them."""
    linears = tuple(f"decoder.layers.{number}.{unit}" for unit in units)
    return (*all_names(linears, experts=1), *linears)


def _numbers(p: Precision) -> set[int]:
    patterns = _patterns(p)
    return {0, *layers_told_apart(patterns)} if patterns else set()


def _patterns(p: Precision) -> list[str]:
    return [*p.keep, *(pattern for pattern, _ in p.modules)]


def _begun(p: Precision, word: str) -> Iterator[str]:
    """Yield the patterns for linears that match nothing which does not begin with a word of another naming's."""
    for pattern in _patterns(p):
        if re.match(rf"(re:\^)?{word}", pattern) and not names_what_is_kept_anyway(pattern):
            yield pattern


def _apart(p: Precision, theirs: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    right = _recipe(p, (*theirs, *others))
    if any(_recipe(p, (name,)) != right for name in theirs):
        yield others[-1]


def _recipe(p: Precision, names: Sequence[str]) -> str | None:
    return p.compute if any(map(p.keeps, names)) else p.recipe_of(names)
