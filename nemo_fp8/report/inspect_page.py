"""Lay out an inspection as an HTML page: the loss under each recipe by layer and role, and what to keep.

Grids show one number by layer and role, with the recipes side by side on one scale of colours. The worst tensors are
dots in the recipes' colours. Cells that a contract keeps in the compute dtype are hatched, cells below the threshold
are marked, and cells without a number are empty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_fp8.inspection.advice import Advice, thresholds
from nemo_fp8.inspection.measure import Inspection, Row
from nemo_fp8.models.families import ROLES
from nemo_fp8.report import figures
from nemo_fp8.report.page import Cell, Column, Page

OPERANDS = {"weight": "Weights", "input": "Inputs", "grad": "Output gradients"}
MOST_ROWS = 4000
"""The most rows of the table with all numbers; a browser is slow to sort more."""
MOST_DB = 45.0
"""The SNR at the end of the scale of colours."""


@dataclass(frozen=True)
class Grid:
    """A grid of one number by layer and role."""

    title: str
    value: Callable[[Inspection, str, list[Row]], float]
    """The number of some tensors under the recipe of a label."""
    percent: bool
    caption: str


def _of_loss(name: str) -> Callable[[Inspection, str, list[Row]], float]:
    """Return a function that gives a number of the loss of some tensors together."""

    def value(inspection: Inspection, label: str, rows: list[Row]) -> float:
        number: float = getattr(inspection.total(label, rows), name)
        return number

    return value


_CROSS = "A cross marks what lies below {snr}."
GRIDS = (
    Grid(
        title="SNR in dB",
        value=_of_loss("snr_db"),
        percent=False,
        caption=f"Signal-to-noise ratio of everything in a cell together. {_CROSS}",
    ),
    Grid(
        title="SNR in dB that 99% of the blocks reach",
        value=_of_loss("block_snr_db"),
        percent=False,
        caption="The same for small parts: blocks of {block}, of which the worst hundredth is left out. Here it shows "
        "when an "
        f"outlier takes the precision of its neighbours, which the SNR of the whole hides. {_CROSS}",
    ),
    Grid(
        title="Underflow in %",
        value=_of_loss("underflow_percent"),
        percent=True,
        caption="Values other than zero that became zero. An empty cell has none.",
    ),
    Grid(
        title="Saturation in %",
        value=_of_loss("saturation_percent"),
        percent=True,
        caption="Values that were too large for their scale. A scale that is found from the tensor itself fits its "
        "largest value, "
        "so anything here is an infinity, or comes of a margin below zero. An empty cell has none.",
    ),
)


DISTANCE = Grid(
    title="Distance in %",
    value=lambda inspection, label, rows: 100 * inspection.transposition(label, rows).distance,
    percent=True,
    caption="How far the weights that the backward multiplies by are from the forward's, of everything in a cell "
    "together. An empty cell has none.",
)


def inspection_page(inspection: Inspection, advice: list[Advice]) -> Page:
    """Return the page of an inspection."""
    rows = inspection.measured()
    operands = [operand for operand in OPERANDS if inspection.measured(operand)]
    weights = inspection.measured("weight")
    captured = f", {len(rows) - len(weights)} captured activations" if len(operands) > 1 else ""
    page = Page(
        f"What quantization does to {inspection.path.resolve().name}",
        f"{len(weights)} weight matrices with {sum(row.elements for row in weights) / 1e6:,.1f} million "
        f"values{captured}. "
        f"{inspection.path}",
    )
    page.section("Overview").text(
        "SNR: how much larger the values are than what quantizing them changed; 6 dB are one bit, E4M3 gives about 31 "
        "dB, E5M2 about 25 dB and E2M1 about 20 dB to values inside its range. Lower is worse. Underflow: values that "
        "became zero."
    )
    if dequantized := inspection.dequantized_words():
        page.text(
            f"Weights of this checkpoint are quantized already: {dequantized}. They were dequantized first; what is "
            "measured of them is a second quantization."
        )
    if packed := inspection.packed_words():
        page.text(f"Not read: {packed}.")
    if unlisted := inspection.unlisted_words():
        page.text(f"In the files, and not in the index, which says what the checkpoint is: {unlisted}.")
    if broken := inspection.not_finite():
        page.text(f"NaN or infinity in {len(broken)} tensors, which no recipe mends: {inspection.not_finite_words()}.")
    _overview(page, inspection, advice, operands)
    page.section(f"What to keep above {thresholds(advice)}")
    for a in advice:
        _keep(page, inspection, a)
    page.section("What the backward multiplies by")
    _backward(page, inspection, advice)
    page.section("The worst ten tensors")
    _worst(page, inspection, advice)
    for operand in operands:
        page.section(f"{OPERANDS[operand]} by layer and role")
        for grid in GRIDS:
            _grid(page, inspection, operand, grid, advice)
        _numbers(page, inspection, operand)
    skipped = [row for row in inspection.rows if row.skipped]
    if skipped:
        page.section("Not quantized").text("These stay as they are under every contract, and were not measured.")
        _skipped(page, skipped)
    return page


def _chip(inspection: Inspection, label: str) -> Cell:
    return Cell(label, figures.color(figures.recipe_of(inspection.recipes[label])))


def _overview(page: Page, inspection: Inspection, advice: list[Advice], operands: list[str]) -> None:
    lines = []
    for a in advice:
        for operand in operands:
            rows = inspection.measured(operand)
            total = inspection.total(a.label, rows)
            lowest = min(rows, key=lambda row: row.losses[a.label].snr_db).losses[a.label].snr_db
            below = sum(row.operand == operand for row in a.below)
            numbers = (
                total.snr_db,
                lowest,
                total.block_snr_db,
                total.underflow_percent,
                total.saturation_percent,
                below,
            )
            lines.append((_chip(inspection, a.label), operand, inspection.stored_words(a.label, operand), *numbers))
    columns = (
        "recipe",
        "operand",
        "stored as",
        Column("SNR dB", ".1f", "All tensors together"),
        Column("lowest SNR", ".1f", "Of any tensor"),
        Column(
            "lowest of blocks", ".1f", "The lowest, over all tensors, of the SNR that 99% of a tensor's blocks reach"
        ),
        Column("underflow %", ".3f"),
        Column("saturation %", ".3f"),
        Column(
            "tensors below",
            "d",
            "Tensors in FP8 that lie below the threshold with their own SNR or that of their blocks",
        ),
    )
    page.table(columns, lines)
    delayed = [label for label, p in inspection.recipes.items() if p.scaling == "delayed"]
    if delayed:
        page.text(
            f"{', '.join(delayed)}: a delayed scale is not in a file; here it comes from the tensor itself, lowered "
            "by the margin."
        )


def _keep(page: Page, inspection: Inspection, a: Advice) -> None:
    compute = a.precision.compute.upper()
    if not a.below:
        page.text(f"{a.label}: nothing quantized lies below {a.snr:g} dB; the lowest is {_db(a.lowest)}.")
        return
    text = (
        f"{a.label}: {len(a.below)} of {len(inspection.measured())} tensors below. With these fields of the contract "
        "their linears "
    )
    text += (
        f"stay in {compute}; {a.share:.1%} of the linear weights remain in FP8, and the lowest of them is at "
        f"{_db(a.lowest)}."
    )
    page.text(text if a.share else f"{a.label}: no linear stays above {a.snr:g} dB; use another recipe, or {compute}.")
    page.code(a.changes)
    whole = a.only_whole_layers(inspection)
    if whole:
        page.text(whole)


def _backward(page: Page, inspection: Inspection, advice: list[Advice]) -> None:
    """Append how far the backward's weights are from the forward's: a table, and a grid if there is any distance."""
    page.text(
        "The backward contracts the other dimension of a weight than the forward. In square blocks, or with one scale "
        "for the whole, both read the same codes; in blocks along one dimension the backward reads another cast of the "
        "weight, and multiplies by another weight than the forward did. The difference is the same for every token: a "
        "bias, and no noise. Differ: the share of elements that are not the same. Distance: the norm of the "
        "difference, relative to the weight's. Gain: what gradients are too long by, or too short."
    )
    weights, lines = inspection.measured("weight"), []
    for label in inspection.recipes:
        turned = [row for row in weights if label in row.transpositions]
        whole = inspection.transposition(label, turned)
        farthest = max(turned, key=lambda row: row.transpositions[label].distance)
        numbers = (whole.differ_percent, 100 * whole.distance, 100 * whole.gain) if whole.elements else (None,) * 3
        far = 100 * farthest.transpositions[label].distance
        at = (far, farthest.name.removesuffix(".weight")) if far else (far, None)
        lines.append((_chip(inspection, label), inspection.backward_words(label), *numbers, *at))
    columns = (
        "recipe",
        "the backward multiplies by",
        Column("differ %", ".2f"),
        Column("distance %", ".3f", "All weights together"),
        Column("gain %", ".3f"),
        Column("farthest %", ".3f", "The distance of the weight that is farthest"),
        "which is",
    )
    page.table(columns, lines)
    if any(row.transpositions[label].distance for row in weights for label in row.transpositions):
        _grid(page, inspection, "weight", DISTANCE, advice)
        _turned(page, inspection, weights)


def _db(value: float) -> str:
    if math.isinf(value):
        return "without loss" if value > 0 else "lost"
    return f"{value:.1f} dB"


# ---------------------------------------------------------------------- figures


def _cells(inspection: Inspection, operand: str) -> tuple[list[str], dict[tuple[str, int | None], list[Row]]]:
    """Return the roles of an operand's tensors, and the tensors of each role and layer."""
    cells: dict[tuple[str, int | None], list[Row]] = defaultdict(list)
    for row in inspection.measured(operand):
        cells[row.place.role, row.place.layer].append(row)
    return [role for role in ROLES if any(role == name for name, _ in cells)], cells


def _grid(page: Page, inspection: Inspection, operand: str, grid: Grid, advice: list[Advice]) -> None:
    from matplotlib.colors import LogNorm, Normalize

    snr = {a.label: a.snr for a in advice}
    low, high = min(snr.values()), max(snr.values())

    roles, cells = _cells(inspection, operand)
    layers: list[int | None] = [*range(inspection.layers)]
    layers += [None] if any(layer is None for _, layer in cells) else []
    values = {
        (label, role, layer): grid.value(inspection, label, rows)
        for (role, layer), rows in cells.items()
        for label in inspection.recipes
    }
    shown = [v for v in values.values() if math.isfinite(v) and (v > 0 or not grid.percent)]
    norm: Normalize
    if grid.percent:
        # All values below a thousandth of a percent have the palest colour: their differences do not matter.
        norm = LogNorm(1e-3, max([1.0, *shown]), clip=True)
    else:
        # Differences above MOST_DB do not matter, and one lossless tensor would take all the colours.
        norm = Normalize(min([low, *shown]), min(max([high + 1, *shown]), max(MOST_DB, high + 1)), clip=True)
    columns = min(len(inspection.recipes), 4 if len(layers) <= 16 else 2 if len(layers) <= 48 else 1)
    lines = -(-len(inspection.recipes) // columns)
    with figures.drawing(10.6, lines * (0.75 + 0.24 * len(roles)), lines, columns, sharex=True, sharey=True) as (
        figure,
        axes,
    ):
        for ax, label in zip(axes.flat, inspection.recipes, strict=False):
            picture = _panel(ax, label, roles, layers, cells, values, grid, norm, snr[label])
        for ax in axes.flat[len(inspection.recipes) :]:
            ax.set_visible(False)
        for ax in axes[-1]:
            ax.set_xlabel("layer")
        over = "max" if not grid.percent and any(v > max(MOST_DB, high + 1) for v in values.values()) else "neither"
        figure.colorbar(picture, ax=axes, pad=0.01, aspect=14 * lines, extend=over, format="%g").outline.set_visible(
            False
        )
    block = "128x128" if operand == "weight" else "1x128"
    hatched = (
        " Hatched: the contract keeps it in the compute dtype."
        if any(row.kept for row in inspection.measured(operand))
        else ""
    )
    page.heading(grid.title).figure(figure, grid.caption.format(snr=thresholds(advice), block=block) + hatched)


def _panel(
    ax: Any,
    label: str,
    roles: list[str],
    layers: list[int | None],
    cells: dict[tuple[str, int | None], list[Row]],
    values: dict[tuple[str, str, int | None], float],
    grid: Grid,
    norm: Any,
    snr: float,
) -> Any:
    """Draw the grid of one recipe: a cell for each layer and role."""
    from matplotlib.patches import Rectangle

    def value(role: str, layer: int | None) -> float:
        found = values.get((label, role, layer), math.nan)
        return math.nan if grid.percent and found == 0 else norm.vmax if found == math.inf else found

    colors = "cividis_r" if grid.percent else "cividis"
    table = [[value(role, layer) for layer in layers] for role in roles]
    picture = ax.pcolormesh(table, cmap=colors, norm=norm, edgecolor=figures.PAPER, linewidth=0.8)
    for (role, layer), rows in cells.items():
        x, y = layers.index(layer), roles.index(role)
        if math.isnan(value(role, layer)):  # a tensor without a number, which is not the same as no tensor
            ax.add_patch(
                Rectangle((x + 0.1, y + 0.1), 0.8, 0.8, facecolor="none", edgecolor=figures.RULE, linewidth=0.7)
            )
        if all(label in row.kept for row in rows):
            ax.add_patch(Rectangle((x, y), 1, 1, fill=False, hatch="////", edgecolor=figures.PAPER, linewidth=0))
        elif not grid.percent and value(role, layer) < snr:
            ax.plot(x + 0.5, y + 0.5, marker="x", color="#ffffff", markersize=4.5, markeredgewidth=1.4)
    ax.set_title(label)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_yticks([i + 0.5 for i in range(len(roles))], roles)
    step = max(1, -(-len(layers) // 12))
    ax.set_xticks(
        [i + 0.5 for i in range(0, len(layers), step)], ["-" if layer is None else layer for layer in layers[::step]]
    )
    if not ax.yaxis_inverted():
        ax.invert_yaxis()
    return picture


def _worst(page: Page, inspection: Inspection, advice: list[Advice]) -> None:
    worst = inspection.worst()
    names = [row.name.removesuffix(".weight") for row in worst]
    styles = figures.lines((label, figures.recipe_of(p)) for label, p in inspection.recipes.items())
    with figures.drawing(10.6, 1.1 + 0.27 * len(worst)) as (figure, axes):
        ax = axes[0, 0]
        for turn, line in enumerate(styles):
            aside = 0.13 * (turn - (len(styles) - 1) / 2)  # so that no dot hides another
            values = [row.losses[line.label].floor_db for row in worst]
            style = line.style | {"linestyle": "none", "markersize": 6.5}
            ax.plot(
                [v if math.isfinite(v) else math.nan for v in values], [i + aside for i in range(len(worst))], **style
            )
        for snr in dict.fromkeys(a.snr for a in advice):
            ax.axvline(snr, color=figures.MUTED, linewidth=1, linestyle="--", label=f"{snr:g} dB")
        ax.set_yticks(range(len(worst)), names)
        ax.invert_yaxis()
        ax.set_xlabel("SNR in dB, of the tensor or of its blocks, whichever is lower")
        figures.legend(figure, axes)
    page.figure(figure, "The lowest under any of the recipes first.")
    columns: list[str | Column] = ["tensor", "shape", Column("amax", ".3g")]
    for label in inspection.recipes:
        columns += [Column(f"{label} dB", ".1f"), Column("underflow %", ".2f", label)]
    page.table(
        columns,
        [_worst_line(inspection, row) for row in worst],
        "SNR of the tensor or of its blocks, whichever is lower.",
    )


def _worst_line(inspection: Inspection, row: Row) -> tuple[Any, ...]:
    amax = max(loss.amax for loss in row.losses.values())
    losses = (row.losses[label] for label in inspection.recipes)
    return (
        row.name,
        "x".join(map(str, row.shape)),
        amax,
        *(n for loss in losses for n in (loss.floor_db, loss.underflow_percent)),
    )


# ---------------------------------------------------------------------- tables


def _numbers(page: Page, inspection: Inspection, operand: str) -> None:
    columns = (
        "layer",
        "role",
        "recipe",
        Column("tensors", "d"),
        Column("SNR dB", ".2f"),
        Column("blocks dB", ".2f", "The SNR that 99% of the blocks reach"),
        Column("underflow %", ".4f"),
        Column("saturation %", ".4f"),
        Column("MSE", ".3g"),
        Column("amax", ".3g"),
        Column("scale_inv from", ".3g"),
        Column("to", ".3g"),
        Column("range used %", ".0f", "Between the smallest and the largest code in use, of what the format spans"),
        Column("not finite", "d"),
    )
    lines = []
    for (role, layer), rows in _cells(inspection, operand)[1].items():
        for label in inspection.recipes:
            t = inspection.total(label, rows)
            name = f"{label} (kept)" if all(label in row.kept for row in rows) else label
            chip = Cell(name, _chip(inspection, label).color)
            scales = (t.scale_min, t.scale_max, t.range_used_percent, t.nonfinite)
            losses = (t.snr_db, t.block_snr_db, t.underflow_percent, t.saturation_percent, t.mse, t.amax)
            lines.append((layer, role, chip, len(rows), *losses, *scales))
    cut = f" The first {MOST_ROWS} of {len(lines)}; --json holds all." if len(lines) > MOST_ROWS else ""
    fold = f"All numbers of {OPERANDS[operand].lower()}, by layer and role"
    page.table(columns, lines[:MOST_ROWS], f"Kept: the contract leaves it in the compute dtype.{cut}", fold)


def _turned(page: Page, inspection: Inspection, weights: list[Row]) -> None:
    """Append a table of all distances: a row for each layer, role and recipe that has one."""
    columns = (
        "layer",
        "role",
        "recipe",
        Column("tensors", "d"),
        Column("differ %", ".3f"),
        Column("distance %", ".4f"),
        Column("gain %", ".4f"),
        Column("cosine", ".6f", "Of the angle between the two"),
    )
    lines = []
    for (role, layer), rows in _cells(inspection, "weight")[1].items():
        for label in inspection.recipes:
            t = inspection.transposition(label, rows)
            if t.difference:
                numbers = (t.differ_percent, 100 * t.distance, 100 * t.gain, t.cosine)
                lines.append((layer, role, _chip(inspection, label), len(rows), *numbers))
    cut = f"The first {MOST_ROWS} of {len(lines)}; --json holds all." if len(lines) > MOST_ROWS else ""
    page.table(columns, lines[:MOST_ROWS], cut, "All distances, by layer and role")


def _skipped(page: Page, rows: list[Row]) -> None:
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.place.role if row.place.kept else "other", row.dtype, row.skipped].append(row)
    lines = [
        (role, len(found), sum(row.elements for row in found), dtype, why, found[0].name)
        for (role, dtype, why), found in groups.items()
    ]
    page.table(("what", Column("tensors", "d"), Column("values", ",d"), "type", "why", "for example"), lines)
