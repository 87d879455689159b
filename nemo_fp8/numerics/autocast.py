"""``autocast(precision, model)``: run the linears inside of the context in FP8, as the contract says.

    fp8 = nemo_fp8.autocast(nemo_fp8.preset("bf16_with_fp8_subchannel_scaling_mixed"), model)
    with fp8:
        loss = model(x)
    loss.backward()

Inside, a ``TorchFunctionMode`` intercepts every ``torch.nn.functional.linear``, so it works for any PyTorch code on a
CPU or a GPU, and nothing is patched. TE's own modules run under TE's own autocast, which is opened along with it.

The model is needed for what depends on *which* linear runs: layers and names that stay in the compute dtype, shapes,
and the state of delayed scaling, which is stored with its module and saved in its ``state_dict``. Activation recompute
runs a module a second time, during backward and often outside of the ``with``. A hook on each module with an FP8 weight
notices that, and repeats what the first run did, with its scales. Several microbatches may share one region; a region's
recompute must come before the next region begins.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.selection import contract_of
from nemo_fp8.numerics import bf16
from nemo_fp8.numerics.delayed import DelayedState, update
from nemo_fp8.numerics.linear import linear
from nemo_fp8.numerics.selection import fits, is_te, linear_weights, require_module

_RECORDS = "_nemo_fp8_records"

# The regions that are open, outermost first.
_open: ContextVar[tuple[autocast, ...]] = ContextVar("nemo_fp8_autocast", default=())


@dataclass
class _Record:
    """The state of one FP8 linear, kept with its module."""

    name: str
    precision: Precision
    delayed: DelayedState | None
    ran: bool = False
    """Whether its last run was in FP8; a recompute must then be in FP8, too."""
    scale: torch.Tensor | None = None
    """The forward scales of its last run."""
    after_backward: Callable[[], None] | None = field(default=None, repr=False)
    """The update of the gradients' scales, on the first linear of a region."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:
        copy = _Record(self.name, self.precision, None)
        if self.delayed is not None:
            copy.delayed = DelayedState(self.precision)
            copy.delayed.load_state_dict(self.delayed.state_dict())
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.name, self.precision, None if self.delayed is None else self.delayed.state_dict())


def _rebuild(name: str, precision: Precision, state: dict[str, torch.Tensor] | None) -> _Record:
    record = _Record(name, precision, None)
    if state is not None:
        record.delayed = DelayedState(precision)
        record.delayed.load_state_dict(state)
    return record


class autocast:
    """Run the linears of a region in FP8 under a contract; see the module's docstring.

    ``precision`` is a contract, or the name of a preset or of a YAML file. ``model`` is needed if the contract treats
    single linears differently or keeps amaxes. ``group`` is the process group over which delayed scaling reduces its
    amaxes. The object may be entered again and again, and nested. A contract without FP8, or ``enabled=False``,
    switches FP8 off inside. Raises PrecisionError if there is no such preset or file, if ``model`` is none, or if the
    contract needs it and it is missing.

    Threads may share the object; a thread that starts inside of a region has none, as with ``torch.autocast``.
    """

    def __init__(
        self,
        precision: Precision | str,
        model: torch.nn.Module | None = None,
        *,
        enabled: bool = True,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        precision = given(precision)
        if model is not None:
            require_module(model)
        self.precision, self.model, self.group = precision, model, group
        self.enabled = enabled and precision.is_quantized
        # Modules hold their records; a weight is looked up when it is used, since it or its module may have been
        # replaced.
        self._owners: WeakKeyDictionary[torch.nn.Module, dict[str, _Record]] = WeakKeyDictionary()
        self._by_id: dict[int, tuple[ref[torch.nn.Module], str]] = {}
        self._searched: dict[int, ref[torch.Tensor]] = {}  # parameters that the whole model was searched for
        self._first: dict[bool, _Record] = {}
        self._inside: dict[int, autocast] = {}  # every region opened since the outermost one, including that one
        self._entered: dict[int, list[ExitStack]] = defaultdict(list)  # by thread: each has regions of its own
        self._of_threads = _Shared()
        if not self.enabled:
            return
        if model is None:
            _refuse_without_model(precision)
        else:
            self._owners = _adopt(model, precision)

    def __enter__(self) -> autocast:
        outer = _open.get()
        if not outer:
            self._inside = {}
        root = outer[0] if outer else self
        if id(self) not in root._inside:
            root._inside[id(self)] = self
            self._first = {}
        managers: list[AbstractContextManager[Any]] = [self._te() if self in outer else self._of_threads.of(self._te)]
        if self.enabled and self.model is None:
            managers.append(_each_module(self._meet))
        if self.enabled:
            managers.append(_Mode(self._linear, self._is_innermost))
        token = _open.set((*outer, self))
        with ExitStack() as stack:  # if a manager raises, those opened before it are closed
            stack.callback(_open.reset, token)
            for manager in managers:
                stack.enter_context(manager)
            self._entered[threading.get_ident()].append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered[threading.get_ident()].pop().__exit__(kind, error, trace)
        if kind is None and not _open.get() and torch.is_grad_enabled():
            for region in self._inside.values():
                region._update_forward()

    def _is_innermost(self) -> bool:
        """Return whether this is the region in which the calling thread is; another thread's hooks and modes ask,
        too."""
        return _open.get()[-1:] == (self,)

    def _update_forward(self) -> None:
        update([r.delayed.forward for r in self._records() if r.delayed], self.group)

    def _update_backward(self) -> None:
        update([r.delayed.backward for r in self._records() if r.delayed], self.group)

    def _records(self) -> Iterator[_Record]:
        return (record for records in self._owners.values() for record in records.values())

    def _record_of(self, weight: torch.Tensor | None) -> _Record | None:
        """Return the record of the module that holds this weight now; None if the weight stays in the compute dtype."""
        if weight is None:
            return None
        found = self._holder(weight)
        searched = self._searched.get(id(weight), lambda: None)
        if (
            found is None and searched() is not weight
        ):  # it was replaced, alone or with its module, or is not in the model
            if self.model is not None and isinstance(weight, torch.nn.Parameter):
                self._owners, self._searched[id(weight)] = _adopt(self.model, self.precision), ref(weight)
            self._by_id = {
                id(getattr(m, name, None)): (ref(m), name) for m, names in self._owners.items() for name in names
            }
            found = self._holder(weight)
        return found

    def _holder(self, weight: torch.Tensor) -> _Record | None:
        module, name = self._by_id.get(id(weight), (lambda: None, ""))
        owner = module()
        # Python may have given the id of a deleted weight to another one.
        return self._owners[owner][name] if owner is not None and getattr(owner, name, None) is weight else None

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        record = self._record_of(weight) or self._record_of(weight._base)
        if record is None and self.model is None and fits(weight, self.precision):
            _refuse_in_checkpoint()
            record = _Record("", self.precision, None)
        if record is None:
            return bf16.linear(x, weight, bias)  # stays in the compute dtype
        if _in_backward() and record.ran:
            return _replay(record, x, weight, bias)
        record.ran = True
        if record.delayed is not None:
            record.scale = record.delayed.forward.scale
            # The first linear forward is the last backward, and with it the step of the gradients is complete.
            # A region that is recomputed from end to end runs forward without grad.
            first = self._first.setdefault(torch.is_grad_enabled(), record) is record
            record.after_backward = self._update_backward if first else None
        return _run(record, x, weight, bias)

    def _meet(self, module: torch.nn.Module, args: Any) -> None:
        """Adopt a linear when it first runs, in a region without a model; recompute needs its record."""
        if self._is_innermost() and isinstance(module, (torch.nn.Linear, torch.nn.MultiheadAttention)):
            self._owners.update(_adopt(module, self.precision))

    def _te(self) -> AbstractContextManager[Any]:
        """Return TE's autocast if TE is in use: TE's modules run their FP8 GEMMs themselves."""
        te = sys.modules.get("transformer_engine.pytorch")
        if te is None or (self.model is not None and not any(is_te(m) for m in self.model.modules())):
            return nullcontext()
        from nemo_fp8.render.te import te_recipe

        if self.precision.keep or self.precision.modules or self.precision.first_layers or self.precision.last_layers:
            raise PrecisionError(
                "Layers kept in the compute dtype, in a model of TransformerEngine's modules.",
                "TE's autocast covers every TE module inside of it, and knows neither layers nor names.",
                "Open autocast around the layers that shall run in FP8, or leave keep, modules, first_layers and "
                "last_layers out.",
            )
        recipe = te_recipe(self.precision) if self.enabled else None
        if hasattr(te, "autocast"):  # TE 2.9 and later
            return te.autocast(enabled=self.enabled, recipe=recipe, amax_reduction_group=self.group)  # type: ignore[no-any-return]
        return te.fp8_autocast(enabled=self.enabled, fp8_recipe=recipe, fp8_group=self.group)  # type: ignore[no-any-return]


def _run(record: _Record, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return linear(
        x, weight, bias, precision=record.precision, delayed=record.delayed, after_backward=record.after_backward
    )


def _replay(record: _Record, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Run the second forward of activation recompute with the scales of the first, recording no amax twice."""
    if record.delayed is None:
        return _run(record, x, weight, bias)
    assert record.scale is not None
    with record.delayed.forward.replay(record.scale):
        return _run(record, x, weight, bias)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# ---------------------------------------------------------------------- interception


class _Shared:
    """A context that threads are in together: the first one opens it, and the last one closes it.

    TE's autocast is one state of the process. If each thread opened its own, one that came second and left last would
    put back what it found, and leave TE in FP8.
    """

    def __init__(self) -> None:
        self._inside, self._lock, self._stack = 0, threading.Lock(), ExitStack()

    @contextmanager
    def of(self, opened: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Hold the context that ``opened()`` gives until this one closes; enter it if no other thread has."""
        with self._lock:
            if not self._inside:
                self._stack.enter_context(opened())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._stack.close()


class _Mode(TorchFunctionMode):
    """Call ``answer`` in place of ``functional.linear`` whenever ``active`` returns True."""

    def __init__(self, answer: Callable[..., torch.Tensor], active: Callable[[], bool]) -> None:
        super().__init__()
        self._answer, self._active = answer, active

    @cached_property
    def _attention(self) -> FunctionType:
        """Return a copy of torch's attention that calls our linears. It copies all globals, so it is made on demand."""
        attention = _with_globals(
            F.multi_head_attention_forward, linear=self._linear, has_torch_function=lambda _: False
        )
        for name in ("_in_projection", "_in_projection_packed"):
            attention.__globals__[name] = _with_globals(getattr(F, name), linear=self._linear)
        return attention

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._answer(input, weight, bias)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._active():
            if func is F.linear:
                return self._linear(*args, **(kwargs or {}))
            # A mode does not see the linears that torch's attention calls internally.
            if func is F.multi_head_attention_forward:
                return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _with_globals(function: Any, **names: Any) -> FunctionType:
    """Return a copy of a function whose globals ``names`` are replaced."""
    missing = [name for name in names if name not in function.__globals__]
    if missing:
        raise PrecisionError(
            f"torch {torch.__version__}: {function.__name__} no longer uses {', '.join(missing)}.",
            "nemo_fp8 redirects these names to reach the linears inside of nn.MultiheadAttention.",
            "Use the torch version that nemo_fp8 was tested with, and report this.",
        )
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextmanager
def _each_module(meet: Callable[[torch.nn.Module, Any], None]) -> Iterator[None]:
    """Call ``meet`` before the forward of every module."""
    handle = torch.nn.modules.module.register_module_forward_pre_hook(meet)
    try:
        yield
    finally:
        handle.remove()


def _refuse_in_checkpoint() -> None:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks and hooks[0].__qualname__.startswith("_checkpoint_hook"):
        raise PrecisionError(
            "A functional linear under activation recompute, in an autocast without a model.",
            "Its second forward comes during backward, where nothing would tell that the first one was in FP8.",
            "Pass the model: autocast(precision, model).",
        )


# ---------------------------------------------------------------------- the model


def _refuse_without_model(precision: Precision) -> None:
    reasons = {
        f"first_layers={precision.first_layers}": precision.first_layers > 0,
        f"last_layers={precision.last_layers}": precision.last_layers > 0,
        f"keep={list(precision.keep)}": bool(precision.keep),
        f"modules={list(precision.modules)}": bool(precision.modules),
        "strict=True": precision.strict,
        "scaling='delayed'": precision.scaling == "delayed",
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise PrecisionError(
            f"autocast without a model, under a contract with {', '.join(found)}.",
            "Layers and names are a model's, and delayed scaling keeps the amaxes of each linear with its module.",
            "Pass the model: autocast(precision, model).",
        )


def _adopt(model: torch.nn.Module, precision: Precision) -> WeakKeyDictionary[torch.nn.Module, dict[str, _Record]]:
    """Attach records and hooks to every module with FP8 weights; the same contract gets its old records back."""
    weights = linear_weights(model, precision)
    owners = {id(p): (module, name) for module in model.modules() for name, p in module.named_parameters(recurse=False)}
    found: WeakKeyDictionary[torch.nn.Module, dict[str, _Record]] = WeakKeyDictionary()
    for name, weight in weights.items():
        module, parameter = owners[id(weight)]
        records = module.__dict__.setdefault(_RECORDS, {})
        record = records.get((parameter, precision))
        if record is None:
            record = _Record(name, contract_of(precision, (name,)), None)
            if precision.scaling == "delayed":
                record.delayed = DelayedState(precision, weight.device)
                # The state_dict holds one state, so another contract with delayed scaling starts a new one.
                for key in [k for k, r in records.items() if k[0] == parameter and r.delayed]:
                    del records[key]
            records[parameter, precision] = record
        found.setdefault(module, {})[parameter] = record
        _hook(module)
    for module in model.modules():  # an attention calls the linears of its children without calling the children
        if isinstance(module, torch.nn.MultiheadAttention):
            module.__dict__.setdefault(_RECORDS, {})
            _hook(module)
    return found


def _hook(module: torch.nn.Module) -> None:
    if _before in module._forward_pre_hooks.values():
        return
    module.register_forward_pre_hook(_before)
    module.register_forward_hook(_after, always_call=True)
    module.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]


_recomputing: ContextVar[tuple[_Mode, ...]] = ContextVar("nemo_fp8_recomputing", default=())


def _before(module: torch.nn.Module, args: Any) -> None:
    """Open FP8 for a recompute: a forward during backward of a module that ran in FP8. No region need be open."""
    records = [
        (id(getattr(owner, parameter)), record)
        for owner in (module, *module.children())
        for (parameter, _), record in owner.__dict__.get(_RECORDS, {}).items()
    ]
    if not _in_backward():
        for _, record in records:
            record.ran = False  # until this forward has run in FP8
        return
    ran = {weight: record for weight, record in records if record.ran}

    def answer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        record = ran.get(id(weight)) or ran.get(id(weight._base))
        return F.linear(x, weight, bias) if record is None else _replay(record, x, weight, bias)

    mode = _Mode(answer, lambda: True)
    _recomputing.set((*_recomputing.get(), mode))
    mode.__enter__()  # type: ignore[no-untyped-call]


def _after(module: torch.nn.Module, args: Any, output: Any) -> None:
    if not _in_backward():
        return
    *outer, mode = _recomputing.get()
    _recomputing.set(tuple(outer))
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _save(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Write delayed scaling to the ``state_dict``: four tensors beside each weight."""
    for (parameter, _), record in module.__dict__.get(_RECORDS, {}).items():
        if record.delayed is not None:
            state.update({f"{prefix}{parameter}.fp8.{name}": t for name, t in record.delayed.state_dict().items()})


def _load(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for (parameter, _), record in module.__dict__.get(_RECORDS, {}).items():
        start = f"{prefix}{parameter}.fp8."
        saved = {name.removeprefix(start): state.pop(name) for name in [n for n in state if n.startswith(start)]}
        if saved and record.delayed is not None:
            record.delayed.load_state_dict(saved)
