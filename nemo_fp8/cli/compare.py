"""``nemo-fp8 compare``. Heavy modules are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_fp8.cli.options import Html, Json, require_report, seeds_of
from nemo_fp8.cli.printing import print_json, print_notes, print_table
from nemo_fp8.cli.progress import run_bars
from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import load

if TYPE_CHECKING:
    from nemo_fp8.report.compare import Comparison, OnStep

DEFAULT = (
    "bf16_mixed,bf16_with_fp8_mixed,bf16_with_fp8_current_scaling_mixed,"
    "bf16_with_fp8_blockwise_mixed,bf16_with_mxfp8_mixed"
)


def compare(
    recipe: Annotated[
        str, typer.Option(help="tiny_llama, another of nemo_fp8.recipes, or package.module.function.")
    ] = "tiny_llama",
    precisions: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Presets or YAML files, by commas; the first without FP8 is the baseline.",
            show_default="BF16, and FP8 under each scaling",
        ),
    ] = DEFAULT,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 300,
    seeds: Annotated[
        str, typer.Option(metavar="LIST", help="Seeds, separated by commas: of weights and of data.")
    ] = "1234",
    ranks: Annotated[int, typer.Option(min=1, help="Processes of each run.")] = 2,
    stack: Annotated[
        str,
        typer.Option(help="nemo or bridge: what trains, here or in the environment beside this one."),
    ] = "nemo",
    monitor: Annotated[
        int, typer.Option(metavar="N", min=0, help="Measure FP8 in every layer each N steps; 0 never.")
    ] = 50,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the last checkpoint of each run there.")
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Train a recipe under several precisions from the same seed and data, and compare loss, step time and memory."""
    contracts = [load(name.strip()) for name in precisions.split(",")]
    numbers = seeds_of(seeds)
    if html is not None:  # fail before minutes of training, not after
        require_report(html)
    from nemo_fp8.report.compare import run_comparison

    with run_bars(len(contracts) * len(numbers), steps) as start:

        def on_run(precision: Precision, seed: int) -> OnStep:
            told = start(f"{precision.name}, seed {seed}")
            return lambda step, loss: told(step, f"loss {loss:.3f}")

        comparison = run_comparison(
            recipe,
            contracts,
            steps=steps,
            seeds=numbers,
            ranks=ranks,
            stack=stack,
            every=monitor,
            keep=keep,
            on_run=on_run,
        )
    if as_json:
        print_json(comparison.to_dict())
    else:
        _print(comparison)
    if html is not None:
        from nemo_fp8.report.compare_page import comparison_page

        print_notes([f"The report is in {comparison_page(comparison).write(html)}."])


def _print(comparison: Comparison) -> None:
    rows = []
    for precision in comparison.precisions:
        s = comparison.summary(precision)
        gaps = list(s["gap_percent_by_seed"].values())
        spread = f"{min(gaps):+.2f} {max(gaps):+.2f}" if len(gaps) > 1 else None
        gap = None if s["gap_percent"] is None else f"{s['gap_percent']:+.2f}"
        ratio = None if s["step_ratio"] is None else f"{s['step_ratio']:.2f}"
        rows.append(
            (
                precision.name,
                f"{s['loss']:.4f}",
                gap,
                spread,
                f"{1000 * s['step_seconds']:.0f}",
                ratio,
                f"{s['memory_bytes'] / 2**20:.0f}",
            )
        )
    seeds = len({run.seed for run in comparison.runs})
    what = f"{comparison.recipe}, {comparison.steps} steps, {seeds} seed{'s' if seeds > 1 else ''}."
    caption = f"{what} Loss: mean of the last tenth. Gap to BF16 in %, and its extremes over seeds."
    print_table(("precision", "loss", "gap", "extremes", "ms", "x BF16", "MiB"), rows, caption)
