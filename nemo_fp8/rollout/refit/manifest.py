"""Announce what a push will bring: the name, dtype and shape of every tensor, before the first byte.

An engine that has begun to take weights cannot go back, so everything is checked before: the manifest is sent first,
and every worker compares it with its model. Afterwards tensors are called by their number in the manifest, and a piece
that does not fit its entry is refused.

A tensor that the trainer has quantized is two entries, as in a DeepSeek checkpoint: codes under the tensor's name, and
FP32 scales of 128x128 blocks under that name with ``_scale_inv`` appended.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import PrecisionError, Problem

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SCALES = "_scale_inv"
Box = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, stop) for every dimension."""
# Limits of a manifest from outside: more than any model needs (the largest, of 384 experts in 60 layers, has 138,000
# tensors if each comes with its scales), and few enough that no manifest fills a machine or blocks a server.
MOST_ENTRIES, LONGEST_NAME, MOST_DIMENSIONS, MOST_BYTES = 1 << 18, 1 << 10, 8, 1 << 44


@dataclass(frozen=True)
class Entry:
    """Name, shape and type of one tensor of a push."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch."""
        return DTYPES[self.dtype]

    @property
    def bytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def rows(self) -> int:
        """The first dimension, along which a tensor is cut. A scalar has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return math.prod(self.shape[1:]) * self.torch_dtype.itemsize

    def bytes_of(self, rows: int) -> int:
        """Return the bytes of so many rows."""
        return rows * self.row_bytes

    @property
    def step(self) -> int:
        """A tensor may be cut after a multiple of so many rows: a matrix between blocks, others anywhere."""
        return BLOCK if len(self.shape) == 2 else 1

    @property
    def is_codes(self) -> bool:
        """Whether the tensor is FP8 codes, whose scales are another entry."""
        return self.dtype == "float8_e4m3fn"

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Entry:
        """Return the entry of a tensor, which may be on the meta device.

        Raises PrecisionError if it is no tensor, is nested, or has a dtype that a push does not take.
        """
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
        dtype = _NAMES.get(tensor.dtype) or _known(name, str(tensor.dtype).removeprefix("torch."))
        return cls(name, dtype, tuple(tensor.shape))


def not_sendable(name: str, tensor: torch.Tensor) -> Problem | None:
    """Return why the bytes of a tensor cannot be sent; None if they can."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # a subclass may keep its memory elsewhere
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
    elif not plain and hasattr(tensor, "full_tensor"):
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


def pairs(tensors: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the (name, tensor) pairs of a mapping, or of an iterable of pairs; raise PrecisionError for another."""
    if isinstance(tensors, Mapping):
        return tensors.items()
    if isinstance(tensors, Iterable) and not isinstance(tensors, (str, torch.Tensor)):
        return tensors
    raise PrecisionError(
        f"Weights came as {_kind(tensors)}.",
        "A push takes a mapping of Hugging Face names to tensors, or an iterable of such pairs.",
        "Push such a mapping: of a Hugging Face model that is dict(model.named_parameters()).",
    )


def _pair(pair: Any) -> tuple[str, torch.Tensor]:
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[0], pair[1]
    raise PrecisionError(
        f"Among the tensors of a push is {_kind(pair)}.",
        "Every one comes as a pair of its name and itself.",
        "Push a mapping, or pairs, such as weights.items().",
    )


class Manifest(Sequence[Entry]):
    """The entries of all tensors of a push, in order. Raises PrecisionError if a name is given twice."""

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
        """The bytes of all tensors together."""
        return sum(entry.bytes for entry in self)

    def scales_of(self, entry: Entry) -> Entry | None:
        """Return the entry of the scales that belong to FP8 codes; None if there is none."""
        i = self.places.get(entry.name + SCALES)
        return None if i is None else self.entries[i]

    def is_scales(self, entry: Entry) -> bool:
        """Return whether an entry holds the scales of another one."""
        i = self.places.get(entry.name.removesuffix(SCALES)) if entry.name.endswith(SCALES) else None
        return i is not None and self.entries[i].is_codes

    # ------------------------------------------------------------------ from tensors

    @classmethod
    def of(cls, tensors: Any, *, to_send: bool = False) -> Manifest | None:
        """Return the manifest of tensors; None for an iterator, which can be gone through only once.

        ``tensors`` is a manifest, a mapping, an iterable of (name, tensor) that can be iterated again, or an object
        with ``metadata()``, as vLLM's weight sources have. No tensor is kept. ``to_send`` says that these are the
        tensors that will be sent, and not only their shapes.

        Raises PrecisionError with all tensors that have no entry or, with ``to_send``, cannot be sent.
        """
        if isinstance(tensors, Manifest):
            return tensors
        if callable(getattr(tensors, "metadata", None)):
            return cls(Entry(m.name, str(m.dtype).removeprefix("torch."), tuple(m.shape)) for m in tensors.metadata())
        named = pairs(tensors)
        if iter(named) is named:
            return None
        entries, problems = list[Entry](), list[Problem]()
        for pair in named:
            try:
                name, tensor = _pair(pair)
                entries.append(Entry.of(name, tensor))
            except PrecisionError as error:
                problems += error.problems
            else:
                problem = not_sendable(name, tensor) if to_send else None
                problems += [problem] if problem else []
        if problems:
            raise PrecisionError(problems)
        return cls(entries)

    # ------------------------------------------------------------------ to and from JSON

    def to_plain(self) -> list[list[Any]]:
        """Return the manifest as plain values, for JSON."""
        return [[e.name, e.dtype, list(e.shape)] for e in self]

    @functools.cached_property
    def digest(self) -> str:
        """A short name for all names, types and shapes."""
        return hashlib.blake2b(json.dumps(self.to_plain()).encode(), digest_size=16).hexdigest()

    @classmethod
    def from_plain(cls, rows: Any) -> Manifest:
        """Return the manifest of plain values that came from outside, after checking all of them.

        Raises PrecisionError if they are no list of (name, dtype, shape) within the limits of this module.
        """
        if not isinstance(rows, list) or not 0 < len(rows) <= MOST_ENTRIES:
            told = f"{len(rows):,} tensors" if isinstance(rows, list) else "no list"
            raise _unreadable(f"It is {told}; a push takes 1 to {MOST_ENTRIES:,} of them.")
        return cls(_entry(row) for row in rows)


def is_version(value: Any) -> bool:
    """Return whether an engine can call its weights so: a name from outside, of a bounded length."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()


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
    """Return ``dtype`` if a push takes it; raise PrecisionError if not."""
    if dtype in DTYPES:
        return dtype
    raise PrecisionError(
        f"{name} comes in {dtype}.",
        f"A push takes {', '.join(DTYPES)}.",
        "Push it in the engine's, such as tensor.to(torch.bfloat16).",
    )


def _kind(value: object) -> str:
    """Return what a value is, in words: ``None``, ``a list``, ``a numpy.ndarray``."""
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
