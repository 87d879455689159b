"""Commands on machines and models: doctor, lint, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_fp8.cli.options import Changes, For, Json, Layout, ModelConfig, Name, VllmPython
from nemo_fp8.cli.printing import print_answers, print_findings, print_json, print_pairs, print_table
from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import load, settings_of

if TYPE_CHECKING:
    from nemo_fp8.preflight.shapes import AuditRow


def doctor(
    described: For = None,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Ask for one precision; exit code 1 if the machine cannot.")
    ] = None,
    as_json: Json = False,
    python: VllmPython = None,
) -> None:
    """Say what this machine, or a described one, makes of every FP8 and NVFP4 recipe, why, and what to do."""
    import os

    from nemo_fp8.preflight.answers import Answer
    from nemo_fp8.preflight.doctor import doctor, sanity
    from nemo_fp8.preflight.engine import recipes_of, resume_findings
    from nemo_fp8.preflight.lint import bridge_findings, first_weight_findings
    from nemo_fp8.preflight.machine import Machine
    from nemo_fp8.preflight.support import EMULATED, NATIVE, RECIPES

    machine = Machine.parse(described) if described is not None else Machine.here(python)
    precision = load(name) if name else None
    wanted = recipes_of(precision) if precision else list(RECIPES)
    answers = [found for found in doctor(machine) if found.recipe in wanted]
    if precision and not wanted:
        reason = (
            f"Training and rollout compute in {precision.compute.upper()}, and the KV cache has no FP8: there is no "
            "recipe to ask for."
        )
        answers = [Answer(precision.name, "none", NATIVE, reason, "")]
    findings = sanity(machine, None if described is not None else os.environ)
    if precision:
        findings += (*bridge_findings(precision, machine), *first_weight_findings(precision))
        if described is None:
            findings += resume_findings(precision, os.environ)
    if as_json:
        print_json(
            {
                "machine": machine.to_dict(),
                "recipes": [vars(a) for a in answers],
                "findings": [f.to_dict() for f in findings],
            }
        )
    else:
        print_pairs(machine.facts())
        alike: dict[tuple[str, str, str], list[str]] = {}
        for a in answers:
            alike.setdefault((a.verdict, a.reason, a.remedy), []).append(RECIPES.get(a.recipe, a.recipe))
        print_answers((", ".join(recipes), *texts) for texts, recipes in alike.items())
        print_findings(findings)
    wrong = any(a.verdict not in (NATIVE, EMULATED) for a in answers) if name else False
    raise typer.Exit(1 if wrong or any(f.severity == "error" for f in findings) else 0)


def lint(
    name: Name,
    model: ModelConfig = None,
    parallel: Layout = None,
    described: For = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Find ignored settings, layers that stay in BF16 unasked, and traps; exit code 1 if there is an error."""
    import os

    from nemo_fp8.findings import worst
    from nemo_fp8.models.layout import Parallel
    from nemo_fp8.models.shapes import Model
    from nemo_fp8.preflight.lint import lint
    from nemo_fp8.preflight.machine import Machine
    from nemo_fp8.preflight.shapes import audit

    settings = settings_of(name, changes)
    shapes, layout = Model.read(model) if model else None, Parallel.of(parallel)
    machine = Machine.parse(described) if described is not None else None
    findings = lint(settings, model=shapes, parallel=layout, machine=machine, environment=os.environ)
    wrong = worst(findings) == "error"
    rows = (
        audit(shapes, Precision.from_dict(settings), layout)
        if shapes and not any(f.code.startswith("contract") for f in findings)
        else []
    )
    if as_json:
        print_json({"findings": [f.to_dict() for f in findings], "layers": [row.to_dict() for row in rows]})
    else:
        print_findings(findings)
        if not findings:
            print_pairs([("ok", "Nothing to say against it.")])
        if rows:
            print_table(("linear, per rank", "shape", "count", "train", "rollout"), [audit_line(row) for row in rows])
            print_pairs(
                [
                    (row.name, reason)
                    for row in rows
                    for reason in dict.fromkeys((row.reason, row.rollout_reason))
                    if reason
                ]
            )
    raise typer.Exit(1 if wrong else 0)


def memory(
    name: Name,
    model: Annotated[
        str,
        typer.Option("--model", help="A Hugging Face config.json, or the folder that holds it.", show_default=False),
    ],
    parallel: Layout = None,
    described: For = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Estimate a training run's memory per GPU, item by item, and what FP8 primary weights save or do not."""
    from nemo_fp8.models.layout import Parallel
    from nemo_fp8.models.shapes import Model
    from nemo_fp8.preflight.machine import Machine
    from nemo_fp8.preflight.memory import alternatives, savings

    asked = (
        Model.read(model),
        load(name, changes),
        Parallel.of(parallel),
        Machine.parse(described) if described is not None else None,
    )
    estimates = alternatives(*asked)
    if as_json:
        return print_json({"estimates": [e.to_dict() for e in estimates], "says": savings(*asked)})
    items = dict.fromkeys(item.name for e in estimates for item in e.items)
    by_name = [{item.name: item.bytes for item in e.items} for e in estimates]
    rows = [(item, *(gib(found.get(item, 0)) for found in by_name)) for item in items]
    rows += [("total", *(gib(e.total) for e in estimates)), ("gathered each step", *(gib(e.gather) for e in estimates))]
    print_table(("GiB on the fullest GPU", *(e.precision for e in estimates)), rows)
    notes = dict.fromkeys(sentence for e in estimates for sentence in e.assumptions)
    saved = savings(*asked)
    return print_pairs([*([("so", saved)] if saved else ()), *(("given", sentence) for sentence in notes)])


def audit_line(row: AuditRow) -> tuple[Any, ...]:
    """Return the cells of one row of ``nemo-fp8 lint``'s table."""
    return (row.name, f"{row.rows} x {row.columns}", row.count, row.train, row.rollout)


def gib(count: int) -> str:
    """Return a number of bytes in GiB, for a table; a dash for none."""
    return f"{count / 2**30:.2f}" if count else "-"
