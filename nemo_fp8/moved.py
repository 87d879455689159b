"""Old names of modules and of things in them; each works for one release and warns with the new name.

    import nemo_fp8.model_shapes            found by the finder of this file, which Python asks after all others
    nemo_fp8.findings.Finding               found by the module's ``__getattr__``, which :func:`renamed` makes

Both cost nothing until an old name is used, and warn with a DeprecationWarning. Type checkers would take a module's
``__getattr__`` for a promise of every name, also a misspelt one, so it is hidden from them:

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
from pathlib import Path
from typing import Any

MOVED = {
    "nemo_fp8.agreement": "nemo_fp8.preflight.agreement",
    "nemo_fp8.cli.bars": "nemo_fp8.cli.progress",
    "nemo_fp8.contract.agreement": "nemo_fp8.preflight.agreement",
    "nemo_fp8.doctor": "nemo_fp8.preflight.doctor",
    "nemo_fp8.explain": "nemo_fp8.contract.explain",
    "nemo_fp8.lint": "nemo_fp8.preflight.lint",
    "nemo_fp8.machine": "nemo_fp8.preflight.machine",
    "nemo_fp8.memory": "nemo_fp8.preflight.memory",
    "nemo_fp8.model_shapes": "nemo_fp8.models.shapes",
    "nemo_fp8.named": "nemo_fp8.contract.naming",
    "nemo_fp8.numerics.canonical": "nemo_fp8.export.canonical",
    "nemo_fp8.numerics.checkpoint": "nemo_fp8.storage.safetensors",
    "nemo_fp8.parallel": "nemo_fp8.models.layout",
    "nemo_fp8.plain_yaml": "nemo_fp8.contract.yaml",
    "nemo_fp8.presets": "nemo_fp8.contract.presets",
    "nemo_fp8.recipes.recorder": "nemo_fp8.experiments.recorder",
    "nemo_fp8.recipes.register": "nemo_fp8.recipes",
    "nemo_fp8.recipes.tiny": "nemo_fp8.experiments.tiny",
    "nemo_fp8.recipes.trial": "nemo_fp8.experiments.trial",
    "nemo_fp8.report.inspect": "nemo_fp8.inspection.measure",
    "nemo_fp8.report.keep": "nemo_fp8.inspection.advice",
    "nemo_fp8.report.loss": "nemo_fp8.inspection.loss",
    "nemo_fp8.rl": "nemo_fp8.experiments.rl",
    "nemo_fp8.rollout.grid": "nemo_fp8.rollout.engine.grid",
    "nemo_fp8.rollout.in_vllm": "nemo_fp8.rollout.engine",
    "nemo_fp8.rollout.in_vllm.compatibility": "nemo_fp8.rollout.engine.compatibility",
    "nemo_fp8.rollout.in_vllm.config": "nemo_fp8.rollout.engine.config",
    "nemo_fp8.rollout.in_vllm.experts": "nemo_fp8.rollout.engine.experts",
    "nemo_fp8.rollout.in_vllm.guard": "nemo_fp8.rollout.access",
    "nemo_fp8.rollout.in_vllm.held": "nemo_fp8.rollout.refit.worker.held",
    "nemo_fp8.rollout.in_vllm.kernels": "nemo_fp8.rollout.engine.kernels",
    "nemo_fp8.rollout.in_vllm.kv": "nemo_fp8.rollout.engine.kv",
    "nemo_fp8.rollout.in_vllm.linear": "nemo_fp8.rollout.engine.linear",
    "nemo_fp8.rollout.in_vllm.ops": "nemo_fp8.rollout.engine.ops",
    "nemo_fp8.rollout.in_vllm.quantizer": "nemo_fp8.rollout.engine.quantizer",
    "nemo_fp8.rollout.in_vllm.reload": "nemo_fp8.rollout.refit.worker.session",
    "nemo_fp8.rollout.in_vllm.reload_checkpoint": "nemo_fp8.rollout.refit.worker.checkpoint",
    "nemo_fp8.rollout.in_vllm.reload_layers": "nemo_fp8.rollout.refit.worker.sinks",
    "nemo_fp8.rollout.in_vllm.reload_layouts": "nemo_fp8.rollout.refit.worker.layouts",
    "nemo_fp8.rollout.in_vllm.reload_plan": "nemo_fp8.rollout.refit.worker.plan",
    "nemo_fp8.rollout.in_vllm.reload_routes": "nemo_fp8.rollout.refit.worker.routes",
    "nemo_fp8.rollout.in_vllm.reload_transfer": "nemo_fp8.rollout.refit.worker.transfer",
    "nemo_fp8.rollout.in_vllm.report": "nemo_fp8.rollout.engine.report",
    "nemo_fp8.rollout.in_vllm.worker": "nemo_fp8.rollout.engine.worker",
    "nemo_fp8.rollout.mismatch": "nemo_fp8.mismatch",
    "nemo_fp8.rollout.refit.endpoints": "nemo_fp8.rollout.refit.door",
    "nemo_fp8.rollout.refit.stream": "nemo_fp8.rollout.refit.wire",
    "nemo_fp8.rollout.refit.transports": "nemo_fp8.rollout.refit.wire",
    "nemo_fp8.rollout.selection": "nemo_fp8.rollout.engine.selection",
    "nemo_fp8.rollout.storage": "nemo_fp8.rollout.engine.storage",
    "nemo_fp8.rollout_layers": "nemo_fp8.models.selection",
    "nemo_fp8.shape_audit": "nemo_fp8.preflight.shapes",
    "nemo_fp8.support": "nemo_fp8.preflight.support",
    "nemo_fp8.tensor_names": "nemo_fp8.models.names",
    "nemo_fp8.terminal": "nemo_fp8.cli.printing",
    "nemo_fp8.train.data": "nemo_fp8.experiments.stories",
    "nemo_fp8.train.engine": "nemo_fp8.preflight.engine",
    "nemo_fp8.train.hybrid": "nemo_fp8.train.own_recipe",
    "nemo_fp8.train.te_tensors": "nemo_fp8.storage.te_tensors",
    "nemo_fp8.train.torch_dist": "nemo_fp8.storage.torch_dist",
}
"""Modules and packages: the old name, and the new one."""


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find the modules of the table under their old names."""

    @classmethod
    def find_when_nothing_else_does(cls) -> None:
        """Append one finder to the finders of this process."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an old name of the table; None for any other."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if _new(name) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module that takes every attribute from the module under its new name; warn."""
        new = _new(spec.name)
        _warn(spec.name, new)
        old = types.ModuleType(spec.name, f"{new} under its old name.")
        old.__path__ = []  # otherwise Python would load the files of the new package a second time
        vars(old)["__getattr__"] = lambda attribute: _attribute(new, attribute)
        return old

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has no code of its own."""


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module`` that finds each old name at its new place.

    ``names`` maps an old name to the full path of the new one. Any other name raises AttributeError, as usual.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, new = names[name].rpartition(".")
        _warn(f"{module}.{name}", names[name])
        return getattr(importlib.import_module(place), new)

    return find


def _attribute(module: str, name: str) -> Any:
    """Return an attribute of a module under its new name.

    Python and torch ask every loaded module for ``__file__`` and the like, and must not have vLLM imported by that.
    """
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {module!r} under its old name has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def _new(name: str) -> str:
    """Return the new name of a module, or of one within a package that moved; empty if there is none.

    ``from nemo_fp8.agreement import rollout_operand`` asks for a module of that name, too, where there is no attribute.
    """
    old = max((old for old in MOVED if f"{name}.".startswith(f"{old}.")), key=len, default="")
    new = MOVED[old] + name.removeprefix(old) if old else ""
    return new if old == name or _is_module(new) else ""


def _is_module(name: str) -> bool:
    """Return whether there is a file or a folder of a module; nothing is imported."""
    path = Path(__file__).parent.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now; the old name goes with the next release.", DeprecationWarning, stacklevel=3)
