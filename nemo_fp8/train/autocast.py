"""Where FP8 is on, and what the modules that are on share: regions, delayed amaxes, activation recompute.

Megatron opens a *region* around each decoder layer, or around all of them under delayed scaling, and a linear that
runs inside one runs in FP8. The three points in time that delayed scaling turns on are TransformerEngine's:

    forward amaxes     count until the outermost region closes, are then reduced over ranks, and give the next scales
    gradient amaxes    the same, in the backward of the module that ran first in the region
    recomputed forward uses the scales that the first forward used, and counts nothing a second time

A forward without gradients (validation) counts nothing either: a run must not depend on how often it is validated.
What a run shares lives in one :class:`Emulation`; where the program is lives in two context variables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nemo_fp8.contract import Precision
from nemo_fp8.numerics.delayed import DelayedScaling, DelayedState, update

Group = Any  # torch.distributed.ProcessGroup | None


class Emulation:
    """The delayed states of the FP8 linears that have run, in the order of their first forward, by the group that reduces their amaxes."""

    def __init__(self) -> None:
        self._states: dict[Group, dict[DelayedState, None]] = defaultdict(dict)

    def remember(self, state: DelayedState, group: Group) -> None:
        """Update this state from now on: a new linear's, or that of one which an earlier run has built and trained.

        Every rank of the group remembers its states in the same order: that of the forward.
        """
        self._states[group][state] = None

    def update(self, direction: str, group: Group) -> None:
        """End of a forward or backward pass: the amaxes of all linears at once, in one reduction."""
        update([getattr(state, direction) for state in self._states[group]], group)


@dataclass
class Region:
    """A stretch of forward in FP8. ``first`` is still to come: the first module of it to run, and the last one to run backward."""

    precision: Precision
    group: Group
    emulation: Emulation
    first: bool = field(default=True)

    def after_backward(self) -> Callable[[], None] | None:
        """What the module that asks has to do when its backward has run: the first one updates the gradients' scales."""
        first, self.first = self.first, False
        if not first or self.precision.scaling != "delayed":
            return None
        return lambda: self.emulation.update("backward", self.group)


class Recompute:
    """A function whose activations are not kept: called once in forward, and once more in backward, in the same region."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.again = False
        self.region: Region | None = None
        self.scales: dict[DelayedScaling, torch.Tensor] = {}

    def __call__(self, *args: Any) -> Any:
        if not self.again:
            region = _REGION.get()
            # The forward whose graph is thrown away must not be the one that is asked to update the gradients' scales.
            self.region = None if region is None else replace(region)
        with _set(_REGION, self.region) if self.again else nullcontext(), _set(_RECOMPUTE, self):
            try:
                return self.function(*args)
            finally:
                self.again = True


_REGION: ContextVar[Region | None] = ContextVar("fp8_region", default=None)
_PRIMARY: ContextVar[Region | None] = ContextVar("fp8_primary_weights", default=None)
_RECOMPUTE: ContextVar[Recompute | None] = ContextVar("fp8_recompute", default=None)


def current_region() -> Region | None:
    """The region that the program is in, if any."""
    return _REGION.get()


@contextmanager
def region(precision: Precision, group: Group, emulation: Emulation) -> Iterator[None]:
    """FP8 under ``precision``, until the context closes."""
    outermost = _REGION.get() is None
    with _set(_REGION, Region(precision, group, emulation)):
        yield
    recomputing = (recompute := _RECOMPUTE.get()) is not None and recompute.again
    if outermost and precision.scaling == "delayed" and torch.is_grad_enabled() and not recomputing:
        emulation.update("forward", group)


def primary_weights(precision: Precision, group: Group, emulation: Emulation) -> AbstractContextManager[None]:
    """Linears that are built until the context closes hold their weights in FP8."""
    return _set(_PRIMARY, Region(precision, group, emulation))


def current_primary_weights() -> Region | None:
    """How linears that are built now hold their weights, if in FP8."""
    return _PRIMARY.get()


def counting(scaling: DelayedScaling) -> AbstractContextManager[None]:
    """Around the forward of a linear: whether its amaxes count, and which scales it uses."""
    recompute = _RECOMPUTE.get()
    if recompute is None:
        return nullcontext() if torch.is_grad_enabled() else scaling.replay(scaling.scale)
    if recompute.again:
        return scaling.replay(recompute.scales[scaling])
    recompute.scales.setdefault(scaling, scaling.scale)
    return nullcontext()


@contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
