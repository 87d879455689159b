"""What a program that knows one naming of modules alone makes of a contract's patterns, where it is something else.

A pattern of ``keep`` or ``modules`` counts if it matches any name of any linear that is stored as one matrix. Megatron
knows its own names, stock vLLM its own, and both try each name by itself. So a contract can be written for them only if
every name of theirs, alone, leads to the answer that all names together lead to:

    *.linear_qkv    Megatron: the same    vLLM: nothing matches
    *.k_proj        Megatron: nothing     vLLM: K alone
    *.self_attn.*   Megatron: nothing     vLLM: the same
    *.mlp.*         Megatron: the same    vLLM: not Mixtral's experts, whose block has another name

Layers are told apart where a pattern names their number. The trade-off: no model is asked, so a pattern that would do
in one family and not in another does not do. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nemo_fp8.contract import Precision
from nemo_fp8.models.families import EXPERTS, HUGGING_FACE, in_hugging_face

_ROUTED = tuple(unit for unit in HUGGING_FACE if unit.startswith("mlp.experts."))


def apart_in_vllm(precision: Precision) -> Iterator[str]:
    """Yield the linears, by Megatron's names, that stock vLLM would store otherwise than the contract says."""
    for number in _numbers(precision):
        at, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        for unit in HUGGING_FACE:
            if unit not in _ROUTED:
                yield from _apart(precision, [theirs + name for name in in_hugging_face(unit)], [at + unit])
        for words in EXPERTS:  # vLLM asks once for all experts of a layer
            parts = [theirs + name for unit in _ROUTED for name in in_hugging_face(unit, words, 0)]
            engine = f"{theirs}{words.block}.experts"
            yield from _apart(precision, [engine], [*parts, *(at + unit for unit in _ROUTED)])


def apart_in_megatron(precision: Precision) -> Iterator[str]:
    """Yield the linears, by Megatron's names, that Megatron's file of recipes would run otherwise."""
    for number in _numbers(precision):
        at = f"decoder.layers.{number}."
        for unit in HUGGING_FACE:
            theirs = [at + unit]
            if unit in _ROUTED:
                theirs.append(at + unit.replace("experts.", "experts.local_experts.0.", 1))
            others = [name for words in EXPERTS for name in in_hugging_face(unit, words, 0)]
            yield from _apart(precision, theirs, [f"model.layers.{number}.{name}" for name in others] + theirs)


def _numbers(p: Precision) -> set[int]:
    patterns = [*p.keep, *(pattern for pattern, _ in p.modules)]
    found = {int(number) for pattern in patterns for number in re.findall(r"layers\\?\.(\d+)", pattern)}
    return {0, *found} if patterns else set()


def _apart(p: Precision, theirs: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    right = _recipe(p, (*theirs, *others))
    if any(_recipe(p, (name,)) != right for name in theirs):
        yield others[-1]


def _recipe(p: Precision, names: Sequence[str]) -> str | None:
    return p.compute if any(map(p.keeps, names)) else p.recipe_of(names)
