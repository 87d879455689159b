"""Save the state of delayed scaling that every tensor-parallel rank goes on from.

A checkpoint holds the amaxes of one tensor-parallel rank, and those of FP8 weights differ by rank until the next
forward (``train/amax_histories.py``). Bridge 0.3.1 calls no callback before it saves, but every rank asks the model for
its ``sharded_state_dict``. So that method of the instance lets the ranks agree first. It is asked for before a
checkpoint is loaded as well, when there is nothing to agree on yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

from nemo_fp8.train.amax_histories import agree_among_ranks, amax_histories


def agree_before_saving(models: Sequence[Any]) -> None:
    """Let ranks agree on the amaxes of these models whenever all of them are asked for their sharded state."""
    for model in models:
        model.sharded_state_dict = _agreeing(model)


def _agreeing(model: Any) -> Any:
    theirs = model.sharded_state_dict

    @wraps(theirs)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        agree_among_ranks(list(amax_histories(model)), model.config)
        return theirs(*args, **kwargs)

    return sharded_state_dict
