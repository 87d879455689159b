"""Export a checkpoint: read, quantize and write one tensor after the other.

    codes, scales = canonical(quantize(weight in the compute dtype))

The weight is rounded to the compute dtype first, since an engine that quantizes at load does so, too. A stack of
experts is quantized matrix by matrix. The source is checked again after every file: if it changed while it was read,
the export would be a mixture of two models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.export.canonical import canonical
from nemo_fp8.export.folder import Destination, _text
from nemo_fp8.export.plan import Output, Plan, Shard
from nemo_fp8.export.source import Source
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.storage.safetensors import INDEX, bytes_of

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
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
    precision: Precision,
    *,
    layout: str = "deepseek",
    restart: bool = False,
    progress: Callable[[int], Progress] | None = None,
) -> Exported:
    """Write a checkpoint as ``precision`` says. An export that was killed resumes; a complete one is left as it is.

    ``restart`` deletes an earlier export first. ``progress`` is called with the number of bytes to read, and returns a
    function that is called as bytes are done.

    Raises PrecisionError if the plan is impossible, the folder cannot be used, or the source changes meanwhile.
    """
    began = time.monotonic()
    plan = Plan.of(source, precision, layout)
    target = Destination(destination)
    _require_apart(source, target.folder)
    with target.locked():
        if target.begin(plan, restart=restart):
            return Exported(plan, target.folder, time.monotonic() - began, len(plan.shards), True)
        step = progress(plan.bytes_in) if progress else lambda count, name: None
        resumed = 0
        for shard in plan.shards:
            if target.has(shard):
                resumed += 1
                step(
                    sum(source.tensors[output.source].bytes for output in shard.outputs if not output.scale), shard.file
                )
                continue
            with target.writing(shard.file) as file:
                _write(file, shard, plan, step)
                _require_unchanged(plan)
        written = _write_the_rest(plan, target)
        target.finish({"fingerprint": plan.fingerprint, "identity": plan.identity, "files": written, **summary(plan)})
        return Exported(plan, target.folder, time.monotonic() - began, resumed, False)


def summary(plan: Plan) -> dict[str, Any]:
    """Return, as plain values, what is in FP8 and what is not, with the reasons."""
    kept: dict[str, list[str]] = {}
    for name, why in plan.selection.kept.items():
        kept.setdefault(f"{why.rule}: {why.reason}", []).append(name)
    return {
        "source_name": Path(plan.source.name).name,
        "precision": plan.precision.to_dict(),
        "layout": plan.layout.name,
        "quantized": len(plan.selection.quantized),
        "kept": kept,
        "misaligned": [problem.to_dict() for problem in plan.selection.misaligned],
        "quantization_config": plan.quantization,
    }


def quantize_weight(matrix: torch.Tensor, operand: Operand, compute: str, name: str) -> Quantized:
    """Return a weight as an export stores it; raise PrecisionError if it holds values that are not finite."""
    x = matrix.to(COMPUTE[compute])
    if not bool(torch.isfinite(x).all()):
        raise PrecisionError(
            f"{name} holds values that are not finite.",
            "NaN or infinity in a weight means that the training run which wrote it had diverged, or that the file is "
            "damaged; or a "
            f"value is too large for {compute.upper()}.",
            "Export an earlier checkpoint.",
        )
    return canonical(quantize(x, operand))


# ---------------------------------------------------------------------- one file


def _write(file: BinaryIO, shard: Shard, plan: Plan, step: Progress) -> None:
    operand = plan.precision.operand("weight", "rollout")
    file.write(shard.header)
    scales = {output.source: output for output in shard.outputs if output.scale}
    for output in shard.outputs:
        if output.scale:
            continue
        file.seek(shard.starts[output.name])
        if output.source not in scales:
            for chunk in _exactly(output, plan.source.chunks(output.source)):
                file.write(chunk)
                step(len(chunk), output.source)
            continue
        assert operand is not None
        found = []
        for matrix in plan.source.matrices(output.source):
            q = quantize_weight(matrix, operand, plan.precision.compute, output.source)
            file.write(bytes_of(q.data))
            found.append(q.scale_inv)
            step(matrix.numel() * matrix.element_size(), output.source)
            del matrix, q  # before the next one is read
        scale = scales[output.source]
        file.seek(shard.starts[scale.name])
        for chunk in _exactly(scale, map(bytes_of, found)):
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
    for name, value in ((INDEX, plan.index), ("config.json", plan.config)):
        if value is not None:
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
