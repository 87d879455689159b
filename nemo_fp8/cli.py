"""``nemo-fp8``: the command line. Thin: parse, call, print.

Every command takes ``--json``. Exit codes: 0 yes or done, 1 the answer is no (contracts differ, a machine cannot,
an error was found), 2 the question was wrong. Heavy modules are imported inside the command that needs them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.terminal import print_answers, print_findings, print_json, print_notes, print_pairs, print_problems, print_table

app = typer.Typer(
    help="One FP8 precision contract for NeMo / Megatron training and vLLM rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Name = Annotated[str, typer.Argument(help="A preset (see `nemo-fp8 list`) or a YAML file.", show_default=False)]
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the contract; may be repeated.")]


def main() -> None:
    """Run the command line; a PrecisionError becomes what, why and remedy on stderr, and exit code 2."""
    try:
        app()
    except PrecisionError as error:
        if "--json" in sys.argv:
            print_json({"error": [vars(p) for p in error.problems]})
        else:
            print_problems(error.problems)
        sys.exit(2)


# ---------------------------------------------------------------------- commands on contracts


@app.command("list")
def list_presets(as_json: Json = False) -> None:
    """List the presets and what each one sets."""
    from nemo_fp8.presets import PRESETS

    if as_json:
        return print_json({name: p.to_dict() for name, p in PRESETS.items()})
    rows = [
        (name, p.format, p.scaling, p.fp8_param or None, f"{p.first_layers}+{p.last_layers}" if p.is_fp8 else None)
        for name, p in PRESETS.items()
    ]
    return print_table(
        ("preset", "FP8", "scaling", "param", "kept"),
        rows,
        "param: FP8 primary weights. kept: decoder layers at start + end that stay in the compute dtype.",
    )


@app.command()
def explain(name: Name, changes: Changes = None, as_json: Json = False) -> None:
    """Say in plain words what a precision stores, and with which scales."""
    from nemo_fp8.explain import explain_rows

    rows = explain_rows(load(name, changes))
    if as_json:
        return print_json([{"about": heading, "says": sentence} for heading, sentence in rows])
    return print_pairs(rows)


@app.command()
def diff(a: Name, b: Name, as_json: Json = False) -> None:
    """Show in which fields two precisions differ; exit code 1 if they do."""
    first, second = load(a), load(b)
    fields = first.diff(second)
    if as_json:
        print_json({name: {"a": mine, "b": theirs} for name, (mine, theirs) in fields.items()})
    elif fields:
        print_table(("field", first.name, second.name), [(name, mine, theirs) for name, (mine, theirs) in fields.items()])
    else:
        print_pairs([("same", f"{first.name} and {second.name} are the same precision.")])
    raise typer.Exit(1 if fields else 0)


@app.command()
def render(
    name: Name,
    to: Annotated[str, typer.Option("--to", help="nemo, bridge, megatron, te, nemo-rl, vllm or env.", show_default=False)],
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Write a precision in another program's words, to paste there."""
    from nemo_fp8.render import render

    rendering = render(load(name, changes), to)
    if as_json:
        return print_json({"to": rendering.to, "settings": rendering.data, "notes": rendering.notes, "lost": rendering.lost})
    sys.stdout.write(rendering.text.rstrip() + "\n")
    # What this side cannot say goes to stderr, so that the text can be piped into a file.
    return print_notes(rendering.notes)


# ---------------------------------------------------------------------- commands on machines and models


@app.command()
def doctor(
    described: Annotated[str | None, typer.Option("--for", metavar="WORDS", help="Another machine: h200,cuda12.8,te2.9.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Ask for one precision; exit code 1 if the machine cannot.")] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine, or a described one, makes of every FP8 recipe, why, and what to do."""
    import os

    from nemo_fp8.doctor import doctor, recipes_of, sanity
    from nemo_fp8.machine import Machine
    from nemo_fp8.support import EMULATED, NATIVE, RECIPES

    machine = Machine.parse(described) if described else Machine.here()
    wanted = recipes_of(load(name)) if name else list(RECIPES)
    answers = [found for found in doctor(machine) if found.recipe in wanted]
    findings = sanity(machine, None if described else os.environ)
    if as_json:
        print_json({"machine": machine.to_dict(), "recipes": [vars(a) for a in answers], "findings": [f.to_dict() for f in findings]})
    else:
        print_pairs(machine.facts())
        alike: dict[tuple[str, str, str], list[str]] = {}
        for a in answers:
            alike.setdefault((a.verdict, a.reason, a.remedy), []).append(RECIPES[a.recipe])
        print_answers((", ".join(recipes), *texts) for texts, recipes in alike.items())
        print_findings(findings)
    wrong = any(a.verdict not in (NATIVE, EMULATED) for a in answers) if name else False
    raise typer.Exit(1 if wrong or any(f.severity == "error" for f in findings) else 0)


# ---------------------------------------------------------------------- reading and printing


def load(name: str, changes: list[str] | None = None) -> Precision:
    """The contract of a preset's name or of a YAML file, with ``field=value`` changes applied."""
    import yaml

    from nemo_fp8.presets import preset

    path = Path(name)
    is_file = path.suffix in (".yaml", ".yml")
    if is_file and not path.is_file():
        raise PrecisionError(f"There is no file {name}.", "A name that ends in .yaml is read as a file.", "Check the path.")
    p = Precision.from_yaml(path.read_text()) if is_file else preset(name)
    pairs = [change.partition("=") for change in changes or []]
    for field, equals, _ in pairs:
        if not equals:
            raise PrecisionError(f"--set {field} has no value.", "A change is a field and its new value.", f"Write --set {field}=VALUE.")
    return p.replace(**{field: yaml.safe_load(value) for field, _, value in pairs}) if pairs else p


if __name__ == "__main__":
    main()
