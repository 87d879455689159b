"""NeMo's pretraining recipes for models that need GPUs, with one of our plugins in place of NeMo's.

Everything but the precision is NeMo's: model, parallelism, optimizer, data (NeMo's mock data: put your own into
``recipe.data``). NeMo's performance settings write into the plugin, so they are applied after it is set.
"""

import importlib
from typing import Any, Protocol

from nemo_fp8.extras import require

__needs__ = require("train")

import nemo_run as run
from nemo.collections import llm

from nemo_fp8.errors import PrecisionError
from nemo_fp8.recipes.precision import Folder, PrecisionLike, plugin_of


class Recipe(Protocol):
    """The signature of every recipe, for type checkers, which cannot see the arguments of generated functions."""

    def __call__(
        self,
        precision: PrecisionLike = ...,
        dir: Folder = ...,
        name: str = ...,
        num_nodes: int = ...,
        num_gpus_per_node: int = ...,
        performance_mode: bool = ...,
    ) -> run.Partial[Any]: ...


def _recipe(model: str, num_nodes: int) -> Recipe:
    """Make the recipe of one of NeMo's models; ``num_nodes`` is the least that its parallelism fits on."""

    def make(
        precision: PrecisionLike = "bf16_with_fp8_blockwise_mixed",
        dir: Folder = None,
        name: str = model,
        num_nodes: int = num_nodes,
        num_gpus_per_node: int = 8,
        performance_mode: bool = False,
    ) -> run.Partial[Any]:
        theirs = importlib.import_module(f"nemo.collections.llm.recipes.{model}")
        recipe = theirs.pretrain_recipe(dir=dir, name=name, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)
        recipe.trainer.plugins = plugin_of(precision)
        if not performance_mode:
            return recipe
        if not hasattr(theirs, "pretrain_performance_optimizations"):
            raise PrecisionError(
                f"performance_mode=True for {model}.",
                "NeMo has no performance settings for this model.",
                "Leave performance_mode out.",
            )
        return theirs.pretrain_performance_optimizations(recipe)

    make.__name__ = make.__qualname__ = model
    make.__doc__ = f"NeMo's ``{model}`` pretraining recipe in any precision, on {num_nodes} x 8 GPUs or more."
    run.cli.factory(target=llm.pretrain, name=f"fp8_{model}")(make)
    return make


llama3_8b = _recipe("llama3_8b", num_nodes=1)
llama3_70b = _recipe("llama3_70b", num_nodes=4)
qwen3_8b = _recipe("qwen3_8b", num_nodes=1)
mixtral_8x7b = _recipe("mixtral_8x7b", num_nodes=8)
