"""The types of the front door, ``nemo_fp8/__init__.pyi``; ``make_docs.py`` puts the file in place.

A table makes the factories when one is first used, and a type checker runs no code. The stub writes down what the
tables come to: every preset as a function, and every argument of a factory with the values that it takes.

A factory returns a ``run.Config``, and nemo-run ships no types: mypy would call the result ``Any``. So the stub names a
subclass of it, which exists for type checkers alone.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from typing import get_type_hints

import nemo_fp8
from nemo_fp8.contract import precision as contract
from nemo_fp8.contract.explain import docstring
from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.preflight.engine import ENGINES
from nemo_fp8.render.nemo import IMPLIED, SETTINGS

STUB = '''"""The public names of ``nemo_fp8`` with their types, for type checkers and editors.

Generated: ``tools/make_docs.py`` writes it from the tables of presets and settings, and ``make check`` holds
it to them.
"""

from typing import Literal, TypedDict, type_check_only

from nemo_run import Config
from torch import dtype
from typing_extensions import Unpack

{imports}
__version__: str

@type_check_only
class _Arguments(TypedDict, total=False):
    """What a factory takes, each of them optional: the arguments of NeMo's plugin, and the fields of the contract."""

{arguments}
@type_check_only
class _PluginConfig(Config[MixedPrecision]):
    """A ``run.Config`` of our plugin. At run time it is no class of its own."""

{factories}'''

WIDTH = 116  # of a docstring, with the quotation marks before its first line

# What neither a table of values nor the contract's annotations tell.
_DTYPE = "dtype | str | None"
_SPECIAL = {
    "keep": "tuple[str, ...] | list[str]",
    "params_dtype": _DTYPE,
    "pipeline_dtype": _DTYPE,
    "autocast_dtype": _DTYPE,
    "autocast_enabled": "bool",
    "first_last_layers_bf16": "bool | None",
    "reuse_grad_buf_for_mxfp8_param_ag": "bool | None",
    "fp4": "None",
    "fp4_recipe": "str",
    "engine": f"Literal{json.dumps(ENGINES)}",
}


def front_door() -> str:
    """Return the whole stub, as ruff formats it."""
    homes = sorted((home, name) for name, home in nemo_fp8._HOMES.items())
    own = [field.name for field in fields(contract.Precision) if field.name != "name"]
    names = dict.fromkeys((*SETTINGS, *IMPLIED, *own, "engine"))
    return STUB.format(
        imports="".join(f"from {home} import {name} as {name}\n" for home, name in homes),
        arguments="".join(f"    {name}: {_SPECIAL.get(name) or _type(name)}\n" for name in names),
        factories="\n".join(_factory(name, precision) for name, precision in PRESETS.items()),
    )


def _type(name: str) -> str:
    """Return the type of an argument under NeMo's name or the contract's."""
    setting = SETTINGS.get(name)
    if setting and setting.values:
        return _one_of(setting.values)
    name = setting.field if setting else name
    # A field whose default is None follows from the others, and None lets it follow again.
    default = getattr(contract.Precision, name)
    if name in contract._CHOICES:
        return _one_of([*contract._CHOICES[name], default])
    hint = get_type_hints(contract.Precision)[name]
    return inspect.formatannotation(hint | None if default is None else hint)


def _one_of(values: Iterable[object]) -> str:
    values = dict.fromkeys(values)
    if all(isinstance(value, bool) for value in values):
        return "bool"
    words = json.dumps([value for value in values if value is not None])
    return f"Literal{words} | None" if None in values else f"Literal{words}"


def _factory(name: str, precision: contract.Precision) -> str:
    """Return a factory with its docstring, in lines that fit."""
    fill = textwrap.TextWrapper(WIDTH, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)
    lines = [line for text in docstring(precision).splitlines() for line in fill.wrap(text) or [""]]
    words = "\n".join(lines).strip()
    return f'def {name}(**changes: Unpack[_Arguments]) -> _PluginConfig:\n    """{words}\n    """\n'
