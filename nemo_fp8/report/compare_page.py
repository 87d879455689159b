"""The HTML report of a comparison: loss curves, the gap to BF16, step time, memory, and what FP8 did to each layer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.report.compare import Comparison
from nemo_fp8.report.figures import drawing, legend, lines, recipe_of
from nemo_fp8.report.page import Column, Page

METRICS = (
    ("snr_db", "SNR in dB"),
    ("underflow_percent", "underflow in %"),
    ("saturation_percent", "saturation in %"),
    ("nonfinite", "not finite"),
)


def comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison; ``comparison_page(c).write("report.html")`` writes it."""
    seeds = list(dict.fromkeys(run.seed for run in comparison.runs))
    page = Page(f"FP8 compare: {comparison.recipe}", f"{comparison.steps} steps, seeds {', '.join(map(str, seeds))}")
    _overview(page, comparison)
    _curves(page, comparison)
    _gaps(page, comparison, seeds)
    _statistics(page, comparison)
    page.section("Contracts")
    for precision in comparison.precisions:
        page.heading(precision.name).code(precision.explain())
    return page


def _overview(page: Page, comparison: Comparison) -> None:
    columns = (
        "precision",
        Column("loss", ".4f", "mean over the last tenth of the steps, and over the seeds"),
        Column("gap in %", "+.2f", "to the first precision without FP8, with the same seed"),
        Column("ms a step", ".0f", "median, the first tenth left out"),
        Column("x BF16", ".2f"),
        Column("MiB", ".0f", "the most that one rank held beyond its program"),
        Column("skipped", ".0f", "steps that the optimizer skipped for an overflow"),
    )
    rows = []
    for precision in comparison.precisions:
        s = comparison.summary(precision)
        cost = 1000 * s["step_seconds"], s["step_ratio"], s["memory_bytes"] / 2**20
        rows.append((precision.name, s["loss"], s["gap_percent"], *cost, s["skipped_steps"]))
    page.section("Overview").table(
        columns, rows, "Step times and memory are those of this machine, where FP8 may be emulated."
    )


def _styles(precisions: Sequence[Precision]) -> dict[str, dict[str, Any]]:
    styled = lines((p.name, recipe_of(p)) for p in precisions)
    return {line.label: line.style | {"marker": ""} for line in styled}


def _smooth(values: Sequence[float], width: int) -> list[float]:
    return [mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def _curves(page: Page, comparison: Comparison) -> None:
    width = max(1, comparison.steps // 30)
    with drawing(9, 3.4, columns=2) as (figure, axes):
        for name, style in _styles(comparison.precisions).items():
            runs = [run for run in comparison.runs if run.precision.name == name]
            losses = [mean(step) for step in zip(*(run.outcome.losses for run in runs), strict=True)]
            steps = range(1, len(losses) + 1)
            axes[0, 0].plot(steps, losses, **style)
            last = len(losses) // 2
            axes[0, 1].plot(steps[last:], _smooth(losses, width)[last:], **style)
        axes[0, 0].set(title="Loss", xlabel="step")
        axes[0, 1].set(title=f"The second half, mean of {width} steps", xlabel="step")
        legend(figure, axes)
    page.section("Loss").figure(figure, "Loss by step, mean over the seeds.")


def _gaps(page: Page, comparison: Comparison, seeds: list[int]) -> None:
    base = comparison.baseline
    others = [p for p in comparison.precisions if base is not None and p.name != base.name]
    if base is None or not others:
        return
    width = max(1, comparison.steps // 10)
    with drawing(9, 3) as (figure, axes):
        for name, style in _styles(others).items():
            for mine, theirs in zip(
                (r for r in comparison.runs if r.precision.name == name), comparison.of(base), strict=True
            ):
                a, b = (_smooth(run.outcome.losses, width) for run in (mine, theirs))
                axes[0, 0].plot(range(1, len(a) + 1), [100 * (x / y - 1) for x, y in zip(a, b, strict=True)], **style)
        axes[0, 0].axhline(0, color="#808080", linewidth=0.8)
        axes[0, 0].set(title=f"Gap to {base.name} in %, mean of {width} steps", xlabel="step")
        legend(figure, axes)
    rows = [(p.name, *comparison.gaps(p)) for p in others]
    page.section("Gap to BF16").figure(figure, "One line for each seed.")
    page.table(
        ("precision", *(Column(f"seed {seed}, %", "+.2f") for seed in seeds)),
        rows,
        "Of the loss over the last tenth of the steps.",
    )


def _statistics(page: Page, comparison: Comparison) -> None:
    """Add the monitor's last measurements of the runs with the first seed."""
    watched = [p for p in comparison.precisions if comparison.of(p)[0].outcome.statistics]
    if not watched:
        return
    page.section("Statistics of FP8")
    numbers = [Column(title, ".3g") for title in ("amax", "scale", *(title for _, title in METRICS))]
    for precision in watched:
        everything = comparison.of(precision)[0].outcome.statistics
        last = max(row["step"] for row in everything)
        rows = [row for row in everything if row["step"] == last]
        worst = min((row for row in rows if row["snr_db"] is not None), key=lambda row: row["snr_db"], default=None)
        page.heading(precision.name)
        if worst is not None:
            page.text(
                f"Step {last}: the lowest SNR is {worst['snr_db']:.1f} dB, of the {worst['operand']} of "
                f"{worst['layer']}."
            )
        table = [
            (row["layer"], row["operand"], row["amax"], row["scale_max"], *(row[name] for name, _ in METRICS))
            for row in rows
        ]
        page.table(["layer", "operand", *numbers], table, f"At step {last}.", fold=f"{len(table)} operands")
