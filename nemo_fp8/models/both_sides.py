"""Tell how both sides store each linear of a model, and which linears they store otherwise.

    compared = both_sides(model, train, rollout)
        .quantized    a Governed for each pair of contracts of linears that are quantized on both sides
        .apart        linears that one side alone keeps in the compute dtype: [(name, why, in training?), ...]

Where :mod:`nemo_fp8.models.governed` compares words, this compares what comes of them: ``first_layers=1`` and
``keep=("*.layers.0.*",)`` are the same linears, and ``last_layers=1`` are those of a layer whose number only the model
knows. Each side is asked by :func:`nemo_fp8.models.stored.stored`, with whole linears. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.models.governed import Governed
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.selection import KEEP, Kept, contract_of, why_kept_by_name
from nemo_fp8.models.shapes import Linear, Model
from nemo_fp8.models.spellings import all_names
from nemo_fp8.models.stored import contract_of_linear, stored


@dataclass(frozen=True)
class Apart:
    """A linear that one side alone keeps in the compute dtype."""

    name: str
    kept: Kept
    quantized: Operand
    """What the other side holds."""
    in_training: bool
    """Whether it is training that keeps it."""
    as_one: bool
    """Whether the rollout would not keep it, were it not held with others as one matrix."""


@dataclass(frozen=True)
class BothSides:
    """The linears of a model that are quantized on both sides, and those that are on one."""

    quantized: list[Governed]
    as_one: list[tuple[str, Precision, Precision]]
    """Of those that are quantized, the ones that an engine holds with others as one matrix and so by another recipe
    than the rollout's own for them; each with its contract in training and in the rollout."""
    apart: list[Apart]


def both_sides(model: Model, train: Precision, rollout: Precision) -> BothSides:
    """Compare every linear of a model."""
    sides = ((train, "train"), (rollout, "rollout"))
    here, there = (stored(model, p, Parallel(), side) for p, side in sides)
    groups: dict[tuple[Precision, Precision, tuple[bool, bool]], Governed] = {}
    as_one: list[tuple[str, Precision, Precision]] = []
    apart: list[Apart] = []
    for layer, linear in model.all_linears():
        name, key = f"decoder.layers.{layer}.{linear.name}", (layer, linear.name)
        ours, theirs = (found if isinstance(found := side[key], Kept) else None for side in (here, there))
        if ours and theirs:
            continue
        alone = contract_of(rollout, (name,), linear.experts)
        if kept := ours or theirs:
            by_others = kept is theirs and kept.rule == KEEP and _quantized_alone(rollout, alone, model, name, linear)
            quantized = next(found for side in (here, there) if isinstance(found := side[key], Operand))
            apart.append(Apart(name, kept, quantized, kept is ours, by_others))
            continue
        own, engines = (contract_of_linear(model, p, layer, linear, side) for p, side in sides)
        pair = own.replace(modules=()), engines.replace(modules=())
        if alone != engines:
            as_one.append((name, *pair))
            continue
        by_rule = (own is not train, engines is not rollout)
        group = groups.setdefault((*pair, by_rule), Governed(*pair, by_rule))
        group.linears.append(name)
        names = all_names((name,), linear.experts)
        rules = (p.rule_of(names) for (p, _), ruled in zip(sides, by_rule, strict=True) if ruled)
        group.patterns[:] = dict.fromkeys((*group.patterns, *(rule[0] for rule in rules if rule)))
    for group in groups.values():
        group.linears[:] = in_short(group.linears)
    return BothSides(sorted(groups.values(), key=lambda group: any(group.by_rule)), as_one, apart)


def _quantized_alone(rollout: Precision, own: Precision, model: Model, name: str, linear: Linear) -> bool:
    """Return whether the rollout's contract says that it quantizes a linear, were it held alone."""
    by_name = why_kept_by_name(rollout, (name,), model.layers, experts=linear.experts)
    return by_name is None and own.operand("weight", "rollout") is not None


def in_short(names: Iterable[str]) -> list[str]:
    """Return names of linears by what they are, with all of their layers: ``decoder.layers.{0-3,7}.mlp.linear_fc1``."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        head, _, rest = name.partition(".layers.")
        number, _, tail = rest.partition(".")
        layers.setdefault((head, tail), []).append(int(number))
    return [f"{head}.layers.{_ranges(numbers)}.{tail}" for (head, tail), numbers in layers.items()]


def _ranges(numbers: list[int]) -> str:
    """Return numbers in words, ``{0-3,7}``; one alone as it is."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return words[0] if len(numbers) == 1 else f"{{{','.join(words)}}}"
