"""Whole runs that fit on a laptop, made of the parts that everybody else uses: nothing in the package imports them but
its reports.

stories, tiny     a corpus that is made as it is read, and a Llama of 5 million parameters that learns it
trial, recorder   one training run of a recipe in processes of its own, and what came of it
rl                GRPO on sorting, FP8 in training and in rollout
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["tiny_llama"]

if TYPE_CHECKING:
    from nemo_fp8.experiments.tiny import tiny_llama
else:  # a type checker that saw this would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from nemo_fp8.experiments.tiny import tiny_llama

        return tiny_llama
