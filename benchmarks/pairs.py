"""Timing by pairs of neighbours, so that a machine that others use too gives the same shares as a quiet one.

    share = median over rounds of (time of the yardstick / time of the way, right after it)

All ways take turns, round after round, each on another piece of memory, more of them than caches hold. Pairs in which
the operating system took a processor away from this process are thrown away, unless none is left. The trade-off: every
way is measured with its yardstick, which doubles the time of a run, and only ratios within one run mean anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

BYTES = 3  # that an element moves: two of BF16, one of FP8
OUTGROWN = 1 << 30  # no processor that this has seen has caches of a GiB


@dataclass(frozen=True)
class Place:
    """Memory for one turn. There are as many as outgrow the caches, so that every turn finds its own in main memory."""

    x: torch.Tensor
    codes: torch.Tensor
    values: torch.Tensor
    plain: torch.Tensor
    target: torch.Tensor


Pairs = dict[str, tuple[Callable[[Place], Any], Callable[[Place], Any]]]


@dataclass(frozen=True)
class Pair:
    """A way, timed right after its yardstick, in seconds."""

    yardstick: float
    way: float
    disturbed: bool


def undisturbed(pairs: list[Pair]) -> list[Pair]:
    return [p for p in pairs if not p.disturbed] or pairs


def seconds(pairs: list[Pair]) -> float:
    return median(p.way for p in undisturbed(pairs))


def share(pairs: list[Pair]) -> float:
    return median(p.yardstick / p.way for p in undisturbed(pairs))


def pair_up(ways: Pairs, places: list[Place], rounds: int, device: str) -> dict[str, list[Pair]]:
    """Measure every way and its yardstick, round after round; they take turns, and each turn has the next place in
    memory."""

    def once(run: Callable[[Place], Any], place: Place) -> float:
        start = time.perf_counter()
        run(place)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def interruptions() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    for pair in ways.values():  # builds, compiles, allocates
        for run in pair:
            run(places[0])
    found: dict[str, list[Pair]] = {name: [] for name in ways}
    turn = itertools.cycle(places)
    for _ in range(rounds):
        for name, (way, yardstick) in ways.items():
            place, before = next(turn), interruptions()
            found[name].append(Pair(once(yardstick, place), once(way, place), interruptions() > before))
    return found


def places_for(shape: tuple[int, int], device: str) -> list[Place]:
    def place() -> Place:
        x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        codes = torch.ones(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        plain = torch.ones(x.numel() * BYTES // 2, dtype=torch.uint8, device=device)
        return Place(x, codes, torch.ones_like(x), plain, torch.ones_like(plain))

    first = place()
    size = sum(t.numel() * t.itemsize for t in vars(first).values())
    return [first, *(place() for _ in range(OUTGROWN // size))]


def memcpy_in_parts(threads: int) -> Callable[[Place], Any] | None:
    """Return the C library's copy, a part for each of torch's own threads, if OpenMP can be asked for them."""
    from nemo_fp8.numerics.kernels import cpu

    address, pointer = cpu.parallel(), ctypes.c_void_p
    if address is None:
        return None
    function = ctypes.CFUNCTYPE(None, pointer)
    parallel = ctypes.CFUNCTYPE(None, function, pointer, ctypes.c_uint, ctypes.c_uint)(address)
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = (pointer, pointer, ctypes.c_size_t), pointer

    def run(place: Place) -> None:
        size = place.plain.numel() // threads
        part = itertools.count()

        def work(_: Any) -> None:
            at = next(part) * size
            copy(place.target.data_ptr() + at, place.plain.data_ptr() + at, size)

        parallel(function(work), None, threads, 0)

    return run


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # mallopt's names of what it sets


@contextlib.contextmanager
def freed_memory_stays(device: str) -> Iterator[None]:
    """Let glibc keep what is freed for the next tensor until the context closes, as CUDA's allocator does: only growing
    costs new pages."""
    libc = ctypes.CDLL(None) if device == "cpu" and sys.platform == "linux" else None
    if libc:
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    yield
    if libc:
        libc.mallopt(_MMAP_MAX, 1 << 16)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 26)
        libc.malloc_trim(0)


@contextlib.contextmanager
def tensors_from_the_system(device: str) -> Iterator[None]:
    """Let every large tensor be memory that the process has never had until the context closes: glibc keeps nothing
    back of what is freed."""
    least, most = 1 << 20, 1 << 25  # what glibc moves the threshold up to by itself
    libc = ctypes.CDLL(None) if device == "cpu" and sys.platform == "linux" else None
    if libc:
        libc.mallopt(_MMAP_THRESHOLD, least)
        libc.malloc_trim(0)
    yield
    if libc:
        libc.mallopt(_MMAP_THRESHOLD, most)
