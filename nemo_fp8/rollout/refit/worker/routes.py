"""Find where every pushed tensor belongs in this worker's model, by running vLLM's own loader without any weights.

Every vLLM model has a ``load_weights`` that knows how checkpoint tensors are renamed, split over workers and fused. We
run it once on meta tensors, which have shapes and no memory. The model's parameters are meta tensors, too, as they were
before loading. A dispatch mode sees every copy that the loader would make, and writes it down instead of making it:

    route = (pushed tensor, box of it)  ->  (layer, parameter, box of it)

On the second of two workers, for a model of hidden size 4096 with 32 query and 8 key heads of 128, for instance

    q_proj.weight [2048:4096, 0:4096]   ->  qkv_proj.weight [0:2048, 0:4096]
    k_proj.weight  [512:1024, 0:4096]   ->  qkv_proj.weight [2048:2560, 0:4096]

The routes answer two questions before the first byte of a push. Is the manifest right: which tensors does the loader
refuse or pass over, and which parameters would it never write? And where do the rows of each tensor go, so that they
can be written as they come? There is no table of models, and any sharding works.

The trade-off: a loader that computes with a tensor on the way cannot be followed, and a few do (Mamba's
A = -exp(A_log)). The operations are written down as well, so the refusal names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from nemo_fp8.errors import Problem
from nemo_fp8.rollout.refit.manifest import Entry

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, stop) for every dimension."""
aten = torch.ops.aten
MOST_PROBLEMS = 20  # a wrong model refuses every tensor, and the first few say what is wrong


@dataclass(frozen=True)
class Target:
    """A parameter of this worker's model, with the shape that it has before loading."""

    layer: str
    parameter: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The parameter's full name in vLLM's model."""
        return f"{self.layer}.{self.parameter}" if self.layer else self.parameter


@dataclass(frozen=True)
class Route:
    """One copy: from a part of a pushed tensor to a box of a parameter, with the same elements in the same order."""

    entry: int
    """Number of the pushed tensor in the manifest."""
    shape: tuple[int, ...]
    """Shape of the whole pushed tensor."""
    source: Box | None
    """The part as a box. None if it is not one (a transpose): then ``view`` takes it from the whole tensor."""
    view: tuple[tuple[int, ...], tuple[int, ...], int]
    """The part as sizes, strides and offset in the whole tensor."""
    target: Target
    to: Box
    """The box of the target that is written."""

    @property
    def elements(self) -> int:
        """The number of elements that are copied."""
        return size_of(self.to)


@dataclass
class Routes:
    """Everything that the loader would do with the tensors of a manifest."""

    by_entry: dict[int, list[Route]] = field(default_factory=dict)
    """The routes of every tensor, by its number. A tensor that the loader passes over has none."""
    constants: dict[Target, list[tuple[Box, float]]] = field(default_factory=dict)
    """Boxes that the loader fills with a number, such as the padding of a vocabulary."""
    parameters: list[Target] = field(default_factory=list)
    """Every parameter that can be loaded. A tied weight is one target, under its first name."""
    aliases: dict[str, str] = field(default_factory=dict)
    """The first name of every tied weight, by its other names."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(tensor, reason) for every tensor that the loader refuses."""
    unfollowed: dict[str, str] = field(default_factory=dict)
    """For every tensor that the loader changes before it writes it: where it goes, and by which operations."""

    def __iter__(self) -> Iterator[Route]:
        for routes in self.by_entry.values():
            yield from routes

    def covered(self) -> dict[Target, int]:
        """Return how many elements of each target the loader writes or fills."""
        # Sets, so that a box that is written twice counts once.
        boxes: dict[Target, set[Box]] = {}
        for route in self:
            boxes.setdefault(route.target, set()).add(route.to)
        for target, filled in self.constants.items():
            boxes.setdefault(target, set()).update(box for box, _ in filled)
        return {target: sum(map(size_of, to)) for target, to in boxes.items()}


def size_of(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def record(model: Any, entries: Sequence[Entry], passed_over: Collection[int] = ()) -> Routes:
    """Return the routes by which ``model.load_weights`` would load these tensors.

    ``passed_over`` are numbers of entries that the loader is not offered. A tensor that the loader refuses or changes
    raises nothing; it is in ``Routes.problems`` or ``Routes.unfollowed``. The model is unchanged afterwards, even if
    the loader fails.
    """
    routes = Routes()
    with _as_before_loading(model, routes) as targets, torch.no_grad():
        sources = [torch.empty(entry.shape, dtype=_dtype_for_loader(entry), device="meta") for entry in entries]
        recorder = _Recorder(entries, sources, targets, routes)
        left = iter([i for i in range(len(entries)) if i not in passed_over])
        # A loader stops at the first tensor it cannot load. Run it again on those that are left, to find all of them.
        while len(routes.problems) + len(routes.unfollowed) < MOST_PROBLEMS:
            try:
                with recorder:
                    model.load_weights((entries[i].name, sources[i]) for i in recorder.offer(left))
                break
            except _NotACopy as error:
                routes.unfollowed[entries[recorder.current].name] = str(error)
            except Exception as error:  # models raise all kinds: KeyError, ValueError, AssertionError, RuntimeError
                routes.problems.append((entries[recorder.current].name, _shortened(error)))
    routes.by_entry = {i: joined(found) for i, found in routes.by_entry.items()}
    return routes


def joined(routes: list[Route]) -> list[Route]:
    """Join routes of one tensor that lie side by side both in the tensor and in one parameter.

    A loader takes a stack of experts apart, into a copy for gate, up and down of each. Gate and up of 128 experts,

        [e:e+1, 0:64, 0:256]   ->  w13_weight [e:e+1, 0:64, 0:256]
        [e:e+1, 64:128, 0:256] ->  w13_weight [e:e+1, 64:128, 0:256],

    are one route from [0:128, 0:128, 0:256], so that a push works with the stack, and not expert by expert.
    """
    if len(routes) == 1 or any(r.source is None or len(r.source) != len(r.to) for r in routes):
        return routes
    for side in range(len(routes[0].shape)):
        rows: dict[Any, list[Route]] = {}
        for route in sorted(routes, key=lambda route: _boxes(route)[0][side]):
            others = [box[:side] + box[side + 1 :] for box in _boxes(route)]
            row = rows.setdefault((route.target, *others), [])
            if row and all(a[side][1] == b[side][0] for a, b in zip(_boxes(row[-1]), _boxes(route), strict=True)):
                row[-1] = _from_to(row[-1], route, side)
            else:
                row.append(route)
        routes = [route for row in rows.values() for route in row]
    return routes


def _boxes(route: Route) -> tuple[Box, Box]:
    assert route.source is not None
    return route.source, route.to


def _from_to(first: Route, last: Route, side: int) -> Route:
    """Return the route from the beginning of one to the end of another one, which lies behind it on this side."""
    source, to = (
        (*a[:side], (a[side][0], b[side][1]), *a[side + 1 :]) for a, b in zip(_boxes(first), _boxes(last), strict=True)
    )
    sizes = tuple(stop - start for start, stop in source)
    return replace(first, source=source, to=to, view=(sizes, *first.view[1:]))


class _NotACopy(Exception):
    """Raised where a loader writes something else to a parameter than a copy of a pushed tensor."""


def unpushable(routes: Routes) -> Problem | None:
    """Return why no push can load this model, or None if one can.

    Names that differ in their numbers only (layers, experts) are one kind; the problem names the first of each kind.
    """
    kinds = {re.sub(r"\d+", "N", name): f"{name} {made}" for name, made in reversed(routes.unfollowed.items())}
    if not kinds:
        return None
    first = [*kinds.values()][::-1][:4]
    return Problem(
        "Weights cannot be pushed into an engine of this model.",
        f"vLLM's loader changes tensors on the way, and a push can only copy: {'; '.join(first)}.",
        "To give it other weights, start another engine from a checkpoint of them.",
    )


def _dtype_for_loader(entry: Entry) -> torch.dtype:
    # FP8 codes go where the values that they stand for would go, and those are what the loader expects.
    return torch.bfloat16 if entry.is_codes else entry.torch_dtype


def _shortened(error: Exception) -> str:
    """Return the message of a loader's error on one line of at most 243 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 240 else f"{text[:240]}..."


@contextmanager
def _as_before_loading(model: torch.nn.Module, routes: Routes) -> Iterator[dict[int, Target]]:
    """Give the model the parameters that its loader expects, as meta tensors, while the context lasts.

    vLLM processes weights after loading (it transposes, packs and renames them), so the live parameters are not those
    that the loader writes. vLLM keeps a description of the latter for its own reload; here they are made from it.

    Yields the target of every such parameter and buffer, by the identity of its storage: the loader writes to views,
    and a view shares only its storage with the parameter. Fills ``routes.parameters`` and ``routes.aliases``.
    """
    kept = [(name, layer, dict(layer._parameters), dict(layer._buffers)) for name, layer in model.named_modules()]
    targets: dict[int, Target] = {}
    made: dict[int, torch.Tensor] = {}  # by the live tensor, so that a tied weight is one tensor here, too
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
                    place[key] = made.get(id(now)) if id(now) in made else before_loading(tensor, layer)
                    if now is not None:
                        made.setdefault(id(now), place[key])
                for key, tensor in place.items():
                    if tensor is None:
                        continue
                    target = Target(name, key, tuple(tensor.shape), tensor.dtype)
                    first = targets.setdefault(_storage_of(tensor), target)
                    if first is not target:  # another name of a tied weight
                        routes.aliases[target.name] = first.name
                    elif place is layer._parameters:
                        routes.parameters.append(target)
        yield targets
    finally:
        for _, layer, parameters, buffers in kept:
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)


def before_loading(tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """Return a parameter as it was when the model was built: a meta tensor with the parameter's own loader."""
    tensor = restore_layer_refs(to_meta_tensor(tensor), layer)
    if hasattr(tensor, "weight_loader"):
        tensor.weight_loader = _get_original_loader(tensor)  # without what vLLM's reload wraps around it
    return tensor


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which all its views share, on the meta device, too."""
    return int(tensor.untyped_storage()._cdata)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a loader. Turns each write to a parameter into a route, and carries out all others.

    The others matter in two ways. Views of a pushed tensor share its storage, so a copy from one is known as a route.
    New tensors are remembered with the operations that made them, so that the error of a write that is no copy can name
    these operations.
    """

    def __init__(
        self, entries: Sequence[Entry], sources: list[torch.Tensor], targets: dict[int, Target], routes: Routes
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries, self.targets, self.routes = entries, targets, routes
        self.sources = {_storage_of(tensor): i for i, tensor in enumerate(sources)}
        self.current = 0
        """Number of the tensor that the loader works on."""
        self.made: dict[int, tuple[torch.Tensor, list[str]]] = {}
        """New tensors with the operations that led to them, by storage. Kept alive, so that no storage is used again
        for another tensor while the loader runs."""

    def offer(self, numbers: Iterator[int]) -> Iterator[int]:
        """Yield the numbers one by one, and remember which one the loader took last."""
        for self.current in numbers:
            yield self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation ``func`` while the mode is on."""
        if func is aten._local_scalar_dense.default and args[0].device.type == "meta":
            # A meta tensor has no value to give to ``.item()``. Any number will do: see _is_scalar_load.
            return float(self.current)
        into = args[0] if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) else None
        target = None if into is None else self.targets.get(_storage_of(into))
        if into is None or target is None:
            out = func(*args, **(kwargs or {}))
            self._remember(func, args, out)
            return out
        self._write(func, into, args, target)
        return into

    def _remember(self, func: Any, args: Any, out: Any) -> None:
        """Note by which operations ``out`` was made of a pushed tensor, or of a parameter, if it was."""
        if not isinstance(out, torch.Tensor) or _storage_of(out) in self.sources or _storage_of(out) in self.targets:
            return  # a view of one of them: known by its storage
        lists = [one if isinstance(one, (list, tuple)) else [one] for one in args]  # torch.cat takes a list
        inputs = [_storage_of(tensor) for one in lists for tensor in one if isinstance(tensor, torch.Tensor)]
        if any(one in known for one in inputs for known in (self.sources, self.targets, self.made)):
            before = [name for one in inputs for name in self._operations(one)]
            is_view = _storage_of(out) in inputs and not func._schema.is_mutable
            self.made[_storage_of(out)] = (out, before if is_view else [*before, _name_of(func)])

    def _operations(self, storage: int) -> list[str]:
        return self.made[storage][1] if storage in self.made else []

    def _write(self, func: Any, into: torch.Tensor, args: Any, target: Target) -> None:
        """Record that the loader writes to ``into``, a view of ``target``; raise _NotACopy if it can't be a route."""
        if into.numel() == 0:
            return
        to = box_of(into, target.shape)
        is_copy, is_fill = func is aten.copy_.default, func in (aten.fill_.Scalar, aten.zero_.default)
        source = args[1] if is_copy and isinstance(args[1], torch.Tensor) else None
        entry = None if source is None else self.sources.get(_storage_of(source))
        if to is not None and source is not None and entry is not None and source.numel() == into.numel():
            view = (tuple(source.shape), tuple(source.stride()), int(source.storage_offset()))
            self._add(entry, box_of(source, self.entries[entry].shape), view, target, to)
        elif to is not None and is_fill and self._is_scalar_load(args, target):
            shape = self.entries[self.current].shape
            whole = tuple((0, n) for n in shape)
            self._add(self.current, whole, (shape, (1,) * len(shape), 0), target, to)
        elif to is not None and is_fill:
            self.routes.constants.setdefault(target, []).append((to, float(args[1]) if len(args) > 1 else 0.0))
        else:
            tensors = [one for one in args[1:] if isinstance(one, torch.Tensor)]
            by = [name for one in tensors for name in self._operations(_storage_of(one))]
            by += [] if is_copy else [_name_of(func)]
            words = ", ".join(dict.fromkeys(map(_in_words, by))) or "a copy in another order"
            raise _NotACopy(f"into {target.name} by {words}")

    def _is_scalar_load(self, args: Any, target: Target) -> bool:
        """Whether a fill loads the current tensor: vLLM's loaders of scalars call ``param.fill_(loaded.item())``."""
        return target.shape in ((), (1,)) and len(args) > 1

    def _add(self, entry: int, source: Box | None, view: Any, target: Target, to: Box) -> None:
        route = Route(entry, self.entries[entry].shape, source, view, target, to)
        self.routes.by_entry.setdefault(entry, []).append(route)


def _name_of(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::"))


def _in_words(operation: str) -> str:
    """Return what a user understands of torch's name of an operation."""
    return {"clone": "a copy in another order", "_to_copy": "a cast"}.get(operation, operation.strip("_"))


def box_of(view: torch.Tensor, shape: tuple[int, ...]) -> Box | None:
    """Return the box that a view shows of a contiguous tensor of ``shape``; None if it shows none.

    The box must have the tensor's dimensions in order; those of size one may be dropped or added. An example: rows 1:3
    and columns 2:5 of a [4, 6] tensor are a view with sizes (2, 3), strides (6, 1) and offset 8 = 1 * 6 + 2.
    Division of the offset by the tensor's strides (6, 1) gives the starts, 1 and 2. Each size of the view belongs to
    the dimension of the same stride: 2 to the rows, 3 to the columns. A transpose has its strides out of order.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    offset, starts = int(view.storage_offset()), []
    for stride in strides:
        start, offset = divmod(offset, stride)
        starts.append(start)
    sizes, dims = [1] * len(shape), [i for i, n in enumerate(shape) if n > 1]
    for n, stride in zip(view.shape, view.stride(), strict=True):
        if n == 1:  # its stride may be anything
            continue
        while dims and strides[dims[0]] != stride:
            dims.pop(0)  # the view has one index of this dimension
        if not dims:
            return None
        sizes[dims.pop(0)] = n
    box = tuple((start, start + n) for start, n in zip(starts, sizes, strict=True))
    # A view that runs over the end of a row has the right strides, and leaves the bounds.
    return box if all(stop <= n for (_, stop), n in zip(box, shape, strict=True)) else None
