"""gloo in the place of NCCL: asked for by NCCL's name it answers, and what it cannot coalesce it does one after the
other.

A group is asked for as ``nccl``, bound to a CUDA device; the CPU that stands for that device speaks gloo. gloo cannot
coalesce: TE's gathers of codes with their scales raise, and Megatron's gathers of tensors of several types come out
corrupted. Under this manager every collective is started as it is called, and the manager waits for all of them.

A group of one rank has nothing to exchange. NCCL does nothing there, or copies the input to the output; gloo hands it
to a thread and copies twice, all gradients and all parameters of a step. So such a copy is made at once, by torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nemo_fp8.te_cpu.memory import lend

_SENT = {
    **dict.fromkeys(("all_gather_single", "all_gather_into_tensor", "_all_gather_base"), "input_tensor"),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"), "input"),
    "all_reduce": "tensor",
}
"""The argument that a rank sends. Its first one receives, in a group of one rank the very same numbers. In torch 2.13
``_single`` is the name, which FSDP2 calls; the others call it."""
_COLLECTIVES = [*_SENT, "isend", "irecv"]
_REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
"""Those that leave a single rank's numbers as they are."""
_open: list[Together] = []


class Together:
    """Collectives that were started under one coalescing manager."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any) -> None:
        """Remember a collective that is under way."""
        self.works.append(work)

    def wait(self) -> None:
        """Wait for all collectives of the manager."""
        for work in self.works:
            work.wait()


@contextmanager
def _one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Together]:
    manager = Together()
    _open.append(manager)
    try:
        yield manager
    finally:
        _open.remove(manager)
    if not async_ops:
        manager.wait()


def _remembered(call: Callable[..., Any]) -> Callable[..., Any]:
    """Report to the manager; and write as NCCL does, past autograd, where gloo copies and is refused a piece that
    ``split`` has made."""

    signature = inspect.signature(call)

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*map(_lent, args), **{n: _lent(value) for n, value in kwargs.items()})
        if _alone(call.__name__, asked.arguments):
            return _DONE if asked.arguments.get("async_op") else None
        work = call(*asked.args, **asked.kwargs)
        if _open and work is not None:
            _open[-1].append(work)
        return work

    return wrapper


class _Done(dist.Work):
    """A collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_DONE = _Done()


def _alone(name: str, asked: dict[str, Any]) -> bool:
    """Fill what receives from what is sent, if the group has one rank; what gloo would refuse is left to it."""
    if name not in _SENT or asked.get("op", dist.ReduceOp.SUM) not in _REDUCTIONS:
        return False
    into, sent = next(iter(asked.values())), asked[_SENT[name]]
    if dist.get_world_size(asked.get("group")) != 1 or into.dtype != sent.dtype or into.numel() != sent.numel():
        return False
    if into.data_ptr() != sent.data_ptr():
        into.view(-1).copy_(sent.reshape(-1))
    return True


def _lent(argument: Any) -> Any:
    return lend(argument) if type(argument) is torch.Tensor else argument


def _over_gloo(make: Callable[..., Any], backend_at: int) -> Callable[..., Any]:
    """Return ``init_process_group`` or ``new_group`` that takes gloo where NCCL is asked for, and binds to no
    device."""

    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if len(args) > backend_at:
            args = (*args[:backend_at], _gloo(args[backend_at]), *args[backend_at + 1 :])
        elif "backend" in kwargs:
            kwargs["backend"] = _gloo(kwargs["backend"])
        kwargs.pop("device_id", None)
        return make(*args, **kwargs)

    return wrapper


def _without_devices(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``barrier`` without ``device_ids``, the numbers of the GPUs on which NCCL runs it."""

    @functools.wraps(barrier)
    def wrapper(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    return wrapper


def _gloo(backend: str | None) -> str | None:
    """Return ``nccl`` and ``cpu:gloo,cuda:nccl`` as gloo, and any other backend as it is."""
    return "gloo" if backend is not None and "nccl" in backend.lower() else backend


_BY_NAME = "a group is asked for as nccl, bound to a CUDA device, and gloo is what speaks here"
_ALL, _OF_CALLERS = (dist, c10d), (dist,)
REPLACED: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...], str]] = {
    "init_process_group": (functools.partial(_over_gloo, backend_at=0), _ALL, _BY_NAME),
    "new_group": (functools.partial(_over_gloo, backend_at=2), _ALL, _BY_NAME),
    "is_nccl_available": (
        lambda theirs: lambda: True,
        _OF_CALLERS,
        "who asks for it gets gloo by its name; torch itself, which would look for NCCL's classes, knows better",
    ),
    "barrier": (_without_devices, _ALL, "it is given the numbers of the GPUs on which NCCL runs it"),
    **dict.fromkeys(
        _COLLECTIVES,
        (
            _remembered,
            _ALL,
            "gloo cannot coalesce, copies twice where one rank has nothing to exchange, and is refused what split made",
        ),
    ),
    "_coalescing_manager": (
        lambda theirs: _one_by_one,
        _ALL,
        "gloo cannot coalesce: TransformerEngine's gathers raise, and Megatron's of several types come out corrupted",
    ),
}
"""Names of torch.distributed: what makes ours of theirs, the modules that get it, and why."""


def take_nccls_place() -> None:
    """Replace the names of the table until the process ends."""
    for name, (make, modules, _) in REPLACED.items():
        if hasattr(dist, name):  # an older torch has fewer
            ours = make(getattr(dist, name))
            for module in modules:
                setattr(module, name, ours)
