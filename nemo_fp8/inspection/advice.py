"""Choose the linears to keep in the compute dtype, so that everything that stays in FP8 is above a given SNR.

The smallest part that can be kept is a *unit* (see ``models/names.py``): Q, K and V together, gate and up together, all
routed experts of a layer. A unit is kept if any operand of any part of it is below the threshold, with its own SNR or
with that of its blocks (see ``loss``). Decoder layers at either end that are kept completely become ``first_layers``
and ``last_layers``. Other units become patterns that match the names of Megatron (training) and of the checkpoint
(rollout). What the contract keeps already stays kept.

The trade-off: each recipe keeps the fewest linears, not the simplest list. If only whole layers can be kept
(TransformerEngine), ``whole_layers`` are the counts that cover all of them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.inspection.measure import Inspection, Row
from nemo_fp8.models.selection import why_kept_by_name

Unit = tuple[int | None, str]


@dataclass(frozen=True)
class Advice:
    """The linears that one recipe should keep, for one threshold."""

    label: str
    snr: float
    """The threshold in dB."""
    precision: Precision
    """The contract with the linears that it should keep."""
    below: tuple[Row, ...]
    """The tensors below the threshold that are in FP8 under the given contract."""
    share: float
    """The share of all linear weights that is still in FP8."""
    lowest: float
    """The lowest SNR of the tensors that are still in FP8; infinite if there are none."""
    whole_layers: tuple[int, int] | None
    """The smallest first_layers and last_layers that cover all of ``below``; None if one is in no layer."""

    @property
    def changes(self) -> str:
        """The fields to paste into the contract."""
        p = self.precision
        counts = [
            f"{name}={count}"
            for name, count in (("first_layers", p.first_layers), ("last_layers", p.last_layers))
            if count
        ]
        return ", ".join([*counts, f"keep=[{', '.join(map(_literal, p.keep))}]"] if p.keep else counts)

    def only_whole_layers(self, inspection: Inspection) -> str:
        """Return a sentence for programs that cannot keep names; empty if nothing is kept by name."""
        before = inspection.recipes[self.label]
        if self.precision.keep == before.keep:
            return ""
        if before.scaling == "delayed" or self.whole_layers is None:
            return ""
        first, last = self.whole_layers
        return (
            f"Without nemo_fp8's plugin Megatron keeps whole layers only: first_layers={first}, last_layers={last} "
            "cover the same."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain values, for JSON."""
        p = self.precision
        return {
            "snr": self.snr,
            "below": [row.name for row in self.below],
            "first_layers": p.first_layers,
            "last_layers": p.last_layers,
            "keep": list(p.keep),
            "share_in_fp8": self.share,
            "lowest_db": self.lowest if math.isfinite(self.lowest) else None,
            "whole_layers": self.whole_layers,
        }


def advise(inspection: Inspection, label: str, snr: float | None = None) -> Advice:
    """Return what to keep under one recipe, so that no tensor in FP8 has an SNR below ``snr`` dB.

    None stands for 10 dB less than the format gives: 20 dB for FP8, 10 dB for NVFP4. Raises PrecisionError for NaN.
    """
    p, rows, layers = inspection.recipes[label], inspection.measured(), inspection.layers
    snr = (20.0 if p.is_fp8 else 10.0) if snr is None else snr
    if math.isnan(snr):
        raise PrecisionError("A threshold of nan dB.", "Nothing lies below it, or above.", "Give a number, such as 20.")
    running = [row for row in rows if label not in row.kept]
    below = [row for row in running if (loss := row.losses[label]).floor_db < snr and not loss.is_broken]
    failing, passing = {_unit(row) for row in below}, {_unit(row) for row in running}
    passing -= failing
    first, last = _ends({layer for layer, _ in failing}, {layer for layer, _ in passing}, layers)
    if p.scaling == "delayed":  # Megatron cannot keep whole layers under delayed scaling
        first = last = 0
    ends = p.replace(first_layers=max(first, p.first_layers), last_layers=max(last, p.last_layers))
    left = [row for row in running if _unit(row) in failing and _runs(ends, row, layers)]
    precision = ends.replace(keep=(*p.keep, *_patterns(left)))
    stays = [row for row in running if _runs(precision, row, layers)]
    weights = [row for row in rows if row.operand == "weight"]
    return Advice(
        label=label,
        snr=snr,
        precision=precision,
        below=tuple(below),
        share=sum(row.elements for row in stays if row.operand == "weight")
        / max(1, sum(row.elements for row in weights)),
        lowest=min((row.losses[label].floor_db for row in stays), default=math.inf),
        whole_layers=_whole_layers(p, failing, layers),
    )


def thresholds(advice: list[Advice]) -> str:
    """Return the thresholds in words, each with the recipes that it is of if there are several."""
    found: dict[float, list[str]] = {}
    for a in advice:
        found.setdefault(a.snr, []).append(a.label)
    if len(found) == 1:
        return f"{advice[0].snr:g} dB"
    return ", ".join(f"{snr:g} dB ({', '.join(labels)})" for snr, labels in found.items())


def _runs(p: Precision, row: Row, layers: int) -> bool:
    return why_kept_by_name(p, (row.place.module,), layers, side="train", layer=row.place.layer) is None


def _unit(row: Row) -> Unit:
    return row.place.layer, row.place.unit


def _ends(failing: set[int | None], passing: set[int | None], layers: int) -> tuple[int, int]:
    """Return how many layers at either end can be kept as a whole.

    None of them has a unit that passes, and the innermost has one that fails.
    """

    def run(order: Iterable[int]) -> int:
        alone = list(itertools.takewhile(lambda layer: layer not in passing, order))
        return max((i for i, layer in enumerate(alone, 1) if layer in failing), default=0)

    first = run(range(layers))
    return first, min(run(reversed(range(layers))), layers - first)


def _whole_layers(p: Precision, failing: Iterable[Unit], layers: int) -> tuple[int, int] | None:
    """Return the smallest counts at both ends that cover these units and the layers that the contract keeps."""
    numbers = [layer for layer, _ in failing]
    if None in numbers:
        return None
    middle = {n for n in numbers if n is not None and p.first_layers <= n < layers - p.last_layers}
    edges = sorted({p.first_layers - 1, layers - p.last_layers, *middle})
    gap = max(itertools.pairwise(edges), key=lambda pair: pair[1] - pair[0], default=(layers - 1, layers))
    return gap[0] + 1, layers - gap[1]


# ---------------------------------------------------------------------- patterns


def _patterns(rows: Iterable[Row]) -> list[str]:
    """Return patterns that match these modules in Megatron and in the checkpoint.

    Layers that keep the same units share a pattern.
    """
    layers: dict[str, set[int]] = defaultdict(set)
    tails: dict[str, set[str]] = defaultdict(set)
    containers, others = {"layers"}, set()
    for row in rows:
        at = row.place
        if at.layer is None:
            others.add(_exactly(at.module))
            continue
        layers[at.unit].add(at.layer)
        tails[at.unit] |= {_generic(at.tail), *_in_megatron(at.unit)}
        containers.add(at.container.rsplit(".", 1)[-1])
    alike: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for unit, numbers in layers.items():
        alike[tuple(sorted(numbers))] |= tails[unit]
    inner = [
        rf"re:(^|\.){_either(containers)}\.{_either(map(str, numbers), sort=False)}\.{_either(names)}$"
        for numbers, names in alike.items()
    ]
    return [*inner, *sorted(others)]


def _generic(tail: str) -> str:
    """Return a name below a layer as a regular expression, with any number for that of an expert."""
    return re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(tail))


def _in_megatron(unit: str) -> set[str]:
    """Return Megatron's names of a unit; experts are one module, or a list of modules."""
    plain = re.escape(unit)
    return (
        {plain, plain.replace(r"experts\.", r"experts\.local_experts\.\d+\.", 1)}
        if unit.startswith("mlp.experts.")
        else {plain}
    )


def _either(names: Iterable[str], sort: bool = True) -> str:
    """Return a regular expression for any one of several."""
    found = sorted(names) if sort else list(names)
    return found[0] if len(found) == 1 else f"({'|'.join(found)})"


def _exactly(module: str) -> str:
    return module if not re.search(r"[*?\[]", module) else f"re:^{re.escape(module)}$"


def _literal(pattern: str) -> str:
    """Return a string as Python source; a raw string if it has a backslash."""
    return f'r"{pattern}"' if "\\" in pattern else f'"{pattern}"'
