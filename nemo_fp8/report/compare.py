"""``nemo-fp8 compare``: one recipe trained under several precisions from the same seeds on the same data, and what came of it.

    gap = (loss - loss of BF16) / loss of BF16        loss: mean over the last tenth of the steps

Each run has processes of its own (:mod:`nemo_fp8.recipes.trial`), one after the other, so that step times can be compared. The
gap is taken seed by seed against the first precision without FP8, and the noise of the gap is shown beside it: its extremes over
the seeds. Light until it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.recipes.trial import Outcome, Trial, run_trial
from nemo_fp8.terminal import print_json, print_notes, print_table

OnStep = Callable[[int, float], None]
DEFAULT = "bf16_mixed,bf16_with_fp8_mixed,bf16_with_fp8_current_scaling_mixed,bf16_with_fp8_blockwise_mixed,bf16_with_mxfp8_mixed"


@dataclass(frozen=True)
class Run:
    """One precision with one seed."""

    precision: Precision
    seed: int
    outcome: Outcome

    @property
    def loss(self) -> float:
        """The mean over the last tenth of the steps, at least one."""
        return mean(self.outcome.losses[-max(1, len(self.outcome.losses) // 10) :])

    @property
    def step_seconds(self) -> float:
        """The median step, the first tenth left out: it builds and warms up."""
        return median(self.outcome.seconds[len(self.outcome.seconds) // 10 :])


@dataclass(frozen=True)
class Comparison:
    """All runs of a recipe, seed by seed."""

    recipe: str
    steps: int
    runs: list[Run]

    @property
    def precisions(self) -> list[Precision]:
        """Each once, in the order in which they were given."""
        return list({run.precision.name: run.precision for run in self.runs}.values())

    @property
    def baseline(self) -> Precision | None:
        """What the others are compared with: the first precision without FP8."""
        return next((p for p in self.precisions if not p.is_fp8), None)

    def of(self, precision: Precision) -> list[Run]:
        """The runs of one precision, one for each seed."""
        return [run for run in self.runs if run.precision.name == precision.name]

    def gaps(self, precision: Precision) -> list[float]:
        """The gap to the baseline in % for each seed; empty without a baseline."""
        if self.baseline is None:
            return []
        return [100 * (mine.loss / base.loss - 1) for mine, base in zip(self.of(precision), self.of(self.baseline), strict=True)]

    def summary(self, precision: Precision) -> dict[str, Any]:
        """One precision's numbers over all seeds."""
        runs, gaps = self.of(precision), self.gaps(precision)
        seconds = mean(run.step_seconds for run in runs)
        base = None if self.baseline is None else mean(run.step_seconds for run in self.of(self.baseline))
        return {
            "precision": precision.name,
            "loss": mean(run.loss for run in runs),
            "gap_percent": mean(gaps) if gaps else None,
            "gap_percent_by_seed": {run.seed: gap for run, gap in zip(runs, gaps, strict=False)},
            "step_seconds": seconds,
            "step_ratio": None if base is None else seconds / base,
            "memory_bytes": max(run.outcome.memory for run in runs),
            "skipped_steps": sum(run.outcome.skipped for run in runs),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "recipe": self.recipe,
            "steps": self.steps,
            "summary": [self.summary(p) for p in self.precisions],
            "runs": [{"precision": run.precision.to_dict(), "seed": run.seed} | vars(run.outcome) for run in self.runs],
        }


def run_comparison(
    recipe: str,
    precisions: Sequence[Precision],
    *,
    steps: int = 300,
    seeds: Sequence[int] = (1234,),
    ranks: int = 2,
    every: int = 0,
    on_run: Callable[[Precision, int], OnStep] | None = None,
) -> Comparison:
    """Train every precision with every seed; ``on_run`` is told of each run, and what it gives is told of each step."""
    runs = []
    for seed in seeds:  # seed by seed, so that a slow spell of the machine falls on all precisions
        for precision in precisions:
            trial = Trial(recipe, precision, steps=steps, seed=seed, ranks=ranks, every=every)
            runs.append(Run(precision, seed, run_trial(trial, on_run(precision, seed) if on_run else None)))
    return Comparison(recipe, steps, runs)


# ---------------------------------------------------------------------- the command


def compare(
    recipe: Annotated[str, typer.Option(help="tiny_llama, another of nemo_fp8.recipes, or package.module.function.")] = "tiny_llama",
    precisions: Annotated[str, typer.Option(metavar="NAMES", help="Presets, by commas; the first without FP8 is the baseline.")] = DEFAULT,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 300,
    seeds: Annotated[str, typer.Option(metavar="LIST", help="Seeds, separated by commas: of weights and of data.")] = "1234",
    ranks: Annotated[int, typer.Option(min=1, help="Processes of each run.")] = 2,
    monitor: Annotated[int, typer.Option(metavar="N", min=0, help="Measure FP8 in every layer each N steps; 0 never.")] = 50,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Train a recipe under several precisions from the same seed and data: loss, gap to BF16, step time, memory, statistics."""
    from nemo_fp8.presets import preset

    contracts = [preset(name.strip()) for name in precisions.split(",")]
    numbers = _numbers(seeds)
    if html is not None:  # before minutes are spent on training
        from nemo_fp8.report.figures import require_matplotlib

        require_matplotlib()
    with _bars(len(contracts) * len(numbers), steps) as on_run:
        comparison = run_comparison(recipe, contracts, steps=steps, seeds=numbers, ranks=ranks, every=monitor, on_run=on_run)
    if as_json:
        print_json(comparison.to_dict())
    else:
        _print(comparison)
    if html is not None:
        from nemo_fp8.report.compare_page import comparison_page

        print_notes([f"The report is in {comparison_page(comparison).write(html)}."])


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise PrecisionError(f"--seeds {seeds!r} is no list of numbers.", f"{error}.", "Write --seeds 1,2,3.") from error


@contextmanager
def _bars(runs: int, steps: int) -> Iterator[Callable[[Precision, int], OnStep]]:
    """Two progress bars on stderr: all runs, and the steps of the present one with its loss."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        everything = bars.add_task("", total=runs * steps)
        each = bars.add_task("", total=steps)

        def on_run(precision: Precision, seed: int) -> OnStep:
            bars.reset(each, description=f"{precision.name}, seed {seed}: starting")

            def on_step(step: int, loss: float) -> None:
                bars.advance(everything)
                bars.update(each, completed=step, description=f"{precision.name}, seed {seed}: loss {loss:.3f}")

            return on_step

        yield on_run


def _print(comparison: Comparison) -> None:
    rows = []
    for precision in comparison.precisions:
        s = comparison.summary(precision)
        gaps = list(s["gap_percent_by_seed"].values())
        spread = f"{min(gaps):+.2f} {max(gaps):+.2f}" if len(gaps) > 1 else None
        gap = None if s["gap_percent"] is None else f"{s['gap_percent']:+.2f}"
        ratio = None if s["step_ratio"] is None else f"{s['step_ratio']:.2f}"
        rows.append(
            (precision.name, f"{s['loss']:.4f}", gap, spread, f"{1000 * s['step_seconds']:.0f}", ratio, f"{s['memory_bytes'] / 2**20:.0f}")
        )
    seeds = len({run.seed for run in comparison.runs})
    what = f"{comparison.recipe}, {comparison.steps} steps, {seeds} seed{'s' if seeds > 1 else ''}."
    caption = f"{what} Loss: mean of the last tenth. Gap to BF16 in %, and its extremes over seeds."
    print_table(("precision", "loss", "gap", "extremes", "ms", "x BF16", "MiB"), rows, caption)
