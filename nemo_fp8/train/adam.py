"""AdamW with TransformerEngine's state layout: one step count per parameter group, two moments per parameter.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   p -= lr (m' / (sqrt(v') + eps) + decay p)

Megatron's distributed optimizer knows TE's and Apex's FusedAdam and, as a last resort, torch's own Adam, whose
checkpoints it mishandles: it asks for a step count before there is one, trips over the 0-dim ``step`` tensor,
and after a resume lets all parameters share ONE such tensor, which then advances once for each of them: wrong
bias corrections, in silence. So this class keeps TE's layout, and torch's fused kernel does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam (``adam_w_mode=False``) or AdamW over parameter groups, on any device torch's fused kernel knows."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise NotImplementedError("Megatron computes gradients before it steps; there is no closure to call.")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self._state_of(p) for p in params]
            self._update(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(float(group["step"]))] * len(params),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state
