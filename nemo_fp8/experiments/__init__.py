"""Whole runs that fit on a laptop, built from the public parts of the package; only its reports import them.

stories, tiny     a corpus that is generated while it is read, and a Llama of 5 million parameters that learns it
one_scale         the same in four bits that are known to train worse, a control
trial, recorder   one training run of a recipe in processes of its own, and its result
rl                GRPO on sorting, FP8 in training and in rollout
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["tiny_llama"]

if TYPE_CHECKING:
    from nemo_fp8.experiments.tiny import tiny_llama
else:  # hidden from type checkers, which would accept any name otherwise

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from nemo_fp8.experiments.tiny import tiny_llama

        return tiny_llama
