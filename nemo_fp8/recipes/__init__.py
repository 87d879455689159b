"""Recipes in NeMo's style: functions that return a ``run.Partial`` and take a ``precision``.

    llama3_8b, llama3_70b, qwen3_8b, mixtral_8x7b    NeMo's own recipes, with one of our plugins

``precision`` is a preset's name, a YAML file, a contract, or a Config of a plugin. nemo-run knows them all: by the
dotted name (``nemo llm pretrain --factory "nemo_fp8.recipes.llama3_8b(precision=bf16_mixed)"``), and by the names under
which they are registered: ``fp8_llama3_8b`` and so on, since NeMo has taken the plain ones. A Llama that learns
something in a minute on two cores is :func:`nemo_fp8.experiments.tiny_llama`.

They are imported at their first use, since NeMo takes ten seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nemo_fp8.moved import renamed

RECIPES = ("llama3_8b", "llama3_70b", "qwen3_8b", "mixtral_8x7b")

__all__ = ["RECIPES", "llama3_8b", "llama3_70b", "mixtral_8x7b", "qwen3_8b"]

if TYPE_CHECKING:
    from nemo_fp8.recipes.big import llama3_8b, llama3_70b, mixtral_8x7b, qwen3_8b
else:  # hidden from type checkers, which would accept any name otherwise
    _old = renamed(__name__, {"tiny_llama": "nemo_fp8.experiments.tiny.tiny_llama"})

    def __getattr__(name: str) -> Any:
        return getattr(importlib.import_module(f"{__name__}.big"), name) if name in RECIPES else _old(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
