"""Rules for the compute dtype as NeMo RL's lists of modules that its rollout leaves alone, and back.

    *.linear_qkv     128x128 blocks: self_attn.q_proj, self_attn.k_proj, self_attn.v_proj     words of parameters' names
                     MX: *.self_attn.q_proj, ..., *.self_attn.qkv_proj                        patterns, vLLM's names too
    *.layers.0.*     .layers.0.                                                               as ``keep`` is written
    *.experts*, but not those of layer 3: *.layers.[!3].mlp.experts*, *.layers.[0-9][0-9].mlp.experts*, ...     patterns

There are two lists, by whether they are MX's (``keys.IGNORED``). Words are tried on Hugging Face's names of parameters,
patterns on vLLM's names, where Q, K and V are one, and all experts of a layer. A list knows no order, and what is on it
is not quantized. So it can say rules for the compute dtype, as long as no rule before them takes a module out of them.
:func:`unsaid` checks whether the lists say the same as a contract, for each linear in the tables of names; linears that
an engine holds as one are decided together. The trade-off: a linear in no table is recognized by its pattern alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nemo_fp8.contract import Precision
from nemo_fp8.models.families import EXPERTS, FUSED, HUGGING_FACE, in_hugging_face
from nemo_fp8.models.governed import layers_unlike_most
from nemo_fp8.models.spellings import all_names
from nemo_fp8.render.nemo_rl_keys import EXPERTS_ALONE
from nemo_fp8.render.rendering import Rules

_WILDCARD = re.compile(r"[*?\[]")
# Layers of which the first four that no pattern names by number stand for all others.
_OTHERS = (3, 17, 58, 104, 5, 29, 61, 110)


@dataclass(frozen=True)
class _Held:
    """Linears of a layer that an engine holds as one: their names below the layer."""

    megatron: tuple[str, ...]
    parts: tuple[str, ...]
    """Hugging Face's names. Of experts: one expert's, under every family's words."""
    engine: tuple[str, ...]
    """vLLM's names of the whole."""

    @property
    def routed(self) -> bool:
        return self.megatron[0].startswith("mlp.experts.")

    def all_names(self, layer: int) -> tuple[str, ...]:
        ours = tuple(f"decoder.layers.{layer}.{name}" for name in self.megatron)
        return tuple(dict.fromkeys((*all_names(ours, experts=1), *self.theirs(layer), *self.wholes(layer))))

    def theirs(self, layer: int) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}.{name}" for name in self.parts)

    def wholes(self, layer: int) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}.{name}" for name in self.engine)


def _all_held() -> Iterator[_Held]:
    routed = tuple(unit for unit in HUGGING_FACE if unit.startswith("mlp.experts."))
    rest = [(unit,) for unit in HUGGING_FACE if unit not in routed]
    down = ("self_attention.linear_q_down_proj",), ("self_attention.linear_kv_down_proj",)
    for units in (*(units for units in rest if units not in down), sum(down, ())):
        parts = tuple(name for unit in units for name in in_hugging_face(unit))
        words = tuple(name.rpartition(".")[2] for name in parts)
        own = (f"{parts[0].rpartition('.')[0]}.{fused}" for fused, of in FUSED if fused and of == words)
        yield _Held(units, parts, tuple(own))
    parts = tuple(name for words in EXPERTS for unit in routed for name in in_hugging_face(unit, words, 0))
    yield _Held(routed, parts, tuple(f"{words.block}.experts" for words in EXPERTS))


_HELD = (*_all_held(),)
_Places = set[tuple[int, _Held]]
Lists = Mapping[bool, Sequence[str]]
"""The lines of NeMo RL's lists, by whether these are patterns of MX rollouts."""


# ---------------------------------------------------------------------- contract -> lists


def as_ignored(pattern: str, mx: bool) -> str | None:
    """Return a pattern of ``keep`` as NeMo RL's lists have it; None if they cannot say it.

    Both take words that a name contains. The list of MX rollouts takes patterns of whole names, too; a name without
    wildcards would leave out every module whose name contains it.
    """
    if pattern.startswith("re:") or re.match(r"(decoder|backbone)\b", pattern):  # no name of vLLM's begins so
        return None
    if re.fullmatch(r"\*[^*?\[\]]+\*", pattern):
        return pattern[1:-1]
    return pattern if mx and _WILDCARD.search(pattern) else None


def line_of_name(pattern: str, mx: bool, experts: bool = False) -> str | None:
    """Return the line of a name to keep; None if it would leave other linears alone than the contract does.

    With ``experts`` only these count, which NVFP4 rollouts alone quantize.
    """
    line = None if pattern.startswith("re:") else pattern if experts else as_ignored(pattern, mx)
    rules = ((pattern, "bf16"),)
    if line is None:
        return None
    meant, kept = _decided(rules, "bf16")[rules[0]], _kept({mx: [line]}, _layers(rules))
    apart = {held for _, held in meant ^ kept}
    return None if any(held.routed or not experts for held in apart) else line


def as_kept(word: str) -> str:
    """Return a line of NeMo RL's lists as a pattern of ``keep``."""
    return word if _WILDCARD.search(word) else f"*{word}*"


def lines_of_rules(p: Precision, mx: bool) -> list[str]:
    """Return the lines that leave alone what a contract's rules give the compute dtype."""
    lines: list[str] = []
    for (pattern, _), places in _decided(p.modules, p.compute).items():
        short = as_ignored(pattern, mx)
        if short is not None and _kept({mx: [short]}, _layers(p.modules)) == places:
            lines.append(short)
            continue
        whole = _whole_layers(p.modules, places)
        lines += (f".layers.{layer}." for layer in whole)
        rest = {(layer, held) for layer, held in places if layer not in whole}
        lines += (line for held in _HELD for line in _lines_of_places(p.modules, rest, held, mx))
    return [*dict.fromkeys(lines)]


def _whole_layers(rules: Rules, places: _Places) -> list[int]:
    """Return the layers of which a rule decides every linear, those of no table with them; none if it decides some of
    every layer."""
    if {layer for layer, _ in places} & _others(rules):
        return []
    return [layer for layer in sorted(_numbered(rules)) if all((layer, held) in places for held in _HELD)]


def experts_of_rules(p: Precision) -> list[str]:
    """Return the patterns of the routed experts to which a contract's rules give the compute dtype."""
    return [*_lines_of(p.modules, p.compute, _HELD[-1:], mx=True)]


def _lines_of(rules: Rules, compute: str, helds: Iterable[_Held], mx: bool) -> Iterator[str]:
    """Yield the lines of what rules give the compute dtype, of some of the linears."""
    for places, held in itertools.product(_decided(rules, compute).values(), helds):
        yield from _lines_of_places(rules, places, held, mx)


def _lines_of_places(rules: Rules, places: _Places, held: _Held, mx: bool) -> Iterator[str]:
    others, layers = _others(rules), {layer for layer, one in places if one is held}
    names = held.engine if held.routed else (*held.parts, *(held.engine if mx else ()))
    numbers = [str(layer) for layer in sorted(layers - others)]
    if layers >= others:  # a word cannot leave a layer out
        numbers = [*_all_but(_layers(rules) - layers)] if mx and layers < _layers(rules) else []
    for at in [f"layers.{number}." for number in numbers] or [""] * (layers >= others):
        for name in names:
            yield f"*.{at}{name}{'*' if held.routed else ''}" if mx else f"{at}{name}"


def _all_but(layers: Iterable[int]) -> Iterator[str]:
    """Yield patterns of the numbers of up to three digits that are none of these: of all but 13, ``[0-9]``,
    ``[!1][0-9]``, ``1[!3]`` and ``[0-9][0-9][0-9]``."""
    for width in (1, 2, 3):
        left_out = {text for text in map(str, layers) if len(text) == width}
        begun = [""]
        for i in range(width):
            rest = "[0-9]" * (width - i - 1)
            digits = {begin: sorted({text[i] for text in left_out if text.startswith(begin)}) for begin in begun}
            for begin, taken in digits.items():
                yield begin + (f"[!{''.join(taken)}]" if taken else "[0-9]") + rest
            begun = [begin + digit for begin, taken in digits.items() for digit in taken]


def unsaid(p: Precision, lines: Lists) -> list[str]:
    """Return the linears, by Megatron's names, that a rollout with these lists would not hold as the rules say."""
    if not (p.modules and p.rolls_out_quantized):
        return []
    places = [(layer, held) for layer in _layers(p.modules) for held in _HELD]
    places = [(n, held) for n, held in places if not any(map(p.keeps, held.all_names(n)))]
    weights = {(n, held): p.of(held.all_names(n)).operand("weight", "rollout") for n, held in places}
    kept = _kept(lines, _layers(p.modules))
    # A name that two kinds of models give to different linears (q_proj) may be on the list for either.
    named = _names(place for place, weight in weights.items() if weight is None)
    found = []
    for (n, held), weight in weights.items():
        outside = p.rollout == "nvfp4" and not held.routed  # in BF16 there, whatever the lists say
        if weight is None:
            right = outside or (n, held) in kept
        else:
            right = weight == p.operand("weight", "rollout") and ((n, held) not in kept or {*held.theirs(n)} <= named)
        if not right:
            found.append(held.all_names(n)[0])
    return [*found, *_unknown(p, lines)]


# Linears that are in no table, as a pattern for more than they may match them; the first stands for all others.
_NO_TABLE = ("others", "mixer.in_proj", "mixer.out_proj", "linear_attn.out_proj")


def _unknown(p: Precision, lines: Lists) -> Iterator[str]:
    """Yield linears of no table, and patterns that match none of a table, which these lists do not say."""
    own, decided = p.operand("weight", "rollout"), _decided(p.modules, p.compute)
    lists = [Precision(keep=tuple(map(as_kept, found))) for found in lines.values()]
    for layer, tail in itertools.product(_layers(p.modules), _NO_TABLE if p.rollout == "fp8" else ()):
        names = [f"{stack}.layers.{layer}.{tail}" for stack in ("decoder", "model", "backbone")]
        if not any(map(p.keeps, names)):
            weight = p.of(names).operand("weight", "rollout")
            left_alone = any(found.keeps(f"model.layers.{layer}.{tail}") for found in lists)
            if left_alone != (weight is None) or weight not in (None, own):
                yield names[0]
    for pattern, recipe in p.modules:
        alone = p.replace(keep=(), modules=((pattern, recipe),))
        if (pattern, recipe) in decided:
            if not decided[pattern, recipe] and not _is_on(pattern, lines) and not _matches_any(pattern):
                yield pattern
        elif alone.of((pattern,)).operand("weight", "rollout") != own and not _matches_any(pattern):
            yield pattern


def _matches_any(pattern: str) -> bool:
    """Return whether a pattern matches a linear of the tables."""
    matches = Precision(keep=(pattern,)).keeps
    rules = ((pattern, "bf16"),)
    return any(matches(name) for layer in _layers(rules) for held in _HELD for name in held.all_names(layer))


# ---------------------------------------------------------------------- lists -> contract


def rules_of_lines(lines: Lists, rules: Rules, compute: str, nvfp4: bool = False) -> tuple[tuple[str, ...], Rules]:
    """Return what these lists keep, as ``keep`` and as those of the training's ``rules`` that they say.

    A rule is said if all that it decides is on a list; with ``nvfp4`` only experts have to be, and rules for NVFP4 are
    said by what is not on it. Lines beyond the rules that are said are names to keep.
    """
    every = tuple(dict.fromkeys(line for found in lines.values() for line in found))
    layers = _layers(rules)
    kept = _kept(lines, layers) | {(n, held) for n in layers for held in _HELD if nvfp4 and not held.routed}
    decided = _decided(rules, compute)
    said = tuple(
        rule
        for rule in dict.fromkeys(rules)
        if (nvfp4 and rule[1] == "nvfp4")  # the rollout's own format, which takes modules out of rules behind it
        or (rule in decided and (decided[rule] <= kept if decided[rule] else _is_on(rule[0], lines)))
    )
    covered = {place for places in _decided(said, compute).values() for place in places}
    if not covered <= kept:  # without the rules before them, these rules would cover more than the list
        said, covered = (), set()
    names = _names(covered)
    of_rules = {as_ignored(pattern, mx) for pattern, _ in said for mx in lines}
    of_rules |= {line for mx in lines for line in _lines_of(said, compute, _HELD, mx)}
    of_rules |= {line for line in every if (found := _matched(line, layers)) and found <= names}
    alone = tuple(rule for rule in EXPERTS_ALONE if nvfp4 and rule not in said)
    return tuple(as_kept(line) for line in every if line not in of_rules), (*said, *alone)


# ---------------------------------------------------------------------- what patterns mean


def _layers(rules: Rules) -> set[int]:
    """Return the layers that patterns tell from most, and four that stand for all others."""
    return _numbered(rules) | _others(rules)


def _numbered(rules: Rules) -> set[int]:
    patterns = tuple(pattern for pattern, _ in rules)
    named = {int(n) for pattern in patterns for n in re.findall(r"layers\\?\.(\d+)\b", pattern)}
    return named | layers_unlike_most(patterns)


def _others(rules: Rules) -> set[int]:
    return {*[n for n in _OTHERS if n not in _numbered(rules)][:4]}


@lru_cache(maxsize=1 << 8)
def _decided(rules: Rules, compute: str) -> Mapping[tuple[str, str], _Places]:
    """Return the linears that each rule for the compute dtype decides, which is the first that matches them."""
    found: dict[tuple[str, str], _Places] = {rule: set() for rule in rules if rule[1] == compute}
    each = [Precision(keep=(pattern,)) for pattern, _ in rules]
    for layer, held in ((layer, held) for layer in _layers(rules) if rules for held in _HELD):
        names = held.all_names(layer)
        first = next((rule for rule, own in zip(rules, each, strict=True) if any(map(own.keeps, names))), None)
        if first in found:
            found[first].add((layer, held))
    return found


def _kept(lines: Lists, layers: Iterable[int]) -> _Places:
    """Return the linears that a list leaves alone: words by every part, patterns by the whole where it has a name."""
    words, patterns = (Precision(keep=tuple(map(as_kept, lines.get(mx, ())))) for mx in (False, True))
    return {
        (n, held)
        for n in layers
        for held in _HELD
        if all(map(words.keeps, held.theirs(n))) or all(map(patterns.keeps, held.wholes(n) or held.theirs(n)))
    }


def _is_on(pattern: str, lines: Lists) -> bool:
    """Return whether a list holds a pattern verbatim, as one for a linear that is in no table."""
    return any(as_ignored(pattern, mx) in found for mx, found in lines.items())


def _names(places: Iterable[tuple[int, _Held]]) -> set[str]:
    return {name for layer, held in places for name in (*held.theirs(layer), *held.wholes(layer))}


def _matched(line: str, layers: Iterable[int]) -> set[str]:
    """Return the names of parts and wholes that a line matches."""
    own = Precision(keep=(as_kept(line),))
    return {name for name in _names((n, held) for n in layers for held in _HELD) if own.keeps(name)}
