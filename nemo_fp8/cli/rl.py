"""``nemo-fp8 rl-compare``. Heavy modules are imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_fp8.cli.options import Html, Json, require_report, seeds_of
from nemo_fp8.cli.printing import print_json, print_notes, print_table
from nemo_fp8.cli.progress import run_bars
from nemo_fp8.lifetime import watched

if TYPE_CHECKING:
    from nemo_fp8.experiments.rl.compare import RlComparison
    from nemo_fp8.experiments.rl.driver import OnStep


def rl_compare(
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where runs lie; those that are there go on.")] = Path(
        "rl-compare"
    ),
    seeds: Annotated[str, typer.Option(metavar="LIST", help="Seeds, separated by commas.")] = "1,2,3",
    steps: Annotated[int, typer.Option(min=2, help="GRPO steps of each run.")] = 80,
    variants: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Some, by commas, of bf16-bf16, bf16-fp8, bf16-nvfp4 and fp8-fp8, and of those in FP8 with "
            "-uncorrected behind; all where not given.",
        ),
    ] = "",
    one_step_off: Annotated[
        bool, typer.Option("--one-step-off", help="Sample the next step's answers while a step trains.")
    ] = False,
    delta: Annotated[
        bool, typer.Option("--delta", help="Push what changed since the step before, instead of all weights.")
    ] = False,
    rollout_python: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The Python that has vLLM; that of .venv-rollout where not given."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A running Ray cluster; one of its own where not given.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write accuracy and mismatch of every arm and seed as JSON."),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Train by GRPO in BF16 or FP8, rolled out in BF16, FP8 or NVFP4: reward, accuracy, KL, mismatch, time of steps."""
    from nemo_fp8.experiments.rl.compare import VARIANTS, run_rl_comparison
    from nemo_fp8.experiments.rl.settings import GrpoSettings

    numbers = seeds_of(seeds)
    names = [name.strip() for name in variants.split(",")] if variants else list(VARIANTS)
    if html is not None:  # fail before minutes of training, not after
        require_report(html)
    # A checkpoint every 5 steps: repeating a few steps after a kill costs less than a checkpoint at each step.
    template = GrpoSettings(
        folder=str(folder.absolute()), base="", steps=steps, save_every=5, one_step_off=one_step_off, delta=delta
    )
    with watched(), run_bars(len(names) * len(numbers), steps) as start:

        def on_run(variant: str, seed: int) -> OnStep:
            told = start(f"{variant}, seed {seed}")
            return lambda row: told(row["step"], f"reward {row['reward']:.2f}" if "reward" in row else "done")

        comparison = run_rl_comparison(
            template, seeds=numbers, variants=names, rollout_python=rollout_python, address=address, on_run=on_run
        )
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(comparison.record(), indent=1) + "\n")
    if as_json:
        print_json(comparison.to_dict())
    else:
        _print(comparison)
    if html is not None:
        from nemo_fp8.report.rl_page import rl_page

        print_notes([f"The report is in {rl_page(comparison).write(html)}."])


def _print(comparison: RlComparison) -> None:
    rows = []
    for variant in comparison.variants:
        s = comparison.summary(variant)
        points = None if s["points_to_baseline"] is None else f"{s['points_to_baseline']:+.1f}"
        accuracy = f"{100 * s['base_accuracy']:.1f}", f"{100 * s['final_accuracy']:.1f}"
        errors = f"{s['token_mult_prob_error']:.4f}", f"{s['gen_kl_error']:.1e}"
        rows.append((variant, *accuracy, points, f"{s['kl']:.3f}", *errors, f"{sum(s['seconds'].values()):.1f}"))
    seeds = len({run.seed for run in comparison.runs})
    caption = (
        f"{comparison.settings.steps} steps, {seeds} seed{'s' if seeds > 1 else ''}. Accuracy on held-out problems in "
        "%, of the base model "
        "and at the end; points to bf16-bf16. Prob error and gen KL: NeMo RL's token_mult_prob_error and "
        "gen_kl_error, mean over steps."
    )
    print_table(("training-rollout", "base", "end", "points", "KL", "prob error", "gen KL", "s/step"), rows, caption)
