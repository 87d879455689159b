"""Safetensors read as a stream: one file, or a folder of shards; one matrix in memory at a time.

    for matrix in Checkpoint.open("llama-3-8b").matrices("model.layers.0.mlp.down_proj.weight"): ...

Reading a file maps it into memory, and the pages that were touched count as the process's until the file is closed;
so a file is opened anew after ``LET_GO`` bytes, which costs a look at its header. A stack of experts is read matrix by
matrix. Weights that are FP8 already come back as the values that they stand for: code times the scale that lies beside
them, of a tensor, a row, or a block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.quantized import Quantized

LET_GO = 64 * 2**20
INDEX = "model.safetensors.index.json"
# safetensors' words for types -> bytes of an element. Those of VALUES can be measured, those of CODES with their scales.
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
VALUES = ("BF16", "F16", "F32", "F64")
CODES = ("F8_E4M3", "F8_E5M2")
SCALES = ("_scale_inv", "_scale")
_SOUND = "Copy or download the file again; its size and checksum are on the page it came from."


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * BYTES.get(self.dtype, 1)


class Checkpoint:
    """The tensors of a checkpoint by name, in the order of the model; nothing is read before it is asked for."""

    def __init__(self, path: Path, entries: dict[str, Entry]) -> None:
        self.path, self.entries = path, entries
        self._file: Path | None = None
        self._handle: Any = None
        self._touched = 0

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """From a safetensors file, a folder of them, or a folder with an index."""
        path = Path(path)
        entries: dict[str, Entry] = {}
        for file, names in _files(path).items():
            for entry in _entries(file):
                if names is not None and entry.name not in names:
                    continue
                if entry.name in entries:
                    raise PrecisionError(
                        f"{entry.name} is in {entries[entry.name].file.name} and in {file.name}.",
                        "A tensor with two values has none; the folder holds more than one checkpoint.",
                        f"Keep one checkpoint in the folder, give a file, or add {INDEX}.",
                    )
                entries[entry.name] = entry
            missing = sorted((names or set()) - entries.keys())
            if missing:
                raise PrecisionError(
                    f"{file.name} does not hold {missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}.",
                    f"{INDEX} says that it does; the shards and the index are of different checkpoints.",
                    "Download the folder again, or remove the index to read whatever the shards hold.",
                )
        return cls(path, entries)

    def scale_of(self, name: str) -> str | None:
        """The name of the scale that lies beside an FP8 weight."""
        stem = name.removesuffix("_packed")
        return next((stem + ending for ending in SCALES if stem + ending in self.entries), None)

    def matrices(self, name: str) -> Iterator[torch.Tensor]:
        """The matrices of a tensor, one after the other: itself, or each one of a stack. FP8 comes dequantized, as FP32."""
        entry = self.entries[name]
        stacked = len(entry.shape) > 2
        scale = self._scale(entry) if entry.dtype in CODES else None
        for i in range(entry.shape[0]) if stacked else (None,):
            matrix = self._read(entry, i)
            if scale is not None:
                matrix = _dequantize(entry.name, matrix, scale[i] if stacked and scale.dim() == 3 else scale)
            yield matrix.float() if matrix.dtype == torch.float64 else matrix
            del matrix  # before the next one is read

    def close(self) -> None:
        """Let go of the file that was read last."""
        self._file = self._handle = None
        self._touched = 0

    def _scale(self, entry: Entry) -> torch.Tensor:
        name = self.scale_of(entry.name)
        if name is None:
            raise PrecisionError(
                f"{entry.name} is {entry.dtype} and has no scale.",
                f"FP8 codes mean something only with their scales, and neither {' nor '.join(entry.name + s for s in SCALES)} is there.",
                "Give the whole checkpoint, or the BF16 one that it was made from.",
            )
        scale = self._read(self.entries[name], None)
        return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale

    def _read(self, entry: Entry, index: int | None) -> torch.Tensor:
        with _readable(entry.file):
            if self._file != entry.file or self._touched > LET_GO:
                self.close()
                self._file, self._handle = entry.file, safe_open(str(entry.file), framework="pt")
            self._touched += entry.bytes // (1 if index is None else max(1, entry.shape[0]))
            found = self._handle.get_tensor(entry.name) if index is None else self._handle.get_slice(entry.name)[index]
        assert isinstance(found, torch.Tensor)
        return found


# ---------------------------------------------------------------------- FP8 that is there already


def _dequantize(name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values that codes and scales stand for. The tile follows from both shapes."""
    tile = _tile(codes.shape, scale.shape)
    if tile == (0, 0):
        raise PrecisionError(
            f"{name} of shape {tuple(codes.shape)} has scales of shape {tuple(scale.shape)}.",
            "They fit no tile that is known: the whole tensor, a row, 128x128, 1x128 or 1x32.",
            "Give the BF16 checkpoint that it was made from.",
        )
    scale = scale if scale.dtype == torch.float8_e8m0fnu else scale.float()
    if tile is None:
        return Quantized(codes, scale.reshape(())).dequantize()
    return Quantized(codes, scale.reshape(-(-codes.shape[0] // tile[0]), -1), tile).dequantize()


def _tile(codes: torch.Size, scale: torch.Size) -> tuple[int, int] | None:
    """The tile that shares a scale; None for the whole tensor, (0, 0) where no known one fits."""
    rows, columns = codes
    if math.prod(scale) == 1:
        return None
    if tuple(scale) in ((rows,), (rows, 1)):
        return (1, columns)
    known = ((128, 128), (1, 32), (1, 128))
    return next((t for t in known if tuple(scale) == (-(-rows // t[0]), -(-columns // t[1]))), (0, 0))


# ---------------------------------------------------------------------- files


def _files(path: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint, each with the tensors that an index expects in it (None without an index)."""
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else {path: None}
    if not path.is_dir():
        raise PrecisionError(f"There is no checkpoint at {path}.", "It is neither a file nor a folder.", "Check the path.")
    if (path / INDEX).is_file():
        return _indexed(path / INDEX)
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise PrecisionError(
            f"{path} holds no safetensors file.",
            "Only safetensors can be read tensor by tensor, and without running code that lies in the file.",
            "Give the folder of a Hugging Face model, or save with safetensors.torch.save_file.",
        )
    return dict.fromkeys(found)


def _indexed(index: Path) -> dict[Path, set[str] | None]:
    try:
        names = json.loads(index.read_text())["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in names.items()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PrecisionError(
            f"{index} cannot be read.", f"It should be JSON with a weight_map: {type(error).__name__}: {error}.", _SOUND
        ) from error
    files: dict[Path, set[str] | None] = {}
    for name, shard in pairs:
        # Names only: a link in the folder may lead elsewhere (Hugging Face's cache is made of them), the index may not.
        if "\\" in shard or PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise PrecisionError(
                f"{index.name} names a shard outside of its folder: {shard!r}.",
                "An index that leads elsewhere is damaged, or meant to have other files read.",
                "Do not trust this checkpoint; download it again from where it comes from.",
            )
        if not (index.parent / shard).is_file():
            raise PrecisionError(
                f"The shard {shard} is missing from {index.parent}.", f"{index.name} lists it.", "Download it, or the whole folder, again."
            )
        expected = files.setdefault(index.parent / shard, set())
        assert expected is not None
        expected.add(name)
    return files


def _entries(file: Path) -> list[Entry]:
    """The tensors that a file says it holds."""
    with _readable(file), safe_open(str(file), framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return [Entry(name, tuple(s.get_shape()), s.get_dtype(), file) for name, s in slices.items()]


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise PrecisionError(f"{file} is damaged, or is no safetensors file.", f"{type(error).__name__}: {error}.", _SOUND) from error
