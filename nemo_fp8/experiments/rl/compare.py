"""``nemo-fp8 rl-compare``: run the same GRPO under several contracts and seeds, and compare the results.

    bf16 / bf16            the baseline
    bf16 / fp8             BF16 training with an FP8 rollout, with and without importance-sampling correction
    fp8 / fp8              blockwise FP8 on both sides, with and without

Runs of one seed share the base model, the problems and the seeds of their samples. Each has a folder of its own, so
that a killed comparison continues where it was, and a further seed reruns no other.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from nemo_fp8 import __version__
from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.experiments.rl.driver import OnStep, ray_session, run_grpo
from nemo_fp8.experiments.rl.settings import GrpoSettings

_BF16, _FP8 = preset("bf16_mixed"), preset("bf16_with_fp8_blockwise_mixed")
# A rollout with the same scales as in FP8 training.
_ROLLOUT = _BF16.replace(rollout="fp8", weight_scale=_FP8.weight_scale, activation_scale=_FP8.activation_scale)
# NVFP4 weights, activations in BF16.
_FOUR_BITS = _BF16.replace(rollout="nvfp4", activation_scheme="none")
_OFF: dict[str, Any] = {"use_importance_sampling_correction": False}

# name -> the contract, and the correction (None: as the contract says).
VARIANTS: dict[str, tuple[Precision, dict[str, Any] | None]] = {
    "bf16-bf16": (_BF16, None),
    "bf16-fp8": (_ROLLOUT, None),
    "bf16-fp8-uncorrected": (_ROLLOUT, _OFF),
    "bf16-nvfp4": (_FOUR_BITS, None),
    "fp8-fp8": (_FP8, None),
    "fp8-fp8-uncorrected": (_FP8, _OFF),
}
BASELINE = "bf16-bf16"
PARTS = ("rollout", "push", "log_probs", "train")
ERRORS = ("token_mult_prob_error", "gen_kl_error")
# The settings that a record tells; all others are the defaults of GrpoSettings.
_TOLD = ("steps", "problems", "answers", "digits", "base_steps", "validation", "validate_every", "one_step_off")


@dataclass(frozen=True)
class RlRun:
    """One variant with one seed."""

    variant: str
    seed: int
    rows: list[dict[str, Any]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of training steps, without the last row, which only validates the final weights."""
        return [row for row in self.rows if "loss" in row]

    def accuracies(self) -> list[tuple[int, float]]:
        """Return (step, validation accuracy) for every step that was validated."""
        return [(row["step"], row["validation_accuracy"]) for row in self.rows if "validation_accuracy" in row]

    def mean_of(self, name: str) -> float:
        """Return the mean of a mismatch metric over all steps."""
        return float(mean(row["mismatch"][name] for row in self.steps))

    def largest(self, name: str) -> float:
        """Return the largest value of a mismatch metric over all steps."""
        return float(max(row["mismatch"][name] for row in self.steps))

    @property
    def gate_fired(self) -> int:
        """The number of steps in which the gate fired."""
        return sum(bool(row.get("gate", {}).get("fired")) for row in self.steps)

    def last(self, name: str) -> float:
        """Return the mean over the last tenth of the steps."""
        return float(mean(row[name] for row in self.steps[-max(1, len(self.steps) // 10) :]))

    def seconds(self, part: str) -> float:
        """Return the median time of a part of a step, without the first step, which warms up."""
        return float(median(row["seconds"].get(part, 0.0) for row in self.steps[1:] or self.steps))


@dataclass(frozen=True)
class RlComparison:
    """All runs, seed by seed."""

    settings: GrpoSettings
    runs: list[RlRun]

    @property
    def variants(self) -> list[str]:
        """List the variants, each once, in order."""
        return list(dict.fromkeys(run.variant for run in self.runs))

    def of(self, variant: str) -> list[RlRun]:
        """Return the runs of a variant, one for each seed."""
        return [run for run in self.runs if run.variant == variant]

    def summary(self, variant: str) -> dict[str, Any]:
        """Return a variant's numbers, means over the seeds; times are those of this machine."""
        runs = self.of(variant)
        base = self.of(BASELINE)
        final = mean(run.accuracies()[-1][1] for run in runs)
        return {
            "variant": variant,
            "seeds": [run.seed for run in runs],
            "base_accuracy": mean(run.accuracies()[0][1] for run in runs),
            "final_accuracy": final,
            "points_to_baseline": 100 * (final - mean(run.accuracies()[-1][1] for run in base)) if base else None,
            "reward": mean(run.last("reward") for run in runs),
            "kl": mean(run.last("kl") for run in runs),
            **{name: mean(run.mean_of(name) for run in runs) for name in ERRORS},
            "gate_fired": sum(run.gate_fired for run in runs),
            "seconds": {part: mean(run.seconds(part) for run in runs) for part in PARTS},
        }

    def record(self) -> dict[str, Any]:
        """Return what figures and pages are made of: accuracies, mismatch and gate by arm and seed, and the machine.

        ``validation_accuracy`` is arm -> seed -> step -> share of the held-out problems; keys are strings, as JSON has
        them.
        """
        s = self.settings
        by_arm: dict[str, dict[str, Any]] = {"validation_accuracy": {}, "mismatch": {}, "gate_fired": {}}
        for run in self.runs:
            mismatch = {name: {"mean": run.mean_of(name), "largest": run.largest(name)} for name in ERRORS}
            found = {
                "validation_accuracy": {str(step): accuracy for step, accuracy in run.accuracies()},
                "mismatch": mismatch,
                "gate_fired": run.gate_fired,
            }
            for what, value in found.items():
                by_arm[what].setdefault(run.variant, {})[str(run.seed)] = value
        return {
            "about": {
                "date": datetime.date.today().isoformat(),
                "machine": f"{os.cpu_count()} processors, {platform.machine()}",
                "versions": f"nemo_fp8 {__version__}, Python {platform.python_version()}",
            },
            "settings": {name: getattr(s, name) for name in _TOLD},
            **by_arm,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all runs as plain values, for JSON."""
        return {
            "settings": self.settings.to_dict(),
            "summary": [self.summary(variant) for variant in self.variants],
            "runs": [vars(run) for run in self.runs],
        }


def run_rl_comparison(
    template: GrpoSettings,
    *,
    seeds: Sequence[int],
    variants: Sequence[str] = tuple(VARIANTS),
    rollout_python: str | None = None,
    address: str | None = None,
    on_run: Callable[[str, int], OnStep] | None = None,
) -> RlComparison:
    """Run every variant with every seed in folders below the template's, and return the comparison.

    ``on_run`` is called before each run and returns its ``on_step``. Raises PrecisionError if a variant is unknown.
    """
    if wrong := [unknown("variant", name, VARIANTS) for name in variants if name not in VARIANTS]:
        raise PrecisionError(wrong)
    runs = []
    with ray_session(template.ranks + template.engines + 1, address):
        for seed in seeds:  # seed by seed, so that a slow phase of the machine affects all variants
            for variant in variants:
                s = settings_of(template, variant, seed)
                rows = run_grpo(s, rollout_python=rollout_python, on_step=on_run(variant, seed) if on_run else None)
                runs.append(RlRun(variant, seed, rows))
    return RlComparison(template, runs)


def settings_of(template: GrpoSettings, variant: str, seed: int) -> GrpoSettings:
    """Return the settings of one run; variants differ in the contract and the correction only."""
    precision, loss_fn = VARIANTS[variant]
    here = Path(template.folder, f"seed-{seed}")
    return replace(
        template, folder=str(here / variant), base=str(here / "base"), seed=seed, precision=precision, loss_fn=loss_fn
    )
