"""Old names within modules, of things that have another name since: each works for one release, and says where the thing is now.

    if not TYPE_CHECKING:
        __getattr__ = renamed(__name__, {"Finding": "nemo_fp8.errors.Problem"})

A module without the name asks its ``__getattr__`` for it (PEP 562), so an old name costs nothing until it is used. Type checkers
take such a function for a promise of every name, misspelt ones too; so it is kept from them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``module``, which finds each old name at its new place with a DeprecationWarning.

    ``names`` maps an old name to the whole path of the new one. Any other name raises AttributeError, as without it.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, new = names[name].rpartition(".")
        warnings.warn(f"{module}.{name} is {names[name]} now; the old name goes with the next release.", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(place), new)

    return find
