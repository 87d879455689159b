"""Decide which linears run in FP8, and say why the others do not: one rule on names and shapes.

    a model's linears   stored(model, precision, layout, side)
    a checkpoint        select({name: shape, ...}, precision, layers=num_hidden_layers)
    one linear          why_kept(precision, names, [(rows of each part, columns)], layers, side=side)

Training, the vLLM plugin, the exporter, lint, memory, inspect and ``autocast`` all call it, and none of them has a
rule of its own: trainer and rollout must agree on every layer. A linear stays in the compute dtype by the first of
these rules that holds:

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

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from nemo_fp8.contract import ROLLOUT_BLOCKS, Operand, Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.models.families import EXPERTS, FUSED, in_hugging_face
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.names import Place, place
from nemo_fp8.models.shapes import Linear, Model

ALWAYS, LAYERS, KEEP, SHAPE, COMPUTE = "always", "layers", "keep", "shape", "compute"

# Scaling -> the multiple that rows and columns of a weight must be. TE checks 8 on the outer dimension only, but each
# dimension is contracted in one of the three GEMMs, and cuBLAS then needs 16 (16 bytes).
GEMM_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": 32}
# In a rollout: the multiple of the last part's rows, and the multiple of the columns under one scale a tensor.
LAST_ROWS, KERNEL_COLUMNS = 32, 128

# qkv_proj -> (q_proj, k_proj, v_proj), and each of these words -> all three.
_FUSED_AS = {name: words for name, words in FUSED if name}
_FUSED_OF = {word: words for _, words in FUSED for word in words}
# The words that may stand before a decoder's list of layers (model.language_model.layers.0), and words that mark
# another list (visual.blocks.0).
_DECODERS = frozenset(
    {"", "model", "language_model", "transformer", "decoder", "backbone", "gpt_neox", "text_model", "llm", "thinker"}
)
_TOWERS = re.compile(r"visual|vision|image|audio|speech|video|encoder|projector|resampler|mtp|eagle|draft")
_EXPERTS = re.compile(r"^(.*?(?:^|\.)experts)(\.|$)")


@dataclass(frozen=True)
class Kept:
    """Why a linear stays in the compute dtype: the rule (one of the five words above), and the reason in words."""

    rule: str
    reason: str

    @property
    def in_short(self) -> str:
        """The reason without numbers and names, so that reports can group layers by it."""
        return {LAYERS: "first or last layers", KEEP: "keep"}.get(self.rule, self.reason)


@dataclass(frozen=True)
class Unit:
    """Linears that an engine holds as one matrix: their tensors and shapes, in the order of its rows."""

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of the tensors."""
        return tuple(module_of(tensor) for tensor in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """The engine's name of the unit, if it has one, and the names of the modules, as from :func:`part_names`."""
        parent, _, word = self.modules[0].rpartition(".")
        if place(self.tensors[0]).role == "experts":
            return (_experts(self.tensors[0]), *self.modules)
        own = next((fused for fused, words in _FUSED_AS.items() if word in words), None)
        return (f"{parent}.{own}", *self.modules) if own else self.modules

    @property
    def experts(self) -> int:
        """The number of routed experts' matrices; 0 for other linears."""
        return len(self.tensors) if place(self.tensors[0]).role == "experts" else 0

    def contract(self, precision: Precision) -> Precision:
        """Return the contract of these linears, without rules: with the recipe that the contract's rules give them."""
        return contract_of(precision, self.names, self.experts).replace(modules=())


@dataclass(frozen=True)
class Selection:
    """The answer for a whole checkpoint: each tensor is part of a unit in FP8, or kept."""

    units: tuple[Unit, ...]
    """The units in FP8."""
    kept: Mapping[str, Kept] = field(default_factory=dict)
    """Tensor -> why it stays in the compute dtype."""
    misaligned: tuple[Problem, ...] = ()
    """A problem for every unit that its shape alone keeps; the caller reports them."""

    @property
    def quantized(self) -> frozenset[str]:
        """The tensors in FP8."""
        return frozenset(tensor for unit in self.units for tensor in unit.tensors)

    @property
    def not_converted(self) -> tuple[str, ...]:
        """The kept modules that an engine could take for FP8 linears: ``modules_to_not_convert`` of a config.json."""
        found = ((name, place(name)) for name in self.kept)
        modules = (
            _experts(name) if p.role == "experts" else p.module for name, p in found if _could_be_linear(name, p)
        )
        return tuple(dict.fromkeys(modules))

    def by_rule(self, rule: str) -> dict[str, Kept]:
        """Return the tensors that one rule keeps."""
        return {name: kept for name, kept in self.kept.items() if kept.rule == rule}


# ---------------------------------------------------------------------- the rule for one linear


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
        return _without_fp8(side)
    by_name = why_kept_by_name(precision, names, layers, side=side, experts=experts, layer=layer)
    if by_name is not None:
        return by_name
    own = contract_of(precision, names, experts)
    if own.operand("weight", side) is None:
        return Kept(KEEP, f"the contract's rules for modules give {names[0]} the compute dtype")
    for parts, columns in shapes:
        reason = (
            gemm_misfit(own.scaling, sum(parts), columns)
            if side == "train"
            else misfit(own, parts, columns, experts=bool(experts))
        )
        if reason:
            return Kept(SHAPE, reason)
    return None


def _without_fp8(side: str) -> Kept:
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
    number = (
        decoder_layer(names[0], counted=bool(layers is not None and (first or last)))
        if isinstance(layer, str)
        else layer
    )
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


def contract_of(precision: Precision, names: Sequence[str], experts: int = 0) -> Precision:
    """Return the contract of linears that are stored as one matrix: with the recipe that the contract's rules give it.

    As with ``keep``, a rule counts if it matches any name of any of these linears, Megatron's or Hugging Face's.
    """
    return precision.of(all_names(names, experts)) if precision.modules else precision


def all_names(names: Sequence[str], experts: int = 0) -> tuple[str, ...]:
    """Return names of linears that are stored as one matrix, and behind them every other name of these linears."""
    return (*names, *_other_names([place(name) for name in names], experts))


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


def part_names(prefix: str, fused: Mapping[str, Sequence[str]] | None = None, experts: int = 0) -> tuple[str, ...]:
    """Return the name of an engine's module, followed by the checkpoint's modules that it is made of.

    ``fused`` is the model's ``packed_modules_mapping`` in vLLM; ``experts`` is the number of routed experts, if any.
    """
    if experts:
        words = next((family.words for family in EXPERTS if family.block in prefix.split(".")), EXPERTS[0].words)
        return (prefix, *(f"{prefix}.{i}.{word}" for i in range(experts) for word in words))
    parent, _, word = prefix.rpartition(".")
    parts = (fused or {}).get(word) or _FUSED_AS.get(word, ())
    return (prefix, *(f"{parent}.{part}" if parent else part for part in parts))


def module_of(tensor: str) -> str:
    """Return the module of a tensor: its name without ``.weight``."""
    return place(tensor).module


def _other_names(places: Iterable[Place], experts: int) -> Iterator[str]:
    """Yield every name of the units that modules belong to."""
    units = {(p.layer, p.unit) for p in places if p.unit and p.layer is not None}
    return (name for layer, unit in sorted(units) for name in _names_of(layer, unit, experts))


@lru_cache(maxsize=1 << 12)
def _names_of(layer: int, unit: str, experts: int) -> tuple[str, ...]:
    """Return the Megatron and Hugging Face names of a unit, of all parts and all experts.

    ``unit`` is Megatron's name below the layer (``self_attention.linear_qkv``). Since the names of all of its parts are
    tried, a pattern that names K keeps Q and V as well, in training and in rollout.
    """
    megatron, routed = f"decoder.layers.{layer}.", unit.startswith("mlp.experts.")
    names = [megatron + unit]
    for e in range(experts) if routed else (0,):
        if routed:
            names.append(megatron + unit.replace("experts.", f"experts.local_experts.{e}.", 1))
        for words in EXPERTS if routed else EXPERTS[:1]:
            names += [f"model.layers.{layer}.{name}" for name in in_hugging_face(unit, words, e)]
    return tuple(names)


def outside_names(layers: Iterable[int]) -> Iterator[str]:
    """Yield names of modules that no contract puts in FP8 (head, embedding, routers); patterns may match them."""
    yield from ("lm_head", "output_layer", "embedding", "model.embed_tokens")
    for layer in layers:
        yield from (
            f"decoder.layers.{layer}.mlp.router",
            *(f"model.layers.{layer}.{words.block}.gate" for words in EXPERTS),
        )


# ---------------------------------------------------------------------- the rule for a whole checkpoint


def select(
    tensors: Mapping[str, Sequence[int]], precision: Precision, *, layers: int | None = None, kv_rows: int | None = None
) -> Selection:
    """Select the tensors of a checkpoint (name -> shape) that are held in FP8, and say why the others are not.

    ``layers`` is the number of decoder layers, by default counted from the names. ``kv_rows`` is the number of rows of
    K, for checkpoints that hold Q, K and V as one tensor. Raises PrecisionError if the contract is strict and shapes
    do not fit, with a problem for every unit.
    """
    layers = layers if layers is not None else _count_layers(tensors)
    chosen: list[Unit] = []
    kept: dict[str, Kept] = {}
    misaligned: list[Problem] = []
    for unit in units_of(tensors):
        reason = _why_unit(unit, precision, layers, kv_rows)
        if reason is None:
            chosen.append(unit)
            continue
        kept |= dict.fromkeys(unit.tensors, reason)
        if reason.rule == SHAPE:
            misaligned.append(_problem(unit, reason, precision))
    if misaligned and precision.strict:
        raise PrecisionError(misaligned)
    return Selection(tuple(chosen), {name: kept[name] for name in tensors if name in kept}, tuple(misaligned))


def units_of(tensors: Mapping[str, Sequence[int]]) -> list[Unit]:
    """Group the tensors of a checkpoint into units; a tensor that is no part of a linear is a unit of its own."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(_key(name), []).append(name)
    return [Unit(found := _in_order(names), tuple(tuple(tensors[name]) for name in found)) for names in groups.values()]


def _key(tensor: str) -> str:
    """Return a key that the tensors of one unit share, and no others."""
    if place(tensor).role == "experts":
        return _experts(tensor)
    if tensor.endswith(".weight"):
        parent, _, word = module_of(tensor).rpartition(".")
        if word in _FUSED_OF:
            return f"{parent}.{'+'.join(_FUSED_OF[word])}"
    return tensor


def sharing_a_scale(tensors: Iterable[str]) -> list[tuple[str, ...]]:
    """Group weights that share one scale in NVFP4: q, k and v; gate and up, of each expert by itself.

    An engine holds them as one matrix, whose kernels take one FP32 scale beneath the block scales. So the amax that the
    scale is made of is that of all of them.
    """
    groups: dict[str, list[str]] = {}
    for name in tensors:
        parent, _, word = module_of(name).rpartition(".")
        key = f"{parent}.{'+'.join(_FUSED_OF[word])}" if word in _FUSED_OF else name
        groups.setdefault(key, []).append(name)
    return [tuple(names) for names in groups.values()]


def _experts(tensor: str) -> str:
    """Return the module of all routed experts of a layer: the name up to ``experts``."""
    found = _EXPERTS.match(module_of(tensor))
    return found[1] if found else module_of(tensor)


def _could_be_linear(tensor: str, p: Place) -> bool:
    return p.role == "experts" or (tensor.endswith(".weight") and p.role not in ("norm", "bias", "embedding"))


def _in_order(names: Sequence[str]) -> tuple[str, ...]:
    """Sort the tensors of a unit in the order of the fused matrix's rows."""

    def rank(name: str) -> int:
        word = module_of(name).rpartition(".")[2]
        return _FUSED_OF[word].index(word) if word in _FUSED_OF else 0

    return tuple(names) if place(names[0]).role == "experts" else tuple(sorted(names, key=rank))


def _why_unit(unit: Unit, precision: Precision, layers: int, kv_rows: int | None) -> Kept | None:
    """Call :func:`why_kept` with the names and shapes of a unit."""
    names, first = unit.names, place(unit.tensors[0])
    experts = first.role == "experts"
    if not first.kept and not all(
        _is_matrix(name, shape, experts) for name, shape in zip(unit.tensors, unit.shapes, strict=True)
    ):
        return Kept(ALWAYS, "it is not the weight of a linear")
    if experts:
        # Experts come as one stack or as many matrices, and some checkpoints store them transposed. Their rows and
        # columns have to be whole blocks alike, so the order does not matter.
        return why_kept(
            precision, names, {((shape[-2],), shape[-1]) for shape in unit.shapes}, layers, experts=unit.experts
        )
    if first.kept:
        return why_kept(precision, names, (), layers)
    rows = [shape[0] for shape in unit.shapes]
    if first.role == "gate_up":
        rows = [rows[0] // 2, rows[0] - rows[0] // 2]
    elif first.role == "qkv" and kv_rows:
        rows = [rows[0] - 2 * kv_rows, kv_rows, kv_rows]
    columns = {shape[-1] for shape in unit.shapes}
    if len(columns) > 1:
        raise PrecisionError(
            f"{', '.join(unit.tensors)} have {' and '.join(map(str, sorted(columns)))} columns.",
            "They are parts of one linear, so they have the same input.",
            "Check where the checkpoint comes from; its tensors do not belong together.",
        )
    return why_kept(precision, names, [(rows, columns.pop())], layers)


def _is_matrix(name: str, shape: tuple[int, ...], experts: bool) -> bool:
    """Whether a tensor is a linear's weight, or a stack of experts' weights, whose name may lack ``.weight``."""
    if experts:
        return len(shape) in (2, 3) and not name.endswith("bias")
    return len(shape) == 2 and name.endswith(".weight")


def _count_layers(tensors: Iterable[str]) -> int:
    return max((layer for layer in map(decoder_layer, tensors) if layer is not None), default=-1) + 1


def _problem(unit: Unit, kept: Kept, precision: Precision) -> Problem:
    names = unit.modules
    name = names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} with it)"
    weights = sum(math.prod(shape) for shape in unit.shapes)
    return Problem(
        f"{name}: {weights:,} weights stay in {precision.compute.upper()}.",
        f"{kept.reason[0].upper()}{kept.reason[1:]}, as blocks of {unit.contract(precision).rollout_block} need.",
        f"Add {names[0]!r} to keep=, or set strict=False.",
        "error" if precision.strict else "warning",
    )


# ---------------------------------------------------------------------- the rule for a model


def stored(model: Model, precision: Precision, layout: Parallel, side: str) -> dict[tuple[int, str], Operand | Kept]:
    """Return how a side stores each linear, or why it stays in the compute dtype, by (layer, Megatron's name).

    The answer holds for every rank of the layout. ``side`` is ``train`` or ``rollout``.
    """
    everything = [(layer, linear.name) for layer, linear in model.all_linears()]
    operand = precision.operand("weight", side)
    if operand is None:
        return dict.fromkeys(everything, _without_fp8(side))
    kept_in = _kept_in_training if side == "train" else _kept_in_rollout
    kept = kept_in(model, precision, layout)

    def chosen(at: tuple[int, str]) -> Operand:
        found = contract_of(precision, (f"decoder.layers.{at[0]}.{at[1]}",), 1).operand("weight", side)
        return operand if found is None else found  # a module without one is kept, and not asked for here

    return {at: kept.get(at) or chosen(at) for at in everything}


def train_cut(linear: Linear, layout: Parallel) -> int:
    """Return the number of ranks that training cuts a linear over."""
    return layout.experts_cut if linear.experts else layout.tensor


def rollout_cut(linear: Linear, layout: Parallel) -> int:
    """Return the number of workers that a rollout cuts a linear over."""
    return 1 if linear.experts and layout.rollout_expert else layout.rollout_cut


def on_rollout_rank(model: Model, linear: Linear, layout: Parallel) -> tuple[tuple[int, ...], int]:
    """Return the rows of each part, and the columns, that one worker of vLLM holds.

    With more workers than key-value heads, vLLM repeats the heads so that each worker has one.
    """
    cut = rollout_cut(linear, layout)
    if linear.name.endswith("linear_qkv") and cut > model.kv_heads:
        q, k, v = linear.parts
        again = cut // model.kv_heads
        linear = replace(linear, parts=(q, k * again, v * again))
    return linear.on_rank(cut)


def _kept_in_training(model: Model, precision: Precision, layout: Parallel) -> dict[tuple[int, str], Kept]:
    kept = {}
    for layer, linear in model.all_linears():
        name, shape = f"decoder.layers.{layer}.{linear.name}", linear.on_rank(train_cut(linear, layout))
        held = why_kept(precision, (name,), [shape], model.layers, side="train", experts=linear.experts)
        if held is not None:
            kept[layer, linear.name] = held
    return kept


def _kept_in_rollout(model: Model, precision: Precision, layout: Parallel) -> dict[tuple[int, str], Kept]:
    """Select as from a checkpoint of this model, then check what kernels multiply of a worker's share."""
    tensors: dict[tuple[int, str], tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for layer, linear in model.all_linears():
        # All experts of a layer are decided together, so one stands for all, unless a pattern may name a single one.
        experts = range(linear.experts) if linear.experts and precision.keep else (0,)
        for name, rows in zip(linear.hugging_face, linear.parts, strict=True):
            found = tuple(f"model.layers.{layer}.{name.replace('*', str(expert))}.weight" for expert in experts)
            tensors[layer, linear.name] = tensors.get((layer, linear.name), ()) + found
            shapes |= dict.fromkeys(found, (rows, linear.columns))
    chosen = select(shapes, precision.replace(strict=False), layers=model.layers)
    kept = {}
    for layer, linear in model.all_linears():
        held = chosen.kept.get(tensors[layer, linear.name][0])
        if held is None and not linear.experts:
            parts, columns = on_rollout_rank(model, linear, layout)
            reason = share_misfit(precision, sum(parts), columns)
            held = Kept(SHAPE, reason) if reason else None
        if held is not None:
            kept[layer, linear.name] = held
    return kept
