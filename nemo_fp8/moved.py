"""Old names of modules, and of things within them: each works for one release, and says where the thing is now.

    import nemo_fp8.model_shapes            the finder of this file, behind Python's own: it is asked for what nothing else has
    nemo_fp8.findings.Finding               the module's ``__getattr__``, made by :func:`renamed`: asked for what the module lacks

Both cost nothing until an old name is used, and warn with a DeprecationWarning. Type checkers would take a module's ``__getattr__``
for a promise of every name, misspelt ones too; so it is kept from them:

    if not TYPE_CHECKING:
        __getattr__ = renamed(__name__, {"Finding": "nemo_fp8.errors.Problem"})
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOVED = {
    "nemo_fp8.model_shapes": "nemo_fp8.models.shapes",
    "nemo_fp8.parallel": "nemo_fp8.models.layout",
    "nemo_fp8.rollout_layers": "nemo_fp8.models.selection",
    "nemo_fp8.tensor_names": "nemo_fp8.models.names",
}
"""Modules: the old name, and the new one."""


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the table under their old names."""

    @classmethod
    def find_when_nothing_else_does(cls) -> None:
        """Put one finder behind all others of this process."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        new = MOVED[spec.name]
        _warn(spec.name, new)
        old = types.ModuleType(spec.name, f"{new} under its old name.")
        vars(old)["__getattr__"] = lambda attribute: getattr(importlib.import_module(new), attribute)
        return old

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to run: every attribute is the new module's."""


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``module``, which finds each old name at its new place.

    ``names`` maps an old name to the whole path of the new one. Any other name raises AttributeError, as without it.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, new = names[name].rpartition(".")
        _warn(f"{module}.{name}", names[name])
        return getattr(importlib.import_module(place), new)

    return find


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now; the old name goes with the next release.", DeprecationWarning, stacklevel=3)
