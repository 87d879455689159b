"""Tell which contract governs each linear, in training and in the rollout, from two contracts and no model.

Rules for modules give a linear another recipe than the contract's own. So two sides agree only if the contracts of
every linear agree:

    governed(train, rollout)    -> a Governed for each pair of contracts that a linear can have on the two sides

Without a model, these stand for its linears:

    the families' linears    those of :data:`nemo_fp8.models.families.HUGGING_FACE`
    all others               Mamba's mixers, linear attention, indexers: one name for all of a layer, which patterns
                             match that match a whole layer (``*``, ``*.layers.3.*``)
    a pattern                of a rule that matches none of these (``*.mixer.in_proj``): it stands for what it names,
                             and other rules match it as if it were a name

Of layers whose linears the same patterns match, the first stands for all; those that a pattern names by their number
stand for themselves.

The trade-off: a model may lack a linear that counts here. A difference is then reported that costs it nothing, and
goes away with a last rule for ``*``; the other way, a difference that it has would be missed. What regular expressions
share with other patterns is compared for the families' linears, mixers and linear attention. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from nemo_fp8.contract import Precision
from nemo_fp8.models.families import EXPERTS, HUGGING_FACE, held_as_one, in_hugging_face
from nemo_fp8.models.spellings import all_names, names_what_is_kept_anyway

_OTHERS = "other linears of "
_NUMBER = re.compile(r"\d+")
_MOST_LAYERS = 128
_STACKS = ("decoder", "model", "backbone")
_NO_TABLE = ("mixer.in_proj", "mixer.out_proj", "linear_attn.in_proj_qkvz", "linear_attn.out_proj")
# What a pattern holds that may match some layers and not others.
_MAY_COUNT = re.compile(r"^re:|layers|[\[?]|\.\d")


@dataclass
class Governed:
    """Linears that have the same two contracts, for the same reasons."""

    train: Precision
    """Their contract in training; it holds no rules."""
    rollout: Precision
    by_rule: tuple[bool, bool]
    """Whether a rule gives them another recipe than the contract's own: in training, in the rollout."""
    linears: list[str] = field(default_factory=list)
    """Megatron's names (``decoder.layers.*`` for layers that no rule names), or patterns."""
    patterns: list[str] = field(default_factory=list)
    """The patterns of the rules that give it."""

    @property
    def by_name(self) -> bool:
        """Whether it holds linears that are known by name, and not only those that stand for all others."""
        return not all(name.startswith(_OTHERS) for name in self.linears)


@dataclass(frozen=True)
class _Side:
    """One side of a contract: a linear's contract on it."""

    precision: Precision
    name: str
    quantized: bool
    own: Precision
    """The contract without its rules."""

    @classmethod
    def of(cls, precision: Precision, side: str) -> _Side:
        return cls(precision, side, precision.operand("weight", side) is not None, precision.replace(modules=()))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of names to keep and of rules; without FP8 there is nothing that they could change."""
        return (*self.precision.keep, *(pattern for pattern, _ in self.precision.modules)) if self.quantized else ()

    def keeps(self, names: tuple[str, ...]) -> bool:
        return self.quantized and any(map(self.precision.keeps, names))

    def contract(self, names: tuple[str, ...]) -> Precision:
        found = self.precision.of(names) if self.quantized else self.own
        return self.own if found is self.precision else found

    def quantizes(self, names: tuple[str, ...]) -> bool:
        return not self.keeps(names) and self.contract(names).operand("weight", self.name) is not None

    def pattern(self, names: tuple[str, ...]) -> str | None:
        """Return the pattern of the rule that holds, if it gives another recipe than the contract's own."""
        rule = self.precision.rule_of(names) if self.contract(names) is not self.own else None
        return rule[0] if rule else None


def governed(train: Precision, rollout: Precision) -> list[Governed]:
    """Group linears by the contracts that govern them on the two sides; those of the contracts' own recipes come first.

    What a side that runs in FP8 has in ``keep`` is left out: see :func:`kept_on_one_side`.
    """
    here, there = sides = _sides(train, rollout)
    groups: dict[tuple[Precision, Precision, tuple[bool, bool]], Governed] = {}
    for shown, names in _linears(*sides):
        if any(side.keeps(names) for side in sides):
            continue
        ours, theirs = here.contract(names), there.contract(names)
        key = (ours, theirs, (ours is not here.own, theirs is not there.own))
        group = groups.setdefault(key, Governed(*key))
        group.linears.append(shown)
        found = dict.fromkeys(pattern for side in sides if (pattern := side.pattern(names)))
        group.patterns += [pattern for pattern in found if pattern not in group.patterns]
    return sorted(groups.values(), key=lambda group: any(group.by_rule))


def scales_tokens(p: Precision) -> bool:
    """Return whether a rollout has an FP32 scale for each token's activations, in any module (``row_scaled``)."""
    inputs = (variant.operand("input", "rollout") for variant in p.variants())
    return any(operand is not None and operand.row_scaled for operand in inputs)


def overruled(p: Precision, linears: Iterable[tuple[str, ...]] | None = None) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the rules for modules that decide nothing, since names to keep or rules before them match all that they do.

    Each with its pattern, its recipe, and the patterns that decide in its place. ``linears`` are the names of each
    linear of a model; without them, of those that stand for any model's. A rule that would change nothing is left out.
    """
    if not p.modules:
        return  # the names of all experts of a model take longer than the rest of lint
    side = _Side.of(p, "train" if p.is_quantized else "rollout")
    every = [*linears] if linears is not None else [names for _, names in _linears(side)]
    rules = [*((pattern, p.compute) for pattern in p.keep), *p.modules]
    matches = {pattern: Precision(keep=(pattern,)).keeps for pattern, _ in rules}
    deciding = [
        [rule for rule in rules if any(map(matches[rule[0]], names))] for names in every if len(rules) > 1
    ]  # the first of them decides
    for rule in p.modules if side.quantized else ():
        first = dict.fromkeys(found[0] for found in deciding if rule in found)
        if rule not in first and any(recipe != rule[1] for _, recipe in first):
            yield *rule, [pattern for pattern, _ in first]


def kept_on_one_side(train: Precision, rollout: Precision) -> list[str]:
    """Return the patterns of ``keep`` that leave a linear in the compute dtype which the other side quantizes.

    It is the linears that count: other patterns for the same ones, or rules for the compute dtype, are no difference.
    But a pattern for a part of a linear (K of Q, K and V) is one unless both sides have it: a contract keeps the whole
    by it, and other programs' lists do not.
    """
    sides = _sides(train, rollout)
    both = {*train.keep} & {*rollout.keep}
    found = set[str]()
    for _, names in _linears(*sides):
        for side, other in (sides, sides[::-1]):
            each = {pattern: Precision(keep=(pattern,)) for pattern in side.precision.keep if side.quantized}
            here = {pattern for pattern, alone in each.items() if any(map(alone.keeps, names))}
            if here and (other.quantizes(names) or not _is_whole(side, names)):
                found |= here if other.quantizes(names) else here - both
    return sorted(found)


def _is_whole(side: _Side, names: tuple[str, ...]) -> bool:
    """Return whether the patterns of a side for the compute dtype name a linear as a whole, or every part of it."""
    rules = (pattern for pattern, recipe in side.precision.modules if recipe == side.precision.compute)
    each = [Precision(keep=(pattern,)).keeps for pattern in (*side.precision.keep, *rules)]
    known = {name for words in EXPERTS for unit in HUGGING_FACE for name in in_hugging_face(unit, words, 0)}
    parts = [name for name in names if name.partition(".layers.")[2].partition(".")[2] in known]
    by_megatron = [name for name in names if name.startswith("decoder.")]
    if all(any(matches(name) for matches in each) for name in parts) or any(any(map(m, by_megatron)) for m in each):
        return True
    wholes = [name for name in names if name not in parts]  # v_proj is in qkv_proj, too, and means V
    return any(any(map(matches, wholes)) and not any(map(matches, parts)) for matches in each)


def apart_in_an_engine(train: Precision, rollout: Precision) -> list[tuple[str, Precision, Precision]]:
    """Return linears that the rollout stores otherwise, since an engine holds them with others as one matrix.

    Each with its contract in training, and in the rollout. A pattern that matches a part of what an engine holds as one
    (:func:`nemo_fp8.models.families.held_as_one`) holds for all of it there, and in training for this part alone.
    """
    here, there = _sides(train, rollout)
    compute, patterns = Precision(compute=train.compute), _patterns(here, there)

    def contract(side: _Side, names: tuple[str, ...]) -> Precision:
        return compute if side.keeps(names) else side.contract(names)

    def apart(number: int) -> Iterator[tuple[str, Precision, Precision]]:
        for unit in HUGGING_FACE:
            names = {name: _names_of(f"decoder.layers.{number}.{name}") for name in held_as_one(unit)}
            whole = contract(there, tuple(name for every in names.values() for name in every))
            if contract(there, names[unit]) != whole:
                yield unit, contract(here, names[unit]), whole

    usual = [*apart(int(_free(patterns)))]
    found = [(f"decoder.layers.*.{unit}", ours, theirs) for unit, ours, theirs in usual]
    for number in sorted(layers_told_apart(patterns)):
        found += [(f"decoder.layers.{number}.{one[0]}", *one[1:]) for one in apart(number) if one not in usual]
    return found


def _sides(train: Precision, rollout: Precision) -> tuple[_Side, _Side]:
    return _Side.of(train, "train"), _Side.of(rollout, "rollout")


def _linears(*sides: _Side) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is shown of every linear, and its names."""
    patterns = _patterns(*sides)
    free = _free(patterns)
    numbers = [int(free), *sorted(layers_told_apart(patterns))]
    unknown = [
        pattern
        for pattern in patterns
        if not names_what_is_kept_anyway(pattern) and _first_match(pattern, numbers) is None
    ]
    tails = list(dict.fromkeys([*_tails(unknown, patterns), *_of_expressions(patterns)]))
    usual = _of_layer(int(free), tails)
    yield from ((shown.replace(f"decoder.layers.{free}", "decoder.layers.*"), names) for shown, names in usual)
    for number in numbers[1:]:
        for (shown, names), (_, of_others) in zip(_of_layer(number, tails), usual, strict=True):
            if any((s.contract(names), s.keeps(names)) != (s.contract(of_others), s.keeps(of_others)) for s in sides):
                yield shown, names
    yield from ((pattern, (pattern,)) for pattern in unknown if pattern.removeprefix("*.") not in tails)


def _patterns(*sides: _Side) -> list[str]:
    return list(dict.fromkeys(pattern for side in sides for pattern in side.patterns))


def _free(patterns: list[str]) -> str:
    """Return a number of four equal digits that no pattern has, so that neither layers.1* nor layers.? matches it."""
    return 4 * next((digit for digit in "987654321" if all(digit not in pattern for pattern in patterns)), "9")


def layers_told_apart(patterns: Iterable[str]) -> set[int]:
    """Return the numbers that patterns hold, and the first of all layers of which they match the same linears."""
    every = [*patterns]
    held = {int(found) for pattern in every for found in _NUMBER.findall(pattern)}
    return held | {alike[0] for alike in _alike(every)}


def layers_unlike_most(patterns: Iterable[str]) -> set[int]:
    """Return the layers of which patterns match other linears than of most layers."""
    most = max(found := _alike(patterns), key=len, default=[])
    return {number for alike in found if alike is not most for number in alike}


def _alike(patterns: Iterable[str]) -> list[list[int]]:
    """Group layers of which patterns match the same linears."""
    counting = [_matched(pattern) for pattern in patterns if _MAY_COUNT.search(pattern)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number in range(_MOST_LAYERS) if counting else ():
        groups.setdefault(tuple(found[number] for found in counting), []).append(number)
    return [*groups.values()]


@lru_cache(maxsize=1 << 8)
def _matched(pattern: str) -> tuple[int, ...]:
    """Return for each layer which names of its linears a pattern matches, as the bits of a number."""
    matches = Precision(keep=(pattern,)).keeps
    return tuple(
        sum(matches(name) << i for i, name in enumerate(name for _, names in _of_layer(n) for name in names))
        for n in range(_MOST_LAYERS)
    )


def _first_match(pattern: str, numbers: Iterable[int]) -> int | None:
    """Return the first of some layers in which a pattern matches a linear of the families, or all of the layer."""
    matches = Precision(keep=(pattern,)).keeps
    return next((n for n in numbers if any(matches(name) for _, names in _of_layer(n) for name in names)), None)


def _tails(unknown: list[str], patterns: list[str]) -> list[str]:
    """Return names below a layer that globs of unknown linears match, alone and together with another glob.

    ``*.mixer.*`` and ``*.in_proj`` have ``mixer.*`` and ``in_proj``, and both match ``mixer.in_proj``.
    """
    globs, blocks = ([p for p in found if p.startswith("*") and "layers" not in p] for found in (patterns, unknown))
    both = [
        block[2:-1] + other.lstrip("*.")
        for block in blocks
        for other in globs
        if block.startswith("*.") and block.endswith(".*") and other != block
    ]
    return list(dict.fromkeys([block[2:] for block in blocks if block.startswith("*.")] + both))


def _of_expressions(patterns: Iterable[str]) -> Iterator[str]:
    """Yield linears of no table that a regular expression matches, maybe beside those of the families."""
    for matches in (Precision(keep=(pattern,)).keeps for pattern in patterns if pattern.startswith("re:")):
        yield from (tail for tail in _NO_TABLE if any(matches(f"{stack}.layers.0.{tail}") for stack in _STACKS))


def _of_layer(number: int, tails: Iterable[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Return Megatron's name and all names of each linear of a layer: the families', all others, and ``tails``."""
    at = f"decoder.layers.{number}"
    known = [(f"{at}.{unit}", _names_of(f"{at}.{unit}")) for unit in HUGGING_FACE]
    more = [(_OTHERS + at, "others"), *((f"{at}.{tail}", tail) for tail in tails)]
    return known + [(shown, tuple(f"{stack}.layers.{number}.{tail}" for stack in _STACKS)) for shown, tail in more]


def _names_of(linear: str) -> tuple[str, ...]:
    """Return all names of a linear of the families, by Megatron's."""
    return all_names((linear,), int(".mlp.experts." in linear))
