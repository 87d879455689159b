"""What a push will bring: every tensor's name, type and shape, known before its first byte.

An engine that has begun to take weights cannot go back, so everything that can be wrong is asked before: the manifest
goes ahead, and every worker holds it against its model. The same list then says where each tensor lies on the wire, and
nothing that comes later is trusted beyond it.

A tensor that the trainer quantized already is two entries, as in a DeepSeek checkpoint: codes under the tensor's name,
and FP32 scales of 128x128 blocks under that name with ``_scale_inv`` behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError, Problem

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)}
BLOCK = 128
SCALES = "_scale_inv"
# What a manifest from outside may hold at most: beyond every model (the largest, of 384 experts in 60 layers, has
# 138,000 tensors where each comes with its scales), and small enough to refuse what would fill a machine or keep a
# server from answering.
MOST_ENTRIES, LONGEST_NAME, MOST_DIMENSIONS, MOST_BYTES = 1 << 18, 1 << 10, 8, 1 << 44


@dataclass(frozen=True)
class Entry:
    """Name, shape and type of one tensor of a push."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def rows(self) -> int:
        """The first dimension, along which a tensor is cut; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.torch_dtype.itemsize

    @property
    def step(self) -> int:
        """Where it may be cut: between blocks of a matrix, between the slabs of anything else."""
        return BLOCK if len(self.shape) == 2 else 1

    @property
    def is_codes(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Entry:
        """The entry of a tensor; only its description is looked at, so it may be on the meta device."""
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise PrecisionError(
                f"{str(name)[:LONGEST_NAME]} is {_kind(tensor)}.",
                "A push takes names with tensors.",
                "Give it a torch.Tensor, or leave it out.",
            )
        if tensor.is_nested:
            raise PrecisionError(
                f"{name} is a nested tensor.", "It has no one shape.", "Push its parts under their own names."
            )
        return cls(name, _known(name, str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape))


def not_sendable(name: str, tensor: torch.Tensor) -> Problem | None:
    """Why the bytes of a tensor cannot be sent, if they cannot."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # others keep their memory in ways of their own
    if tensor.is_meta:
        what, why, remedy = (
            "on the meta device",
            "It has a shape and no values.",
            "Push it after it was loaded or gathered.",
        )
    elif tensor.layout != torch.strided:
        what, why, remedy = (
            f"{str(tensor.layout).removeprefix('torch.')}",
            "The engine's weights are dense.",
            "Push tensor.to_dense().",
        )
    elif hasattr(tensor, "full_tensor"):
        what, why, remedy = (
            "a DTensor",
            "This process holds a part of it only.",
            "Push tensor.full_tensor(), which every rank must call.",
        )
    elif plain and tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        what, why, remedy = (
            "without memory",
            "Its storage was let go, as FSDP does between steps.",
            "Push it where it is gathered.",
        )
    else:
        return None
    return Problem(f"{name} is {what}.", why, remedy)


class Manifest(Sequence[Entry]):
    """All tensors of a push, in order."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self.places = {entry.name: i for i, entry in enumerate(self.entries)}
        if len(self.places) < len(self.entries):
            seen: set[str] = set()
            twice = sorted({e.name for e in self.entries if e.name in seen or seen.add(e.name)})  # type: ignore[func-returns-value]
            raise PrecisionError(
                f"Names given twice: {', '.join(twice[:5])}.",
                "The second tensor would overwrite the first.",
                "Give every tensor once.",
            )

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, i: Any) -> Any:
        return self.entries[i]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self)

    def scales_of(self, entry: Entry) -> Entry | None:
        """The entry of the scales that belong to a tensor of FP8 codes; None where it has none."""
        i = self.places.get(entry.name + SCALES)
        return None if i is None else self.entries[i]

    def is_scales(self, entry: Entry) -> bool:
        """Whether an entry holds the scales of another one."""
        i = self.places.get(entry.name.removesuffix(SCALES)) if entry.name.endswith(SCALES) else None
        return i is not None and self.entries[i].is_codes

    # ------------------------------------------------------------------ where it comes from

    @classmethod
    def of(cls, tensors: Any, *, to_send: bool = False) -> Manifest | None:
        """The manifest of anything that can tell without giving up its tensors; None for an iterator, which cannot.

        A mapping or a sequence of pairs is looked at; something with ``metadata()``, as vLLM's weight sources have, is
        asked; what can be iterated again and again is gone through once, tensor by tensor, and nothing is kept.
        ``to_send`` says that these are the tensors themselves: those without bytes that can be sent are refused, all by
        name.
        """
        if isinstance(tensors, Manifest):
            return tensors
        if callable(getattr(tensors, "metadata", None)):
            return cls(Entry(m.name, str(m.dtype).removeprefix("torch."), tuple(m.shape)) for m in tensors.metadata())
        named = tensors.items() if isinstance(tensors, Mapping) else tensors
        if iter(named) is named:
            return None
        entries, problems = list[Entry](), list[Problem]()
        for name, tensor in named:
            try:
                entries.append(Entry.of(name, tensor))
            except PrecisionError as error:
                problems += error.problems
            else:
                problem = not_sendable(name, tensor) if to_send else None
                problems += [problem] if problem else []
        if problems:
            raise PrecisionError(problems)
        return cls(entries)

    # ------------------------------------------------------------------ in and out

    def to_plain(self) -> list[list[Any]]:
        """The manifest as plain values, for JSON."""
        return [[e.name, e.dtype, list(e.shape)] for e in self]

    @classmethod
    def from_plain(cls, rows: Any) -> Manifest:
        """From outside: nothing is believed before it has been checked."""
        if not isinstance(rows, list) or not 0 < len(rows) <= MOST_ENTRIES:
            told = f"{len(rows):,} tensors" if isinstance(rows, list) else "no list"
            raise _unreadable(f"It is {told}; a push takes 1 to {MOST_ENTRIES:,} of them.")
        return cls(_entry(row) for row in rows)


def _entry(row: Any) -> Entry:
    try:
        name, dtype, shape = row
    except (TypeError, ValueError):
        raise _unreadable(f"{row!r} is no name, dtype and shape.") from None
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise _unreadable(f"{str(name)[:80]!r} is no tensor's name.")
    dtype = _known(name, str(dtype))
    whole = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS and all(type(n) is int and n > 0 for n in shape)
    if not whole or math.prod(shape) > MOST_BYTES:
        raise _unreadable(f"{name} has no shape that a tensor could have: {str(shape)[:80]}.")
    return Entry(name, dtype, tuple(shape))


def _known(name: str, dtype: str) -> str:
    if dtype in DTYPES:
        return dtype
    raise PrecisionError(
        f"{name} comes in {dtype}.",
        f"A push takes {', '.join(DTYPES)}.",
        "Push it in the engine's, such as tensor.to(torch.bfloat16).",
    )


def _kind(value: object) -> str:
    return (
        "None"
        if value is None
        else f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
    )


def _unreadable(why: str) -> PrecisionError:
    return PrecisionError(
        [
            Problem(
                "The manifest of a push cannot be read.",
                why,
                "Push with nemo_fp8.rollout.Refit, which writes it from the tensors.",
            )
        ]
    )
