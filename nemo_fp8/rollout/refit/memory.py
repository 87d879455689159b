"""Share memory between two processes of one user, without a file that could outlive them.

The sender makes an anonymous file in memory (``memfd``), and receivers open it through ``/proc/PID/fd/N``. The kernel
allows that to the same user (and root) only. It frees the memory when the last process closes it or dies, so nothing is
left in ``/dev/shm`` after a trainer was killed. The trade-off: sender and receivers must see each other's process ids,
so two containers that share only ``/dev/shm`` have to push over HTTP.

A receiver checks what it opens: such a file, of the announced size, and sealed, so that it cannot shrink under the
reader (a read beyond its end would kill the process). The file's name is random: the kernel uses file descriptors
again, and the name makes sure that a handle never opens other memory than its own.

A receiver keeps mapped what the sender holds (:class:`Mappings`), since the operating system would have to find every
page again for the next push. The sender holds a lock on its memory, which ends with it: who could take the lock learns
that the memory is to be let go of, however the sender ended.

A trainer that keeps its tensors in such memory (:class:`SharedWeights`) has them quantized from where they lie. Memory
that torch shares by itself (``tensor.share_memory_()``) is not sealed, so it is copied like any other.
"""

from __future__ import annotations

import copy
import fcntl
import itertools
import mmap
import os
import secrets
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit.alive import LOOK
from nemo_fp8.rollout.refit.manifest import Manifest, pairs

NAME = "nemo_fp8-refit"
BUFFERS = 2
"""How many pieces of memory a push over HTTP has under way."""
MOST_SPARE = 64 << 20
"""The bytes of a piece of memory that is kept for the next body; a body is larger only if a tensor cannot be cut."""
MOST_MAPPED = 2 * BUFFERS
"""How many pieces of memory a worker keeps mapped: a trainer's buffers and its weights, and as many of another one."""
ALIGNMENT = 64  # bytes; each tensor begins at a multiple
# Linux' numbers, which Python's fcntl has only since 3.13.
_ADD_SEALS, _GET_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1033, 1034, 1, 2, 4
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW


def aligned(size: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _let_go(fd: int, owner: int) -> None:
    """Close memory, and give up its lock, which a child that was forked since would hold on to with its copy."""
    if os.getpid() == owner:  # a child that ends leaves the lock to its parent
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class Shared:
    """The sender's side: ``size`` bytes, as ``tensor``, that other processes can open by ``handle``."""

    def __init__(self, size: int) -> None:
        self.size, self.name = size, f"{NAME}-{secrets.token_hex(16)}"
        self._fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, _ADD_SEALS, _SEALS)
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # until the descriptor is closed, by this process or by its end
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._close = weakref.finalize(self, _let_go, self._fd, os.getpid())

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Return the offset of a tensor that lies in this memory in one piece; None if it does not."""
        if not tensor.is_cpu or not tensor.is_contiguous() or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        offset = tensor.data_ptr() - self.tensor.data_ptr()
        return offset if offset >= 0 and offset + tensor.nbytes <= self.size else None

    @property
    def handle(self) -> dict[str, Any]:
        """What a receiver needs to open the memory, as plain values."""
        return {"pid": os.getpid(), "fd": self._fd, "size": self.size, "name": self.name}

    def close(self) -> None:
        """Unmap the memory, and let go of its lock. The kernel frees it when the receivers have unmapped it, too."""
        if self._fd >= 0:
            del self.tensor, self._map
            self._close()
            self._fd = -1


class Spare:
    """Memory for bytes that workers are to read, one body after the other, and that is used again: the operating system
    takes longer to find, clear and free pages than bytes take to come into them, and workers keep it mapped.

    A few pieces are kept (BUFFERS), none of them larger than MOST_SPARE. Sizes are powers of two, so that a body fits
    where one came that was a little shorter. What an earlier body has left is still there: say how much is ``used``.
    """

    def __init__(self) -> None:
        self._free: list[Shared] = []

    @contextmanager
    def lent(self, size: int) -> Iterator[Shared]:
        """Give memory of this size or more. It is freed if the context ends by an error: a worker may still read it."""
        fits = [one for one in self._free if one.size >= size]
        if fits:
            shared = min(fits, key=lambda one: one.size)
            self._free.remove(shared)
        else:
            shared = Shared(1 << (size - 1).bit_length())
        try:
            yield shared
        except BaseException:
            shared.close()
            raise
        if shared.size <= MOST_SPARE:
            self._free.append(shared)
        else:
            shared.close()
        while len(self._free) > BUFFERS:
            smallest = min(self._free, key=lambda one: one.size)
            self._free.remove(smallest)
            smallest.close()

    @contextmanager
    def holding(self, body: Any) -> Iterator[dict[str, Any]]:
        """Copy bytes (anything with a buffer) into such memory; yield what a message says of it."""
        with memoryview(body).cast("B") as raw, self.lent(max(1, len(raw))) as shared:
            shared._map[: len(raw)] = raw
            yield {"memory": shared.handle, "used": len(raw)}


class SharedWeights(Mapping[str, torch.Tensor]):
    """Tensors by their names, all in one piece of shared memory: workers on this host read them without a copy.

        weights = SharedWeights(named_tensors)      # once
        parameter.data = weights[name]              # once, if the trainer's parameters shall lie there
        weights[name].copy_(tensor)                 # after each step, if they lie elsewhere
        Refit(engine).push(weights)

    ``tensors`` is a mapping, or an iterable of names with tensors; their values are copied. The memory is freed when
    the last tensor is let go, and by the kernel if the trainer is killed. Its handle is open as long as this object.

    Raises PrecisionError if there are none, or with all that cannot be pushed.
    """

    def __init__(self, tensors: Any) -> None:
        named = [*pairs(tensors)]
        Manifest.of(named, to_send=True)
        ends = [*itertools.accumulate(aligned(t.nbytes) for _, t in named)]
        if not ends:
            raise PrecisionError("No tensors to share.", "The mapping is empty.", "Give the model's tensors.")
        self.shared = Shared(max(1, ends[-1]))
        self._tensors = {
            name: self.shared.tensor[first : first + t.nbytes].view(t.dtype).view(t.shape)
            for (name, t), first in zip(named, [0, *ends], strict=False)
        }
        for name, tensor in named:
            self._tensors[name].copy_(tensor.detach())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Opened:
    """The receiver's side: the sender's bytes, to be read only.

    Raises PrecisionError if ``handle``, which came from outside, is not that of a ``Shared`` of this user.
    """

    def __init__(self, handle: Any) -> None:
        pid, fd, size, name = _parts_of(handle)
        path = f"/proc/{pid}/fd/{fd}"
        try:
            target = os.readlink(path)
            if not name.startswith(NAME) or target != f"/memfd:{name} (deleted)":
                raise _refused(handle, f"It is {target}, and not the memory that a Refit made")
            own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _refused(
                handle, f"{path} cannot be opened: {error.strerror}. Both sides need one user and one list of processes"
            ) from None
        try:
            if fcntl.fcntl(own, _GET_SEALS) & _SEALS != _SEALS:
                raise _refused(handle, "It is not sealed, so that it could shrink while it is read")
            if os.fstat(own).st_size != size:
                raise _refused(handle, f"It holds {os.fstat(own).st_size} bytes")
            mapped = mmap.mmap(own, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException as error:
            os.close(own)
            if isinstance(error, OSError):
                raise _refused(handle, f"It cannot be mapped: {error.strerror}") from None
            raise
        self.fd = own
        """A descriptor of the memory, open as long as this object."""
        self._close = weakref.finalize(self, os.close, own)
        self.size = size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that it is not writable, as intended
            self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._first = self.bytes.data_ptr()

    @property
    def held(self) -> bool:
        """Whether the sender still holds the memory. If not, nobody will again."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def read(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that lies in the memory, without a copy. It must not be written to.

        Raises PrecisionError if it would not lie inside.
        """
        count = 1
        for n in shape:
            count *= n
        self.address(offset, count * dtype.itemsize, dtype.itemsize)
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

    def first(self, size: Any) -> Opened:
        """Return so many bytes of the memory, as if there were no others; ``size`` came from outside.

        Raises PrecisionError if there are not so many.
        """
        if type(size) is not int or not 0 <= size <= self.size:
            raise PrecisionError(
                f"{str(size)[:20]} bytes of {self.size} of shared memory are said to be used.",
                "There are no others.",
                "Push with nemo_fp8.rollout.Refit; if that did it, report it.",
            )
        part = copy.copy(self)
        part.size = size
        return part

    def address(self, offset: int, size: int, unit: int) -> int:
        """Return where ``size`` bytes lie in this process, at an offset that came from outside; elements are of
        ``unit`` bytes.

        Raises PrecisionError if they would not lie inside.
        """
        if offset < 0 or offset % unit or offset + size > self.size:
            raise PrecisionError(
                f"A tensor of {size} bytes at {offset} of {self.size} bytes of shared memory.",
                "It does not lie inside.",
                "Push with nemo_fp8.rollout.Refit; if that did it, report it.",
            )
        return self._first + offset


class Mappings:
    """The memory of senders that a worker has opened, by handle: mapped for as long as its sender holds it. While there
    is any, one thread looks once a second whether that is so."""

    def __init__(self) -> None:
        self._opened: OrderedDict[tuple[int, int, int, str], Opened] = OrderedDict()
        """What was used last is last."""
        self._alone, self._watched = threading.Lock(), False

    def opened(self, handle: Any) -> Opened:
        """Return the memory behind a handle that came from outside. Raises PrecisionError as :class:`Opened` does."""
        key = _parts_of(handle)
        with self._alone:
            memory = self._opened.get(key)
            if memory is None:
                memory = Opened(handle)
                while len(self._opened) >= MOST_MAPPED:
                    self._opened.popitem(last=False)
                self._opened[key] = memory
            self._opened.move_to_end(key)
            if not self._watched:
                self._watched = True
                threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True, name=NAME).start()
        return memory

    def __len__(self) -> int:
        return len(self._opened)

    def _let_go(self) -> bool:
        """Unmap what its sender has let go of; return whether anything is left."""
        with self._alone:
            for key, memory in [*self._opened.items()]:
                if not memory.held:
                    del self._opened[key]
            self._watched = bool(self._opened)
            return self._watched


def _watch(of: weakref.ref[Mappings]) -> None:
    """Let go of what senders have let go of, however they ended, until there is nothing left."""
    while (mappings := of()) is not None and mappings._let_go():
        del mappings
        time.sleep(LOOK)


def _parts_of(handle: Any) -> tuple[int, int, int, str]:
    """Return the pid, fd, size and name in a handle that came from outside; raise PrecisionError if it is none."""
    try:
        pid, fd, size, name = (handle[key] for key in ("pid", "fd", "size", "name"))
    except (TypeError, KeyError):
        raise _refused(handle, "It is no pid, fd, size and name") from None
    if not all(type(n) is int and n >= 0 for n in (pid, fd, size)) or size == 0:
        raise _refused(handle, "The pid, fd and size are whole numbers, and size is not 0")
    return pid, fd, size, str(name)


def _refused(handle: Any, why: str) -> PrecisionError:
    return PrecisionError(
        f"Shared memory {str(handle)[:120]} is refused.",
        f"{why}.",
        "Push from the same host, user and container, or over HTTP with Refit(url, transport='http').",
    )
