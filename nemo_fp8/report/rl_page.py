"""The HTML report of an RL comparison: accuracy, reward, KL, mismatch of trainer and rollout, and the time of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import Any

from nemo_fp8.experiments.rl.compare import ERRORS, PARTS, VARIANTS, RlComparison, RlRun
from nemo_fp8.report.figures import drawing, legend, lines, recipe_of
from nemo_fp8.report.page import Column, Page

# NeMo RL's own gates.
_GATES = {"token_mult_prob_error": 1.05, "gen_kl_error": 0.004}


def rl_page(comparison: RlComparison) -> Page:
    """Return the page of an RL comparison; ``rl_page(c).write("report.html")`` writes it."""
    s = comparison.settings
    seeds = list(dict.fromkeys(run.seed for run in comparison.runs))
    way = "one step off-policy" if s.one_step_off else "synchronous"
    page = Page("FP8 reinforcement learning", f"GRPO, {s.steps} steps, {way}, seeds {', '.join(map(str, seeds))}")
    _overview(page, comparison)
    _accuracy(page, comparison, seeds)
    _curves(page, comparison)
    _mismatch(page, comparison)
    _time(page, comparison)
    page.section("Contracts")
    for name in comparison.variants:
        page.heading(name).code(VARIANTS[name][0].explain())
    return page


def _overview(page: Page, comparison: RlComparison) -> None:
    columns = (
        "training-rollout",
        Column("base %", ".1f", "validation accuracy of the base model"),
        Column("end %", ".1f", "validation accuracy of the last weights"),
        Column("points", "+.1f", "to bf16-bf16"),
        Column("reward", ".3f", "mean of the last tenth of the steps"),
        Column("KL", ".3f", "to the base model, mean of the last tenth of the steps"),
        Column("token_mult_prob_error", ".4f", "mean over all steps"),
        Column("gen_kl_error", ".2g", "mean over all steps"),
        Column("gate fired", ".0f", "steps"),
    )
    rows = []
    for variant in comparison.variants:
        v = comparison.summary(variant)
        accuracy = 100 * v["base_accuracy"], 100 * v["final_accuracy"], v["points_to_baseline"]
        rows.append((variant, *accuracy, v["reward"], v["kl"], *(v[name] for name in ERRORS), v["gate_fired"]))
    page.section("Overview").table(columns, rows, "Means over the seeds.")


def _accuracy(page: Page, comparison: RlComparison, seeds: Sequence[int]) -> None:
    with drawing(9, 3.4) as (figure, axes):
        for variant, style in _styles(comparison).items():
            runs = [run.accuracies() for run in comparison.of(variant)]
            steps = [step for step, _ in runs[0]]
            axes[0, 0].plot(steps, [100 * mean(run[i][1] for run in runs) for i in range(len(steps))], **style)
        axes[0, 0].set(title="Validation accuracy in %", xlabel="step")
        legend(figure, axes)
    page.section("Validation accuracy").figure(
        figure, "Held-out problems, answered greedily by the rollout engine; mean over the seeds."
    )
    columns: list[str | Column] = [
        "training-rollout",
        *(Column(f"seed {seed}, base %", ".1f") for seed in seeds),
        *(Column(f"{seed}, end %", ".1f") for seed in seeds),
    ]
    rows = []
    for variant in comparison.variants:
        found = [run.accuracies() for run in comparison.of(variant)]
        rows.append((variant, *(100 * run[0][1] for run in found), *(100 * run[-1][1] for run in found)))
    page.table(columns, rows)


def _curves(page: Page, comparison: RlComparison) -> None:
    with drawing(9, 3.2, columns=2) as (figure, axes):
        _plot(axes[0, 0], comparison, lambda row: row["reward"])
        _plot(axes[0, 1], comparison, lambda row: row["kl"])
        axes[0, 0].set(title="Reward", xlabel="step")
        axes[0, 1].set(title="KL to the base model", xlabel="step")
        legend(figure, axes)
    page.section("Reward and KL").figure(figure, f"Mean over the seeds and over {_width(comparison)} steps.")


def _mismatch(page: Page, comparison: RlComparison) -> None:
    with drawing(9, 3.2, columns=2) as (figure, axes):
        for axis, name in zip(axes[0], ERRORS, strict=True):
            _plot(axis, comparison, partial(_error, name))
            axis.set(title=name, xlabel="step")
            if name == "gen_kl_error":
                axis.set_yscale("log")
        legend(figure, axes)
    page.section("Mismatch of trainer and rollout").figure(
        figure, f"Mean over the seeds and over {_width(comparison)} steps."
    )
    page.text(
        ", ".join(f"{name} is asked to stay below {gate}" for name, gate in _GATES.items()) + " in NeMo RL's own tests."
    )
    rows = [
        (variant, *(max(run.largest(name) for run in comparison.of(variant)) for name in ERRORS))
        for variant in comparison.variants
    ]
    page.table(
        ("training-rollout", Column("largest token_mult_prob_error", ".4f"), Column("largest gen_kl_error", ".2g")),
        rows,
        "Of any step.",
    )


def _time(page: Page, comparison: RlComparison) -> None:
    parts = (Column(f"{part.replace('_', '-')}, s", ".2f") for part in PARTS)
    columns: list[str | Column] = ["training-rollout", *parts, Column("all, s", ".2f")]
    rows = []
    for variant in comparison.variants:
        seconds = comparison.summary(variant)["seconds"]
        rows.append((variant, *(seconds[part] for part in PARTS), sum(seconds.values())))
    page.section("Time of a step").table(
        columns, rows, "Medians over the steps. On a CPU FP8 is emulated, and costs instead of saving."
    )


def _styles(comparison: RlComparison) -> dict[str, dict[str, Any]]:
    styled = lines((name, recipe_of(VARIANTS[name][0])) for name in comparison.variants)
    return {line.label: line.style | {"marker": ""} for line in styled}


def _width(comparison: RlComparison) -> int:
    return max(1, comparison.settings.steps // 16)


def _plot(axis: Any, comparison: RlComparison, value: Callable[[dict[str, Any]], float]) -> None:
    """Draw one smoothed line for each variant."""
    for variant, style in _styles(comparison).items():
        runs = comparison.of(variant)
        values = [mean(value(run.steps[i]) for run in runs) for i in range(_common(runs))]
        width = _width(comparison)
        smooth = [mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
        axis.plot(range(len(smooth)), smooth, **style)


def _error(name: str, row: dict[str, Any]) -> float:
    return float(row["mismatch"][name])


def _common(runs: Sequence[RlRun]) -> int:
    return min(len(run.steps) for run in runs)
