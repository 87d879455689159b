"""The arguments of the plugin, of its factories and of the command line: NeMo's, and every other field of a contract.

fiddle, nemo-run and NeMo's io read the signature of what they build, configure or record: names, types and defaults. A
plugin that takes ``**arguments`` has none, so it is made here, of NeMo's own signature and the contract's fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, get_type_hints

from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision

from nemo_fp8.contract import Precision
from nemo_fp8.render.nemo import IMPLIED, SETTINGS


def _parameters() -> list[inspect.Parameter]:
    """Return every argument of NeMo's plugin and every other field of the contract, typed, for the command line."""
    hints = get_type_hints(Precision)
    own = {f.name: hints[f.name] for f in fields(Precision) if f.name != "name"}
    types: dict[str, Any] = {name: str if setting.values else own[setting.field] for name, setting in SETTINGS.items()}
    types |= {"grad_reduce_in_fp32": bool, "first_last_layers_bf16": bool, "reuse_grad_buf_for_mxfp8_param_ag": bool}
    types |= {name: Any for name in IMPLIED if name not in types}
    types |= {name: hint for name, hint in own.items() if name not in types} | {"engine": str}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in types.items()
    ]


PARAMETERS = _parameters()
_OF_NEMO = inspect.signature(MegatronMixedPrecision.__init__).parameters


def as_nemo(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter with NeMo's default, the value that a Config reports for an argument that was not set."""
    if parameter.name == "precision":  # NeMo takes it by position, without a default
        return parameter.replace(default="bf16-mixed", kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    theirs = _OF_NEMO.get(parameter.name, parameter)
    return parameter.replace(default=theirs.default)


def takes(parameters: Iterable[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give an ``__init__`` with ``**arguments`` a real signature, for fiddle, nemo-run and NeMo's io."""

    def signed(init: Callable[..., None]) -> Callable[..., None]:
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        init.__signature__ = inspect.Signature([me, *parameters])  # type: ignore[attr-defined]
        return init

    return signed
