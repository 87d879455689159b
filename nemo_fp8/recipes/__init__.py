"""Ready recipes in NeMo's own style: a function returns a ``run.Partial``, and ``precision`` says what it trains in.

    llama3_8b, llama3_70b, qwen3_8b, mixtral_8x7b    NeMo's own recipes, with one of our plugins
    tiny_llama                                       a Llama that learns something in a minute on two cores

``precision`` is a preset's name, a contract, or a Config of a plugin. nemo-run knows them all: by the dotted name
(``nemo llm pretrain --factory "nemo_fp8.recipes.tiny_llama(precision=bf16_mixed)"``), and by the names under which they
are registered, which are ``tiny_llama`` and, where NeMo has taken the plain name, ``fp8_llama3_8b`` and so on.

They are loaded when they are used: NeMo takes ten seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {"llama3_8b": "big", "llama3_70b": "big", "qwen3_8b": "big", "mixtral_8x7b": "big", "tiny_llama": "tiny"}
RECIPES = tuple(_MODULES)

__all__ = ["RECIPES", "llama3_8b", "llama3_70b", "mixtral_8x7b", "qwen3_8b", "tiny_llama"]

if TYPE_CHECKING:
    from nemo_fp8.recipes.big import llama3_8b, llama3_70b, mixtral_8x7b, qwen3_8b
    from nemo_fp8.recipes.tiny import tiny_llama
else:  # a type checker that saw this would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
