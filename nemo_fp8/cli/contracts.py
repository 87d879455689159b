"""Commands on contracts: list, explain, diff, render, check."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nemo_fp8.cli.options import Changes, Json, ModelConfig, Name
from nemo_fp8.cli.printing import print_findings, print_json, print_notes, print_pairs, print_table
from nemo_fp8.contract.naming import load


def list_presets(as_json: Json = False) -> None:
    """List the presets and what each one sets."""
    from nemo_fp8.contract.presets import PRESETS

    if as_json:
        return print_json({name: p.to_dict() for name, p in PRESETS.items()})
    rows = [
        (
            name,
            p.format,
            p.scaling,
            p.fp8_param or None,
            f"{p.first_layers}+{p.last_layers}" if p.is_quantized else None,
        )
        for name, p in PRESETS.items()
    ]
    return print_table(
        ("preset", "format", "scaling", "param", "kept"),
        rows,
        "param: FP8 primary weights. kept: decoder layers at start + end that stay in the compute dtype.",
    )


def explain(name: Name, changes: Changes = None, as_json: Json = False) -> None:
    """Say in plain words what a precision stores, and with which scales."""
    from nemo_fp8.contract.explain import explain_rows

    rows = explain_rows(load(name, changes))
    if as_json:
        return print_json([{"about": heading, "says": sentence} for heading, sentence in rows])
    return print_pairs(rows)


def diff(a: Name, b: Name, as_json: Json = False) -> None:
    """Show in which fields two precisions differ; exit code 1 if they do."""
    first, second = load(a), load(b)
    fields = first.diff(second)
    if as_json:
        print_json({name: {"a": mine, "b": theirs} for name, (mine, theirs) in fields.items()})
    elif fields:
        print_table(
            ("field", first.name, second.name), [(name, mine, theirs) for name, (mine, theirs) in fields.items()]
        )
    else:
        print_pairs([("same", f"{first.name} and {second.name} are the same precision.")])
    raise typer.Exit(1 if fields else 0)


def render(
    name: Name,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="nemo, bridge, megatron, te, nemo-rl, vllm, env, te-precision, modelopt, verl, skyrl, slime or trl.",
            show_default=False,
        ),
    ],
    changes: Changes = None,
    layers: Annotated[
        int | None, typer.Option(help="The model's decoder layers, for nemo-rl's NVFP4.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face config.json, or the folder that holds it, for modelopt's lists of modules.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a precision in another program's words, to paste there."""
    from nemo_fp8.render import render

    rendering = render(load(name, changes), to, layers, model)
    if as_json:
        return print_json(
            {"to": rendering.to, "settings": rendering.data, "notes": rendering.notes, "lost": rendering.lost}
        )
    sys.stdout.write(rendering.text.rstrip() + "\n")
    # Notes on what the other program cannot express go to stderr, so that the text can be piped into a file.
    return print_notes(rendering.notes)


def check(
    train: Name,
    rollout: Annotated[
        str | None, typer.Argument(help="The rollout's precision; leave out with --nemo-rl.", show_default=False)
    ] = None,
    nemo_rl: Annotated[bool, typer.Option("--nemo-rl", help="Read both sides from a NeMo RL YAML.")] = False,
    model: ModelConfig = None,
    as_json: Json = False,
) -> None:
    """Prove that training and rollout multiply with the same values, or say what differs; exit code 1 if it does."""
    from nemo_fp8.preflight.agreement import check

    notes: list[str] = []
    if nemo_rl:
        from nemo_fp8.render.nemo_rl import beside_the_contract, check_nemo_rl, ignored_by_nemo_rl
        from nemo_fp8.render.nemo_rl_file import read_document

        compared = check_nemo_rl(Path(train), model)
        document = read_document(Path(train))
        beside = (*ignored_by_nemo_rl(document), *beside_the_contract(document))
        notes = [f"{p.what} {p.why} {p.remedy}" for p in beside]
        if compared is None:
            if as_json:
                return print_json({"agrees": None, "findings": [], "notes": notes})
            print_pairs([("not compared", "The rollout's settings are not read; the notes say why.")])
            return print_notes(notes)
        agreement = compared
    else:
        trained = load(train)
        agreement = check(train=trained, rollout=load(rollout) if rollout else trained, model=model)
    if as_json:
        print_json(agreement.to_dict() | {"notes": notes})
    else:
        print_pairs([("agrees" if agreement.agrees else "differs", str(agreement).partition("\n")[0])])
        print_findings(agreement.findings)
        print_notes(notes)
    raise typer.Exit(0 if agreement.agrees else 1)
