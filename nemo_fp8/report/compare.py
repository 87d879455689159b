"""``nemo-fp8 compare``: train a recipe under several precisions with the same seeds and data, and compare the results.

    gap = (loss - loss of BF16) / loss of BF16        loss: mean over the last tenth of the steps

Runs are trained one after the other, each in its own processes (:mod:`nemo_fp8.experiments.trial`), so that step times
can be compared. The gap is taken for each seed against the first precision without FP8. Its extremes over the seeds are
shown as its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.trial import Outcome, Trial, python_for, run_trial

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Run:
    """The record of one training: a precision with a seed."""

    precision: Precision
    seed: int
    outcome: Outcome

    @property
    def loss(self) -> float:
        """The mean loss over the last tenth of the steps, at least one."""
        return mean(self.outcome.losses[-max(1, len(self.outcome.losses) // 10) :])

    @property
    def step_seconds(self) -> float:
        """The median seconds of a step, without the first tenth of the steps, in which things are built."""
        return median(self.outcome.seconds[len(self.outcome.seconds) // 10 :])


@dataclass(frozen=True)
class Comparison:
    """All runs of a recipe, seed by seed."""

    recipe: str
    steps: int
    runs: list[Run]

    @property
    def precisions(self) -> list[Precision]:
        """The precisions of the runs, each once, in the order of the runs."""
        return list({run.precision.name: run.precision for run in self.runs}.values())

    @property
    def baseline(self) -> Precision | None:
        """The first precision without FP8, with which the others are compared; None if all have FP8."""
        return next((p for p in self.precisions if not p.is_quantized), None)

    def of(self, precision: Precision) -> list[Run]:
        """Return the runs of a precision, one for each seed."""
        return [run for run in self.runs if run.precision.name == precision.name]

    def gaps(self, precision: Precision) -> list[float]:
        """Return the gap to the baseline in % for each seed; empty without a baseline."""
        if self.baseline is None:
            return []
        return [
            100 * (mine.loss / base.loss - 1)
            for mine, base in zip(self.of(precision), self.of(self.baseline), strict=True)
        ]

    def summary(self, precision: Precision) -> dict[str, Any]:
        """Return a precision's numbers over all seeds."""
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
        """Return the comparison as plain values, for JSON."""
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
    stack: str = "nemo",
    every: int = 0,
    keep: Path | None = None,
    on_run: Callable[[Precision, int], OnStep] | None = None,
) -> Comparison:
    """Train every precision with every seed; raise PrecisionError if two of them have one name.

    ``on_run`` is called for each run, and returns a function that is called for each step. ``keep`` is a folder for the
    last checkpoint of each run, as ``PRECISION-seedSEED``.
    """
    names = [precision.name for precision in precisions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PrecisionError(
            f"{', '.join(sorted(twice))} is given twice.",
            "Runs go by the name of their precision.",
            "Give each a name=.",
        )
    python_for(recipe, stack)  # refuses what no run could train, before the first is said to start
    runs = []
    for seed in seeds:  # seeds outside, so that a time in which the machine is slow hits all precisions
        for precision in precisions:
            kept = None if keep is None else str(keep / f"{precision.name}-seed{seed}")
            trial = Trial(recipe, precision, steps=steps, seed=seed, ranks=ranks, stack=stack, every=every, keep=kept)
            runs.append(Run(precision, seed, run_trial(trial, on_run(precision, seed) if on_run else None)))
    return Comparison(recipe, steps, runs)
