"""Somebody else's names, replaced for as long as a context lasts: a table, checked before it is applied.

Megatron has no switch for a machine without CUDA, and none for FP8 without TransformerEngine, so a few of its
names have to be replaced. Each replacement is one row that says where, what and why. Before the first name is
touched the whole table is held against the installed version: a name that is gone, or a function whose
parameters changed, is one clear error that names every row that does not fit. When the context closes, every
name holds what it held before, in the reverse order, whatever happened in between.

The trade-off: names are process-wide, so two runs in one process take turns.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nemo_fp8.errors import PrecisionError, Problem

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One replaced name. ``target`` is ``package.module`` or ``package.module:Class``."""

    target: str
    name: str
    replacement: Any
    why: str
    optional: bool = False
    """The name exists only beside TransformerEngine; without it the row adds the name, and takes it away again."""

    def owner(self) -> Any:
        """The module or class that holds the name."""
        module, _, path = self.target.partition(":")
        owner = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part)
        return owner

    def misfit(self) -> str | None:
        """What is wrong with this row for the installed version, if anything."""
        try:
            owner = self.owner()
        except (ImportError, AttributeError) as error:
            return f"{self.target} is not there ({error})"
        original = getattr(owner, self.name, _MISSING)
        if original is _MISSING:
            return None if self.optional else f"{self.target} has no {self.name}"
        return _signature_misfit(f"{self.target}.{self.name}", original, self.replacement)


def is_patched(patches: Iterable[Patch]) -> bool:
    """Whether every name of the table holds its replacement now."""
    return all(vars(patch.owner()).get(patch.name) is patch.replacement for patch in patches)


@contextmanager
def patched(patches: Iterable[Patch], purpose: str) -> Iterator[None]:
    """Every name of the table replaced, until the context closes. ``purpose`` says in an error what it was for."""
    patches = tuple(patches)
    misfits = [(patch, misfit) for patch in patches if (misfit := patch.misfit())]
    if misfits:
        raise PrecisionError(
            Problem(
                f"{purpose} does not fit the installed {_version_of(patch.target)}: {misfit}.",
                f"It has to replace this name: {patch.why}",
                "Install the versions in constraints/training.txt, or adapt this row of the table.",
            )
            for patch, misfit in misfits
        )
    held: list[tuple[Any, str, Any]] = []
    try:
        for patch in patches:
            owner = patch.owner()
            # Read past descriptors: a class must get back its own function or staticmethod, not what getattr binds,
            # and a name it only inherits must be inherited again.
            held.append((owner, patch.name, vars(owner).get(patch.name, _MISSING)))
            setattr(owner, patch.name, patch.replacement)
        yield
    finally:
        for owner, name, before in reversed(held):
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _signature_misfit(name: str, original: Any, replacement: Any) -> str | None:
    """Whether a replacing function could be called in another way than the function it stands for."""
    if not inspect.isfunction(original) or not inspect.isfunction(replacement):
        return None
    theirs, ours = inspect.signature(original).parameters, inspect.signature(replacement).parameters
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in (*theirs.values(), *ours.values())):
        return None
    if list(theirs) != list(ours):
        return f"{name} takes ({', '.join(theirs)}), and our replacement takes ({', '.join(ours)})"
    return None


def _version_of(target: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    distribution = {"megatron": "megatron-core", "nemo": "nemo-toolkit"}.get(
        target.partition(".")[0], target.partition(".")[0]
    )
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return distribution
