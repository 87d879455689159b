"""Say how a side stores each linear of a model on the ranks of a layout, or why it stays in the compute dtype.

    stored(model, precision, layout, "train")      asks about each linear, with the shape of a rank's share of it
    stored(model, precision, layout, "rollout")    selects as from a checkpoint of the model, whose linears are whole,
                                                   and then asks what kernels can multiply of a worker's share

The rule is that of :mod:`nemo_fp8.models.selection`; the answer holds for every rank. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.models.families import held_as_one
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.selection import SHAPE, Kept, contract_of, share_misfit, why_kept, without_fp8
from nemo_fp8.models.shapes import Linear, Model
from nemo_fp8.models.units import select


def stored(model: Model, precision: Precision, layout: Parallel, side: str) -> dict[tuple[int, str], Operand | Kept]:
    """Return how a side stores each linear, or why it stays in the compute dtype, by (layer, Megatron's name).

    The answer holds for every rank of the layout. ``side`` is ``train`` or ``rollout``.
    """
    linears = [*model.all_linears()]
    operand = precision.operand("weight", side)
    if operand is None:
        return dict.fromkeys(((layer, linear.name) for layer, linear in linears), without_fp8(side))
    kept_in = _kept_in_training if side == "train" else _kept_in_rollout
    kept = kept_in(model, precision, layout)

    def chosen(at: tuple[int, Linear]) -> Operand:
        found = contract_of_linear(model, precision, *at, side).operand("weight", side)
        return operand if found is None else found  # a module without one is kept, and not asked for here

    return {
        (layer, linear.name): kept.get((layer, linear.name)) or chosen((layer, linear)) for layer, linear in linears
    }


def contract_of_linear(model: Model, precision: Precision, layer: int, linear: Linear, side: str) -> Precision:
    """Return the contract of a linear on a side: with the recipe that the rules for modules give it, and in a rollout
    all that an engine holds as one with it."""
    together = held_as_one(linear.name) if side == "rollout" else (linear.name,)
    names = (n.name for n in model.linears(layer) if n.name in together)
    return contract_of(precision, tuple(f"decoder.layers.{layer}.{name}" for name in names), linear.experts)


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
        named = precision.keep or precision.modules
        experts = range(linear.experts) if linear.experts and named else (0,)
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
            own = contract_of_linear(model, precision, layer, linear, "rollout")
            reason = share_misfit(own, sum(parts), columns)
            held = Kept(SHAPE, reason) if reason else None
        if held is not None:
            kept[layer, linear.name] = held
    return kept
