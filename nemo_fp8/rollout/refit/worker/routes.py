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

A few loaders compute with a tensor on the way (Mamba's A = -exp(A_log)). Their operations are written down as well
(:mod:`nemo_fp8.rollout.refit.worker.tape`), and a push repeats them. The trade-off: what a loader computes in Python
with a tensor's values cannot be followed, and is refused by name.
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
from nemo_fp8.rollout.refit.manifest import Box, Entry
from nemo_fp8.rollout.refit.worker.tape import Computation, Tape, View, storage_id, view_of

aten = torch.ops.aten
DONE_ONCE = ("_mla_q_lora_scaled", "_mla_kv_lora_scaled")
"""What vLLM's loaders note on a layer whose weights they have changed in place, and then leave out: LongCat's, which
multiplies the weights of two norms. Another model's weights are as unchanged as the first were."""
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

    def __hash__(self) -> int:
        return hash((self.layer, self.parameter))  # not of all fields: a push asks a few thousand times


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
    made: Computation | None = None
    """How the values are made of pushed tensors, if the loader does not copy them; ``view`` is then of the result."""

    @property
    def entries(self) -> tuple[int, ...]:
        """Numbers of all pushed tensors that the values come from."""
        return (self.entry,) if self.made is None else tuple(self.made.inputs)

    def __hash__(self) -> int:
        return hash((self.entry, self.to))  # as of Target

    @property
    def elements(self) -> int:
        """The number of elements that are copied."""
        return size_of(self.to)


@dataclass
class Routes:
    """Everything that the loader would do with the tensors of a manifest."""

    by_entry: dict[int, list[Route]] = field(default_factory=dict)
    """The routes of every tensor, by its number. A tensor that the loader passes over has none; a route whose values
    are made of several tensors stands under each."""
    constants: dict[Target, list[tuple[Box, float]]] = field(default_factory=dict)
    """Boxes that the loader fills with a number, such as the padding of a vocabulary."""
    parameters: list[Target] = field(default_factory=list)
    """Every parameter that can be loaded. A tied weight is one target, under its first name."""
    aliases: dict[str, str] = field(default_factory=dict)
    """The first name of every tied weight, by its other names."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(tensor, reason) for every tensor that the loader refuses."""
    unfollowed: dict[str, str] = field(default_factory=dict)
    """For every tensor whose loader cannot be followed: where it goes, and by which operations."""

    def __iter__(self) -> Iterator[Route]:
        for number, routes in self.by_entry.items():
            yield from (route for route in routes if route.entry == number)

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
        # By name, as a checkpoint's file has them. Where names of other parts stand between those of a part, vLLM calls
        # the part's loader more than once, and LongCat's multiplies its norms at the end of the first call.
        offered = (i for i in range(len(entries)) if i not in passed_over)
        left = iter(sorted(offered, key=lambda i: entries[i].name))
        # A loader stops at the first tensor it cannot load. Run it again on those that are left, to find all of them.
        while len(routes.problems) + len(routes.unfollowed) < MOST_PROBLEMS:
            try:
                with recorder:
                    model.load_weights((entries[i].name, sources[i]) for i in recorder.offer(left))
                break
            except _NotFollowed as error:
                routes.unfollowed[entries[recorder.current].name] = str(error)
            except Exception as error:  # models raise all kinds: KeyError, ValueError, AssertionError, RuntimeError
                routes.problems.append((entries[recorder.current].name, _shortened(error)))
        recorder.settle()
    routes.by_entry = {i: joined(found) for i, found in sorted(routes.by_entry.items())}
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


class _NotFollowed(Exception):
    """Raised where a loader writes something to a parameter that no operation on a pushed tensor has made."""


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
        f"vLLM's loader makes values that a push cannot make again: {'; '.join(first)}.",
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
    kept = [
        (name, layer, dict(layer.__dict__), dict(layer._parameters), dict(layer._buffers))
        for name, layer in model.named_modules()
    ]
    targets: dict[int, Target] = {}
    made: dict[int, torch.Tensor] = {}  # by the live tensor, so that a tied weight is one tensor here, too
    try:
        for name, layer, _, parameters, buffers in kept:
            for note in DONE_ONCE:
                layer.__dict__.pop(note, None)
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
                    first = targets.setdefault(storage_id(tensor), target)
                    if first is not target:  # another name of a tied weight
                        routes.aliases[target.name] = first.name
                    elif place is layer._parameters:
                        routes.parameters.append(target)
        yield targets
    finally:
        for _, layer, attributes, parameters, buffers in kept:
            layer.__dict__.clear()
            layer.__dict__.update(attributes)
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)


def before_loading(tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """Return a parameter as it was when the model was built: a meta tensor with the parameter's own loader."""
    tensor = restore_layer_refs(to_meta_tensor(tensor), layer)
    # Without what vLLM's reload wraps around it. That is a function; a partial (of MiniMax-M2's norms) has no name.
    if hasattr(tensor, "weight_loader") and hasattr(tensor.weight_loader, "__name__"):
        tensor.weight_loader = _get_original_loader(tensor)
    return tensor


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a loader. Turns each write to a parameter into a route, and carries out all others.

    Views of a pushed tensor share its storage, so a copy from one is known as a route. All that makes or changes
    tensors is on the tape, so that a write of something else is known as a computation.
    """

    def __init__(
        self, entries: Sequence[Entry], sources: list[torch.Tensor], targets: dict[int, Target], routes: Routes
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries, self.targets, self.routes = entries, targets, routes
        self.sources = {storage_id(tensor): i for i, tensor in enumerate(sources)}
        self.current = 0
        """Number of the tensor that the loader works on."""
        self.asked: set[int] = set()
        """Numbers of the tensors whose value was asked for."""
        self.tape = Tape()
        self.parameters = {storage: (target.shape, target.dtype) for storage, target in targets.items()}
        self.tangled: dict[Target, int] = {}
        """The storages of parameters that the loader reads or changes after it wrote them: made as a whole."""

    def offer(self, numbers: Iterator[int]) -> Iterator[int]:
        """Yield the numbers one by one, and remember which one the loader took last."""
        for self.current in numbers:
            yield self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation of torch: it calls this for every one while the mode is on."""
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].device.type == "meta":
            self.asked.add(self.current)
            return self._value()
        changed = kwargs.get("out", args[0] if args else None) if func._schema.is_mutable else None
        if not isinstance(changed, torch.Tensor):
            out = func(*args, **kwargs)
            if self._makes(out, args):
                self.tape.add(func, args, kwargs, out)
            return out
        target = self.targets.get(storage_id(changed))
        if target is None:
            out = func(*args, **kwargs)
            self.tape.add(func, args, kwargs, out, changed)
            return out
        if changed.numel():
            self._write(func, changed, args, target)
            self.tape.add(func, args, kwargs, changed, changed)
        return changed

    def _makes(self, out: Any, args: Any) -> bool:
        """Return whether an operation made a meta tensor that is no view of an argument."""
        first = out[0] if isinstance(out, (list, tuple)) and out else out
        if not isinstance(first, torch.Tensor) or not first.is_meta:
            return False
        return all(storage_id(one) != storage_id(first) for one in args if isinstance(one, torch.Tensor))

    def _write(self, func: Any, into: torch.Tensor, args: Any, target: Target) -> None:
        """Record that the loader writes to ``into``, a view of ``target``; raise _NotFollowed if nobody knows what."""
        to = box_of(into, target.shape)
        is_copy, is_fill = func is aten.copy_.default, func in (aten.fill_.Scalar, aten.zero_.default)
        source = args[1] if is_copy and isinstance(args[1], torch.Tensor) else None
        if to is not None and is_fill and len(args) > 1 and args[1] == self._value():
            shape = self.entries[self.current].shape
            whole = tuple((0, n) for n in shape)
            self._add(Route(self.current, shape, whole, (shape, (1,) * len(shape), 0), target, to))
        elif is_fill and self.current in self.asked:
            raise _NotFollowed(f"into {target.name} by arithmetic in Python")
        elif to is not None and is_fill:
            self.routes.constants.setdefault(target, []).append((to, float(args[1]) if len(args) > 1 else 0.0))
        elif to is None or source is None:
            self.tangled[target] = storage_id(into)
        elif self._is_as_pushed(source) and source.numel() == into.numel():
            entry, shown = self.sources[storage_id(source)], view_of(source)
            shape = self.entries[entry].shape
            view = (shown.shape, shown.strides, shown.offset)
            self._add(Route(entry, shape, box_of(source, shape), view, target, to))
        else:
            made = self._computation(view_of(source.expand(into.shape)))
            if made.beside:
                self.tangled[target] = storage_id(into)
            else:
                self._add_made(made, target, to)

    def _is_as_pushed(self, source: torch.Tensor) -> bool:
        """Return whether a tensor is a view of a pushed one that the loader did not change."""
        storage = storage_id(source)
        return storage in self.sources and storage not in self.tape.of

    def settle(self) -> None:
        """Replace all routes to a tangled parameter by one: the loader's steps that make all of it.

        A parameter that the loader changes and that nothing was loaded into stays as it is: the change was made when
        the engine started.
        """
        for target, storage in self.tangled.items():
            loaded = self.routes.constants.pop(target, None) is not None
            for number, routes in self.routes.by_entry.items():
                self.routes.by_entry[number] = others = [route for route in routes if route.target != target]
                loaded |= len(others) < len(routes)
            strides = _strides(target.shape)
            try:
                made = self._computation(View(storage, target.shape, strides, 0, target.dtype))
                if loaded or made.inputs:
                    self._add_made(made, target, tuple((0, n) for n in target.shape))
            except _NotFollowed as error:
                self.routes.unfollowed[target.name] = str(error)

    def _computation(self, result: View) -> Computation:
        """Return how the loader made this value; raise _NotFollowed if it used a tensor that nobody knows."""
        made = self.tape.computation(result, self.sources, self.parameters)
        known = {*made.inputs.values(), *made.beside, *(one for step in made.steps for one in step.makes)}
        if not {result.storage, *(one for step in made.steps for one in step.reads())} <= known:
            raise _NotFollowed(f"by {made.words} with a tensor that was not pushed")
        return made

    def _add_made(self, made: Computation, target: Target, to: Box) -> None:
        if not made.inputs:
            raise _NotFollowed(f"into {target.name} by {made.words}")
        shape = tuple(stop - start for start, stop in to)
        number = self.current if self.current in made.inputs else next(iter(made.inputs))
        self._add(Route(number, self.entries[number].shape, None, (shape, _strides(shape), 0), target, to, made))

    def _value(self) -> float:
        """Return a number that stands for the current tensor's value, which a meta tensor does not have.

        vLLM's loaders of scalars call ``param.fill_(loaded.item())``: where such a number is filled in, it tells which
        tensor was read. Its fraction is one that floats hold exactly, and that no loader fills in for itself.
        """
        return self.current + 0.0859375

    def _add(self, route: Route) -> None:
        for entry in route.entries:
            self.routes.by_entry.setdefault(entry, []).append(route)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def box_of(view: torch.Tensor, shape: tuple[int, ...]) -> Box | None:
    """Return the box that a view shows of a contiguous tensor of ``shape``; None if it shows none.

    The box must have the tensor's dimensions in order; those of size one may be dropped or added. An example: rows 1:3
    and columns 2:5 of a [4, 6] tensor are a view with sizes (2, 3), strides (6, 1) and offset 8 = 1 * 6 + 2.
    Division of the offset by the tensor's strides (6, 1) gives the starts, 1 and 2. Each size of the view belongs to
    the dimension of the same stride: 2 to the rows, 3 to the columns. A transpose has its strides out of order.
    """
    strides = _strides(shape)
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
