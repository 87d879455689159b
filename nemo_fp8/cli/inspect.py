"""``nemo-fp8 inspect``. Heavy modules are imported when it runs."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_fp8.cli.options import Html, Json, require_report
from nemo_fp8.cli.printing import print_json, print_notes, print_pairs, print_table
from nemo_fp8.cli.progress import byte_bar
from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import is_file, label_of, load
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.errors import PrecisionError, unknown

if TYPE_CHECKING:
    from nemo_fp8.inspection.advice import Advice
    from nemo_fp8.inspection.measure import Inspection, Row

# Short names for one contract of each scaling: a preset, and changes to it.
SHORT: dict[str, tuple[str, dict[str, Any]]] = {
    "delayed": ("bf16_with_fp8_delayed_mixed", {}),
    "tensorwise": ("bf16_with_fp8_tensorwise_mixed", {}),
    "blockwise": ("bf16_with_fp8_blockwise_mixed", {}),
    "blockwise-fp32": ("bf16_with_fp8_blockwise_mixed", {"weight_scale": "fp32", "activation_scale": "fp32"}),
    "mxfp8": ("bf16_with_mxfp8_mixed", {}),
    "nvfp4": ("bf16_with_nvfp4_mixed", {}),
    "nvfp4-1x16": ("bf16_with_nvfp4_mixed", {"weight_block": "1x16"}),
}
# Delayed scaling is left out: on a file it equals tensorwise.
DEFAULT = ("tensorwise", "blockwise", "mxfp8", "nvfp4")


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="A safetensors file, or the folder of a model.", show_default=False)
    ],
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            metavar="NAME",
            help=f"A preset, a YAML file, or one of {', '.join(SHORT)}; may be repeated.",
            show_default=", ".join(DEFAULT),
        ),
    ] = None,
    activations: Annotated[
        Path | None,
        typer.Option("--activations", metavar="FILE", help="Inputs and gradients that nemo_fp8.capture recorded."),
    ] = None,
    snr: Annotated[
        float | None,
        typer.Option(
            "--snr",
            metavar="DB",
            help="Say what to keep out of FP8 to stay above this.",
            show_default="20, and 10 for NVFP4",
        ),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Measure what FP8 and NVFP4 do to each tensor of a checkpoint: SNR, underflow, saturation, and what to keep."""
    recipes = {label_of(name): _named(name) for name in precision or DEFAULT}
    if html is not None:  # fail before minutes of measuring, not after
        require_report(html)

    from nemo_fp8.inspection.advice import advise
    from nemo_fp8.inspection.measure import inspect_checkpoint

    with byte_bar() as progress:
        inspection = inspect_checkpoint(checkpoint, recipes, activations=activations, progress=progress)
    advice = [advise(inspection, label, snr) for label in recipes]
    if as_json:
        print_json({**inspection.to_dict(), "snr": snr, "keep": {a.label: a.to_dict() for a in advice}})
    else:
        _print(inspection, advice)
    if html is not None:
        from nemo_fp8.report.inspect_page import inspection_page

        written = inspection_page(inspection, advice).write(html)
        print_notes([f"The report is in {written}."])


def _named(name: str) -> Precision:
    if name in SHORT:
        base, changes = SHORT[name]
        return preset(base).replace(**changes)
    if not is_file(name) and name.replace("-", "_") not in PRESETS:
        raise PrecisionError([unknown("precision", name, [*SHORT, *PRESETS])])
    return load(name)


# ---------------------------------------------------------------------- text


def _print(inspection: Inspection, advice: list[Advice]) -> None:
    from nemo_fp8.inspection.advice import thresholds
    from nemo_fp8.models.families import ROLES

    rows, labels = inspection.measured(), list(inspection.recipes)
    skipped = Counter(row.place.role if row.place.kept else "other" for row in inspection.rows if row.skipped)
    weights = inspection.measured("weight")
    dequantized = inspection.dequantized_words()
    facts = [
        ("checkpoint", str(inspection.path)),
        (
            "linears",
            f"{len(weights)} with {sum(row.elements for row in weights):,} weights, {inspection.layers} decoder layers",
        ),
        ("activations", f"{len(rows) - len(weights)} inputs and gradients" if len(rows) > len(weights) else ""),
        ("quantized already", f"{dequantized}, dequantized first" if dequantized else ""),
        ("not quantized", ", ".join(f"{count} {role}" for role, count in skipped.items())),
        ("not read", inspection.packed_words()),
        ("not in the index", inspection.unlisted_words()),
        ("NaN or inf", inspection.not_finite_words()),
        ("read", f"{inspection.bytes / 1e6:,.0f} MB in {inspection.seconds:.1f} s"),
    ]
    print_pairs([(about, fact) for about, fact in facts if fact])
    operands = list(dict.fromkeys(row.operand for row in rows))
    lines = [_recipe_line(inspection, a, operand) for a in advice for operand in operands]
    _table(
        ("recipe", "operand", "SNR dB", "lowest", "blocks", "underflow", "saturated", "below"),
        lines,
        "lowest: of any tensor; blocks: the lowest that 99% of a tensor's blocks reach. Underflow and saturation in %. "
        f"below: tensors below {thresholds(advice)}.",
    )
    if not all(pair.are_one for label in labels for pair in inspection.copies(label)):
        _print_transposition(inspection, weights)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.operand, row.place.role), []).append(row)
    names = {key: key[1] if key[0] == "weight" else f"{key[1]} {key[0]}" for key in groups}
    order = sorted(groups, key=lambda key: (operands.index(key[0]), ROLES.index(key[1])))
    by_role = [
        (names[key], len(groups[key]), *(_pair(inspection, label, groups[key]) for label in labels)) for key in order
    ]
    _table(("role", "tensors", *labels), by_role, "Lowest SNR in dB of a tensor or its blocks, and underflow in %.")
    worst = [
        (row.name.removesuffix(".weight"), *(_db(row.losses[label].floor_db) for label in labels))
        for row in inspection.worst()
    ]
    _table(("worst tensors", *labels), worst, "SNR in dB of the tensor or its blocks, whichever is lower.")
    for a in advice:
        _print_advice(inspection, a)


def _print_transposition(inspection: Inspection, weights: list[Row]) -> None:
    lines = []
    for label in inspection.recipes:
        whole = inspection.transposition(label, weights)
        farthest = max(row.transpositions[label].distance for row in weights if label in row.transpositions)
        numbers = (whole.differ_percent, 100 * whole.distance, 100 * farthest, 100 * whole.gain)
        words = [f"{round(number, 4) + 0.0:.3g}" if whole.elements else "-" for number in numbers]
        lines.append((label, inspection.backward_words(label), *words))
    _table(
        ("recipe", "backward multiplies by", "differ", "distance", "farthest", "gain"),
        lines,
        "How far it is from the weight that the forward used, in %; farthest: of any tensor.",
    )


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]], caption: str) -> None:
    print_pairs([("", "")])
    print_table(columns, rows, caption)


def _recipe_line(inspection: Inspection, a: Advice, operand: str) -> tuple[Any, ...]:
    rows = inspection.measured(operand)
    total = inspection.total(a.label, rows)
    return (
        a.label,
        operand,
        _db(total.snr_db),
        _db(min(row.losses[a.label].snr_db for row in rows)),
        _db(total.block_snr_db),
        f"{total.underflow_percent:.3g}",
        f"{total.saturation_percent:.3g}",
        sum(row.operand == operand for row in a.below),
    )


def _pair(inspection: Inspection, label: str, rows: list[Row]) -> str:
    return (
        f"{_db(min(row.losses[label].floor_db for row in rows))} {inspection.total(label, rows).underflow_percent:.2g}%"
    )


def _db(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}"  # never -0.0


def _print_advice(inspection: Inspection, a: Advice) -> None:
    print_pairs([("", "")])
    if not a.below:
        return print_pairs([(a.label, f"Nothing quantized lies below {a.snr:g} dB.")])
    count = len(inspection.measured())
    found = (
        f"{len(a.below)} of {count} tensors below {a.snr:g} dB. With this, {a.share:.1%} of the linear weights stay in "
        "FP8:"
    )
    print_pairs([(a.label, found)])
    sys.stdout.write(f"{a.changes}\n")  # on one line, to be copied
    return print_pairs([("", whole)] if (whole := a.only_whole_layers(inspection)) else [])
