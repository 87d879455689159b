"""``nemo-fp8 compare``: one recipe trained under several precisions from the same seeds on the same data, and what came
of it.

    gap = (loss - loss of BF16) / loss of BF16        loss: mean over the last tenth of the steps

Each run has processes of its own (:mod:`nemo_fp8.experiments.trial`), one after the other, so that step times can be
compared. The gap is taken seed by seed against the first precision without FP8, and the noise of the gap is shown
beside it: its extremes over the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.trial import Outcome, Trial, run_trial

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Run:
    """The record of one training: a precision with a seed."""

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
        return [
            100 * (mine.loss / base.loss - 1)
            for mine, base in zip(self.of(precision), self.of(self.baseline), strict=True)
        ]

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
        """The comparison as plain values, for JSON."""
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
    keep: Path | None = None,
    on_run: Callable[[Precision, int], OnStep] | None = None,
) -> Comparison:
    """Train every precision with every seed; ``on_run`` is told of each run, and what it gives is told of each step.

    ``keep`` is a folder: the last checkpoint of each run goes into it, as ``PRECISION-seedSEED``.
    """
    names = [precision.name for precision in precisions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PrecisionError(
            f"{', '.join(sorted(twice))} is given twice.",
            "Runs go by the name of their precision.",
            "Give each a name=.",
        )
    runs = []
    for seed in seeds:  # seed by seed, so that a slow spell of the machine falls on all precisions
        for precision in precisions:
            kept = None if keep is None else str(keep / f"{precision.name}-seed{seed}")
            trial = Trial(recipe, precision, steps=steps, seed=seed, ranks=ranks, every=every, keep=kept)
            runs.append(Run(precision, seed, run_trial(trial, on_run(precision, seed) if on_run else None)))
    return Comparison(recipe, steps, runs)
