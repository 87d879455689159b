"""Draw the pictures of the documents from their records, or with ``--check`` say which are older than theirs.

    .venv/bin/python tools/make_pictures.py [--check]

A picture is a function from a record to a figure, and a row of ``PICTURES``. Each SVG says in its ``<desc>`` which
record it comes from, with the first digits of the SHA-256 of its figures: so whether it is up to date does not hang on
the version of matplotlib, whose layout moves by fractions of a point. Text stays text. Colours are those of
``nemo_fp8.report.figures``, which colour-blind people tell apart; ink follows the reader's light or dark setting.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.report.figures import INK, MUTED, color, drawing, legend, recipe_of, to_svg

ROOT = Path(__file__).parents[1]
RECORDS, TARGET = ROOT / "docs/benchmarks", ROOT / "docs/pictures"

# The same names as in docs/site.css, for who reads the file itself.
STYLE = """<style>
svg { --ink: #1b1f24; --muted: #57606a; --rule: #d0d7de; --paper: #fff; background: var(--paper); }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e8eb; --muted: #a3abb5; --rule: #444b55; --paper: #1e2129; } }
</style>"""


def loss(rows: list[dict[str, Any]]) -> Any:
    """Draw curves where the record holds the loss of every step, which ``benchmarks/train.py loss`` now keeps; else
    where the runs ended."""
    return curves(rows) if all("losses" in row for row in rows) else ends(rows)


def ends(rows: list[dict[str, Any]]) -> Any:
    """Draw where each FP8 run ended, against BF16 with the same seed; and how far BF16 itself moves from seed to
    seed."""
    found = {(row["precision"], row["seed"]): row["loss"] for row in rows}
    base = {seed: value for (name, seed), value in found.items() if name == "bf16_mixed"}
    names = [name for name in dict.fromkeys(name for name, _ in found) if name != "bf16_mixed"]
    with drawing(8, 2.6) as (figure, axes):
        axis = axes[0, 0]
        noise = [100 * (value / mean(base.values()) - 1) for value in base.values()]
        axis.axvspan(min(noise), max(noise), color=color("bf16"), alpha=0.18, linewidth=0)
        axis.annotate(
            "BF16, seed to seed",
            (max(noise), len(names) - 0.62),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=MUTED,
        )
        for row, name in enumerate(names):
            gaps = [100 * (found[name, seed] / base[seed] - 1) for seed in base]
            hue = color(recipe_of(PRESETS[name]))
            axis.plot(gaps, [row] * len(gaps), linestyle="", marker="o", markersize=7, alpha=0.6, color=hue)
            axis.plot([mean(gaps)], [row], linestyle="", marker="|", markersize=16, markeredgewidth=2.5, color=hue)
            axis.annotate(f"mean {mean(gaps):+.2f} %", (2.05, row), va="center", color=hue)
        axis.set(
            xlabel=f"loss after {rows[0]['steps']} steps against BF16 with the same seed, %",
            xlim=(-2.2, 2.7),
            ylim=(len(names) - 0.4, -0.6),
        )
        axis.set_yticks(range(len(names)), [recipe_of(PRESETS[name]) for name in names])
        axis.set_xticks([-2, -1, 0, 1, 2])
        axis.tick_params(axis="y", length=0, labelcolor=INK)
        axis.grid(visible=False, axis="y")
    return figure


def curves(rows: list[dict[str, Any]]) -> Any:
    """Draw each FP8 recipe's curve over BF16's, mean of the seeds with the band that they span, each loss a mean over
    ten steps."""
    runs: dict[str, list[list[float]]] = {}
    for row in rows:
        runs.setdefault(row["precision"], []).append(smooth(row["losses"], 10))
    base = runs.pop("bf16_mixed")
    columns = (len(runs) + 1) // 2
    with drawing(3 + 3 * columns, 5, rows=2, columns=columns, sharex=True, sharey=True) as (figure, axes):
        for axis in axes.flat[len(runs) :]:
            axis.set_visible(False)
        for axis, (name, mine) in zip(axes.flat, runs.items(), strict=False):
            # A control is no preset: a recipe that is known to be worse.
            recipe = recipe_of(PRESETS[name]) if name in PRESETS else name.replace("_", " ")
            hue = color(recipe) if name in PRESETS else MUTED
            band(axis, mine, hue)
            band(axis, base, color("bf16"), linestyle="--", linewidth=1)
            end, of_bf16 = mean(c[-1] for c in mine), mean(c[-1] for c in base)
            axis.set(yscale="log", yticks=[0.25, 0.5, 1, 2, 4], yticklabels=["0.25", "0.5", "1", "2", "4"])
            axis.minorticks_off()
            axis.set_title(recipe, color=hue, fontweight="bold")
            axis.text(0.97, 0.93, f"ends at {end:.3f}", transform=axis.transAxes, ha="right", va="top", color=hue)
            axis.text(
                0.97,
                0.81,
                f"BF16 at {of_bf16:.3f}",
                transform=axis.transAxes,
                ha="right",
                va="top",
                color=color("bf16"),
            )
        least = min(value for several in (base, *runs.values()) for curve in several for value in curve)
        axes[0, 0].set_ylim(bottom=0.9 * least)
        for axis in axes[:, 0]:
            axis.set_ylabel("loss, nats a token")
        for axis in axes.flat[len(runs) - columns : len(runs)]:  # the lowest of each column
            axis.set_xlabel("step")
            axis.tick_params(labelbottom=True)
    return figure


def rl(record: dict[str, Any]) -> Any:
    """Draw accuracy on held-out problems while GRPO trains: BF16 on both sides, and FP8 on both."""
    arms = {"bf16-bf16": ("BF16 on both sides", "bf16", "--"), "fp8-fp8": ("FP8 on both sides", "blockwise", "-")}
    found = {arm: list(record["validation_accuracy"][arm].values()) for arm in arms}
    ends = {arm: 100 * mean(list(seed.values())[-1] for seed in seeds) for arm, seeds in found.items()}
    with drawing(8, 3.6) as (figure, axes):
        axis = axes[0, 0]
        for arm, (label, recipe, dash) in arms.items():
            steps = [int(step) for step in found[arm][0]]
            band(
                axis,
                [[100 * a for a in seed.values()] for seed in found[arm]],
                color(recipe),
                steps,
                linestyle=dash,
                marker="o",
            )
            # The ends lie close together: the higher one's label stands above its point, the other's below.
            up = ends[arm] == max(ends.values())
            place = {"xy": (steps[-1], ends[arm]), "xytext": (8, 5 if up else -5), "textcoords": "offset points"}
            axis.annotate(f"{label}, {ends[arm]:.1f} %", **place, va="bottom" if up else "top", color=color(recipe))
        axis.set(xlabel="GRPO step", ylabel="held-out problems solved, %")
        axis.set_xlim(0, steps[-1] * 1.32)
        axis.set_xticks(steps)
    return figure


def push(record: dict[str, Any]) -> Any:
    """Draw the seconds until an engine holds other weights, by every way; FP8 in colour, on a logarithmic axis."""
    rows = {
        "BF16 push": "BF16 push",
        "BF16 push, by rows": "BF16 by rows push",
        "FP8 push": "FP8 push",
        "FP8 push of changes": "FP8 push of changes",
        "FP8 push from shared memory": "FP8 push from shared memory",
        "vLLM reads the checkpoint again, BF16": "vLLM's own reload, BF16",
        "vLLM reads the checkpoint again, FP8": "vLLM's own reload, FP8",
    }
    starts = {f"an engine starts, {kind}": record["start_seconds"][kind] for kind in ("BF16", "FP8")}
    seconds_of = {label: record["best"][row]["wall"] for label, row in rows.items()} | starts
    ways = {"a plain copy of the bytes": (record["copy_seconds"], MUTED)} | {
        label: (seconds, color("blockwise" if "FP8" in label else "bf16")) for label, seconds in seconds_of.items()
    }
    with drawing(8, 3.6) as (figure, axes):
        axis = axes[0, 0]
        for row, (seconds, colour) in enumerate(ways.values()):
            axis.plot([0.01, seconds], [row, row], color=colour, linewidth=1)
            axis.plot([seconds], [row], color=colour, marker="o", markersize=7)
            axis.annotate(
                f"{seconds:.2g} s", (seconds, row), (9, 0), textcoords="offset points", va="center", color=INK
            )
        axis.set(
            xscale="log",
            xlim=(0.01, 130),
            xlabel=f"seconds, {record['parameters'] / 1e6:.0f} million parameters",
            ylim=(len(ways) - 0.4, -0.6),
        )
        axis.set_xticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
        axis.set_yticks(range(len(ways)), ways)
        axis.tick_params(axis="y", length=0, labelcolor=INK)
        axis.grid(visible=False, axis="y")
        axis.minorticks_off()
    return figure


def snr(record: dict[str, Any]) -> Any:
    """Draw the SNR of down projections by layer, of the whole and of its blocks: the first hides what the second
    tells."""
    rows = sorted(
        (row for row in record["tensors"] if row["role"] == "down" and row["precisions"]), key=lambda row: row["layer"]
    )
    layers = [row["layer"] for row in rows]
    recipes = ("tensorwise", "blockwise", "mxfp8")
    with drawing(9, 3, columns=len(recipes), sharey=True) as (figure, axes):
        for axis, recipe in zip(axes[0], recipes, strict=True):
            whole, blocks = ([row["precisions"][recipe][name] for row in rows] for name in ("snr_db", "block_snr_db"))
            axis.plot(layers, whole, color=MUTED, linestyle="--", marker="s")
            axis.plot(layers, blocks, color=color(recipe), marker="o", markersize=5)
            for name, values, up in (("blocks", blocks, -14), ("whole tensor", whole, 6)):
                at = values.index(min(values) if name == "blocks" else max(values))
                words, place = f"{name} {round(values[at])} dB", (layers[at], values[at])
                axis.annotate(words, place, (0, up), textcoords="offset points", ha="center", color=INK)
            axis.set_title(recipe, color=color(recipe), fontweight="bold")
            axis.set(xlabel="layer", xticks=layers, xlim=(-0.4, layers[-1] + 0.4), ylim=(-9, 60))
        axes[0, 0].set_ylabel("SNR of down projections, dB")
    return figure


def transposition(record: dict[str, Any]) -> Any:
    """Draw the gap of every arm to the one that reads the forward's codes, by the distance of the weights, with
    intervals."""
    hues = {"NVFP4 weights": "nvfp4", "FP8 weights": "blockwise", "NVFP4": "tensorwise"}
    with drawing(9, 3.4, columns=2, width_ratios=[1, 1.2]) as (figure, axes):
        recipes, everything = axes[0]
        for axis, chosen in (
            (recipes, [row for row in record["arms"] if row["is_recipe"]]),
            (everything, record["arms"]),
        ):
            axis.axhline(0, color=MUTED, linewidth=1)
            for turn, (family, hue) in enumerate(hues.items()):
                rows = [row for row in chosen if row["family"] == family and not row["reference"]]
                # Square blocks of all families lie at 0: side by side.
                aside = (turn - 1) * (0.35 if axis is recipes else 0)
                axis.errorbar(
                    [100 * row["weights_distance"] + aside for row in rows],
                    [row["gap"] for row in rows],
                    [row["half"] for row in rows],
                    linestyle="",
                    marker="osD"[turn],
                    markersize=6,
                    capsize=3,
                    color=color(hue),
                    label=family,
                )
            axis.set_xlabel("distance of the weights, %")
        recipes.set_ylabel("loss against same codes, %")
        recipes.set_title("Recipes")
        everything.set_title("and errors made larger")
        legend(figure, axes)
    return figure


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return the running mean over so many values, and over as many as there are at the beginning."""
    return [mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def band(
    axis: Any, curves: Iterable[Sequence[float]], colour: str, x: Sequence[float] | None = None, **style: Any
) -> None:
    """Draw the mean of some curves, and the band between the lowest and the highest of them."""
    at = list(zip(*curves, strict=True))
    x = range(1, len(at) + 1) if x is None else x
    axis.fill_between(
        x, [min(values) for values in at], [max(values) for values in at], color=colour, alpha=0.22, linewidth=0
    )
    axis.plot(x, [mean(values) for values in at], color=colour, **style)


# The picture -> its record, and what draws it; without those whose record has not been taken.
PICTURES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    name: (record, figure_of)
    for name, record, figure_of in (
        ("loss", "training.json", loss),
        ("four_bits", "nvfp4.json", loss),
        ("rl", "rl.json", rl),
        ("push", "refit.json", push),
        ("snr", "snr.json", snr),
        ("transposition", "transposition.json", transposition),
    )
    if (RECORDS / record).exists()
}


def fingerprint(record: str) -> str:
    """Return what an SVG says of the record that it was drawn from: its figures count, and not where and by which
    command they were taken."""
    values = json.loads((RECORDS / record).read_text())
    if isinstance(values, dict):
        values.pop("about", None)
    return f"{record} {hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]}"


def drawn_from(picture: str) -> str:
    """Return the fingerprint of its record that the committed SVG holds."""
    path = TARGET / f"{picture}.svg"
    said = re.search(r"<desc>(.*?)</desc>", path.read_text()) if path.exists() else None
    return said[1] if said else ""


def draw(picture: str) -> str:
    """Return the SVG of a picture: a file of its own, in pixels, with its colours and where it comes from."""
    record, figure_of = PICTURES[picture]
    figure = figure_of(json.loads((RECORDS / record).read_text()))
    wide, high = (96 * inches for inches in figure.get_size_inches())
    svg = re.sub(r' style="width:[^"]*"', f' width="{wide:.0f}" height="{high:.0f}"', to_svg(figure, picture), count=1)
    return re.sub(r"(<svg [^>]*>)", rf"\1\n<desc>{fingerprint(record)}</desc>\n{STYLE}", svg, count=1)


def main() -> None:
    stale = [name for name, (record, _) in PICTURES.items() if drawn_from(name) != fingerprint(record)]
    if "--check" in sys.argv[1:]:
        if stale:
            sys.exit(f"Older than their records: {', '.join(stale)}. Run: make docs")
        return
    TARGET.mkdir(exist_ok=True)
    for name in PICTURES:
        (TARGET / f"{name}.svg").write_text(draw(name))
    print(f"drew {', '.join(PICTURES)}")


if __name__ == "__main__":
    main()
