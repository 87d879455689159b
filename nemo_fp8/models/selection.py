"""Decide which linears run in FP8, and say why the others do not: one rule on names and shapes.

    one linear     why_kept(precision, names, [(rows of each part, columns)], layers, side=side)
    a checkpoint   select({name: shape, ...}, precision, layers=num_hidden_layers), in ``units.py``
    a model        stored(model, precision, layout, side), in ``stored.py``

The second and the third ask the first. Training, the vLLM plugin, the exporter, lint, memory, inspect and ``autocast``
call one of them, and none has a rule of its own: trainer and rollout must agree on every layer.

A linear stays in the compute dtype by the first of these rules that holds:

    compute   that side of the contract has no FP8
    always    it is a router, an embedding, a head, a norm or a bias; in a rollout also if it lies outside of the
              decoder (vision towers)
    layers    it lies in the contract's first or last decoder layers, or behind the last (draft heads)
    keep      a pattern of the contract matches one of its names: Megatron's, Hugging Face's or the engine's; or the
              first of its rules for modules that matches gives it the compute dtype
    shape     its rows or columns do not fit (below); a strict contract raises, for all such linears at once

Linears that are stored as one matrix are decided together. In a rollout that is a *unit*, what an engine holds as one:
Q, K and V; gate and up; DeepSeek's two down projections; all routed experts of a layer. In training it is what Megatron
holds as one: Q, K and V; gate and up, of all experts; every other linear alone. If a pattern names a part of a unit
that Megatron holds apart, lint reports it.

Shapes that fit:

    training            rows and columns on a rank are multiples of 16 (MX, NVFP4: 32), since each of them is contracted
                        by one of the three GEMMs
    rollout, 128x128    columns are whole blocks. Rows of each fused part are whole blocks, so that no block covers
                        two parts; the last part ends on a multiple of 32. Parts of experts are whole blocks, all of
                        them. This is what vLLM loads from a checkpoint and its kernels on GPUs and CPUs multiply
    rollout, tensor     columns are a multiple of 128, the rows of all parts together of 32: the same kernels run these
    rollout, 1x32       columns are a multiple of 32
    rollout, 1x16       columns are a multiple of 16 (NVFP4); vLLM pads rows where a kernel wants more

The trade-off: the rule for a rollout looks at whole weights and knows no tensor parallelism, since one checkpoint
serves every layout. If kernels cannot multiply a worker's share of a linear (:func:`share_misfit`), the linear stays in
the compute dtype on that layout only; shares of experts are padded instead. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_fp8.contract import ROLLOUT_BLOCKS, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.names import place
from nemo_fp8.models.spellings import all_names, names_in_an_engine
from nemo_fp8.moved import renamed

if not TYPE_CHECKING:  # see nemo_fp8.moved
    _TO_UNITS = ("Selection", "Unit", "module_of", "part_names", "select", "sharing_a_scale", "units_of")
    _TO_STORED = ("on_rollout_rank", "rollout_cut", "stored", "train_cut")
    __getattr__ = renamed(
        __name__,
        {name: f"nemo_fp8.models.units.{name}" for name in _TO_UNITS}
        | {name: f"nemo_fp8.models.stored.{name}" for name in _TO_STORED}
        | {"outside_names": "nemo_fp8.models.spellings.outside_names"},
    )

ALWAYS, LAYERS, KEEP, SHAPE, COMPUTE = "always", "layers", "keep", "shape", "compute"

# Scaling -> the multiple that rows and columns of a weight must be. TE checks 8 on the outer dimension only, but each
# dimension is contracted in one of the three GEMMs, and cuBLAS then needs 16 (16 bytes).
GEMM_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": 32}
# In a rollout: the multiple of the last part's rows, and the multiple of the columns under one scale a tensor.
LAST_ROWS, KERNEL_COLUMNS = 32, 128

# The words that may stand before a decoder's list of layers (model.language_model.layers.0), and words that mark
# another list (visual.blocks.0).
_DECODERS = frozenset(
    {"", "model", "language_model", "transformer", "decoder", "backbone", "gpt_neox", "text_model", "llm", "thinker"}
)
_TOWERS = re.compile(r"visual|vision|image|audio|speech|video|encoder|projector|resampler|mtp|eagle|draft")


@dataclass(frozen=True)
class Kept:
    """Why a linear stays in the compute dtype: the rule (one of the five words above), and the reason in words."""

    rule: str
    reason: str
    field: str = "keep"
    """The contract's field that names the linear, where the rule is a name: keep or modules."""

    @property
    def in_short(self) -> str:
        """The reason without numbers and names, so that reports can group layers by it."""
        return {LAYERS: "first or last layers", KEEP: self.field}.get(self.rule, self.reason)


# ---------------------------------------------------------------------- the rule


Shape = tuple[Sequence[int], int]  # rows of each part, columns
BY_NAME = "by its name"  # why_kept(layer=BY_NAME) reads the number of the layer from the name


def why_kept(
    precision: Precision,
    names: Sequence[str],
    shapes: Iterable[Shape],
    layers: int | None = None,
    *,
    side: str = "rollout",
    experts: int = 0,
    layer: int | str | None = BY_NAME,
) -> Kept | None:
    """Say why linears that are stored as one matrix stay in the compute dtype; None if they run in FP8.

    names     modules of the parts, in the caller's own naming, behind the name of the whole if it has one
    shapes    (rows of each part, columns) of each matrix: of a rank's share in training, of the whole in a rollout
    layers    the number of decoder layers; None leaves out the rules that count them
    side      ``train`` or ``rollout``
    experts   the number of routed experts that the matrix belongs to; 0 for other linears
    layer     the number of the decoder layer, or None for none; by default it is read from the first name

    Raises PrecisionError if layers have to be counted and a name does not tell whose layers it counts.
    """
    if precision.operand("weight", side) is None:
        return without_fp8(side)
    by_name = why_kept_by_name(precision, names, layers, side=side, experts=experts, layer=layer)
    if by_name is not None:
        return by_name
    own = contract_of(precision, names, experts)
    if own.operand("weight", side) is None:
        return Kept(KEEP, f"the contract's rules for modules give {names[0]} the compute dtype", "modules")
    for parts, columns in shapes:
        reason = (
            gemm_misfit(own.scaling, sum(parts), columns)
            if side == "train"
            else misfit(own, parts, columns, experts=bool(experts))
        )
        if reason:
            return Kept(SHAPE, reason)
    return None


def without_fp8(side: str) -> Kept:
    """Return why every linear of a side stays in the compute dtype, under a contract that has no FP8 there."""
    return Kept(COMPUTE, f"the contract {'trains' if side == 'train' else 'generates'} in the compute dtype")


def why_kept_by_name(
    precision: Precision,
    names: Sequence[str],
    layers: int | None,
    *,
    side: str = "rollout",
    experts: int = 0,
    layer: int | str | None = BY_NAME,
) -> Kept | None:
    """Apply the rules that need names only: always, layers, keep. The arguments are those of :func:`why_kept`."""
    places = [place(name) for name in names]
    for p in places:
        if p.kept:
            return Kept(ALWAYS, p.kept)
    first, last = precision.first_layers, precision.last_layers
    counted = layers is not None and bool(first or last)
    number = decoder_layer(names[0], counted=counted) if isinstance(layer, str) else layer
    if number is None and side == "rollout":
        return Kept(ALWAYS, "by its name in vLLM it lies outside of the decoder, where training has no FP8 either")
    if layers is not None and number is not None and number >= layers:
        return Kept(LAYERS, f"layer {number} lies behind the {layers} layers of the decoder")
    if layers is not None and number is not None and (number < first or number >= layers - last):
        return Kept(
            LAYERS, f"decoder layer {number} of {layers}, and the contract keeps the first {first} and the last {last}"
        )
    if precision.keep:
        # Both sides must answer alike, whichever naming each of them uses: a pattern counts if it matches the
        # Megatron or the Hugging Face name of any linear that is fused with this one.
        matched = next(filter(precision.keeps, all_names(names, experts)), "")
        if matched:
            return Kept(KEEP, f"the contract's keep patterns match {matched}")
    return None


# ---------------------------------------------------------------------- names


def contract_of(precision: Precision, names: Sequence[str], experts: int = 0, side: str = "train") -> Precision:
    """Return the contract of linears that are stored as one matrix: with the recipe that the contract's rules give it.

    As with ``keep``, a rule counts if it matches any name of any of these linears, Megatron's or Hugging Face's; in a
    ``rollout`` also of those that an engine holds as one with them.
    """
    if not precision.modules:
        return precision
    return precision.of(names_in_an_engine(names, experts) if side == "rollout" else all_names(names, experts))


def decoder_layer(name: str, *, counted: bool = False) -> int | None:
    """Return the number of the decoder layer that a module lies in; None if it lies in none.

    With ``counted`` (the contract keeps first or last layers), raises PrecisionError if the list of layers has an
    unknown name: if it were counted by mistake, the model's precision would change without a word.
    """
    at = place(name)
    path = at.container.split(".")[:-1]
    if at.layer is None or any(_TOWERS.search(word) for word in path):
        return None
    if counted and not set(path) <= _DECODERS:
        raise PrecisionError(
            f"Cannot tell whether {name} lies in a decoder layer.",
            "The contract counts decoder layers from the start or the end, and this list of layers has an unknown "
            "name.",
            f"Set first_layers=0 and last_layers=0, and name the layers in keep, as in keep=('{at.container}.0.*',).",
        )
    return at.layer


# ---------------------------------------------------------------------- shapes


def misfit(precision: Precision, parts: Sequence[int], columns: int, *, experts: bool = False) -> str | None:
    """Say why rollout blocks cannot hold a matrix of ``parts`` rows and ``columns``; None if they can.

    ``experts``: an engine stores the parts of experts apart, so the last part, too, needs whole blocks.
    """
    block = ROLLOUT_BLOCKS[precision.rollout_block]
    rows, across = block or (1, KERNEL_COLUMNS)
    if columns % across:
        return f"{columns} columns are not a multiple of {across}"
    *fused, last = parts
    for part in (*fused, last) if experts else fused:
        if part % rows:
            return f"a part of {part} rows is not a multiple of {rows}"
    # Blocks end with each part, so the last part's rows count; without blocks of rows, those of the whole matrix.
    ending, step = last if rows > 1 else sum(parts), _row_step(precision)
    return f"{ending} rows are not a multiple of {step}" if ending % step else None


def gemm_misfit(scaling: str | None, rows: int, columns: int) -> str | None:
    """Say why the GEMMs of training cannot multiply a rank's weight ``[rows, columns]``; None if they can."""
    return None if scaling is None else _not_multiples(GEMM_MULTIPLE[scaling], rows=rows, columns=columns)


def primary_misfit(scaling: str | None, rows: int, columns: int) -> str | None:
    """Say why a weight in FP8 has ragged blocks at its edges; None if all blocks are whole, or the scaling has none."""
    return _not_multiples(KERNEL_COLUMNS, rows=rows, columns=columns) if scaling == "blockwise" else None


def _not_multiples(multiple: int, **sides: int) -> str | None:
    bad = [f"{value} {side}" for side, value in sides.items() if value % multiple]
    return f"{' and '.join(bad)} not a multiple of {multiple}" if bad else None


def share_misfit(precision: Precision, rows: int, columns: int) -> str | None:
    """Say why kernels cannot multiply one worker's share of a linear that fits as a whole; None if they can."""
    _, across = ROLLOUT_BLOCKS[precision.rollout_block] or (1, KERNEL_COLUMNS)
    if columns % across:
        return f"{columns} columns on one worker are not a multiple of {across}"
    step = _row_step(precision)
    return f"{rows} rows on one worker are not a multiple of {step}" if rows % step else None


def _row_step(precision: Precision) -> int:
    """Return the multiple of the rows that kernels need: 1 for MX and NVFP4 weights, which are padded or decoded."""
    return 1 if precision.rollout_block in ("1x32", "1x16") else LAST_ROWS
