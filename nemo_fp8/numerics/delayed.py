"""Delayed scaling: this step's scale comes from the amaxes of earlier steps, so that no tensor is read twice.

Each tensor (a *slot*) keeps a history of amaxes, newest at the end, with row 0 collecting the current step:

    during a step    history[0] = max(history[0], amax of every tensor quantized),  scale unchanged
    at its end       amax = MAX over ranks of history[0];  roll; history[-1] = amax; history[0] = 0
                     scale = max_of_format * 2**-margin / (max of the history | amax)

An amax of 0 means that the slot saw nothing and leaves history and scale alone; an infinite one enters the
history and keeps the scale, so with ``max`` it blocks the scale until it rolls out, exactly as in TE.

Forward slots are updated when the outermost autocast ends, the gradient's in the backward of the first module
that ran forward: the code that runs the modules calls :func:`update`. All state is tensors, so that a checkpoint
resumes to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels, scales
from nemo_fp8.numerics.formats import Format, format_of
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.numerics.quantized import Quantized

FORWARD, BACKWARD = ("input", "weight"), ("grad",)


class DelayedScaling:
    """Amax history and scales of a module's tensors in one direction; column i belongs to ``roles[i]``."""

    def __init__(
        self,
        format: Format,
        roles: tuple[str, ...],
        *,
        history_len: int,
        algo: str,
        margin: int,
        device: torch.device | str = "cpu",
    ):
        self.format, self.roles, self.algo, self.margin = format, roles, algo, margin
        self.scale = torch.ones(len(roles), device=device)
        self.history = torch.zeros(history_len, len(roles), device=device)
        self._replayed: torch.Tensor | None = None

    def quantize(self, x: torch.Tensor, role: str, operand: Operand, *, statistics: bool = False) -> Quantized:
        """Quantize ``x`` with the scale of earlier steps, and record its amax for later ones."""
        self._follow(x.device)
        slot = self.roles.index(role)
        if self._replayed is not None:
            return quantize(x, operand, scale=self._replayed[slot], statistics=statistics)
        amax = kernels.amax(x.detach())
        if amax is None:
            amax = scales.amax_of(x.detach())
        self.history[0, slot] = torch.fmax(self.history[0, slot], amax)
        return quantize(x, operand, scale=self.scale[slot].clone(), statistics=statistics)

    def _follow(self, device: torch.device) -> None:
        """Move the state to the device of its tensors, in case the model was moved."""
        if self.scale.device != device:
            self.scale, self.history = self.scale.to(device), self.history.to(device)

    @contextmanager
    def replay(self, scale: torch.Tensor) -> Iterator[None]:
        """Quantize with these scales and record nothing, for the second forward of activation recompute."""
        previous, self._replayed = self._replayed, scale
        try:
            yield
        finally:
            self._replayed = previous

    def update(self, amax: torch.Tensor | None = None) -> None:
        """End a step: roll the history and compute new scales. ``amax`` is the reduced one; None takes this rank's."""
        latest = self.history[0] if amax is None else torch.where(amax != 0, amax, self.history[0])
        used = latest != 0
        rolled = torch.cat([self.history[1:], latest[None]])
        # max over the history; NaN is skipped, as by fmaxf
        chosen = rolled.nan_to_num(nan=0.0, posinf=float("inf")).amax(0) if self.algo == "max" else latest
        chosen = torch.where(used, chosen, 0.0)
        # New tensors, never in place: a graph whose backward has not run may hold the old ones.
        self.scale = scales.delayed_scale(chosen, self.scale, self.format, self.margin)
        rolled[0] = 0.0
        self.history = torch.where(used, rolled, self.history)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return scale and history."""
        return {"scale": self.scale.clone(), "history": self.history.clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore scale and history. Raises PrecisionError if one is missing, or has another shape than here."""
        for name in ("scale", "history"):
            if name not in state:
                raise PrecisionError(
                    f"Delayed scaling without its {name}.",
                    "A checkpoint holds scale and history of both directions beside a weight, or none of them.",
                    "Load the whole checkpoint; without any of its .fp8. tensors scales start anew.",
                )
            mine, theirs = getattr(self, name), state[name]
            if mine.shape != theirs.shape:
                raise PrecisionError(
                    f"Delayed scaling: {name} of shape {tuple(theirs.shape)} for one of {tuple(mine.shape)}.",
                    "The checkpoint was written under another amax_history_len or by another kind of module.",
                    "Resume with the contract that the run was started with.",
                )
            setattr(self, name, theirs.detach().to(mine).clone())


class DelayedState:
    """The delayed scaling of one linear: input and weight forward, the output's gradient backward."""

    def __init__(self, precision: Precision, device: torch.device | str = "cpu"):
        self.precision = precision
        self.forward, self.backward = (_direction(precision, roles, device) for roles in (FORWARD, BACKWARD))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return four tensors: scale and history of both directions."""
        return {
            f"{way}.{name}": t for way in ("forward", "backward") for name, t in getattr(self, way).state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore both directions."""
        for way in ("forward", "backward"):
            prefix = f"{way}."
            getattr(self, way).load_state_dict(
                {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
            )

    def for_role(self, role: str) -> DelayedScaling:
        """Return the direction of an operand: forward for ``input`` and ``weight``, backward for ``grad``."""
        return self.backward if role in BACKWARD else self.forward


def _direction(precision: Precision, roles: tuple[str, ...], device: torch.device | str) -> DelayedScaling:
    operand = precision.operand(roles[0])
    if operand is None or not operand.delayed:
        raise PrecisionError(
            f"Delayed state for scaling={precision.scaling!r}.",
            "Only delayed scaling remembers amaxes.",
            "Use it with a contract of scaling='delayed'.",
        )
    return DelayedScaling(
        format_of(operand.format),
        roles,
        history_len=precision.amax_history_len,
        algo=precision.amax_compute_algo,
        margin=precision.margin,
        device=device,
    )


def update(states: Iterable[DelayedScaling], group: torch.distributed.ProcessGroup | None = None) -> None:
    """End a step for many states at once: one MAX reduction over ``group`` for all of them.

    Every rank of the group must pass the same states in the same order.
    """
    states = list(states)
    if not states:
        return
    amaxes = torch.cat([s.history[0] for s in states])
    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=group)
    for state, amax in zip(states, torch.split(amaxes, [len(s.roles) for s in states]), strict=True):
        state.update(amax)
