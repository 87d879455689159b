"""Export a checkpoint: read, quantize and write one tensor after the other.

    codes, scales = encode(weight in the compute dtype)        codings.py

The weight is rounded to the compute dtype first, since an engine that quantizes at load does so, too. A stack of
experts is quantized matrix by matrix. Where weights share a scale (NVFP4), all that share it are read first for their
amax, so that each weight is read twice. The source is checked again after every file: if it changed while it was read,
the export would be a mixture of two models.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError
from nemo_fp8.export.codings import CODES, Encoded, in_compute
from nemo_fp8.export.folder import Destination, _text
from nemo_fp8.export.plan import Output, Plan, Shard
from nemo_fp8.export.source import Source
from nemo_fp8.moved import renamed
from nemo_fp8.numerics.modelopt import amax_of
from nemo_fp8.storage.safetensors import bytes_of

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"COMPUTE": "nemo_fp8.export.codings.COMPUTE"})

# Called with the number of source bytes that are done, and the name of their tensor or file.
Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Exported:
    """Files, bytes and seconds of a finished export."""

    plan: Plan
    folder: Path
    seconds: float
    resumed: int
    """The number of files that an earlier, killed export had written."""
    done_before: bool
    """Whether the export was complete already."""

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain values, for JSON."""
        return {
            "folder": str(self.folder),
            "seconds": self.seconds,
            "files_written_before": self.resumed,
            "done_before": self.done_before,
            "bytes_in": self.plan.bytes_in,
            "bytes_out": self.plan.bytes_out,
            "notes": [*self.plan.source.notes],
            **summary(self.plan),
        }


def export(
    source: Source,
    destination: str | Path,
    precision: Precision | str,
    *,
    layout: str | None = None,
    restart: bool = False,
    progress: Callable[[int], Progress] | None = None,
) -> Exported:
    """Write a checkpoint as ``precision`` says, a contract or the name of one. An export that was killed resumes; a
    complete one is left as it is.

    ``restart`` deletes an earlier export first. ``progress`` is called with the number of bytes to read, and returns a
    function that is called as bytes are done.

    Raises PrecisionError if the plan is impossible, the folder cannot be used, or the source changes meanwhile.
    """
    began = time.monotonic()
    plan = Plan.of(source, given(precision), layout)
    target = Destination(destination)
    _require_apart(source, target.folder)
    with target.locked():
        if target.begin(plan, restart=restart):
            return Exported(plan, target.folder, time.monotonic() - began, len(plan.shards), True)
        step = progress(plan.bytes_in) if progress else lambda count, name: None
        resumed = 0
        amaxes = Amaxes(plan)
        for shard in plan.shards:
            if target.has(shard):
                resumed += 1
                step(
                    sum(source.tensors[output.source].bytes for output in shard.outputs if output.part == CODES),
                    shard.file,
                )
                continue
            with target.writing(shard.file) as file:
                _write(file, shard, plan, amaxes, step)
                _require_unchanged(plan)
        written = _write_the_rest(plan, target)
        target.finish({"fingerprint": plan.fingerprint, "identity": plan.identity, "files": written, **summary(plan)})
        return Exported(plan, target.folder, time.monotonic() - began, resumed, False)


def summary(plan: Plan) -> dict[str, Any]:
    """Return, as plain values, what is quantized and what is not, with the reasons."""
    kept: dict[str, list[str]] = {}
    for name, why in plan.selection.kept.items():
        kept.setdefault(f"{why.rule}: {why.reason}", []).append(name)
    return {
        "source_name": Path(plan.source.name).name,
        "precision": plan.precision.to_dict(),
        "layout": plan.layout.name,
        "quantized": len(plan.selection.quantized),
        "formats": formats(plan),
        "kept": kept,
        "misaligned": [problem.to_dict() for problem in plan.selection.misaligned],
        "quantization_config": plan.quantization,
    }


def formats(plan: Plan) -> dict[str, int]:
    """Return how many weights are stored in each format, by its name."""
    named = {"1x16": "NVFP4", "1x32": "MXFP8"}
    return dict(Counter(named.get(p.rollout_block, "FP8") for p in plan.forms.values()))


class Amaxes:
    """The largest magnitudes of weights that share a scale, each found when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.found = plan, dict[tuple[str, ...], torch.Tensor]()

    def of(self, name: str) -> torch.Tensor | None:
        """Return the amax of all weights that share a scale with this one; None if its format has no such scale.

        Raises PrecisionError if one of them holds values that are not finite.
        """
        if not self.plan.codings[name].shares_amax:
            return None
        names = self.plan.sharing[name]
        if names not in self.found:
            compute = self.plan.precision.compute
            amaxes = [
                amax_of(in_compute(matrix, compute, other))
                for other in names
                for matrix in self.plan.source.matrices(other)
            ]
            self.found[names] = torch.stack(amaxes).amax()
        return self.found[names]


def encode(plan: Plan, name: str, matrix: torch.Tensor, amaxes: Amaxes) -> Encoded:
    """Return the parts of a weight as an export stores them; raise PrecisionError for values that are not finite."""
    return plan.codings[name].encode(in_compute(matrix, plan.precision.compute, name), amaxes.of(name))


# ---------------------------------------------------------------------- one file


def _write(file: BinaryIO, shard: Shard, plan: Plan, amaxes: Amaxes, step: Progress) -> None:
    file.write(shard.header)
    parts: dict[str, list[Output]] = {}
    for output in shard.outputs:
        parts.setdefault(output.source, []).append(output)
    for name, outputs in parts.items():
        codes, *others = outputs
        file.seek(shard.starts[codes.name])
        if not others:
            for chunk in _exactly(codes, plan.source.chunks(name)):
                file.write(chunk)
                step(len(chunk), name)
            continue
        found: dict[str, list[torch.Tensor]] = {output.part: [] for output in others}
        for matrix in plan.source.matrices(name):
            made = encode(plan, name, matrix, amaxes)
            file.write(bytes_of(made.pop(CODES)))
            for part, tensor in made.items():
                found[part].append(tensor)
            step(matrix.numel() * matrix.element_size(), name)
            del matrix, made  # before the next one is read
        for output in others:
            file.seek(shard.starts[output.name])
            for chunk in _exactly(output, map(bytes_of, found[output.part])):
                file.write(chunk)


def _exactly(output: Output, chunks: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield chunks; raise PrecisionError if they have not as many bytes as planned."""
    count = 0
    for chunk in chunks:
        count += len(chunk)
        yield chunk
    if count != output.about.bytes:
        raise PrecisionError(
            f"{output.name} has {count:,} bytes, where its shape says {output.about.bytes:,}.",
            "The source gave another tensor than it had announced.",
            "Copy or download the source again.",
        )


def _write_the_rest(plan: Plan, target: Destination) -> list[str]:
    """Write everything but weights, config.json last; return the names of all files of the export."""
    written = [shard.file for shard in plan.shards]
    for name, content in plan.source.files():
        target.write(name, content)
        written.append(name)
    for name, value in plan.texts.items():
        target.write(name, _text(value))
        written.append(name)
    return written


# ---------------------------------------------------------------------- checks


def _require_apart(source: Source, folder: Path) -> None:
    inside, outside = folder.resolve(), Path(source.name).resolve()
    if inside == outside or (inside == outside.parent and outside.is_file()):
        raise PrecisionError(
            f"{folder} is the source itself.",
            "An export never writes over what it reads.",
            "Give the name of a new folder.",
        )


def _require_unchanged(plan: Plan) -> None:
    if plan.source.identity() != plan.identity["source"]:
        raise PrecisionError(
            f"{plan.source.name} changed while it was read.",
            "What was written so far may be of two models.",
            "Wait until it is whole, and export again with --restart.",
        )
