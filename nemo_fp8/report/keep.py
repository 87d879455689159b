"""Which linears to keep in the compute dtype, so that everything that stays in FP8 is above a given SNR.

What can be kept on its own is a *unit* (see ``names``): Q, K and V together, gate and up together, all routed experts
of a layer. A unit is kept if any operand of any part of it is below the threshold. Decoder layers at either end of
which nothing remains become ``first_layers`` and ``last_layers``; the others become patterns, which match the names of
Megatron (training) and of the checkpoint (rollout). What a contract keeps already stays kept.

The trade-off: each recipe gets the fewest linears, not the simplest list. Where only whole layers can be kept
(TransformerEngine), ``whole_layers`` are the counts that cover them all.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_fp8.contract import Precision
from nemo_fp8.report.inspect import Inspection, Row

Unit = tuple[int | None, str]


@dataclass(frozen=True)
class Advice:
    """What one recipe should keep, for one threshold."""

    label: str
    snr: float
    precision: Precision
    """The contract with what it should keep."""
    below: tuple[Row, ...]
    """The tensors in FP8 under the contract as it was that are below the threshold."""
    share: float
    """The part of all linear weights that is in FP8 after that."""
    lowest: float
    """The lowest SNR among what is in FP8 after that; infinite where nothing is."""
    whole_layers: tuple[int, int] | None
    """The smallest first_layers and last_layers that cover everything below; None where a linear lies outside of layers."""

    @property
    def changes(self) -> str:
        """The fields to paste into the contract."""
        p = self.precision
        fields = {"first_layers": p.first_layers, "last_layers": p.last_layers, "keep": list(p.keep)}
        return ", ".join(f"{name}={_literal(value)}" for name, value in fields.items() if value)


def advise(inspection: Inspection, label: str, snr: float) -> Advice:
    """What to keep under one recipe, so that no tensor in FP8 has an SNR below ``snr``."""
    p, rows = inspection.recipes[label], inspection.measured()
    below = [row for row in rows if row.losses[label].snr_db < snr]
    failing = {_unit(row) for row in below}
    by_layer: dict[int | None, set[Unit]] = defaultdict(set)
    for row in rows:
        by_layer[row.place.layer].add(_unit(row))
    whole = [layer in by_layer and by_layer[layer] <= failing for layer in range(inspection.layers)]
    # Megatron cannot leave whole layers out of delayed scaling.
    first, last = (0, 0) if p.scaling == "delayed" else (_run(whole), _run(whole[::-1]))
    ends = p.replace(first_layers=max(first, p.first_layers), last_layers=max(last, p.last_layers))
    left = [row for row in rows if _unit(row) in failing and not ends.keeps(row.place.module, row.place.layer, inspection.layers)]
    precision = ends.replace(keep=(*p.keep, *_patterns(left)))
    stays = [row for row in rows if not precision.keeps(row.place.module, row.place.layer, inspection.layers)]
    weights = [row for row in rows if row.operand == "weight"]
    return Advice(
        label=label,
        snr=snr,
        precision=precision,
        below=tuple(row for row in below if label not in row.kept),
        share=sum(row.elements for row in stays if row.operand == "weight") / max(1, sum(row.elements for row in weights)),
        lowest=min((row.losses[label].snr_db for row in stays), default=math.inf),
        whole_layers=_whole_layers(failing, inspection.layers),
    )


def _unit(row: Row) -> Unit:
    return row.place.layer, row.place.unit


def _run(flags: list[bool]) -> int:
    """How many are true before the first that is not."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def _whole_layers(failing: Iterable[Unit], layers: int) -> tuple[int, int] | None:
    """Counts at both ends that cover the layers of these units, as few as possible."""
    numbers = [layer for layer, _ in failing]
    if None in numbers:
        return None
    edges = sorted({-1, layers, *(n for n in numbers if n is not None)})
    gap = max(zip(edges, edges[1:], strict=False), key=lambda pair: pair[1] - pair[0])
    return gap[0] + 1, layers - gap[1]


# ---------------------------------------------------------------------- patterns


def _patterns(rows: Iterable[Row]) -> list[str]:
    """Patterns that match these modules in Megatron and in the checkpoint: one for all layers that keep the same units."""
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
        rf"re:(^|\.){_either(containers)}\.{_either(map(str, numbers), sort=False)}\.{_either(names)}$" for numbers, names in alike.items()
    ]
    return [*inner, *sorted(others)]


def _generic(tail: str) -> str:
    """A name below a layer as a regular expression, with any number where an expert's stands."""
    return re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(tail))


def _in_megatron(unit: str) -> set[str]:
    """Megatron's names of a unit; experts are one module, or a list of them."""
    plain = re.escape(unit)
    return {plain, plain.replace(r"experts\.", r"experts\.local_experts\.\d+\.", 1)} if unit.startswith("mlp.experts.") else {plain}


def _either(names: Iterable[str], sort: bool = True) -> str:
    """One of several, folded around what they begin with."""
    found = sorted(names) if sort else list(names)
    return found[0] if len(found) == 1 else f"({'|'.join(found)})"


def _exactly(module: str) -> str:
    return module if not re.search(r"[*?\[]", module) else f"re:^{re.escape(module)}$"


def _literal(value: int | list[str]) -> str:
    """As Python source; a pattern with a backslash as a raw string."""
    if isinstance(value, int):
        return str(value)
    return "[" + ", ".join(f'r"{v}"' if "\\" in v else f'"{v}"' for v in value) + "]"
