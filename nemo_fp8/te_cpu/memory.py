"""How much memory tensors hold, as ``torch.cuda`` tells it of a GPU: what there is now, and the most that there was.

    now    the bytes of every storage that a live tensor of Python, or a gradient of one, holds; each counted once
    host   storages that were asked for as pinned, or fetched from the GPU: the host's there, and in none of the numbers
    lent   tensors as a collective knows them, in none of the numbers: who lends them holds others of the same memory,
           and gloo's threads let go of theirs up to 0.2 s after the work is done, where NCCL's are gone with it
    most   now, or the most that the C heap held at a call of TE's extension, less what was no tensor's

torch's allocator of a CPU counts nothing, so that tensors are looked for among the objects of the garbage collector:
exact, but for what Python does not know (results that an operator of torch's own saves for its backward, such as the
probabilities of a cross entropy; what ``gc.freeze`` has put aside), and as slow as there are objects (0.1 s with NeMo
loaded). The heap is asked of glibc, which walks all its free pieces: microseconds in a new process, milliseconds in one
whose heap lies in pieces; and it holds other things too, so that the most is between what tensors hold and what the
process does. Every call after a reset is looked at until looks have taken two seconds; from then on, and before any
reset, only where they have taken a fiftieth of the time at most, so that a peak of a few milliseconds may go unseen.
Without glibc 2.33 the heap cannot be asked, and the most is the largest sum that a call of ``now`` saw.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WeakRef: Any = reductions.StorageWeakRef

_EVERY = 50
"""A look at the heap costs at most one part in so many of the time."""

_KINDS = ("allocated", "active", "reserved")
"""Bytes that CUDA's allocator tells apart, and that are the same here."""

_LENT = "lent_to_a_collective"
"""The attribute of a tensor that nobody but a collective was given."""

_FREE = 2.0
"""Seconds of looks that a reset pays for: who resets the peak will ask for it, and is owed more than a sample."""


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""The tensors that a sparse one is made of, by its layout."""


class _Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


_ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _ask is not None:
    _ask.restype = _Heap


def _heap() -> int:
    """Return the bytes that C code of this process has allocated and not freed; 0 where it cannot be asked."""
    if _ask is None:
        return 0
    found = _ask()
    return int(found.uordblks + found.hblkhd)


def _kinds(cls: type) -> Iterator[type]:
    """Yield a class and all that derive from it, but for tensors that hold others, which are found for themselves."""
    if getattr(cls, "__torch_dispatch__", None) in (None, torch._C._disabled_torch_dispatch_impl):
        yield cls
    derived: type
    for derived in type.__subclasses__(cls):
        yield from _kinds(derived)


def parts_of(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names of a tensor's parts, and them, where it is made of others: TE's quantized ones, and DTensors,
    which name their mesh among their parts."""
    if is_traceable_wrapper_subclass(tensor):
        parts = ((name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        yield from ((name, part) for name, part in parts if isinstance(part, torch.Tensor))


def _lying(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what of a tensor lies in memory: of one made of others those; nothing of one that ``torch.func`` wraps
    around another."""
    if is_traceable_wrapper_subclass(tensor):
        for _, part in parts_of(tensor):
            yield from _lying(part)
    elif tensor.device.type == "cpu" and tensor.layout in _PARTS:
        yield from (getattr(tensor.detach(), part)() for part in _PARTS[tensor.layout])
    elif tensor.device.type == "cpu" and torch._C._has_storage(tensor):
        yield tensor


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor of the same memory, past autograd, for a collective to hold as long as it likes: it does
    not count."""
    lent = tensor.detach()
    setattr(lent, _LENT, True)
    return lent


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    except RuntimeError:  # of views whose base has changed since torch answers nothing: FSDP's parameters are such
        return None


class _Host:
    """The storages that lie in the host's memory where there is a GPU. A weak reference keeps a storage's address
    from being that of another."""

    def __init__(self) -> None:
        self.storages: dict[int, Any] = {}
        self.enough = 64

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that a tensor lies in the host's memory, and return it."""
        with torch._C.DisableTorchFunctionSubclass():
            for part in _lying(tensor):
                held = _WeakRef(part.untyped_storage())
                self.storages[held.cdata] = held
        if len(self.storages) > self.enough:
            self.storages = {address: held for address, held in self.storages.items() if not held.expired()}
            self.enough = 2 * len(self.storages) + 64
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the host's memory."""
        if not self.storages:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return any(part.untyped_storage()._cdata in self.storages for part in _lying(tensor))


HOST = _Host()


def _storages() -> dict[int, int]:
    """Return the bytes of each storage that a live tensor holds on the GPU."""
    kinds = set(_kinds(torch._C.TensorBase))
    found = [thing for thing in gc.get_objects() if type(thing) in kinds and not hasattr(thing, _LENT)]
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        grads = [_gradient(tensor) for tensor in found]
        for tensor in (part for held in found + grads if held is not None for part in _lying(held)):
            storage = tensor.untyped_storage()
            if storage._cdata not in HOST.storages:
                storages[storage._cdata] = storage.nbytes()
    return storages


def _held() -> int:
    """Return the bytes of all live tensors."""
    return sum(_storages().values())


class Count:
    """What tensors hold, and the most that they did since :meth:`reset`."""

    def __init__(self) -> None:
        self.most = self.other = self.top = 0
        self.again = self.free = 0.0

    def now(self, device: object = None) -> int:
        """Return the bytes of live tensors."""
        self._look()
        held = _held()
        self.other = max(self.other, _heap() - held)
        self.most = max(self.most, held)
        return held

    def peak(self, device: object = None) -> int:
        """Return the most bytes of live tensors since ``reset``."""
        self.now()
        return max(self.most, self.top - self.other)

    def reset(self, device: object = None) -> None:
        """Start the peak again at what is allocated now."""
        self.most = self.other = self.top = 0
        self.free = _FREE
        self.now()

    def look(self) -> None:
        """Raise the peak to what is allocated now, unless that was counted a moment ago. TE's extension calls this
        whenever it has computed."""
        if time.perf_counter() >= self.again:
            self._look()

    def _look(self) -> None:
        began = time.perf_counter()
        self.top = max(self.top, _heap())
        ended = time.perf_counter()
        self.free -= ended - began
        self.again = ended if self.free > 0 else ended + _EVERY * (ended - began)

    def stats(self, device: object = None) -> dict[str, int]:
        """Return both, and what CUDA's allocator alone could tell, under the names of ``torch.cuda.memory_stats``."""
        told = {"current": self.now(), "peak": self.peak()}
        return {
            **{f"{kind}_bytes.all.{which}": n for kind in _KINDS for which, n in told.items()},
            **{f"inactive_split_bytes.all.{which}": 0 for which in told},
            **{f"{kind}.all.current": len(_storages()) for kind in ("allocation", "active")},
            **dict.fromkeys(("num_alloc_retries", "num_ooms"), 0),
        }

    def summary(self, device: object = None, abbreviated: bool = False) -> str:
        """Return the allocated bytes, now and at most, in words."""
        return "\n".join(f"{name}: {n / 2**20:.1f} MiB" for name, n in self.stats().items() if "allocated" in name)


COUNT = Count()
