"""Read tensors from Megatron's ``torch_dist`` checkpoints, one at a time, without Megatron, ranks or trusted pickles.

A checkpoint is shards ``*.distcp`` and an index ``.metadata``. The index has the chunks of every tensor, and the place
of every chunk in the files. So a tensor is put together from its chunks, whatever the layout of ranks was. The layers
of a model are one tensor with a leading dimension: ``read(name, (3,))`` returns that of layer 3, and reads no other.

``.metadata`` is a pickle of torch's and Megatron's classes. The unpickler here makes an empty class for every name and
never looks one up, so nothing in the file can run, and none of the classes must be installed. What the index says is
checked: files lie inside of the folder, spans inside of the files, and chunks have the size that they claim.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.storage.te_tensors import load_tensor

INDEX = ".metadata"
_AGAIN = (
    "Give another checkpoint of the run, or copy this one again; `nemo_fp8.train.checkpoints` says which ones are "
    "whole."
)
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and the place of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """Shape, dtype and chunks of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class TorchDist:
    """The tensors of a ``torch_dist`` checkpoint by name."""

    def __init__(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        self.folder, self.tensors = folder, tensors

    @classmethod
    def open(cls, folder: str | Path, prefix: str = "") -> TorchDist:
        """Open a checkpoint's tensors whose names begin with ``prefix``, which is removed from the names.

        Raises PrecisionError if the index cannot be read, or is wrong about the files.
        """
        folder = Path(folder)
        try:
            index = _Bags((folder / INDEX).open("rb")).load()
            places = {
                (key.fqn, _numbers(getattr(key, "offset", None))): place for key, place in index.storage_data.items()
            }
            found = {
                name.removeprefix(prefix): _stored(folder, name, about, places)
                for name, about in index.state_dict_metadata.items()
                if name.startswith(prefix) and hasattr(about, "chunks")
            }
        except PrecisionError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            why = f"It should be the index of a torch_dist checkpoint: {type(error).__name__}: {error}."
            raise PrecisionError(f"{folder / INDEX} cannot be read.", why, _AGAIN) from error
        return cls(folder, found)

    def read(self, name: str, at: tuple[int, ...] = ()) -> torch.Tensor:
        """Return a tensor, or its part at the first indices ``at``.

        Raises PrecisionError if chunks are missing or damaged.
        """
        stored = self.tensors[name]
        depth = len(at)
        out = torch.empty(stored.shape[depth:], dtype=stored.dtype)
        filled = 0
        for chunk in stored.chunks:
            if not all(o <= i < o + s for i, o, s in zip(at, chunk.offsets, chunk.sizes, strict=False)):
                continue
            part = self._load(name, chunk)[tuple(i - o for i, o in zip(at, chunk.offsets, strict=False))]
            spans = zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            out[tuple(slice(o, o + s) for o, s in spans)] = part
            filled += part.numel()
        if filled != out.numel():
            raise PrecisionError(
                f"{self.folder}: of {name} {filled:,} elements are there, of {out.numel():,}.",
                "The chunks that the index lists do not make up the tensor.",
                _AGAIN,
            )
        return out

    def _load(self, name: str, chunk: Chunk) -> torch.Tensor:
        with chunk.file.open("rb") as file:
            file.seek(chunk.start)
            content = file.read(chunk.length)
        try:
            found = load_tensor(content)
        except Exception as error:  # a damaged archive may raise anything
            raise PrecisionError(
                f"{chunk.file}: the bytes of {name} at {chunk.start:,} are damaged.",
                f"{type(error).__name__}: {error}.",
                _AGAIN,
            ) from error
        if found.numel() == math.prod(chunk.sizes):
            found = found.view(chunk.sizes)  # TE keeps a part of a stack as a plain matrix
        if tuple(found.shape) != chunk.sizes:
            raise PrecisionError(
                f"{chunk.file}: what lies at {chunk.start:,} is not the part of {name} that the index says.",
                f"A tensor of shape {chunk.sizes} was expected.",
                _AGAIN,
            )
        return found


# ---------------------------------------------------------------------- the index


class _Bag:
    """Stands in for every pickled object; keeps its arguments and attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Named(_Bag):
    """Stands in for every global name, also for values such as ``torch.bfloat16``; keeps the name."""

    name = ""


class _Bags(pickle.Unpickler):
    """An unpickler that imports nothing: every global name becomes a class of its own, made here."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        full = f"{module}.{name}"
        return self._classes.setdefault(full, type(name, (_Named,), {"name": full}))


def _stored(folder: Path, name: str, about: Any, places: Mapping[tuple[str, Any], Any]) -> Stored:
    dtype = _DTYPES.get(_dtype_name(about.properties))
    chunks = []
    for chunk in about.chunks:
        offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
        assert offsets is not None
        assert sizes is not None
        place = places.get((name, offsets)) or places[(name, None)]
        chunks.append(Chunk(offsets, sizes, _inside(folder, place.relative_path), int(place.offset), int(place.length)))
    shape = _numbers(about.size)
    assert shape is not None
    for chunk in chunks:
        _check(name, chunk, shape, dtype)
    return Stored(shape, dtype or torch.uint8, tuple(chunks))


def _dtype_name(properties: Any) -> str:
    """Return ``torch.bfloat16``, for instance, from an object that has it as an attribute or first in its state."""
    dtype = getattr(properties, "dtype", None)
    if dtype is None:
        state = getattr(properties, "state", ())
        dtype = state[0] if isinstance(state, (tuple, list)) and state else None
    return str(getattr(dtype, "name", ""))


def _numbers(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(n) for n in value)


def _inside(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or "\\" in name
        or not (folder / path).resolve().is_relative_to(folder.resolve())
    ):
        raise PrecisionError(
            f"{folder / INDEX} names a file outside of its folder: {name!r}.",
            "An index that leads elsewhere is damaged, or meant to have other files read.",
            "Do not trust this checkpoint.",
        )
    return folder / path


def _check(name: str, chunk: Chunk, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Raise PrecisionError if a chunk lies outside of its tensor or its file, or has fewer bytes than elements."""
    fits = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        min(o, s) >= 0 and o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    there = chunk.file.stat().st_size if chunk.file.is_file() else -1
    size = math.prod(chunk.sizes)  # at least a byte an element: the index gives FP8 weights their compute dtype
    if not fits or chunk.start < 0 or not size <= chunk.length <= there - chunk.start:
        raise PrecisionError(
            f"{chunk.file.name} does not hold the part of {name} that {INDEX} says.",
            f"{chunk.length:,} bytes at {chunk.start:,} for shape {chunk.sizes} of {shape}, and the file has "
            f"{max(there, 0):,}.",
            _AGAIN,
        )


def layers_of(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield for every tensor of a model its name there, and its indices in the stored stack.

    ``decoder.layers.mlp.linear_fc2.weight`` [layers, ...] gives ``decoder.layers.0.mlp...`` and so on; experts, which
    are a second dimension, get their numbers below ``mlp.experts``.
    """
    for name, stored in tensors.items():
        head, found, tail = name.partition("decoder.layers.")
        if not found or tail.split(".")[0].isdigit():
            for at, below in _experts(tail, stored.shape):
                yield (f"{head}{found}{below}" if found else name), at
            continue
        for layer in range(stored.shape[0]):
            for at, below in _experts(tail, stored.shape[1:]):
                yield f"{head}decoder.layers.{layer}.{below}", (layer, *at)


def _experts(tail: str, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    below = tail.replace("mlp.experts.experts.", "mlp.experts.")
    if below == tail or len(shape) != 3:
        yield (), tail
        return
    for expert in range(shape[0]):
        yield (expert,), below.replace("mlp.experts.", f"mlp.experts.{expert}.")
