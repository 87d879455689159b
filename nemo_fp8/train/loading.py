"""Refuse checkpoints that would be loaded wrongly, before a tensor of them is read.

    layers of Megatron's own     Their optimizer state follows the order of their parameters, which differs from that of
                                 TransformerEngine's layers, and the FP8 state of their linears is not TE's. Weights
                                 have the same names in both, so a new run can start from them.
    ckpt_load_optimizer=False    NeMo loads the weights, finds the optimizer's settings beside them, and leaves the FP32
                                 master weights as they were initialized. The first step overwrites the weights with
                                 those. ``RestoreConfig`` starts a run from weights alone.

Nothing is converted: a new run from the same weights loses Adam's moments and the position in the data, and is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.train.checkpoints import Checkpoint

_START = "Start a run from its weights: nl.AutoResume(restore_config=nl.RestoreConfig(path={path!r}))"
_OLD_LAYERS = Problem(
    "{path} was written by Megatron's own layers, and this model has TransformerEngine's.",
    "So it was where TransformerEngine was not installed, where a local layer spec was asked for, and where nemo_fp8 "
    "emulated FP8 without it. The weights have the same names, but the optimizer's state lies in another order, and "
    "the state of FP8 has another form.",
    f"{_START} with MegatronStrategy(ckpt_load_strictness=False).",
)
_FIRST_MASTERS = Problem(
    "Resuming from {path} with ckpt_load_optimizer=False.",
    "NeMo 2.7.3 loads the weights and keeps the master weights that the model was initialized with, and the first step "
    "writes these over the weights.",
    f"{_START}, or leave ckpt_load_optimizer=True.",
)


def require_loadable(model: Any) -> None:
    """Raise PrecisionError if a run would load its checkpoint wrongly; call it on a built model, before loading."""
    try:
        trainer = model.trainer
        strategy, resumed = trainer.strategy, trainer.ckpt_path
    except (AttributeError, RuntimeError):  # there is no trainer, or it loads nothing
        return
    restore = None if resumed else getattr(strategy, "restore_config", None)
    path = resumed or getattr(restore, "path", None)
    if path is None or not trainer.training:
        return
    problems = []
    if resumed and not strategy.ckpt_load_optimizer:
        problems.append(_FIRST_MASTERS)
    weights_alone = (
        restore is not None and not restore.load_optim_state and strategy.ckpt_load_strictness not in (None, True)
    )
    if not weights_alone and _has_te_layers(model) and _is_of_local_layers(Checkpoint.at(path)):
        problems.append(_OLD_LAYERS)
    if problems:
        # Resuming NeMo names the weights in it, and RestoreConfig takes the checkpoint itself.
        raise PrecisionError(_at(problems, Checkpoint.at(path).folder))


def _at(problems: list[Problem], path: str | Path) -> Iterator[Problem]:
    for problem in problems:
        yield Problem(problem.what.format(path=path), problem.why, problem.remedy.format(path=str(path)))


def _has_te_layers(model: torch.nn.Module) -> bool:
    return any(isinstance(getattr(module, "fp8_meta", None), dict) for module in model.modules())


def _is_of_local_layers(checkpoint: Checkpoint) -> bool:
    """Return whether its linears were Megatron's own, by their extra state.

    TransformerEngine's is a tensor, empty without FP8; Megatron's is None; that of the earlier emulation is a dict.
    """
    return any(state is None or isinstance(state, dict) for state in checkpoint.objects(r"\.linear_\w+\._extra_state"))
