"""Modules that have another name since: the old one still imports, for one release, and says the new one.

    import nemo_fp8.model_shapes    ->  nemo_fp8.models.shapes, and a DeprecationWarning

``import nemo_fp8`` puts the finder behind Python's own, so that it is asked only for names that nothing else has.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

MOVED = {
    "nemo_fp8.model_shapes": "nemo_fp8.models.shapes",
    "nemo_fp8.parallel": "nemo_fp8.models.layout",
    "nemo_fp8.rollout_layers": "nemo_fp8.models.selection",
    "nemo_fp8.tensor_names": "nemo_fp8.models.names",
}


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
        warnings.warn(f"{spec.name} is {new} now; the old name goes with the next release.", DeprecationWarning, stacklevel=2)
        old = types.ModuleType(spec.name, f"{new} under its old name.")
        vars(old)["__getattr__"] = lambda attribute: getattr(importlib.import_module(new), attribute)
        return old

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to run: every attribute is the new module's."""
