"""Keep validation and checkpoints from changing the amaxes of delayed scaling, in Bridge's runs.

``train/amax_histories.py`` says what the first row of a history is. The same two things interfere with it as in NeMo's
runs (``train/delayed_amaxes.py``), and a third with all rows: Bridge's checkpoint of adapters holds what is called an
adapter's, and so not TransformerEngine's state of the linears. A model's own methods are where they begin, whatever
callbacks a user gives. So these of the instance are replaced (``COVERED``), and those of the class are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from nemo_fp8.train.amax_histories import agree_among_ranks, amax_histories, hold_rows, restore_rows

STATE, SAVED, BENEATH = "._extra_state", ".adapter._extra_state", ".to_wrap._extra_state"
"""TransformerEngine's state of a linear: in a checkpoint, in one of adapters, and in a module that holds an adapter."""

COVERED = {
    "train": "Bridge calls eval() before a validation and train() after it: the row is restored at its end",
    "sharded_state_dict": "every rank asks for it before a checkpoint is written: the ranks agree on the row first. It "
    "is asked for before one is loaded as well, when there is nothing to agree on yet. Where there are adapters, the "
    "state of a linear is called an adapter's",
    "load_state_dict": "it gives each linear what is called its adapter's",
}
"""Methods that are wrapped on a model, and not on its class: the reason of each."""


def keep_amaxes_of_training(models: Sequence[Any]) -> None:
    """Let ranks agree on the amaxes of these models before they are saved, save them with adapters, and forget those of
    validation."""
    for model in models:
        model.sharded_state_dict = _saving(model)
        model.load_state_dict = _loading(model)
        model.train = _forgetting_validation(model)


def _saving(model: Any) -> Any:
    theirs = model.sharded_state_dict

    @wraps(theirs)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        agree_among_ranks(list(amax_histories(model)), model.config)
        found = theirs(*args, **kwargs)
        of_adapters = {key for key in found if ".adapter." in key}
        if not of_adapters:
            return found
        return {key if key in of_adapters else key.replace(STATE, SAVED): found[key] for key in found}

    return sharded_state_dict


def _loading(model: Any) -> Any:
    theirs = model.load_state_dict

    @wraps(theirs)
    def load_state_dict(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        holders = {name.removesuffix(".to_wrap") for name, _ in model.named_modules() if name.endswith(".to_wrap")}

        def place(key: str) -> str:
            at = key.removesuffix(SAVED)
            return key if at == key else at + (BENEATH if at in holders else STATE)

        return theirs({place(key): value for key, value in state_dict.items()}, *args, **kwargs)

    return load_state_dict


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
