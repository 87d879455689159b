"""Measure what FP8 would do to a checkpoint, and to captured activations, before a run is spent on it.

Every weight matrix is quantized as each contract says, and measured: SNR of the whole and of its blocks, underflow,
saturation, MSE, amax, the range of scales, the dynamic range in use; and how far the copy that the backward multiplies
by is from the forward's (``transposition``). One matrix is in memory at a time, and becomes a row of numbers.

A file does not have the scales of delayed scaling, which come from earlier steps. Here they come from the tensor
itself, lowered by the contract's margin, which is right for a weight that changes slowly. Embeddings, norms, routers
and the output head stay in the compute dtype under every contract; they are listed, but not measured.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("numerics")

import torch

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError
from nemo_fp8.inspection.loss import BLOCKS, Loss
from nemo_fp8.models.names import Place, place
from nemo_fp8.models.selection import contract_of, why_kept
from nemo_fp8.models.units import decoder, outside
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.numerics.scales import amax_of, delayed_scale
from nemo_fp8.numerics.transposition import ONE, Copies, Transposition, whole_blocks
from nemo_fp8.storage.safetensors import CODES, SCALE_2, VALUES, Checkpoint, Entry

Progress = Callable[[int, str], None]
_DECODED = (*CODES, "NVFP4")
_PACKED = "is packed or no float"
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


@dataclass(frozen=True)
class Row:
    """One tensor: its place in the model, and its loss under each recipe or why it is not measured."""

    name: str
    operand: str
    """The operand of a GEMM that it is: ``weight``, ``input`` or ``grad``."""
    place: Place
    shape: tuple[int, ...]
    dtype: str
    skipped: str = ""
    """Why it is not quantized, under any contract."""
    note: str = ""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    """The losses by the recipe's label."""
    transpositions: Mapping[str, Transposition] = field(default_factory=dict)
    """Label -> how far, for a weight, the copy that the backward multiplies by is from the forward's."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """By label, why that contract keeps this linear in the compute dtype, although it could be quantized."""

    @property
    def elements(self) -> int:
        """The number of values."""
        return torch.Size(self.shape).numel()

    @property
    def floor_db(self) -> float:
        """The lowest SNR under any recipe, of the tensor or of its blocks."""
        return min(loss.floor_db for loss in self.losses.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        measured = {
            label: {
                **loss.to_dict(),
                "kept": self.kept.get(label),
                "transposition": turned.to_dict() if (turned := self.transpositions.get(label)) else None,
            }
            for label, loss in self.losses.items()
        }
        return {
            "name": self.name,
            "operand": self.operand,
            "role": self.place.role,
            "layer": self.place.layer,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "not_quantized": self.skipped or None,
            "note": self.note or None,
            "precisions": measured,
        }


@dataclass(frozen=True)
class Inspection:
    """The losses of every tensor of a checkpoint under several recipes."""

    path: Path
    recipes: Mapping[str, Precision]
    rows: tuple[Row, ...]
    layers: int
    """The number of decoder layers."""
    bytes: int
    seconds: float
    unlisted: tuple[str, ...] = ()
    """Tensors in the files that the index does not list: no part of the checkpoint."""

    def measured(self, *operands: str) -> list[Row]:
        """Return the rows that were measured, of these operands or of all."""
        return [row for row in self.rows if row.losses and (not operands or row.operand in operands)]

    def worst(self, count: int = 10) -> list[Row]:
        """Return the tensors with the lowest SNR under any of the recipes."""
        return sorted(self.measured(), key=lambda row: row.floor_db)[:count]

    def not_finite(self) -> list[Row]:
        """Return the tensors that hold a NaN or an infinity."""
        return [row for row in self.measured() if next(iter(row.losses.values())).nonfinite]

    def not_finite_words(self) -> str:
        """Return the names of these tensors, and which of them have no finite value at all."""
        of = ((row.name, next(iter(row.losses.values())).is_broken) for row in self.not_finite())
        return ", ".join(f"{name} (all of it)" if all_ else name for name, all_ in of)

    def packed_words(self) -> str:
        """Return what may be weights and is packed in a way that is not known here: one name of each kind, and how many
        there are of it."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.skipped.endswith(_PACKED):
                kinds.setdefault((row.name.rpartition(".")[2], row.skipped), []).append(row.name)
        return ", ".join(
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({why})"
            for (_, why), names in kinds.items()
        )

    def unlisted_words(self) -> str:
        """Return one name of the tensors that the index leaves out, and how many there are."""
        return f"{self.unlisted[0]} and {len(self.unlisted) - 1} more" if self.unlisted[1:] else "".join(self.unlisted)

    def dequantized_words(self) -> str:
        """Return how many weights were quantized already, by their format."""
        found = Counter(row.dtype for row in self.measured() if row.note)
        return ", ".join(f"{count} in {dtype}" for dtype, count in found.items())

    def total(self, label: str, rows: Iterable[Row]) -> Loss:
        """Return the loss of several tensors under one recipe, as if they were one tensor."""
        return Loss.together(row.losses[label] for row in rows)

    def transposition(self, label: str, rows: Iterable[Row]) -> Transposition:
        """Return how far the backward's copies of several weights are from the forward's, as if they were one."""
        return Transposition.together(row.transpositions[label] for row in rows if label in row.transpositions)

    def copies(self, label: str) -> tuple[Copies, ...]:
        """Return how the forward's and the backward's copies of weights are stored: more than one if rules differ."""
        found = (Copies.under(_own(self.recipes[label], row)) for row in self.measured("weight"))
        return tuple(dict.fromkeys(found))

    def backward_words(self, label: str) -> str:
        """Return in words what the backward multiplies by."""
        return _by_rules(copies.words for copies in self.copies(label))

    def stored_words(self, label: str, operand: str) -> str:
        """Return in words how the tensors of an operand are stored."""
        found = (_own(self.recipes[label], row).operand(operand) for row in self.measured(operand))
        return _by_rules(stored.words() for stored in found if stored)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "checkpoint": str(self.path),
            "layers": self.layers,
            "bytes": self.bytes,
            "not_listed": list(self.unlisted),
            "seconds": round(self.seconds, 3),
            "precisions": {label: p.to_dict() for label, p in self.recipes.items()},
            "tensors": [row.to_dict() for row in self.rows],
        }


def inspect_checkpoint(
    path: str | Path,
    recipes: Mapping[str, Precision | str] | Precision | str,
    *,
    activations: str | Path | None = None,
    progress: Callable[[int], Progress] | None = None,
) -> Inspection:
    """Measure a checkpoint, and a file of captured activations, under each recipe: a contract, or the name of one.

    ``recipes`` has a label for each of them; one alone is labelled with its name.

    ``progress`` is called once with the number of bytes to read. It returns a function that is called after each tensor
    with its bytes and its name.

    Raises PrecisionError if a recipe has no FP8, a file cannot be read, or there is nothing to measure in it.
    """
    if not isinstance(recipes, Mapping):
        recipes = {(alone := given(recipes)).name: alone}
    contracts = {label: given(recipe) for label, recipe in recipes.items()}
    _require_fp8(contracts)
    checkpoint = Checkpoint.open(path)
    sources = [(checkpoint, rows := _weights(checkpoint))]
    if activations is not None:
        captured = Checkpoint.open(activations)
        sources.append((captured, _captured(captured)))
    layers = 1 + max(
        (row.place.layer for row in rows if row.place.layer is not None and not row.place.kept), default=-1
    )
    experts = _experts(row for _, found in sources for row in found)
    read = sum(source.entries[row.name].bytes for source, found in sources for row in found if not row.skipped)
    report = progress(read) if progress else lambda count, name: None
    measured, start = [], time.perf_counter()
    for source, found in sources:
        for row in found:
            if not row.skipped:
                losses, turned = _measure(source, row, contracts)
                kept = {label: why for label, p in contracts.items() if (why := _kept(p, row, layers, experts))}
                row = replace(row, losses=losses, transpositions=turned, kept=kept)
                report(source.entries[row.name].bytes, row.name)
            measured.append(row)
        source.close()
    seconds = time.perf_counter() - start
    left_out = tuple(checkpoint.unlisted)
    inspection = Inspection(Path(path), contracts, tuple(measured), layers, read, seconds, left_out)
    if not any(row.losses and row.operand == "weight" for row in measured):
        packed = inspection.packed_words()
        raise PrecisionError(
            f"{path} holds no weight matrix{' that can be read' if packed else ''}.",
            f"Of its {len(rows)} tensors none is a matrix of floats that a linear layer multiplies with."
            + (f" Not read: {packed}." if packed else ""),
            "Give the BF16 checkpoint that it was made from."
            if packed
            else "Give a model's checkpoint, not an optimizer's or an adapter's state.",
        )
    return inspection


# ---------------------------------------------------------------------- which tensors


def _weights(checkpoint: Checkpoint) -> list[Row]:
    """Return every tensor of a checkpoint but the scales, with the reason if it is no linear's weight."""
    scales = {checkpoint.scale_of(name) for name in checkpoint.entries}
    packed = {name for name in checkpoint.entries if checkpoint.is_nvfp4(name)}
    scales |= {scale for name in packed for scale in (name + SCALE_2, f"{place(name).module}.input_scale")}
    rows = []
    for name, entry in checkpoint.entries.items():
        if name not in scales:
            e = replace(entry, shape=checkpoint.shape_of(name), dtype="NVFP4" if name in packed else entry.dtype)
            rows.append(Row(name, "weight", place(name), e.shape, e.dtype, _skipped(e), _note(e)))
    return _in_order(rows)


def _captured(checkpoint: Checkpoint) -> list[Row]:
    """Return the inputs and gradients that ``nemo_fp8.capture`` recorded."""
    rows = [
        Row(e.name, operand, place(e.name), e.shape, e.dtype, "" if e.elements else "empty")
        for e in checkpoint.entries.values()
        if (operand := e.name.rsplit(".", 1)[-1]) in ("input", "grad") and e.dtype in VALUES
    ]
    if not rows:
        raise PrecisionError(
            f"{checkpoint.path} holds no captured activations.",
            "They are called after their linear, with .input or .grad behind it.",
            "Write them with nemo_fp8.capture(model, FILE).",
        )
    return _in_order([replace(row, skipped=row.skipped or row.place.kept) for row in rows])


def _in_order(rows: list[Row]) -> list[Row]:
    """Sort rows by layer. Layers of other stacks than the decoder (a vision tower) do not count as layers."""
    main = decoder((row.place for row in rows if not row.skipped), {row.place.module: row.elements for row in rows})
    rows = [row if row.place.container in ("", main) else replace(row, place=outside(row.place)) for row in rows]
    return sorted(rows, key=lambda row: (row.place.layer is None, row.place.layer or 0))


def _skipped(entry: Entry) -> str:
    where = place(entry.name)
    if where.kept:
        return where.kept
    if entry.dtype not in (*VALUES, *_DECODED) and len(entry.shape) > 1:
        return f"{entry.dtype} {_PACKED}"
    is_weight = entry.name.rsplit(".", 1)[-1].startswith("weight") or where.role == "experts"
    if not is_weight or len(entry.shape) != (3 if len(entry.shape) == 3 and where.role == "experts" else 2):
        return "not a weight matrix"
    return "" if entry.elements else "empty"


def _note(entry: Entry) -> str:
    return f"{entry.dtype}, dequantized first" if entry.dtype in _DECODED else ""


def _kept(p: Precision, row: Row, layers: int, experts: int) -> str:
    """Return why a contract keeps a linear in the compute dtype; empty if it does not."""
    shapes = [((row.shape[-2],), row.shape[-1])] if row.operand == "weight" else []
    held = why_kept(p, (row.place.module,), shapes, layers, side="train", experts=experts, layer=row.place.layer)
    return held.in_short if held else ""


def _experts(rows: Iterable[Row]) -> int:
    """Return how many routed experts a layer has, by the highest number in a name."""
    return 1 + max((int(found[1]) for row in rows if (found := _EXPERT.search(row.place.module))), default=-1)


# ---------------------------------------------------------------------- measuring


def _measure(
    source: Checkpoint, row: Row, recipes: Mapping[str, Precision]
) -> tuple[dict[str, Loss], dict[str, Transposition]]:
    """Return the loss and the transposition of a tensor under each recipe; the same casts share one measurement."""
    own = {label: _own(p, row) for label, p in recipes.items()}
    casts = {label: (p.operand(row.operand), p.margin if p.scaling == "delayed" else 0) for label, p in own.items()}
    distinct = {(replace(operand, delayed=False), margin) for operand, margin in casts.values() if operand is not None}
    found: dict[tuple[Operand, int], list[Loss]] = {cast: [] for cast in distinct}
    pairs = {label: Copies.under(p) for label, p in own.items()} if row.operand == "weight" else {}
    copies = {label: ONE if pair.are_one else pair for label, pair in pairs.items()}
    turned: dict[Copies, list[Transposition]] = {pair: [] for pair in copies.values()}
    for matrix in source.matrices(row.name):
        for operand, margin in distinct:
            found[operand, margin].append(measure(matrix, operand, margin, BLOCKS[row.operand]))
        for pair, parts in turned.items():
            parts.append(pair.measure(matrix))
        del matrix  # before the next one is read
    together = {cast: Loss.together(losses) for cast, losses in found.items()}
    losses = {
        label: together[replace(operand, delayed=False), margin]
        for label, (operand, margin) in casts.items()
        if operand is not None
    }
    return losses, {label: Transposition.together(turned[pair]) for label, pair in copies.items()}


def _by_rules(words: Iterable[str]) -> str:
    """Return what holds for all tensors in words, or what holds for some and for others, if rules tell them apart."""
    distinct = sorted({*words})
    return f"by rules: {' or '.join(distinct)}" if len(distinct) > 1 else distinct[0]


def _own(precision: Precision, row: Row) -> Precision:
    """Return the contract of a tensor's module; the whole one for a module that a rule leaves in the compute dtype, so
    that it is seen what it would lose."""
    own = contract_of(precision, (row.place.module,), 1)
    return precision if own.operand(row.operand) is None else own


def measure(matrix: torch.Tensor, operand: Operand, margin: int, block: tuple[int, int]) -> Loss:
    """Quantize a matrix as an operand with its own scale, and return the loss.

    ``margin`` lowers the scale, as in delayed scaling. ``block`` is that of the blocks' SNR.
    """
    scale = None
    if margin:
        format = format_of(operand.format)
        scale = delayed_scale(amax_of(matrix), torch.ones((), device=matrix.device), format, margin)
    whole = whole_blocks(matrix, operand)
    chance = torch.Generator(matrix.device).manual_seed(0) if operand.stochastic else None
    loss = Loss.of(whole, quantize(whole, operand, scale=scale, statistics=True, generator=chance), block)
    return replace(loss, elements=matrix.numel())


def _require_fp8(recipes: Mapping[str, Precision]) -> None:
    plain = [label for label, p in recipes.items() if not p.is_quantized]
    if plain or not recipes:
        raise PrecisionError(
            f"{plain[0]} has no FP8 to inspect." if plain else "No precision to inspect.",
            "A contract without FP8 GEMMs quantizes nothing.",
            "Choose precisions with FP8; `nemo-fp8 list` shows which have it.",
        )
