"""Select the linears of a checkpoint that are held in FP8, in units: linears that an engine holds as one matrix.

    select({"model.layers.0.self_attn.q_proj.weight": (4096, 4096), ...}, precision)
        .units    (q, k, v of layer 0), (its o), (its gate and up), ...: the tensors in FP8
        .kept     tensor -> why it stays in the compute dtype

A unit is Q, K and V; gate and up; DeepSeek's two down projections; all routed experts of a layer; any other linear
alone. Its tensors go to FP8 together or not at all: :func:`nemo_fp8.models.selection.why_kept` is asked once, with all
of their names and the rows of each part. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.models.families import EXPERTS, FUSED
from nemo_fp8.models.names import Place, place
from nemo_fp8.models.selection import ALWAYS, SHAPE, Kept, contract_of, decoder_layer, why_kept

# qkv_proj -> (q_proj, k_proj, v_proj), and each of these words -> all three.
_FUSED_AS = {name: words for name, words in FUSED if name}
_FUSED_OF = {word: words for _, words in FUSED for word in words}
_EXPERTS = re.compile(r"^(.*?(?:^|\.)experts)(\.|$)")


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
    return _fused(tensor) if tensor.endswith(".weight") else tensor


def _fused(tensor: str) -> str:
    """Return a key that q, k and v share, or gate and up, those of each expert by themselves; else the tensor."""
    parent, _, word = module_of(tensor).rpartition(".")
    return f"{parent}.{'+'.join(_FUSED_OF[word])}" if word in _FUSED_OF else tensor


def sharing_a_scale(tensors: Iterable[str]) -> list[tuple[str, ...]]:
    """Group weights that share one scale in NVFP4: q, k and v; gate and up, of each expert by itself.

    An engine holds them as one matrix, whose kernels take one FP32 scale beneath the block scales. So the amax that the
    scale is made of is that of all of them.
    """
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(_fused(name), []).append(name)
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


# ---------------------------------------------------------------------- the selection


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
        """The names of all tensors that are held in FP8."""
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
    """Return whether a tensor is a linear's weight, or a stack of experts' weights, whose name may lack ``.weight``.

    One without values is none.
    """
    if 0 in shape:
        return False
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


# ---------------------------------------------------------------------- the stacks of layers of a checkpoint


def decoder(places: Iterable[Place], sizes: Mapping[str, int]) -> str:
    """Return the container with the most weights: the decoder, whose layers first_layers and last_layers count."""
    weights: Counter[str] = Counter()
    for p in places:
        if p.container and not p.kept:
            weights[p.container] += sizes[p.module]
    return weights.most_common(1)[0][0] if weights else ""


def outside(p: Place) -> Place:
    """Return a place in another stack of layers (a vision tower) as one outside of the decoder."""
    return p if p.kept else Place(p.module, p.role, p.module, tail=p.module)
