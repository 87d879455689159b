"""Replace names of Megatron, NeMo and TransformerEngine while a context is open: a table of patches, checked before it
is applied.

Four names are replaced in all. Each is one row that says where, what and why:

    megatron_cpu.py     two that gloo or a build of torch without CUDA cannot serve; for a run on a CPU
    first_weights.py    one that loses the first values of FP8 weights; while a model is built
    row_casts.py        one that casts shares of FP8 weights into transposes, too, which nobody reads; while a run lasts

Before the first name is replaced, the whole table is compared with the installed versions. If a name is gone, or the
parameters of a function differ, one PrecisionError names every row that does not fit. When the context closes, also by
an exception, every name gets its former value back, in reverse order.

The trade-off: names belong to the process, so two runs in one process cannot overlap.
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
    """One name to replace. ``target`` is ``package.module`` or ``package.module:Class``."""

    target: str
    name: str
    replacement: Any
    why: str

    def owner(self) -> Any:
        """Import and return the module or class that holds the name."""
        module, _, path = self.target.partition(":")
        owner = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part)
        return owner

    def misfit(self) -> str | None:
        """Say why this row does not fit the installed version; None if it does."""
        try:
            owner = self.owner()
        except (ImportError, AttributeError) as error:
            return f"{self.target} is not there ({error})"
        original = getattr(owner, self.name, _MISSING)
        if original is _MISSING:
            return f"{self.target} has no {self.name}"
        return _signature_misfit(f"{self.target}.{self.name}", original, self.replacement)


def is_patched(patches: Iterable[Patch]) -> bool:
    """Return whether every name of the table holds its replacement now."""
    return all(vars(patch.owner()).get(patch.name) is patch.replacement for patch in patches)


@contextmanager
def patched(patches: Iterable[Patch], purpose: str) -> Iterator[None]:
    """Replace every name of the table until the context closes.

    ``purpose`` begins the sentence of an error. Raises PrecisionError if a row does not fit the installed version.
    """
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
            # Read from vars() and not by getattr: a class must get its function or staticmethod object back, not a
            # bound one, and a name that it inherits must be inherited again.
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
    """Say how the parameters of two functions differ; None if they do not, or if one takes ``*args``."""
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
