"""Follow a loader that computes: write down its operations on meta tensors, and repeat them on the values of a push.

A few of vLLM's loaders do not copy a tensor, but write what they made of it: Mamba's ``A = -exp(A_log)``, GPT-NeoX's
rows of q, k and v in another order, Llama 4's permuted heads. While :mod:`nemo_fp8.rollout.refit.worker.routes` runs a
loader without weights, every operation on a pushed tensor becomes a step on a tape:

    what Mamba2's loader does     copy_(A, A_log)   x = exp(A)   y = neg(x)   copy_(A, y)
    what is repeated for A        the same four, with the pushed A_log, and with memory beside the model in place of A

The steps that lead to one write are a :class:`Computation`. Its tensors are views of storages, since views made by
``.data`` or ``narrow`` are all of one storage and the tape needs no step for them. So a loader that computes needs no
code of its own here, and what it wrote is what it writes at load: the same operations on the same values.

The trade-off: the tensors of a computation must come whole, and all must be there before it runs. What Python does with
a value (``.item()``) is no operation and cannot be followed.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_WORDS = {"clone": "a copy in another order", "copy": "a copy", "_to_copy": "a cast", "cat": "a concatenation"}


@dataclass(frozen=True)
class View:
    """A tensor as a view of a storage, which has a number."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Step:
    """One operation: its arguments with views in place of tensors, and the storages that it makes or changes."""

    operation: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    makes: tuple[int, ...]
    changes: int | None

    def reads(self) -> Iterator[int]:
        """Yield the storages of all arguments."""
        for one in _flat((self.arguments, tuple(self.named.values()))):
            if isinstance(one, View):
                yield one.storage

    @property
    def name(self) -> str:
        """The operation's name without torch's underscores."""
        return str(self.operation._schema.name.removeprefix("aten::")).rstrip("_")


@dataclass(frozen=True, eq=False)
class Computation:
    """The steps that make one value of pushed tensors."""

    steps: tuple[Step, ...]
    inputs: Mapping[int, int]
    """Number of the pushed tensor -> its storage in the steps. All must be there before the steps run."""
    beside: Mapping[int, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each parameter that the steps write and read, by its storage: memory beside the model."""
    result: View

    @property
    def words(self) -> str:
        """The operations in a user's words; ``a copy in another order`` if they only move values."""
        words = [_WORDS.get(step.name, step.name) for step in self.steps if not (step.name == "copy" and self.beside)]
        return ", ".join(dict.fromkeys(words)) or "a copy in another order"

    @cached_property
    def digest(self) -> str:
        """Eight digits that differ for workers whose steps differ, as they do where each holds another shard."""
        numbers: dict[int, int] = {}  # a storage's identity is that of memory, and differs in every process

        def plain(tree: Any) -> Any:
            if isinstance(tree, View):
                number = numbers.setdefault(tree.storage, len(numbers))
                return [number, tree.shape, tree.strides, tree.offset, str(tree.dtype)]
            if isinstance(tree, dict):
                return sorted((name, plain(one)) for name, one in tree.items())
            return [plain(one) for one in tree] if isinstance(tree, (list, tuple)) else str(tree)

        told = [[step.name, plain(step.arguments), plain(step.named)] for step in self.steps]
        return hashlib.blake2b(repr([told, plain(self.result)]).encode(), digest_size=4).hexdigest()

    def run(self, pushed: Mapping[int, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the value; ``pushed`` are the inputs by their numbers, and ``device`` is where the parameters lie.

        No pushed tensor is changed, though a loader may change what it was given.
        """
        changed = {step.changes for step in self.steps}
        memory = {
            storage: _flat_memory(pushed[i].clone() if storage in changed else pushed[i].contiguous())
            for i, storage in self.inputs.items()
        }
        for storage, (shape, dtype) in self.beside.items():
            memory[storage] = torch.zeros(math.prod(shape), dtype=dtype, device=device)
        for step in self.steps:
            arguments, named = _filled((step.arguments, dict(step.named)), memory, device)
            out = step.operation(*arguments, **named)
            made = [one for one in _flat((out,)) if isinstance(one, torch.Tensor)]
            if step.changes is None:
                for storage, tensor in zip(step.makes, made, strict=True):
                    memory[storage] = _flat_memory(tensor)
        return _seen(self.result, memory)


class Tape:
    """All steps that a loader made, in order, and which of them made or changed each storage."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.of: dict[int, list[int]] = defaultdict(list)
        """Numbers of the steps that make or change a storage."""
        self.kept: list[torch.Tensor] = []
        """New tensors, kept alive so that no storage has the identity of an earlier one."""

    def add(self, operation: Any, arguments: Any, named: Any, out: Any, changes: torch.Tensor | None = None) -> None:
        """Write down an operation, with what it returned; ``changes`` is the argument that it writes to, if any."""
        made = () if changes is not None else tuple(one for one in _flat((out,)) if isinstance(one, torch.Tensor))
        self.kept += made
        makes, changed = tuple(map(storage_id, made)), None if changes is None else storage_id(changes)
        for storage in makes if changed is None else (changed,):
            self.of[storage].append(len(self.steps))
        self.steps.append(Step(operation, _viewed(tuple(arguments)), _viewed(dict(named)), makes, changed))

    def computation(
        self, result: View, sources: Mapping[int, int], parameters: Mapping[int, tuple[tuple[int, ...], torch.dtype]]
    ) -> Computation:
        """Return how a tensor was made, as it is now.

        ``sources`` are the numbers of pushed tensors, ``parameters`` shapes and dtypes, both by their storages.
        """
        needed: set[int] = set()
        read = {result.storage}
        ahead = [(result.storage, len(self.steps))]
        while ahead:
            storage, before = ahead.pop()
            for number in self.of.get(storage, ()):
                if number < before and number not in needed:
                    needed.add(number)
                    read.update(self.steps[number].reads())
                    ahead += [(one, number) for one in self.steps[number].reads()]
        inputs = {sources[storage]: storage for storage in read if storage in sources}
        beside = {storage: parameters[storage] for storage in read if storage in parameters}
        return Computation(tuple(self.steps[number] for number in sorted(needed)), inputs, beside, result)


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which all its views share, on the meta device, too."""
    return int(tensor.untyped_storage()._cdata)


def view_of(tensor: torch.Tensor) -> View:
    """Return what a tensor shows of its storage."""
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    return View(storage_id(tensor), sizes, strides, int(tensor.storage_offset()), tensor.dtype)


def _flat(tree: Any) -> Iterator[Any]:
    """Yield everything in lists, tuples and dicts of arguments."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _flat(one)
    else:
        yield tree


def _viewed(tree: Any) -> Any:
    """Return arguments with a view in place of every meta tensor. Other tensors are constants, and stay."""
    if isinstance(tree, dict):
        return {name: _viewed(one) for name, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_viewed, tree))
    return view_of(tree) if isinstance(tree, torch.Tensor) and tree.is_meta else tree


def _filled(tree: Any, memory: Mapping[int, torch.Tensor], device: torch.device) -> Any:
    """Return arguments with a tensor in memory in place of every view, and ``device`` in place of the meta device."""
    if isinstance(tree, dict):
        return {name: _filled(one, memory, device) for name, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_filled(one, memory, device) for one in tree)
    if isinstance(tree, torch.device) and tree.type == "meta":
        return device
    return _seen(tree, memory) if isinstance(tree, View) else tree


def _seen(view: View, memory: Mapping[int, torch.Tensor]) -> torch.Tensor:
    flat = memory[view.storage].view(view.dtype)
    return flat.as_strided(view.shape, view.strides, flat.storage_offset() + view.offset)


def _flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a contiguous or permuted tensor's elements, in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
