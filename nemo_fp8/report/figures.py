"""Draw plots for a page: one style, one colour for each recipe, readable on a light and on a dark page.

    with drawing(8, 3) as (figure, axes):
        for line in lines([("bf16", "bf16"), ("blockwise fp32", "blockwise")]):
            axes[0, 0].plot(steps, losses[line.label], **line.style)
        legend(figure, axes)
    page.figure(figure, "What it shows.")

A figure becomes inline SVG. Its text and frames are drawn in placeholder colours, which are then replaced by the CSS
variables of the page, so that they follow the reader's light or dark setting. A recipe's colour has enough contrast on
both. The colours are Okabe and Ito's, which colour-blind people can tell apart; their orange is darker. Two variants of
a recipe have the same colour and differ in dash and marker, so no information is in the hue alone.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.extras import require

COLORS = {
    "bf16": "#808080",
    "delayed": "#cc79a7",
    "tensorwise": "#d55e00",
    "blockwise": "#0072b2",
    "mxfp8": "#009e73",
    "nvfp4": "#c08a00",
}
# Successive lines of one recipe.
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")

# Placeholder colours, and below the CSS variables of the page that replace them.
INK, MUTED, RULE, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)"}
_POINTS_TO_PIXELS = 4 / 3

_LOOK = {
    "svg.fonttype": "none",  # text stays text, which is small and sharp, and which the browser's search finds
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


def recipe_of(precision: Precision) -> str:
    """Return the name by which :func:`color` finds a contract's colour: its scaling, or ``bf16`` without FP8."""
    return precision.scaling or "bf16"


def color(recipe: str) -> str:
    """Return the colour of a recipe; raise PrecisionError if it has none."""
    if recipe not in COLORS:
        raise PrecisionError([unknown("recipe", recipe, COLORS)])
    return COLORS[recipe]


@dataclass(frozen=True)
class Line:
    """The label and the style of a line; ``style`` are keywords of ``axes.plot``."""

    label: str
    style: dict[str, Any]


def lines(series: Iterable[tuple[str, str]]) -> list[Line]:
    """Return styles for (label, recipe) pairs: a recipe's lines share a colour, and differ in dash and marker."""
    seen: Counter[str] = Counter()
    styled = []
    for label, recipe in series:
        turn = seen[recipe]
        seen[recipe] += 1
        style = {"color": color(recipe), "linestyle": DASHES[turn % 4], "marker": MARKERS[turn % 4], "label": label}
        styled.append(Line(label, style))
    return styled


@contextmanager
def drawing(width: float, height: float, rows: int = 1, columns: int = 1, **subplots: Any) -> Iterator[tuple[Any, Any]]:
    """Make a figure of so many inches, and yield it with its axes (a 2-D array); draw while the context lasts.

    The figure is not one of pyplot's, which are global.
    """
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def legend(figure: Any, axes: Any) -> None:
    """Add one legend above all axes of a figure, with each label once."""
    found = {label: handle for a in axes.flat for handle, label in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside upper left", ncols=min(len(found), 6), handlelength=2.4)


def to_svg(figure: Any, name: str = "") -> str:
    """Return a figure as inline SVG in the colours of the page, as wide as the page allows.

    Give figures of one page different names: their clip paths are named after them.
    """
    matplotlib = require_matplotlib()
    text = io.StringIO()
    with matplotlib.rc_context(_LOOK | {"svg.hashsalt": f"nemo_fp8 {name}"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, variable)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    width = figure.get_figwidth() * 72 * _POINTS_TO_PIXELS
    # Never so small that text cannot be read: a narrow screen scrolls the figure sideways.
    style = f'style="width:100%;max-width:{width:.0f}px;min-width:{min(width, 860):.0f}px"'
    return re.sub(
        r'(<svg [^>]*?)width="[^"]*pt"',
        rf"\1{style}",
        re.sub(r'(<svg [^>]*?)height="[^"]*pt" ?', r"\1", svg, count=1),
        count=1,
    )


def require_matplotlib() -> Any:
    """Return the module matplotlib; raise an error that says how to install it if it is missing."""
    require("report")
    import matplotlib

    return matplotlib
