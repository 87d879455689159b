"""Verify an export: its folder holds what the contract says of the source, and exporting it again changes nothing.

For every quantized weight W with its codes C and scales s, all read from the disk and compared bit for bit:

    right        (C, s) = Q(W)                   the numerics, on the source
    idempotent   (C, s) = Q(bf16(C * s))         dequantizing to BF16 and exporting again gives the same file; only
                                                 128x128 blocks have that form (codings.py), others are not asked
    copied       every tensor that was kept has the source's bytes
    described    the config, the index and what else says how the weights are stored are those of the plan

Q is the coding's ``encode``, of 128x128 blocks ``canonical(quantize(.))``. Without ``canonical`` idempotence holds for
values only: with power-of-two scales the
codes of about one tile in twenty would double while their scale halves (see :mod:`nemo_fp8.export.canonical`);
``tiles_moved`` counts these tiles. With FP32 scales both would stay the same without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.export.codings import CODES, COMPUTE
from nemo_fp8.export.folder import Destination
from nemo_fp8.export.plan import Plan
from nemo_fp8.export.run import Amaxes, Progress, encode
from nemo_fp8.storage.safetensors import Checkpoint


@dataclass
class Certificate:
    """The result of a verification: how much was compared, and how much differs."""

    weights: int = 0
    codes: int = 0
    scales: int = 0
    tiles_moved: int = 0
    """Tiles with half the scale and twice the codes of ``quantize``, without ``canonical``; their values are equal."""
    copied: int = 0
    copied_bytes: int = 0
    codes_wrong: int = 0
    scales_wrong: int = 0
    codes_changed: int = 0
    """Codes that change when the values are quantized again."""
    scales_changed: int = 0
    bytes_wrong: int = 0
    described: int = 0
    """Files that say how the weights are stored: the config, the index, ModelOpt's own."""
    files_wrong: int = 0
    idempotent: bool = True
    """Whether it was asked if codes and scales change when the values are quantized again."""
    names: list[str] = field(default_factory=list)
    """Tensors and files with any difference."""

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.names

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"holds": self.holds, **asdict(self)}

    def problems(self) -> list[Problem]:
        """Return a problem for each kind of difference."""
        rows = (
            (self.codes_wrong + self.scales_wrong, "codes and scales are not those of the source", _DAMAGED),
            (
                self.codes_changed + self.scales_changed,
                "codes and scales change when the values are quantized again",
                _UNSTABLE,
            ),
            (self.bytes_wrong, "bytes of kept tensors are not the source's", _DAMAGED),
            (self.files_wrong, "files say something else of the weights than the export wrote", _REWRITTEN),
        )
        where = f"{', '.join(self.names[:3])}{f' and {len(self.names) - 3} more' if len(self.names) > 3 else ''}"
        return [Problem(f"{count:,} {what}: {where}.", *words) for count, what, words in rows if count]


_DAMAGED = (
    "The export or the source was changed since it was written, or a disk loses bytes.",
    "Export again with --restart.",
)
_REWRITTEN = (
    "An engine would read codes as another format, or weights that are none as codes.",
    "Export again with --restart.",
)
_UNSTABLE = (
    "The values do not fit the compute dtype that they come back through.",
    "Export with a compute dtype of bf16.",
)


def verify(plan: Plan, folder: str | Path, *, progress: Callable[[int], Progress] | None = None) -> Certificate:
    """Compare a complete export with its source, tensor by tensor. ``progress`` is that of :func:`export`.

    Raises PrecisionError if the folder holds no export of this plan, or its tensors are not the planned ones.
    """
    target = Destination(folder)
    if target.receipt.get("fingerprint") != plan.fingerprint:
        raise PrecisionError(
            f"{folder} is not an export of this source under this contract.",
            "Its fingerprint is another one.",
            "Give the source, the precision and the layout that it was made with.",
        )
    written = Checkpoint.open(target.folder)
    _require_planned(plan, written)
    found, amaxes = Certificate(idempotent=all(c.comes_back for c in plan.codings.values())), Amaxes(plan)
    step = progress(plan.bytes_in) if progress else lambda count, name: None
    try:
        for name, about in plan.source.tensors.items():
            before = (
                found.codes_wrong,
                found.scales_wrong,
                found.codes_changed,
                found.scales_changed,
                found.bytes_wrong,
            )
            if name in plan.selection.quantized:
                _compare_weight(found, plan, written, name, amaxes)
            else:
                _compare_copy(found, plan, written, name)
            if before != (
                found.codes_wrong,
                found.scales_wrong,
                found.codes_changed,
                found.scales_changed,
                found.bytes_wrong,
            ):
                found.names.append(name)
            step(about.bytes, name)
    finally:
        written.close()
    for name, said in plan.texts.items():
        found.described += 1
        if not _says(target.folder / name, said):
            found.files_wrong += 1
            found.names.append(name)
    for name in ALONE_SAYING_IT - plan.texts.keys():
        if (target.folder / name).exists():
            found.files_wrong += 1
            found.names.append(name)
    return found


ALONE_SAYING_IT = {"hf_quant_config.json"}
"""Files by which vLLM takes weights for quantized where config.json does not say that they are."""


def _says(path: Path, said: Any) -> bool:
    """Return whether a file of JSON says this, however it is written."""
    try:
        return bool(json.loads(path.read_text()) == json.loads(json.dumps(said)))
    except (OSError, ValueError):
        return False


def _compare_weight(found: Certificate, plan: Plan, written: Checkpoint, name: str, amaxes: Amaxes) -> None:
    coding, dtype = plan.codings[name], COMPUTE[plan.precision.compute]
    parts = [*coding.parts(plan.source.tensors[name].shape)]
    stored = zip(*(written.stored(plan.layout.name_of(name, part)) for part in parts), strict=True)
    for matrix, tensors in zip(plan.source.matrices(name), stored, strict=True):
        ours = dict(zip(parts, tensors, strict=True))
        right = encode(plan, name, matrix, amaxes)
        found.tiles_moved += coding.moved(matrix.to(dtype), right)
        for part in parts:
            wrong = _differing(ours[part], right[part])
            if part == CODES:
                found.codes += matrix.numel()
                found.codes_wrong += wrong
            else:
                found.scales += ours[part].numel()
                found.scales_wrong += wrong
        if coding.comes_back:
            again = encode(plan, name, coding.decode(ours, dtype), amaxes)
            for part in parts:
                changed = _differing(ours[part], again[part])
                found.codes_changed += changed if part == CODES else 0
                found.scales_changed += changed if part != CODES else 0
    found.weights += 1


def _compare_copy(found: Certificate, plan: Plan, written: Checkpoint, name: str) -> None:
    found.copied += 1
    for ours, theirs in _side_by_side(written.chunks(name), plan.source.chunks(name)):
        found.copied_bytes += len(ours)
        found.bytes_wrong += ours != theirs


def _side_by_side(a: Iterator[memoryview], b: Iterator[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield two streams of bytes in parts of one length, wherever each is cut; what only one has, beside nothing."""
    left, right = memoryview(b""), memoryview(b"")
    while True:
        left, right = left or next(a, left), right or next(b, right)
        size = min(len(left), len(right)) or max(len(left), len(right))
        if not size:
            return
        yield left[:size], right[:size]
        left, right = left[size:], right[size:]


def _require_planned(plan: Plan, written: Checkpoint) -> None:
    """Raise PrecisionError if a folder's tensors are not those of the plan, in name, shape or dtype."""
    planned = {o.name: (o.about.shape, o.about.dtype) for shard in plan.shards for o in shard.outputs}
    there = {name: (entry.shape, entry.dtype) for name, entry in written.entries.items()}
    wrong = sorted(name for name in planned.keys() | there.keys() if planned.get(name) != there.get(name))
    if wrong:
        raise PrecisionError(
            f"{written.path}: {wrong[0]}{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''} is not as it was "
            "planned.",
            "A file was replaced or deleted since the export.",
            "Export again with --restart.",
        )


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    kind = torch.uint8 if a.element_size() == 1 else torch.int32
    return int((a.view(kind) != b.view(kind)).sum())
