"""Report which linear layers of a model really run in FP8: contract x model x split -> an audit table and findings.

The rule of :mod:`nemo_fp8.models.selection` decides. Here its answers for a model become a table, which groups layers
with the same answer and says what they run in and why, and findings about what the answers mean: blocks that tensor
parallelism cuts, packed sequences, key-value heads that several ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nemo_fp8.contract import ROLLOUT_BLOCKS, SIDES, Operand, Precision
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import Problem
from nemo_fp8.findings import finding
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.selection import (
    GEMM_MULTIPLE,
    KEEP,
    LAYERS,
    SHAPE,
    Kept,
    gemm_misfit,
    primary_misfit,
)
from nemo_fp8.models.shapes import COLUMN, ROW, Linear, Model
from nemo_fp8.models.spellings import outside_names
from nemo_fp8.models.stored import contract_of_linear, on_rollout_rank, rollout_cut, stored, train_cut
from nemo_fp8.preflight.machine import Machine

# Scaling -> the multiple that NeMo RL pads packed sequences to.
PACKING = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 128}


@dataclass(frozen=True)
class AuditRow:
    """Linears with the same answer. ``count`` is over all decoder layers and all experts of one rank."""

    name: str
    rows: int
    columns: int
    count: int
    train: str
    reason: str
    rollout: str
    rollout_reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


# ---------------------------------------------------------------------- one layer


def own_blocks(p: Precision, model: Model, linear: Linear, parallel: Parallel) -> str | None:
    """Say how the rollout's tensor parallelism cuts through 128x128 blocks of a linear; None if it does not."""
    cut = rollout_cut(linear, parallel)
    if ROLLOUT_BLOCKS[p.rollout_block] != (BLOCK, BLOCK) or cut == 1:
        return None
    parts, columns = on_rollout_rank(model, linear, parallel)
    rows = next((part for part in parts if part % BLOCK), None) if linear.split == COLUMN else None
    if rows is not None:
        return f"a part has {rows} rows, not a multiple of {BLOCK}"
    return f"{columns} columns are not a multiple of {BLOCK}" if linear.split == ROW and columns % BLOCK else None


# ---------------------------------------------------------------------- the table


def _in_words(p: Precision, fate: Operand | Kept) -> tuple[str, str]:
    """Return what a linear runs in, and why it is not FP8."""
    if isinstance(fate, Operand):
        return "NVFP4" if fate.format == "e2m1" else "FP8", ""
    return "refused" if fate.rule == SHAPE and p.strict else p.compute.upper(), fate.in_short


def audit(model: Model, p: Precision, parallel: Parallel | None = None) -> list[AuditRow]:
    """Return what every linear runs in, in training and in rollout, one row for all layers with the same answer."""
    parallel = parallel or Parallel()
    grouped: dict[tuple[Any, ...], int] = {}
    fates = {side: stored(model, p, parallel, side) for side in SIDES}
    for layer, linear in model.all_linears():
        parts, columns = linear.on_rank(train_cut(linear, parallel))
        train, reason = _in_words(p, fates["train"][layer, linear.name])
        own, there = (contract_of_linear(model, p, layer, linear, side) for side in SIDES)
        if train == "FP8" and _is_primary(own, p) and (param := primary_misfit(own.scaling, sum(parts), columns)):
            reason = f"its blocks at the edges are cut short: {param}"
        rollout, rollout_reason = _in_words(p, fates["rollout"][layer, linear.name])
        if rollout == "FP8" and (cut := own_blocks(there, model, linear, parallel)):
            rollout_reason = f"blocks of its own on each rank: {cut}"
        key = (linear.name, sum(parts), columns, train, reason, rollout, rollout_reason)
        grouped[key] = grouped.get(key, 0) + max(1, linear.experts // parallel.expert)
    return [
        AuditRow(name, rows, columns, count, train, reason, rollout, why)
        for (name, rows, columns, train, reason, rollout, why), count in grouped.items()
    ]


def _is_primary(own: Precision, p: Precision) -> bool:
    """Return whether a linear's weight is kept in FP8; one with a recipe of its own is kept in the compute dtype."""
    return own is p and p.fp8_param


def _most_of(p: Precision, multiples: Mapping[str, int]) -> tuple[int, str]:
    """Return the largest multiple that a recipe of some module needs, and that recipe; 1 without any.

    All are powers of two, so what fits the largest fits every other.
    """
    scalings = [own.scaling for own in p.variants() if own.scaling]
    most = max(scalings, key=multiples.__getitem__, default="")
    return multiples.get(most, 1), most


def packing_multiple(p: Precision, parallel: Parallel) -> tuple[int, str]:
    """Return the multiple that each packed sequence is padded to, and its factors in words."""
    factors = [(multiple, scaling) for multiple, scaling in [_most_of(p, PACKING)] if scaling]
    if parallel.context > 1:
        factors.append((2 * parallel.context, f"2 x context parallel {parallel.context}"))
    if parallel.sequence_parallel and parallel.tensor > 1:
        factors.append((parallel.tensor, "tensor parallel with sequence parallel"))
    multiple = 1
    for factor, _ in factors:
        multiple *= factor
    return multiple, " x ".join(f"{factor} ({why})" for factor, why in factors)


# ---------------------------------------------------------------------- findings


def shape_findings(model: Model, p: Precision, parallel: Parallel, machine: Machine | None) -> Iterator[Problem]:
    """Yield every finding about the shapes of a model."""
    yield from _split_findings(model, parallel)
    if p.is_quantized or p.rolls_out_quantized:
        yield from _kept_findings(model, p)
    if p.is_quantized:
        yield from _train_findings(model, p, parallel, machine)
    if p.rolls_out_quantized:
        yield from _rollout_findings(model, p, parallel)
    if p.is_quantized and p.rolls_out_quantized:
        yield from _one_sided_findings(model, p)


def _split_findings(model: Model, parallel: Parallel) -> Iterator[Problem]:
    tokens, together = parallel.seq_length or 0, parallel.tensor if parallel.sequence_parallel else 1
    checks = (
        ("The number of attention heads", model.heads, parallel.tensor, "tp"),
        ("The number of key-value heads (GQA groups)", model.kv_heads, parallel.tensor, "tp"),
        ("The number of layers", model.layers, parallel.pipeline, "pp"),
        ("The number of experts", model.experts, parallel.expert, "ep"),
        ("The sequence length", tokens, 2 * parallel.context if parallel.context > 1 else 1, "cp (two chunks a rank)"),
        (
            "The sequence length on a context-parallel rank",
            tokens // parallel.context,
            together,
            "tp (with sequence parallel)",
        ),
    )
    for quantity, value, by, name in checks:
        if value % by:
            yield finding("not-divisible", name, quantity=quantity, value=value, by=by, parallel=name)
    # If the rollout follows training, one finding is enough for both.
    if parallel.rollout_cut != parallel.tensor and model.heads % parallel.rollout_cut:
        heads, by, name = "The number of attention heads", parallel.rollout_cut, "rollout-tp"
        yield finding("not-divisible", name, quantity=heads, value=model.heads, by=by, parallel=name)
    for linear in dict.fromkeys(linear for _, linear in model.all_linears()):
        cut = train_cut(linear, parallel)
        sides = linear.parts if linear.split == COLUMN else (linear.columns,) if linear.split == ROW else ()
        for value in dict.fromkeys(side for side in sides if side % cut and "attention" not in linear.name):
            yield finding(
                "not-divisible", linear.name, quantity=f"The width of {linear.name}", value=value, by=cut, parallel="tp"
            )
    if parallel.sequence_parallel and parallel.tensor == 1:
        yield finding("sequence-parallel-without-tensor-parallel", "sequence_parallel")
    if model.kv_heads < parallel.rollout_cut and not model.mla:
        yield finding("gqa-replicated", "rollout_tensor", kv=model.kv_heads, tp=parallel.rollout_cut)
    padded = -(-model.vocab // (128 * parallel.tensor)) * 128 * parallel.tensor
    if padded != model.vocab:
        yield finding("vocab-padding", "embedding", vocab=model.vocab, padded=padded)


def _kept_findings(model: Model, p: Precision) -> Iterator[Problem]:
    compute = p.compute.upper()
    if p.first_layers + p.last_layers >= model.layers:
        total = p.first_layers + p.last_layers
        yield finding(
            "layers-all-kept",
            "first_layers",
            first=p.first_layers,
            last=p.last_layers,
            num_layers=model.layers,
            kept=total,
            compute=compute,
        )
    elif all(isinstance(fate, Kept) and fate.rule in (KEEP, LAYERS) for fate in _train_or_rollout(model, p).values()):
        yield finding("layers-all-matched", "keep", keep=list(p.keep))
    others = [*outside_names(model.moe_layers)]
    for field, pattern in (*(("keep", name) for name in p.keep), *(("modules", name) for name, _ in p.modules)):
        alone = Precision(format="hybrid", scaling="tensorwise", keep=(pattern,))
        matched = any(isinstance(fate, Kept) and fate.rule == KEEP for fate in _train_or_rollout(model, alone).values())
        if not matched and not any(map(alone.keeps, others)):
            yield finding("keep-matches-nothing", field, field=field, pattern=pattern)
    if model.experts:
        yield finding("router-kept", "router", experts=model.experts)


def _train_or_rollout(model: Model, p: Precision) -> dict[tuple[int, str], Operand | Kept]:
    """Return how a side with FP8 stores each linear; what names alone decide is the same on both sides."""
    return stored(model, p, Parallel(), "train" if p.is_quantized else "rollout")


def _train_findings(model: Model, p: Precision, parallel: Parallel, machine: Machine | None) -> Iterator[Problem]:
    compute = p.compute.upper()
    for linear, own in _running(model, p):
        parts, columns = linear.on_rank(train_cut(linear, parallel))
        facts: dict[str, Any] = {"layer": linear.name, "rows": sum(parts), "columns": columns}
        scaling = own.scaling or ""
        bad = gemm_misfit(scaling, sum(parts), columns)
        param = primary_misfit(scaling, sum(parts), columns)
        if bad:
            severity = None if p.strict else "warning"
            yield finding(
                "shape", linear.name, severity=severity, scaling=scaling, reason=bad, compute=compute, **facts
            )
        elif param and _is_primary(own, p):
            yield finding("param-shape", linear.name, reason=param, **facts)
        elif param and not primary_misfit(own.scaling, linear.rows, linear.columns):
            yield finding("block-straddles-ranks", linear.name, **facts)
        if scaling == "blockwise" and own.rollout == "fp8" and not bad and (seam := _seam(model, linear, parts)):
            yield finding("grids-differ", linear.name, reason=seam, **facts)
    step, scaling = _most_of(p, GEMM_MULTIPLE)
    multiple, factors = packing_multiple(p, parallel)
    if parallel.pad_to and parallel.pad_to % multiple:
        yield finding("padding-too-small", "packing", given=parallel.pad_to, multiple=multiple, factors=factors)
    elif parallel.packed:
        yield finding("padding", "packing", multiple=multiple, factors=factors)
    if parallel.seq_length and not parallel.packed:
        tokens = parallel.seq_length * parallel.micro_batch // parallel.context
        if tokens % step:
            yield finding("tokens", "seq_length", tokens=tokens, multiple=step, scaling=scaling)
    if model.experts:
        yield finding("expert-tokens", "experts", multiple=step, scaling=scaling)


def _rollout_findings(model: Model, p: Precision, parallel: Parallel) -> Iterator[Problem]:
    fates = stored(model, p, parallel, "rollout")
    kept = {at: fate for at, fate in fates.items() if isinstance(fate, Kept)}
    for linear, reason in dict.fromkeys(
        (n, kept[i, n.name].reason) for i, n in model.all_linears() if _rule(kept, i, n) == SHAPE
    ):
        severity = "error" if p.strict else None
        facts: dict[str, Any] = {"layer": linear.name, "rows": linear.rows, "columns": linear.columns}
        yield finding("rollout-kept", linear.name, severity=severity, reason=reason, compute=p.compute.upper(), **facts)
    for linear, own in _distinct(model, p, "rollout", lambda layer, linear: _rule(kept, layer, linear) is None):
        parts, columns = on_rollout_rank(model, linear, parallel)
        facts = {"layer": linear.name, "rows": sum(parts), "columns": columns}
        reason = own_blocks(own, model, linear, parallel) or ""
        if reason and linear.name.endswith("linear_qkv") and parts[1] < BLOCK:
            yield finding("rollout-kv-shard", linear.name, rows=parts[1], most=_most_for_kv(model))
        elif reason:
            yield finding(
                "rollout-shape", linear.name, reason=reason, remedy=_fitting(own, model, linear, parallel), **facts
            )
        elif own.deep_gemm and (sum(parts) % BLOCK or columns % BLOCK):
            yield finding("deepgemm-shape", linear.name, **facts)


def _one_sided_findings(model: Model, p: Precision) -> Iterator[Problem]:
    """Yield linears that a pattern keeps on one side only, since an engine's unit is larger than Megatron's."""
    sides = [stored(model, p, Parallel(), side) for side in SIDES]
    said = set()
    for layer, linear in model.all_linears():
        train, rollout = (fates[layer, linear.name] for fates in sides)
        rules = {fate.rule for fate in (train, rollout) if isinstance(fate, Kept)}
        if isinstance(train, Operand) == isinstance(rollout, Operand) or rules != {KEEP} or linear.name in said:
            continue
        said.add(linear.name)
        one, other = ("training", "the rollout") if isinstance(train, Operand) else ("the rollout", "training")
        whole = [
            n.name for n in model.linears(layer) if isinstance(rollout, Kept) and sides[1][layer, n.name] == rollout
        ]
        gaps = {"one": one, "other": other, "compute": p.compute.upper(), "whole": " and ".join(whole) or linear.name}
        yield finding("kept-on-one-side", linear.name, layer=linear.name, **gaps)


def _rule(kept: dict[tuple[int, str], Kept], layer: int, linear: Linear) -> str | None:
    """Return the rule that keeps a linear out of the rollout's FP8."""
    return kept[layer, linear.name].rule if (layer, linear.name) in kept else None


def _seam(model: Model, linear: Linear, parts: tuple[int, ...]) -> str | None:
    """Say where a 128x128 block of Megatron's fused weight covers several Hugging Face weights; None if nowhere."""
    if linear.name.endswith("linear_qkv"):  # heads of Q, K and V alternate
        return f"heads of {model.head_dim} rows" if model.head_dim % BLOCK else None
    return next((f"a part of {part} rows" for part in parts[:-1] if part % BLOCK), None)


def _most_for_kv(model: Model) -> int | str:
    """Return the widest rollout tensor parallelism that leaves whole blocks of K and V on each rank."""
    fits = (
        n
        for n in range(model.kv_heads, 0, -1)
        if model.kv_heads % n == 0 and model.kv_heads // n * model.head_dim % BLOCK == 0
    )
    return next(fits, "none (no split leaves whole blocks)")


def _fitting(p: Precision, model: Model, linear: Linear, parallel: Parallel) -> str:
    cut = parallel.rollout_cut

    def fits(smaller: int) -> bool:
        return own_blocks(p, model, linear, replace(parallel, rollout_tensor=smaller)) is None

    found = [str(n) for n in range(1, cut) if cut % n == 0 and fits(n)]
    return " or ".join(found) or "another size (none below it fits)"


def _distinct(
    model: Model, p: Precision, side: str, take: Callable[[int, Linear], bool] = lambda layer, linear: True
) -> list[tuple[Linear, Precision]]:
    """List each kind of linear that ``take`` accepts once, under each contract that a side has for it."""
    accepted = ((layer, linear) for layer, linear in model.all_linears() if take(layer, linear))
    return list(
        dict.fromkeys((linear, contract_of_linear(model, p, layer, linear, side)) for layer, linear in accepted)
    )


def _running(model: Model, p: Precision) -> list[tuple[Linear, Precision]]:
    """List each kind of linear that runs in FP8 in at least one layer, with its contract."""
    fates = stored(model, p, Parallel(), "train")

    def runs(layer: int, linear: Linear) -> bool:
        fate = fates[layer, linear.name]
        return isinstance(fate, Operand) or fate.rule == SHAPE

    return _distinct(model, p, "train", runs)
