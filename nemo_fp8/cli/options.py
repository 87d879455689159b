"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from nemo_fp8.errors import PrecisionError

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Name = Annotated[str, typer.Argument(help="A preset (see `nemo-fp8 list`) or a YAML file.", show_default=False)]
For = Annotated[
    str | None, typer.Option("--for", metavar="WORDS", help="Another machine, such as h200,cuda12.8,te2.9.")
]
ModelConfig = Annotated[
    str | None, typer.Option("--model", help="A Hugging Face config.json, or the folder that holds it.")
]
Layout = Annotated[
    str | None, typer.Option("--parallel", metavar="WORDS", help="How ranks split it, such as tp4,pp2,dp8,sp,seq4096.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the contract; may be repeated."),
]
VllmPython = Annotated[
    Path | None,
    typer.Option("--vllm-python", metavar="PATH", help="The Python that has vLLM.", show_default=".venv-rollout"),
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots.")]


def require_report(html: Path) -> None:
    """Raise PrecisionError now if a report could not be drawn or written after the work that it is about."""
    from nemo_fp8.report.figures import require_matplotlib

    require_matplotlib()
    if not html.parent.is_dir() or html.is_dir():
        raise PrecisionError(
            f"Cannot write {html}.", "Its folder does not exist, or it is a folder itself.", "Give another path."
        )
    if not os.access(html if html.exists() else html.parent, os.W_OK):
        raise PrecisionError(
            f"Cannot write {html}.", "You may not write there.", "Give a path in a folder that you may write to."
        )


def seeds_of(text: str) -> list[int]:
    """Return the numbers of ``1,2,3``; raise PrecisionError for anything else."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError as error:
        raise PrecisionError(f"--seeds {text!r} is no list of numbers.", f"{error}.", "Write --seeds 1,2,3.") from error
