"""``nemo-fp8``: the command line. Thin: parse, call, print.

Every command takes ``--json``. Exit codes: 0 yes or done, 1 the answer is no (contracts differ, a machine cannot,
an error was found), 2 the question was wrong. Heavy modules are imported inside the command that needs them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.report.command import inspect
from nemo_fp8.report.compare import compare
from nemo_fp8.terminal import print_answers, print_findings, print_json, print_notes, print_pairs, print_problems, print_table

if TYPE_CHECKING:
    from nemo_fp8.shape_audit import AuditRow

app = typer.Typer(
    help="One FP8 precision contract for NeMo / Megatron training and vLLM rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Name = Annotated[str, typer.Argument(help="A preset (see `nemo-fp8 list`) or a YAML file.", show_default=False)]
For = Annotated[str | None, typer.Option("--for", metavar="WORDS", help="Another machine, such as h200,cuda12.8,te2.9.")]
ModelConfig = Annotated[str | None, typer.Option("--model", help="A Hugging Face config.json, or the folder that holds it.")]
Layout = Annotated[str | None, typer.Option("--parallel", metavar="WORDS", help="How ranks split it, such as tp4,pp2,dp8,sp,seq4096.")]
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the contract; may be repeated.")]


def main() -> None:
    """Run the command line; a PrecisionError becomes what, why and remedy on stderr, and exit code 2."""
    # What torch says of NVIDIA's packages while it is imported is no business of somebody who asked about a checkpoint.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
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


# ---------------------------------------------------------------------- commands on checkpoints and runs

app.command()(inspect)
app.command()(compare)

# ---------------------------------------------------------------------- commands on machines and models


@app.command()
def doctor(
    described: For = None,
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


@app.command()
def lint(
    name: Name,
    model: ModelConfig = None,
    parallel: Layout = None,
    described: For = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Find ignored settings, layers that will not run in FP8, and traps; exit code 1 if there is an error."""
    import os

    from nemo_fp8.findings import worst
    from nemo_fp8.lint import lint
    from nemo_fp8.machine import Machine
    from nemo_fp8.model_shapes import Model
    from nemo_fp8.parallel import Parallel
    from nemo_fp8.shape_audit import audit

    settings = settings_of(name, changes)
    shapes, layout = Model.read(model) if model else None, Parallel.of(parallel)
    machine = Machine.parse(described) if described else None
    findings = lint(settings, model=shapes, parallel=layout, machine=machine, environment=os.environ)
    wrong = worst(findings) == "error"
    rows = audit(shapes, Precision.from_dict(settings), layout) if shapes and not any(f.code == "contract" for f in findings) else []
    if as_json:
        print_json({"findings": [f.to_dict() for f in findings], "layers": [row.to_dict() for row in rows]})
    else:
        print_findings(findings)
        if not findings:
            print_pairs([("ok", "Nothing to say against it.")])
        if rows:
            print_table(("linear, per rank", "shape", "count", "train", "rollout"), [audit_line(row) for row in rows])
            print_pairs([(row.name, reason) for row in rows for reason in dict.fromkeys((row.reason, row.rollout_reason)) if reason])
    raise typer.Exit(1 if wrong else 0)


@app.command()
def memory(
    name: Name,
    model: Annotated[str, typer.Option("--model", help="A Hugging Face config.json, or the folder that holds it.", show_default=False)],
    parallel: Layout = None,
    described: For = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Estimate a training run's memory per GPU, item by item, and what FP8 primary weights save or do not."""
    from nemo_fp8.machine import Machine
    from nemo_fp8.memory import alternatives, savings
    from nemo_fp8.model_shapes import Model
    from nemo_fp8.parallel import Parallel

    asked = (Model.read(model), load(name, changes), Parallel.of(parallel), Machine.parse(described) if described else None)
    estimates = alternatives(*asked)
    if as_json:
        return print_json({"estimates": [e.to_dict() for e in estimates], "says": savings(*asked)})
    items = dict.fromkeys(item.name for e in estimates for item in e.items)
    by_name = [{item.name: item.bytes for item in e.items} for e in estimates]
    rows = [(item, *(gib(found.get(item, 0)) for found in by_name)) for item in items]
    rows += [("total", *(gib(e.total) for e in estimates)), ("gathered each step", *(gib(e.gather) for e in estimates))]
    print_table(("GiB on the fullest GPU", *(e.precision for e in estimates)), rows)
    notes = dict.fromkeys(sentence for e in estimates for sentence in e.assumptions)
    return print_pairs([("so", savings(*asked)), *(("given", sentence) for sentence in notes)])


@app.command()
def check(
    train: Name,
    rollout: Annotated[str | None, typer.Argument(help="The rollout's precision; leave out with --nemo-rl.", show_default=False)] = None,
    nemo_rl: Annotated[bool, typer.Option("--nemo-rl", help="Read both sides from a NeMo RL YAML.")] = False,
    as_json: Json = False,
) -> None:
    """Prove that training and rollout hold the same weights, or say what differs; exit code 1 if something does."""
    from nemo_fp8.agreement import check
    from nemo_fp8.render.nemo_rl import ignored_by_nemo_rl, read_nemo_rl

    notes = []
    if nemo_rl:
        text = read_text(train)
        trained, rolled = read_nemo_rl(text)
        notes = [f"{p.what} {p.why} {p.remedy}" for p in ignored_by_nemo_rl(text)]
    else:
        trained = load(train)
        rolled = load(rollout) if rollout else trained
    agreement = check(train=trained, rollout=rolled)
    if as_json:
        print_json(agreement.to_dict() | {"notes": notes})
    else:
        print_pairs([("agrees" if agreement.agrees else "differs", str(agreement).partition("\n")[0])])
        print_answers((f.problem.what, f.severity, f.problem.why, f.problem.remedy) for f in agreement.findings)
        print_notes(notes)
    raise typer.Exit(0 if agreement.agrees else 1)


# ---------------------------------------------------------------------- reading and printing


def load(name: str, changes: list[str] | None = None) -> Precision:
    """The contract of a preset's name or of a YAML file, with ``field=value`` changes applied."""
    from nemo_fp8.presets import preset

    p = Precision.from_yaml(read_text(name)) if is_file(name) else preset(name)
    changed = changes_of(changes)
    return p.replace(**changed) if changed else p


def settings_of(name: str, changes: list[str] | None = None) -> dict[str, Any]:
    """The same as plain settings, which need not make a contract: lint says why they do not."""
    from nemo_fp8.plain_yaml import load_mapping

    if is_file(name):
        return load_mapping(read_text(name), "a precision contract") | changes_of(changes)
    try:
        return load(name, changes).to_dict()
    except PrecisionError:
        return load(name).to_dict() | changes_of(changes)


def changes_of(changes: list[str] | None) -> dict[str, Any]:
    """``field=value`` words as settings, each value read as YAML."""
    import yaml

    pairs = [change.partition("=") for change in changes or []]
    for field, equals, _ in pairs:
        if not equals:
            raise PrecisionError(f"--set {field} has no value.", "A change is a field and its new value.", f"Write --set {field}=VALUE.")
    return {field: yaml.safe_load(value) for field, _, value in pairs}


def is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def read_text(name: str) -> str:
    if not Path(name).is_file():
        raise PrecisionError(f"There is no file {name}.", "A name that ends in .yaml is read as a file.", "Check the path.")
    return Path(name).read_text()


def audit_line(row: AuditRow) -> tuple[Any, ...]:
    return (row.name, f"{row.rows} x {row.columns}", row.count, row.train, row.rollout)


def gib(count: int) -> str:
    return f"{count / 2**30:.2f}" if count else "-"


if __name__ == "__main__":
    main()
