"""``nemo-fp8 export``. Heavy modules are imported when it runs."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_fp8.cli.options import Changes, Json, VllmPython
from nemo_fp8.cli.printing import print_json, print_notes, print_pairs, print_problems
from nemo_fp8.cli.progress import byte_bar, waiting
from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import load
from nemo_fp8.errors import Problem

if TYPE_CHECKING:
    from nemo_fp8.export import Certificate, Exported, Source
    from nemo_fp8.export.logprobs import Comparison


def export(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A safetensors file, or the folder of a model.", show_default=False)
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="A new folder, or one to go on with.", show_default=False)
    ],
    precision: Annotated[
        str,
        typer.Option(
            "--precision", metavar="NAME", help="A preset (see `nemo-fp8 list`) or a YAML file.", show_default=False
        ),
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="NAME",
            help="deepseek or compressed-tensors for blocks of 128x128; modelopt for NVFP4, MXFP8 and mixed formats.",
            show_default=False,
        ),
    ] = None,
    from_nemo: Annotated[
        bool, typer.Option("--from-nemo", help="SRC is a NeMo checkpoint: a folder with weights/ and context/.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove what was written; exit code 1 if it is not as it should be.")
    ] = False,
    vllm: Annotated[
        bool, typer.Option("--vllm/--no-vllm", help="With --verify: also compare with vLLM, on the fly against loaded.")
    ] = True,
    python: VllmPython = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete what an earlier export left in DST, and begin anew.")
    ] = False,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in FP8, NVFP4 or BF16 in Hugging Face's layout, as a stream; after a kill, it resumes."""
    contract = load(precision, changes)

    from nemo_fp8.export import export as write
    from nemo_fp8.export import verify as certify
    from nemo_fp8.export.logprobs import vllm_python

    engine = vllm_python(python) if verify and vllm else None  # fail before minutes of writing, not after
    if engine is not None:
        from nemo_fp8.preflight.engine import require
        from nemo_fp8.preflight.machine import Machine

        require(contract.replace(deep_gemm=False), Machine.here(engine), sides=("rollout",))
    opened = _open(source, from_nemo)
    with byte_bar("export") as progress:
        done = write(opened, destination, contract, layout=layout, restart=restart, progress=progress)
    certificate = comparison = None
    if verify:
        with byte_bar("verify") as progress:
            certificate = certify(done.plan, destination, progress=progress)
    if engine is not None and certificate is not None and certificate.holds:
        comparison = _against_vllm(opened, done, contract, engine)
    if as_json:
        print_json(
            done.to_dict()
            | ({"certificate": certificate.to_dict()} if certificate else {})
            | ({"vllm": comparison.to_dict()} if comparison else {})
        )
    else:
        _print(done, certificate, comparison)
    if (certificate and not certificate.holds) or (comparison and not comparison.equal):
        raise typer.Exit(1)


def _open(path: Path, from_nemo: bool) -> Source:
    if from_nemo:
        from nemo_fp8.train.nemo_checkpoint import NemoCheckpoint

        return NemoCheckpoint.open(path)
    from nemo_fp8.export import HuggingFace

    return HuggingFace.open(path)


def _against_vllm(source: Source, done: Exported, precision: Precision, python: Path) -> Comparison:
    """Compare vLLM on the export (decoded, if vLLM cannot load it) with vLLM that quantizes the source itself."""
    from nemo_fp8.export import HuggingFace
    from nemo_fp8.export import export as write
    from nemo_fp8.export.logprobs import as_it_is, compare, log_probs, on_the_fly, reads_codes

    decoded = done.plan.quantization is not None and not reads_codes(python, done.plan)
    with tempfile.TemporaryDirectory(prefix=".nemo_fp8_", dir=done.folder.parent) as work:
        if decoded:
            again = write(
                HuggingFace.open(done.folder), Path(work, "decoded"), Precision(compute=precision.compute)
            ).folder
            with waiting("vLLM quantizes the decoded export on the fly"):
                loaded = log_probs(again, on_the_fly(precision), python)
        else:
            with waiting("vLLM loads the export"):
                loaded = log_probs(done.folder, as_it_is(precision), python)
        folder = getattr(source, "bf16_folder", None)
        if folder is None:  # no engine can load the source directly
            folder = write(source, Path(work, "bf16"), Precision(compute=precision.compute)).folder
        with waiting("vLLM quantizes the source on the fly"):
            quantized = log_probs(folder, on_the_fly(precision), python)
    return replace(compare(loaded, quantized), decoded=decoded)


# ---------------------------------------------------------------------- text


def _print(done: Exported, certificate: Certificate | None, comparison: Comparison | None) -> None:
    from nemo_fp8.export.run import formats

    plan = done.plan
    rows = [
        ("checkpoint", f"{done.folder} ({plan.layout.name} layout)" if plan.quantization else str(done.folder)),
        ("written", _written(done)),
        *((f"in {name}", f"{count} weights") for name, count in formats(plan).items()),
        *([] if plan.quantization else [("in FP8", "nothing: the contract generates in the compute dtype")]),
        *_kept(done),
        *(_certified(certificate) if certificate else []),
        *(_compared(comparison) if comparison else []),
    ]
    print_pairs(rows)
    print_notes(_misaligned(plan.selection.misaligned))
    print_notes(plan.source.notes)
    if certificate and not certificate.holds:
        print_problems(certificate.problems())


def _written(done: Exported) -> str:
    files, sizes = (
        len(done.plan.shards),
        f"{done.plan.bytes_in / 1e6:,.1f} MB became {done.plan.bytes_out / 1e6:,.1f} MB",
    )
    if done.done_before:
        return f"{sizes}; it was done before, and nothing was written"
    before = f"; {done.resumed} of {files} weight files were there from before" if done.resumed else ""
    return f"{sizes} in {done.seconds:.1f} s{before}"


def _kept(done: Exported) -> list[tuple[str, str]]:
    if done.plan.quantization is None:
        return []
    counts = Counter(kept.rule for kept in done.plan.selection.kept.values())
    words = {
        "always": "always",
        "layers": "first or last layers",
        "keep": "named in keep or modules",
        "shape": "for their shape",
    }
    told = ", ".join(f"{counts[rule]} {text}" for rule, text in words.items() if counts[rule])
    return [("kept", told or "nothing")]


def _certified(c: Certificate) -> list[tuple[str, str]]:
    moved = (
        f"; {c.tiles_moved:,} of {c.scales:,} tiles are written with half the scale and twice the codes"
        if c.tiles_moved
        else ""
    )
    return [
        (
            "right",
            f"{c.codes_wrong + c.scales_wrong:,} of {c.codes:,} codes and {c.scales:,} scales differ from the "
            f"source's{moved}",
        ),
        *_idempotent(c),
        ("copied", f"{c.bytes_wrong:,} differences in {c.copied:,} kept tensors ({c.copied_bytes / 1e6:,.1f} MB)"),
        ("described", f"{c.files_wrong:,} of {c.described:,} files say something else of the weights than was written"),
    ]


def _idempotent(c: Certificate) -> list[tuple[str, str]]:
    if not c.idempotent:
        return []
    return [
        (
            "idempotent",
            f"{c.codes_changed:,} codes and {c.scales_changed:,} scales change when it is dequantized and exported "
            "again",
        )
    ]


def _compared(c: Comparison) -> list[tuple[str, str]]:
    verdict = "bitwise equal" if c.equal else f"{c.differing:,} differ, by up to {c.largest:.3g}"
    how = "decoded and quantized again (vLLM cannot read such codes on this machine)" if c.decoded else "loaded"
    return [
        (
            "vLLM",
            f"{verdict}: {c.compared:,} log-probabilities at {c.positions} positions, {how}, against quantized on the "
            "fly",
        )
    ]


def _misaligned(problems: tuple[Problem, ...], most: int = 5) -> list[str]:
    lines: list[Any] = [f"{p.what} {p.why}" for p in problems[:most]]
    return lines + (
        [f"{len(problems) - most} more for their shape; nemo_fp8_export.json names all of them."]
        if len(problems) > most
        else []
    )
