"""Factories: ``bf16_with_fp8_mixed()`` and one for each preset, returning ``run.Config`` of our plugin.

One function body makes all factories from the presets' table; ``nemo_fp8/__init__.pyi`` has their types. Every
argument of NeMo's plugin is a keyword, under NeMo's name, and so is every field that only our contract has:
``bf16_with_fp8_mixed(fp8_margin=1, fp8_params=True)``.

Only what the contract sets is written into the Config, under NeMo's names, so that ``recipe.trainer.plugins.fp8_margin
= 1`` works as with NeMo's own.

nemo-run finds the factories through the entry-point group ``nemo_run.cli``: ``trainer.plugins=bf16_with_fp8_mixed``
resolves on its command line without an import by the user. Lightning annotates that argument ``Precision``, so that
is the type they are registered under; NeMo's own are registered under the plugin's class, and do not resolve.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("train")

import nemo_run as run
from lightning.pytorch.plugins import Precision as LightningPrecision

from nemo_fp8.contract import Precision
from nemo_fp8.contract.explain import docstring
from nemo_fp8.contract.naming import given
from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.nemo import changes_from_nemo
from nemo_fp8.train.plugin import MixedPrecision, plugin_arguments
from nemo_fp8.train.signature import PARAMETERS

logger = logging.getLogger("nemo_fp8")


def plugin_config(precision: Precision | str, engine: str = "auto") -> run.Config[MixedPrecision]:
    """Return the ``run.Config`` of our plugin for any contract: ``trainer.plugins = plugin_config(my_contract)``."""
    chosen = {} if engine == "auto" else {"engine": engine}
    contract = precision if isinstance(precision, Precision) else given(precision)
    return run.Config(MixedPrecision, **plugin_arguments(contract), **chosen)


def _factory(name: str, precision: Precision) -> Callable[..., run.Config[MixedPrecision]]:
    def make(**changes: Any) -> run.Config[MixedPrecision]:
        engine = changes.pop("engine", "auto")
        return plugin_config(precision.replace(**changes_from_nemo(changes, base=precision)), engine)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = docstring(precision)
    make.__signature__ = inspect.Signature(PARAMETERS, return_annotation=run.Config[MixedPrecision])  # type: ignore[attr-defined]
    run.cli.factory(target=LightningPrecision)(_heard(make))
    return make


def _heard(make: Callable[..., run.Config[MixedPrecision]]) -> Callable[..., run.Config[MixedPrecision]]:
    """Wrap a factory so that its errors go to the log, too: nemo-run swallows what a factory raises."""

    @functools.wraps(make)
    def heard(**changes: Any) -> run.Config[MixedPrecision]:
        try:
            return make(**changes)
        except PrecisionError as error:
            logger.error("%s: %s", make.__name__, error)
            raise

    return heard


globals().update({name: _factory(name, precision) for name, precision in PRESETS.items()})
__all__ = ["plugin_config", *PRESETS]
