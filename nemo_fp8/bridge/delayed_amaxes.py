"""Keep validation and checkpoints from changing the amaxes of delayed scaling, in Bridge's runs.

``train/amax_histories.py`` says what the first row of a history is. The same two things interfere with it as in NeMo's
runs (``train/delayed_amaxes.py``). A model's own methods are where they begin, whatever callbacks a user gives:

    train                 Bridge calls eval() before a validation and train() after it. The row is restored at its end
    sharded_state_dict    every rank asks for it before a checkpoint is written. The ranks agree on the row first. It is
                          asked for before one is loaded as well, when there is nothing to agree on yet

So both methods of the instance are replaced, and those of the class are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from nemo_fp8.train.amax_histories import agree_among_ranks, amax_histories, hold_rows, restore_rows


def keep_amaxes_of_training(models: Sequence[Any]) -> None:
    """Let ranks agree on the amaxes of these models before they are saved, and forget those of validation."""
    for model in models:
        model.sharded_state_dict = _agreeing(model)
        model.train = _forgetting_validation(model)


def _agreeing(model: Any) -> Any:
    theirs = model.sharded_state_dict

    @wraps(theirs)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        agree_among_ranks(list(amax_histories(model)), model.config)
        return theirs(*args, **kwargs)

    return sharded_state_dict


def _forgetting_validation(model: Any) -> Any:
    theirs = model.train
    held: dict[int, torch.Tensor] = {}

    @wraps(theirs)
    def train(mode: bool = True) -> Any:
        nonlocal held
        if model.training and not mode:
            held = hold_rows(amax_histories(model))
        elif mode and not model.training:
            restore_rows(amax_histories(model), held)
        return theirs(mode)

    return train
