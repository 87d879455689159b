"""``nemo-fp8 run``: run a command in which TransformerEngine works on a CPU."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from nemo_fp8.cli.options import Json
from nemo_fp8.cli.printing import print_json, print_notes

# Options after the first word of the command belong to the command.
COMMANDS_WORDS = {"allow_interspersed_args": False}


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="After --, such as torchrun train.py.", show_default=False)
    ],
    arch: Annotated[
        int | None,
        typer.Option("--arch", metavar="NUMBER", help="What the CPU stands for: 100 (Blackwell) or 90 (Hopper)."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a command in which TransformerEngine works without a GPU.

    Wherever a Python process of the command imports TransformerEngine, this package stands beneath it. An installed
    package does that in every process by itself; this is for a checkout, or another folder, on PYTHONPATH. Where there
    is a GPU the command runs as it is.
    """
    from nemo_fp8.te_cpu import launch

    nothing = launch.nothing_to_do(arch, os.environ)
    variables = {} if nothing else launch.variables_for(arch, os.environ)
    if as_json:
        print_json({"command": command, "environment": variables, "note": nothing})
    elif dry_run:
        said = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        sys.stdout.write(" ".join([*said, *map(shlex.quote, command)]) + "\n")
    if nothing and not as_json:
        print_notes([nothing])
    if not dry_run:
        raise typer.Exit(launch.run(command, variables))
