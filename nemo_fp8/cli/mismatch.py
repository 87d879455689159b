"""``nemo-fp8 mismatch``. Heavy modules are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_fp8.cli.options import Changes, Html, Json, require_report
from nemo_fp8.cli.printing import print_findings, print_json, print_notes, print_pairs, print_table
from nemo_fp8.cli.progress import step_bar
from nemo_fp8.contract.naming import load
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.findings import finding

if TYPE_CHECKING:
    from nemo_fp8.mismatch import ImportanceSampling, Prediction, Verdict
    from nemo_fp8.mismatch.files import Recording
    from nemo_fp8.report.mismatch import Mismatch


def mismatch(
    log_probs: Annotated[
        Path,
        typer.Argument(help="A .safetensors or .jsonl file with both sides, or the trainer's.", show_default=False),
    ],
    rollout: Annotated[
        Path | None, typer.Argument(metavar="[ROLLOUT]", help="The rollout's, where it is another file.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="The trainer's BF16 weights: predict a band.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="NAME", help="The contract: a preset or a YAML file.", show_default=False),
    ] = None,
    activations: Annotated[
        bool,
        typer.Option(
            "--activations/--weights-only",
            help="Whether the engine's kernels quantize activations; on CPUs they do not.",
        ),
    ] = True,
    held: Annotated[
        Path | None,
        typer.Option(
            "--held", metavar="FILE", help="A receipt (.json), or codes and scales read back from the engine."
        ),
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option("--previous", metavar="FOLDER", help="The weights of the push before, to know what is stale."),
    ] = None,
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", help="How many sequences to emulate.", min=8)
    ] = 64,
    device: Annotated[str, typer.Option("--device", help="The torch device that emulates.")] = "cpu",
    false_positives: Annotated[
        float, typer.Option("--false-positives", metavar="P", help="The chance to fire on sound weights.")
    ] = 1e-3,
    limits: Annotated[
        list[str] | None, typer.Option("--limit", metavar="METRIC=VALUE", help="Exit code 1 above it; may be repeated.")
    ] = None,
    truncate: Annotated[
        str | None,
        typer.Option("--truncate", metavar="TYPE:[MIN:]MAX", help="tis:2, icepop:0.5:5, or seq-mask-tis:MIN:MAX."),
    ] = None,
    kl_type: Annotated[str, typer.Option("--kl", metavar="TYPE", help="The KL estimator: k1, k2 or k3.")] = "k3",
    drop: Annotated[
        bool, typer.Option("--drop-infinite", help="Leave tokens with a log-prob of -inf out, and count them.")
    ] = False,
    html: Html = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Compare log-probs of trainer and rollout; with --model, tell FP8's noise from broken weights (exit code 1)."""
    if (model is None) != (precision is None):
        raise PrecisionError(
            "A band is predicted from --model and --precision, and one of them is missing.",
            "The weights are the trainer's, and the contract says how the engine quantizes them.",
            "Give both, or neither for the metrics alone.",
        )
    given = {"--held": held and model is None, "--previous": previous and held is None}
    for option, alone in given.items():
        if alone:
            needs = "--model and --precision" if option == "--held" else "--held"
            raise PrecisionError(
                f"{option} without {needs}.",
                "What an engine holds is compared with the trainer's weights, under the contract.",
                f"Give {needs}, too, or leave {option} out.",
            )
    if html is not None:
        require_report(html)

    from nemo_fp8.mismatch.files import Recording
    from nemo_fp8.report.mismatch import Mismatch

    recording = Recording.read(log_probs, rollout)
    if count := recording.not_numbers():
        return _refuse_nan(count, as_json)
    found = Mismatch(
        str(log_probs), recording, recording.pair("drop" if drop else "refuse"), _importance(truncate), kl_type
    )
    found = _with(found, limits=_limits(limits, found))
    if model is not None and precision is not None:
        contract = load(precision, changes)
        chosen = recording.some(sequences)
        prediction = _predict(chosen, model, contract, activations, device)
        verdict = _judge(chosen, prediction, model, held, previous, false_positives, drop)
        found = _with(found, prediction=prediction, verdict=verdict)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    if html is not None:
        from nemo_fp8.report.mismatch_page import mismatch_page

        print_notes([f"The report is in {mismatch_page(found).write(html)}."])
    raise typer.Exit(1 if found.fired else 0)


def _with(found: Mismatch, **changes: Any) -> Mismatch:
    from dataclasses import replace

    return replace(found, **changes)


def _predict(recording: Recording, model: Path, contract: Any, activations: bool, device: str) -> Prediction:
    from nemo_fp8.mismatch import predict
    from nemo_fp8.mismatch.files import Folder

    if recording.tokens is None:
        raise PrecisionError(
            "The file holds no tokens.",
            "A band is predicted by running the trainer's model on them.",
            "Add tokens, [sequences, tokens], to the file; or leave --model out for the metrics alone.",
        )
    _require_device(device)
    folder = Folder(model, device)
    config = folder.config()
    with step_bar("emulate", 3 * int(config.get("num_hidden_layers", 0))) as advance:
        tokens = recording.tokens.to(device)
        mask = recording.mask.to(device) if recording.mask is not None else None
        return predict(config, folder, tokens, contract, mask=mask, activations=activations, progress=advance).cpu()


def _require_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PrecisionError(
            f"--device {device} cannot be used.",
            f"{str(error).splitlines()[0]}.",
            "Give cpu, or a device that is here.",
        ) from error


def _judge(
    recording: Recording,
    prediction: Prediction,
    model: Path,
    held: Path | None,
    previous: Path | None,
    chance: float,
    drop: bool,
) -> Verdict:
    from nemo_fp8.mismatch import Gate
    from nemo_fp8.mismatch.files import Folder, read_held

    return Gate(false_positives=chance).judge(
        prediction,
        recording.pair("drop" if drop else "refuse"),
        recording.tokens,
        weights=Folder(model) if held else None,
        held=read_held(held) if held else None,
        previous=Folder(previous) if previous else None,
    )


def _importance(words: str | None) -> ImportanceSampling:
    from nemo_fp8.mismatch import ImportanceSampling

    if words is None:
        return ImportanceSampling()
    kind, *bounds = words.split(":")
    try:
        numbers = [float(bound) for bound in bounds]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise PrecisionError(
            f"--truncate {words} names no bounds.",
            "They are one number, or two.",
            "Write TYPE:MAX or TYPE:MIN:MAX, such as tis:2.",
        )
    return ImportanceSampling(
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=numbers[-1],
        truncated_importance_sampling_ratio_min=numbers[0] if len(numbers) == 2 else None,
    )


def _limits(words: list[str] | None, found: Mismatch) -> tuple[tuple[str, float], ...]:
    known, limits = found.metrics, []
    for word in words or []:
        name, _, value = word.partition("=")
        if name not in known:
            raise PrecisionError([unknown("metric to limit", name, known)])
        try:
            limits.append((name, float(value)))
        except ValueError:
            raise PrecisionError(
                f"--limit {word} has no number.", "A limit is a metric and its largest value.", "Write METRIC=1.08."
            ) from None
    return tuple(limits)


# ---------------------------------------------------------------------- text


def _refuse_nan(count: int, as_json: bool) -> None:
    found = finding("gate-nan", "log-probs", count=count)
    if as_json:
        print_json({"fired": True, "problems": [found.to_dict()]})
    else:
        print_findings([found])
    raise typer.Exit(1)


def _print(found: Mismatch) -> None:
    from nemo_fp8.report.mismatch import MEANING, quantiles

    pair, expected, verdict = found.pair, found.expected, found.verdict
    dropped = f", {pair.dropped:,} with -inf left out" if pair.dropped else ""
    print_pairs([("log-probs", f"{pair.tokens:,} tokens in {pair.sequences:,} sequences{dropped}")])
    rows = [
        (name, _number(value), *([_number(expected[name])] if expected else []), MEANING[name])
        for name, value in found.metrics.items()
    ]
    print_table(("metric", "observed", *(["predicted"] if expected else []), "t trainer, g rollout"), rows)
    print_pairs([("|t - g|", ", ".join(f"{_number(size)} at {point}" for point, size in quantiles(pair).items()))])
    findings = [finding("gate-limit", name, metric=name, value=value, limit=limit) for name, value, limit in found.over]
    if verdict is not None:
        print_pairs([("", "")])
        rows = [
            (c.name, *map(_number, (c.observed, c.band.expected, c.band.low, c.band.high)), c.side)
            for c in verdict.checks
        ]
        caption = f"typical |d| of log-probs; sound weights leave it with a chance of {verdict.false_positives:g}"
        print_table(("gate", "observed", "expected", "lowest", "highest", "band"), rows, caption)
        findings += verdict.findings
    print_findings(findings)
    if verdict is not None and not findings:
        told = "; every weight that was told is the trainer's" if verdict.told else ""
        print_pairs([("", ""), ("ok", f"This is the noise of the contract{told}.")])


def _number(value: float) -> str:
    return f"{value:.4g}"
