"""Which part of which pushed tensor belongs where in this worker's model, asked of vLLM's own loader without a byte of
weights.

Every model of vLLM knows how its checkpoint's tensors are renamed, split over workers and fused, in its
``load_weights`` and the loaders of its parameters. So it is run once with tensors that have shapes and no memory, while
the model's parameters, too, are as they were before they were loaded, and every copy that it would make is written down
instead:

    route = (pushed tensor, box of it)  ->  (layer, parameter, box of it)

That is the manifest check (what the loader refuses, passes over or never writes is known before the first byte) and
the plan by which pieces of tensors go straight to where they live. No table of models, and any sharding. The
trade-off: a loader that computes with a tensor on the way, as a few families have (Mamba's A = -exp(A_log)), cannot be
followed; the operations that it does are written down too, and said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from nemo_fp8.errors import Problem
from nemo_fp8.rollout.refit.manifest import Entry

Box = tuple[tuple[int, int], ...]
aten = torch.ops.aten
MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Target:
    """A parameter of this worker's model."""

    layer: str
    parameter: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.parameter}" if self.layer else self.parameter


@dataclass(frozen=True)
class Route:
    """One copy: a part of a pushed tensor to a box of a parameter, of equally many elements in the same order."""

    entry: int
    shape: tuple[int, ...]
    """Of the whole pushed tensor."""
    source: Box | None
    """None for a part that is no box (a transpose): it can only be taken from the whole tensor, as ``view`` says."""
    view: tuple[tuple[int, ...], tuple[int, ...], int]
    """Sizes, strides and offset of the part."""
    target: Target
    to: Box

    @property
    def elements(self) -> int:
        return size_of(self.to)


@dataclass
class Routes:
    """What the loader would do with a manifest."""

    by_entry: dict[int, list[Route]] = field(default_factory=dict)
    constants: dict[Target, list[tuple[Box, float]]] = field(default_factory=dict)
    """What it fills by itself: the padding of a vocabulary."""
    parameters: list[Target] = field(default_factory=list)
    """Every parameter that can be loaded; two names of one tied weight are one target."""
    aliases: dict[str, str] = field(default_factory=dict)
    """The second name of a tied weight, and its first."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Tensors that the loader refuses, each with the reason."""
    unfollowed: dict[str, str] = field(default_factory=dict)
    """Tensors of which the loader makes something else than a copy, each with what it makes, and how."""

    def __iter__(self) -> Iterator[Route]:
        for routes in self.by_entry.values():
            yield from routes

    def covered(self) -> dict[Target, int]:
        """How many elements of each target are written, or filled."""
        boxes: dict[Target, set[Box]] = {}
        for route in self:
            boxes.setdefault(route.target, set()).add(route.to)
        for target, filled in self.constants.items():
            boxes.setdefault(target, set()).update(box for box, _ in filled)
        return {target: sum(map(size_of, to)) for target, to in boxes.items()}


def size_of(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def record(model: Any, entries: Sequence[Entry], passed_over: Collection[int] = ()) -> Routes:
    """Where ``model.load_weights`` takes these tensors. The model is the same afterwards, whatever happens."""
    routes = Routes()
    with _as_before_loading(model, routes) as targets, torch.no_grad():
        sources = [torch.empty(entry.shape, dtype=_loaded_as(entry), device="meta") for entry in entries]
        recorder = _Recorder(entries, sources, targets, routes)
        todo = iter([i for i in range(len(entries)) if i not in passed_over])
        while len(routes.problems) + len(routes.unfollowed) < MOST_PROBLEMS:
            try:
                with recorder:
                    model.load_weights((entries[i].name, sources[i]) for i in recorder.each(todo))
                break
            except _Unfollowed as error:
                routes.unfollowed[entries[recorder.current].name] = str(error)
            except Exception as error:  # whatever a loader does about a tensor that it does not like
                routes.problems.append((entries[recorder.current].name, _words(error)))
    return routes


class _Unfollowed(Exception):
    """What a loader makes of a tensor, where that is no copy of it."""


def unpushable(routes: Routes) -> Problem | None:
    """Why no push can fill this model, if none can: one problem, with the first of each kind of tensor."""
    kinds = {re.sub(r"\d+", "N", name): f"{name} {made}" for name, made in reversed(routes.unfollowed.items())}
    if not kinds:
        return None
    first = [*kinds.values()][::-1][:4]
    return Problem(
        "Weights cannot be pushed into an engine of this model.",
        f"vLLM's loader changes tensors on the way, and a push can only copy: {'; '.join(first)}.",
        "To give it other weights, start another engine from a checkpoint of them.",
    )


def _loaded_as(entry: Entry) -> torch.dtype:
    return torch.bfloat16 if entry.is_codes else entry.torch_dtype  # codes go where the values would go


def _words(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 240 else f"{text[:240]}..."


@contextmanager
def _as_before_loading(model: torch.nn.Module, routes: Routes) -> Iterator[dict[int, Target]]:
    """The model with its parameters as its loaders know them, on no device; by storage, what each of them is."""
    kept = [(name, layer, dict(layer._parameters), dict(layer._buffers)) for name, layer in model.named_modules()]
    found: dict[int, Target] = {}
    tied: dict[int, torch.Tensor] = {}  # by the live tensor: names of one weight stay names of one weight
    try:
        for name, layer, parameters, buffers in kept:
            before_parameters, before_buffers = get_layerwise_info(layer).restore_metadata
            for place, before, live in (
                (layer._parameters, before_parameters, parameters),
                (layer._buffers, before_buffers, buffers),
            ):
                place.clear()
                place.update({key: tensor for key, tensor in live.items() if key in SKIP_TENSORS})
                for key, tensor in before.items():
                    now = live.get(key)
                    place[key] = tied.get(id(now)) if id(now) in tied else before_loading(tensor, layer)
                    if now is not None:
                        tied.setdefault(id(now), place[key])
                for key, tensor in place.items():
                    if tensor is None:
                        continue
                    target = Target(name, key, tuple(tensor.shape), tensor.dtype)
                    first = found.setdefault(_identity(tensor), target)
                    if first is not target:
                        routes.aliases[target.name] = first.name
                    elif place is layer._parameters:
                        routes.parameters.append(target)
        yield found
    finally:
        for _, layer, parameters, buffers in kept:
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)


def before_loading(tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """A parameter as it was when the model was built, with its own loader."""
    tensor = restore_layer_refs(to_meta_tensor(tensor), layer)
    if hasattr(tensor, "weight_loader"):
        tensor.weight_loader = _get_original_loader(tensor)
    return tensor


def _identity(tensor: torch.Tensor) -> int:
    """What all views of a tensor share, on any device."""
    return int(tensor.untyped_storage()._cdata)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each copy that vLLM's loader would make, and makes none."""

    def __init__(
        self, entries: Sequence[Entry], sources: list[torch.Tensor], targets: dict[int, Target], routes: Routes
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries, self.targets, self.routes = entries, targets, routes
        self.sources = {_identity(tensor): i for i, tensor in enumerate(sources)}
        self.current = 0
        self.made: dict[int, tuple[torch.Tensor, list[str]]] = {}
        """What the loader made of tensors, by its storage: the result, kept so that no other takes its place, and the
        operations."""

    def each(self, numbers: Iterator[int]) -> Iterator[int]:
        for self.current in numbers:
            yield self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and args[0].device.type == "meta":
            return float(self.current)  # older loaders fill with the value of a scalar; see _written
        into = args[0] if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) else None
        target = None if into is None else self.targets.get(_identity(into))
        if into is None or target is None:
            out = func(*args, **(kwargs or {}))
            self._follow(func, args, out)
            return out
        self._written(func, into, args, target)
        return into

    def _follow(self, func: Any, args: Any, out: Any) -> None:
        """Remember what a new tensor was made of: of a pushed one, or of a parameter that one was copied to."""
        if not isinstance(out, torch.Tensor) or _identity(out) in self.sources or _identity(out) in self.targets:
            return
        lists = [one if isinstance(one, (list, tuple)) else [one] for one in args]
        inputs = [_identity(tensor) for one in lists for tensor in one if isinstance(tensor, torch.Tensor)]
        if any(one in known for one in inputs for known in (self.sources, self.targets, self.made)):
            before = [name for one in inputs for name in self.made.get(one, (None, []))[1]]
            view = _identity(out) in inputs and not func._schema.is_mutable
            self.made[_identity(out)] = (out, before if view else [*before, func._schema.name.removeprefix("aten::")])

    def _written(self, func: Any, into: torch.Tensor, args: Any, target: Target) -> None:
        if into.numel() == 0:
            return
        to = box_of(into, target.shape)
        if func is aten.copy_.default and isinstance(args[1], torch.Tensor) and to is not None:
            source = args[1]
            entry = self.sources.get(_identity(source))
            if entry is not None and source.numel() == into.numel():
                shape = self.entries[entry].shape
                view = (tuple(source.shape), tuple(source.stride()), int(source.storage_offset()))
                self.routes.by_entry.setdefault(entry, []).append(
                    Route(entry, shape, box_of(source, shape), view, target, to)
                )
                return
        elif func in (aten.fill_.Scalar, aten.zero_.default) and to is not None:
            if target.shape in ((), (1,)) and len(args) > 1:
                shape = self.entries[self.current].shape
                box = tuple((0, n) for n in shape)
                self.routes.by_entry.setdefault(self.current, []).append(
                    Route(self.current, shape, box, (shape, (1,) * len(shape), 0), target, to)
                )
            else:
                self.routes.constants.setdefault(target, []).append((to, float(args[1]) if len(args) > 1 else 0.0))
            return
        by = [
            name
            for one in args[1:]
            if isinstance(one, torch.Tensor)
            for name in self.made.get(_identity(one), (None, []))[1]
        ]
        by += [] if func is aten.copy_.default else [func._schema.name.removeprefix("aten::")]
        raise _Unfollowed(
            f"into {target.name} by {', '.join(dict.fromkeys(map(_in_words, by))) or 'a copy in another order'}"
        )


def _in_words(operation: str) -> str:
    """What a loader does, where torch's name for it would not be understood."""
    return {"clone": "a copy in another order", "_to_copy": "a cast"}.get(operation, operation.strip("_"))


def box_of(view: torch.Tensor, shape: tuple[int, ...]) -> Box | None:
    """The part of a contiguous tensor of that shape that a view shows, if that is a box with its dimensions in
    order."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    offset, starts = int(view.storage_offset()), []
    for stride in strides:
        start, offset = divmod(offset, stride)
        starts.append(start)
    sizes, dims = [1] * len(shape), [i for i, n in enumerate(shape) if n > 1]
    for n, stride in zip(view.shape, view.stride(), strict=True):
        if n == 1:
            continue
        while dims and strides[dims[0]] != stride:
            dims.pop(0)
        if not dims:
            return None
        sizes[dims.pop(0)] = n
    box = tuple((start, start + n) for start, n in zip(starts, sizes, strict=True))
    return box if all(stop <= n for (_, stop), n in zip(box, shape, strict=True)) else None
