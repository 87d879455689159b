"""Say how a worker keeps each tensor of a push: what a trainer needs to know what it may patch, or cast by itself.

    kept as                                             patched                 cast by the trainer
    FP8 in a known layout, blocks of the whole tensor   codes and scales        codes and scales
    as it was pushed (norms, embeddings)                values                  no
    anything else                                       no: whole, with all     no
                                                        that are gathered
                                                        with it, if it changed

All of it follows from the plan, which keeps it for its next pushes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from nemo_fp8.contract import Operand
from nemo_fp8.rollout.refit import casting
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.routes import Route
from nemo_fp8.rollout.refit.worker.sinks import InPlace, Sink, name_of, stacked, word
from nemo_fp8.rollout.refit.worker.staged import Staged

if TYPE_CHECKING:
    from nemo_fp8.rollout.refit.worker.plan import Plan


@dataclass(frozen=True)
class Keeping:
    """How a worker keeps one tensor. It can be patched if ``why`` is empty."""

    operand: Operand | None
    """The blocks and scales of an FP8 tensor that can be patched; None for any other."""
    parts: tuple[str, ...]
    """The parts of the tensor that this worker holds, as receipts name them."""
    why: str = ""
    """Why it must come whole."""

    def to_plain(self) -> list[Any]:
        """Return this as plain values."""
        return [None if self.operand is None else list(astuple(self.operand)), list(self.parts), self.why]


def kept_by(plan: Plan, sinks: dict[Any, Sink]) -> tuple[dict[int, Keeping], list[list[int]]]:
    """Return how this worker keeps each tensor, and which tensors must come together if one of them comes whole."""
    found, groups = {}, list[list[int]]()
    for i, routes in plan.routes.by_entry.items():
        ways = [sinks[route.target] for route in routes]
        reasons = {_why_whole(plan, route, sink) for route, sink in zip(routes, ways, strict=True)}
        operands = {sink.operand if isinstance(sink, Blocks) else None for sink in ways}
        why = next((why for why in sorted(reasons) if why), "")
        mixed = "" if why or len(operands) < 2 else "It is kept in two ways"
        operand = None if why or mixed else next(iter(operands), None)
        found[i] = Keeping(operand, tuple(name_of(route) for route in routes), why or mixed)
    groups += [[*route.entries] for route in plan.routes if len(route.entries) > 1]  # a loader makes one of them
    routes_to: dict[Sink, list[Route]] = {}
    for route in plan.routes:
        routes_to.setdefault(sinks[route.target], []).append(route)
    for sink, mine in routes_to.items():
        if isinstance(sink, Blocks):
            groups += [[r.entry for r in mine if m in range(*stacked(r.to)[0])] for m in sink.straddling]
        elif not isinstance(sink, InPlace):
            groups.append([route.entry for route in mine])
    return found, groups


def castable(plan: Plan, kept: dict[int, Keeping]) -> dict[int, Operand | None]:
    """Return the operand by which a trainer may cast each large tensor; None where it must send the values."""
    return {
        i: keeping.operand if keeping.operand is not None and _is_cast_in_parts(plan, i, keeping.operand) else None
        for i, keeping in kept.items()
        if plan.manifest[i].bytes > casting.LEAST
    }


def plain_castable(found: Mapping[int, Operand | None]) -> list[list[Any]]:
    """Return operands as plain values, each with the numbers of its tensors."""
    numbers: dict[Operand | None, list[int]] = {}
    for i, operand in found.items():
        numbers.setdefault(operand, []).append(i)
    return [[None if operand is None else list(astuple(operand)), mine] for operand, mine in numbers.items()]


def _is_cast_in_parts(plan: Plan, i: int, operand: Operand) -> bool:
    """Return whether rows of a tensor can be cast as one matrix: they are of a matrix of values, or whole experts of a
    stack whose blocks do not run into one another."""
    entry = plan.manifest[i]
    if operand.block is None or entry.is_codes or len(entry.shape) not in (2, 3):
        return False
    return len(entry.shape) == 2 or (i in plan.stacks and entry.shape[1] % operand.block[0] == 0)


def _why_whole(plan: Plan, route: Route, sink: Sink) -> str:
    """Return why the part of a tensor that takes this route cannot be patched; ``""`` if it can."""
    if isinstance(sink, Blocks):
        if not sink.same_grid(route) or sink.straddling & {*range(*stacked(route.to)[0])}:
            return "The engine's blocks are not those of the unsharded tensor"
    elif isinstance(sink, InPlace):
        if route.source is None or sink.live.dtype != plan.manifest[route.entry].torch_dtype:
            return f"The engine keeps it in another order, or in {word(sink.live.dtype)}"
    else:
        if isinstance(sink, Staged) and has_one_scale(sink):
            return "One scale is made of the whole weight"
        return "The kernel packs the layer as a whole" if isinstance(sink, Staged) else "It is a scale of the KV cache"
    return ""


def has_one_scale(sink: Staged) -> bool:
    """Return whether a layer's weight has a scale that is made of all of it."""
    operand = getattr(sink.layer.quant_method, "operand", None)
    return operand is not None and operand.format == "e2m1"
