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

Layers are told apart by the numbers that patterns hold, or by the first that they match; of the others, one stands for
all.

The trade-off: a model may lack a linear that counts here. A difference is then reported that costs it nothing, and
goes away with a last rule for ``*``; the other way, a difference that it has would be missed. What regular expressions
share with other patterns is compared for the families' linears only. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nemo_fp8.contract import Precision
from nemo_fp8.models.families import HUGGING_FACE
from nemo_fp8.models.names import names_what_is_kept_anyway
from nemo_fp8.models.selection import all_names

_OTHERS = "other linears of "
_NUMBER = re.compile(r"\d+")
_MOST_LAYERS = 128


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
    quantized: bool
    own: Precision
    """The contract without its rules."""

    @classmethod
    def of(cls, precision: Precision, side: str) -> _Side:
        return cls(precision, precision.operand("weight", side) is not None, precision.replace(modules=()))

    @property
    def rules(self) -> tuple[tuple[str, str], ...]:
        """The rules; without FP8 there is nothing that they could change."""
        return self.precision.modules if self.quantized else ()

    def keeps(self, names: tuple[str, ...]) -> bool:
        return self.quantized and any(map(self.precision.keeps, names))

    def contract(self, names: tuple[str, ...]) -> Precision:
        found = self.precision.of(names) if self.quantized else self.own
        return self.own if found is self.precision else found

    def pattern(self, names: tuple[str, ...]) -> str | None:
        """Return the pattern of the rule that holds, if it gives another recipe than the contract's own."""
        rule = self.precision.rule_of(names) if self.contract(names) is not self.own else None
        return rule[0] if rule else None


def governed(train: Precision, rollout: Precision) -> list[Governed]:
    """Group linears by the contracts that govern them on the two sides; those of the contracts' own recipes come first.

    What a side that runs in FP8 has in ``keep`` is left out: ``keep`` comes before rules, and is compared by itself.
    """
    here, there = sides = (_Side.of(train, "train"), _Side.of(rollout, "rollout"))
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


def _linears(*sides: _Side) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is shown of every linear, and its names."""
    patterns = list(dict.fromkeys(pattern for side in sides for pattern, _ in side.rules))
    # A number of four equal digits that no pattern has, so that neither layers.1* nor layers.? matches it.
    free = 4 * next((digit for digit in "987654321" if all(digit not in pattern for pattern in patterns)), "9")
    numbers = [int(free), *sorted({found for pattern in patterns for found in _numbers_of(pattern)})]
    unknown = [
        pattern
        for pattern in patterns
        if not names_what_is_kept_anyway(pattern) and _first_match(pattern, numbers) is None
    ]
    tails = _tails(unknown, patterns)
    usual = _of_layer(int(free), tails)
    yield from ((shown.replace(f"decoder.layers.{free}", "decoder.layers.*"), names) for shown, names in usual)
    for number in numbers[1:]:
        for (shown, names), (_, of_others) in zip(_of_layer(number, tails), usual, strict=True):
            if any((s.contract(names), s.keeps(names)) != (s.contract(of_others), s.keeps(of_others)) for s in sides):
                yield shown, names
    yield from ((pattern, (pattern,)) for pattern in unknown if pattern.removeprefix("*.") not in tails)


def _numbers_of(pattern: str) -> Iterator[int]:
    """Yield the numbers that a pattern holds, and that of a layer it means if these are not layers (``layers.1?.``)."""
    held = [int(found) for found in _NUMBER.findall(pattern)]
    yield from held
    if (pattern.startswith("re:") or "layers" in pattern) and _first_match(pattern, held) is None:
        found = _first_match(pattern, range(_MOST_LAYERS))
        if found is not None:
            yield found


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


def _of_layer(number: int, tails: Iterable[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Return Megatron's name and all names of each linear of a layer: the families', all others, and ``tails``."""
    at = f"decoder.layers.{number}"
    known = [
        (f"{at}.{unit}", all_names((f"{at}.{unit}",), int(unit.startswith("mlp.experts.")))) for unit in HUGGING_FACE
    ]
    more = [(_OTHERS + at, "others"), *((f"{at}.{tail}", tail) for tail in tails)]
    stacks = ("decoder", "model", "backbone")
    return known + [(shown, tuple(f"{stack}.layers.{number}.{tail}" for stack in stacks)) for shown, tail in more]
