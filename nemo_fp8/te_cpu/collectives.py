"""Coalesced collectives over gloo, one after the other.

gloo cannot coalesce: TE's gathers of codes with their scales raise, and Megatron's gathers of tensors of several types come out
corrupted. Under this manager every collective is started as it is called, and the manager waits for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_COLLECTIVES = """all_gather_into_tensor _all_gather_base reduce_scatter_tensor _reduce_scatter_base all_reduce isend irecv""".split()
_open: list[Together] = []


class Together:
    """What was started under one manager."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any) -> None:
        """Remember a collective that is under way."""
        self.works.append(work)

    def wait(self) -> None:
        """Wait for all of them."""
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
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        if _open and work is not None:
            _open[-1].append(work)
        return work

    return wrapper


def take_one_by_one() -> None:
    """Replace torch's coalescing manager, and the collectives that report to it, until the process ends."""
    for name in _COLLECTIVES:
        wrapper = _remembered(getattr(dist, name))
        setattr(dist, name, wrapper)
        setattr(c10d, name, wrapper)
    dist._coalescing_manager = c10d._coalescing_manager = _one_by_one  # type: ignore[attr-defined]
