"""``from nemo_fp8 import lightning as nl``: NeMo's lightning module, with a Trainer that takes FP8 arguments.

NeMo's own document puts the FP8 arguments beside the plugin, on the Trainer:

    run.Config(nl.Trainer, plugins=bf16_with_fp8_mixed(), **trainer_args, **fp8_args)

NeMo's Trainer has no such arguments and fails. This one passes them to the plugin. It is simpler to pass them to the
factory: ``plugins=bf16_with_fp8_mixed(**fp8_args)``. Everything else comes from ``nemo.lightning`` unchanged.
"""

from __future__ import annotations

import inspect
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("train")

import nemo.lightning as _nemo

from nemo_fp8.errors import PrecisionError
from nemo_fp8.train.plugin import MixedPrecision
from nemo_fp8.train.signature import PARAMETERS, takes

# Of its __init__: asked of the class, Python 3.11.2 answers with the (*args, **kwargs) of __new__, which NeMo's io
# mixin gives it.
_OF_TRAINER = {name: p for name, p in inspect.signature(_nemo.Trainer.__init__).parameters.items() if name != "self"}
_OF_PLUGIN = [p for p in PARAMETERS if p.name not in _OF_TRAINER]


class Trainer(_nemo.Trainer):
    """NeMo's Trainer, which passes FP8 arguments to its precision plugin.

    Raises PrecisionError for such arguments without a plugin of ours among ``plugins``.
    """

    @takes([*_OF_TRAINER.values(), *_OF_PLUGIN])
    def __init__(self, *args: Any, plugins: Any = None, **arguments: Any) -> None:
        for_plugin = {p.name: arguments.pop(p.name) for p in _OF_PLUGIN if p.name in arguments}
        super().__init__(*args, plugins=_with(plugins, for_plugin) if for_plugin else plugins, **arguments)


def _with(plugins: Any, changes: dict[str, Any]) -> Any:
    """Return the plugins with ``changes`` made to the one that holds a contract."""
    if isinstance(plugins, (list, tuple)):
        changed = [_with(plugin, changes) if isinstance(plugin, MixedPrecision) else plugin for plugin in plugins]
        if changed != list(plugins):
            return changed
    elif isinstance(plugins, MixedPrecision):
        return plugins.replace(**changes)
    given = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    raise PrecisionError(
        f"The Trainer was given {given}, and no nemo_fp8 plugin to hand it to.",
        "Precision settings belong to the precision plugin; a Trainer has none of its own.",
        f"Give them to the factory: plugins=bf16_with_fp8_mixed({given}), imported from nemo_fp8.",
    )


def __getattr__(name: str) -> Any:
    return getattr(_nemo, name)
