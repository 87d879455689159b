"""Read safetensors as a stream: one file or a folder of shards, one matrix in memory at a time.

    for matrix in Checkpoint.open("llama-3-8b").matrices("model.layers.0.mlp.down_proj.weight"): ...

The safetensors library checks a file's header (sizes, overlaps, gaps, the file's length). The bytes are then read at
the place that the header gives. They are not mapped, since pages of a mapped file count as the process's memory until
the file is closed. A stack of experts is read matrix by matrix. Weights that are FP8 already are dequantized: code
times the scale in the checkpoint, which may be that of a tensor, a row, or a block. So are NVFP4 weights of ModelOpt's,
which are bytes of two codes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.nvfp4_tensor import BLOCK, QuantizedNVFP4
from nemo_fp8.numerics.quantized import Quantized

INDEX = "model.safetensors.index.json"
# safetensors' names of dtypes -> torch's. Tensors of VALUES can be quantized, those of CODES dequantized first.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
VALUES = ("BF16", "F16", "F32", "F64")
CODES = ("F8_E4M3", "F8_E5M2")
SCALES = ("_scale_inv", "_scale")
SCALE_2 = "_scale_2"  # of NVFP4: the FP32 scale beneath the block scales
_SOUND = "Copy or download the file again; its size and checksum are on the page it came from."


@dataclass(frozen=True)
class Described:
    """Dtype, shape and size in bytes of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """The dtype by safetensors' name."""
    bytes: int

    @classmethod
    def of(cls, shape: Sequence[int], dtype: str) -> Described:
        """Describe a tensor of this shape and dtype."""
        return cls(tuple(shape), dtype, math.prod(shape) * DTYPES[dtype].itemsize)


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    """The offset of its first byte in the file."""
    bytes: int

    @property
    def elements(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class Checkpoint:
    """The tensors of a checkpoint by name, in the order of the files. A tensor is read only by a method for it."""

    def __init__(self, path: Path, entries: dict[str, Entry], unlisted: Sequence[str] = ()) -> None:
        self.path, self.entries = path, entries
        self.unlisted = unlisted
        """What lies in the files and is not in the index; it belongs to the checkpoint no more."""
        self._file: BinaryIO | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a safetensors file, a folder of them, or a folder with an index; only headers are read.

        Raises PrecisionError if files are missing or damaged, a tensor is in two of them, or it cannot be told what a
        weight's scales are.
        """
        path = Path(path)
        entries: dict[str, Entry] = {}
        passed: dict[str, Path] = {}
        for file, names in _files(path).items():
            for entry in _entries(file):
                if names is not None and entry.name not in names:
                    passed.setdefault(entry.name, file)
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
                    f"{file.name} does not hold "
                    f"{missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}.",
                    f"{INDEX} says that it does; the shards and the index are of different checkpoints.",
                    "Download the folder again, or remove the index to read whatever the shards hold.",
                )
        for name in entries.keys() & passed.keys():
            raise PrecisionError(
                f"{name} is in {entries[name].file.name}, where {INDEX} has it, and in {passed[name].name}.",
                "Engines load every tensor of both files, and keep the one that comes last.",
                "Save the model anew, each tensor in one file, as save_pretrained() of transformers does.",
            )
        _require_one_reading(entries)
        return cls(path, entries, [*passed])

    def scale_of(self, name: str) -> str | None:
        """Return the name of the scale of an FP8 weight; None if there is none."""
        stem = name.removesuffix("_packed")
        return next((stem + ending for ending in SCALES if stem + ending in self.entries), None)

    def is_nvfp4(self, name: str) -> bool:
        """Return whether a tensor is bytes of two E2M1 codes, in ModelOpt's layout."""
        return self.entries[name].dtype == "U8" and name + SCALE_2 in self.entries

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor's values, of which a byte of NVFP4 holds two."""
        *rows, columns = self.entries[name].shape or (1,)
        return (*rows, 2 * columns) if self.is_nvfp4(name) else self.entries[name].shape

    def matrices(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor, or each matrix of a stack; FP8 and NVFP4 are dequantized to FP32.

        Raises PrecisionError if FP8 codes have no scale, one of an unknown shape, or one that is zero or negative.
        """
        entry = self.entries[name]
        if self.is_nvfp4(name):
            yield from self._four_bits(name)
            return
        stacked = len(entry.shape) > 2
        scale = self._scale(entry) if entry.dtype in CODES else None
        for i in range(entry.shape[0]) if stacked else (None,):
            matrix = self._read(entry, i)
            if scale is not None:
                of_each = stacked and scale.dim() > 0 and len(scale) == entry.shape[0]
                matrix = _dequantize(entry.name, matrix, scale[i] if of_each else scale)
            yield matrix.float() if matrix.dtype == torch.float64 else matrix
            del matrix  # before the next one is read

    def _four_bits(self, name: str) -> Iterator[torch.Tensor]:
        codes, scales = self.entries[name], self.entries.get(name + "_scale")
        if scales is None:
            raise PrecisionError(
                f"{name} is NVFP4 and has no block scales.",
                f"Its codes mean something only with them, and {name}_scale is not there.",
                "Give the whole checkpoint, or the BF16 one that it was made from.",
            )
        scale_2 = self._read(self.entries[name + SCALE_2], None).reshape(-1)
        experts = codes.shape[0] if len(codes.shape) == 3 else 1
        fitting = (*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK)
        if (scales.shape, scales.dtype) != (fitting, "F8_E4M3") or len(scale_2) not in (1, experts):
            raise PrecisionError(
                f"{name} of shape {codes.shape} has {scales.dtype} block scales of shape {scales.shape}, and "
                f"{len(scale_2)} beneath them.",
                f"NVFP4 has one in E4M3 for 16 codes, which are 8 bytes, {fitting} of them, neither padded nor "
                "swizzled, and one beneath them for each matrix, or for all of a stack.",
                "Give the BF16 checkpoint that it was made from.",
            )
        stack: list[int | None] = [*range(experts)] if len(codes.shape) == 3 else [None]
        for i, beneath in zip(stack, scale_2.expand(experts), strict=True):
            two_a_byte, of_blocks = self._read(codes, i), self._read(scales, i)
            # A block far below the matrix's largest value has a scale of zero and codes that are none; not all have.
            of_each = of_blocks.float()
            lost = (of_each < 0) | (beneath <= 0) | (of_each <= 0).all()
            _require_whole(name, lost & (two_a_byte & 0x77).view(*lost.shape, BLOCK // 2).any(-1))
            yield QuantizedNVFP4.from_modelopt(two_a_byte, of_blocks, beneath).dequantize()

    def stored(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor, or each matrix of a stack, as it is stored: FP8 as codes, without their scales.

        Raises PrecisionError if nothing is known of its type, or the file is damaged.
        """
        entry = self.entries[name]
        for i in range(entry.shape[0]) if len(entry.shape) == 3 else (None,):
            yield self._read(entry, i)

    def chunks(self, name: str, size: int = 16 * 2**20) -> Iterator[memoryview]:
        """Yield the bytes of a tensor as they are stored. Each chunk is overwritten by the next one.

        Raises PrecisionError if the file is damaged.
        """
        entry, buffer = self.entries[name], bytearray(min(size, self.entries[name].bytes))
        for at in range(0, entry.bytes, size):
            part = memoryview(buffer)[: min(size, entry.bytes - at)]
            self._read_into(part, entry, at)
            yield part

    def close(self) -> None:
        """Close the file that was read last."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _scale(self, entry: Entry) -> torch.Tensor:
        name = self.scale_of(entry.name)
        if name is None:
            raise PrecisionError(
                f"{entry.name} is {entry.dtype} and has no scale.",
                "FP8 codes mean something only with their scales, and neither "
                f"{' nor '.join(entry.name + s for s in SCALES)} is there.",
                "Give the whole checkpoint, or the BF16 one that it was made from.",
            )
        scale = self._read(self.entries[name], None)
        if scale.dim() == 4:  # ModelOpt's [n, 1, k, 1]
            scale = scale[:, 0, :, 0]
        return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale

    def _read(self, entry: Entry, index: int | None) -> torch.Tensor:
        """Read a whole tensor, or one matrix of a stack."""
        if entry.dtype not in DTYPES:
            raise PrecisionError(
                f"{entry.name} has elements of type {entry.dtype}.",
                f"Nothing is known of that type; those that are known are {', '.join(DTYPES)}.",
                "Give the BF16 checkpoint that it was made from.",
            )
        shape = entry.shape if index is None else entry.shape[1:]
        size = entry.bytes if index is None else entry.bytes // entry.shape[0]
        found = torch.empty(size, dtype=torch.uint8)
        if size:
            self._read_into(found.numpy().data, entry, size * (index or 0))
        return found.view(DTYPES[entry.dtype]).view(shape)

    def _read_into(self, part: memoryview, entry: Entry, at: int) -> None:
        with _readable(entry.file):
            if self._file is None or self._file.name != str(entry.file):
                self.close()
                self._file = entry.file.open("rb", buffering=0)
            self._file.seek(entry.start + at)
            read = 0
            while read < len(part):
                count = self._file.readinto(part[read:])  # type: ignore[attr-defined]
                if not count:
                    raise OSError(f"it ends in the middle of {entry.name}")
                read += count


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


# ---------------------------------------------------------------------- dequantization


def _dequantize(name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of codes and scales; the tile follows from both shapes."""
    tile = _tile(codes.shape, scale.shape)
    if tile == (0, 0):
        raise PrecisionError(
            f"{name} of shape {tuple(codes.shape)} has scales of shape {tuple(scale.shape)}.",
            "They fit no tile that is known: the whole tensor, a row, 128x128, 1x128 or 1x32.",
            "Give the BF16 checkpoint that it was made from.",
        )
    scale = scale if scale.dtype == torch.float8_e8m0fnu else scale.float()
    scale = scale.reshape(() if tile is None else (-(-codes.shape[0] // tile[0]), -1))
    lost = scale.float() <= 0
    if lost.any() and Quantized(codes, lost.float(), tile).dequantize().any():  # zeros may have any scale
        _require_whole(name, lost)
    return Quantized(codes, scale, tile).dequantize()


def _require_whole(name: str, lost: torch.Tensor) -> None:
    """Raise PrecisionError if any scale is lost."""
    if lost.any():
        raise PrecisionError(
            f"{int(lost.sum())} of the {lost.numel()} scales of {name} are zero or negative.",
            "Their codes are not zero, and a code times zero is: the weight is lost, as where scales were never "
            "written.",
            "Give a checkpoint whose scales are whole, or the BF16 one that it was made from.",
        )


def _tile(codes: torch.Size, scale: torch.Size) -> tuple[int, int] | None:
    """Return the tile that shares a scale; None for the whole tensor, (0, 0) if no known tile fits."""
    rows, columns = codes
    if math.prod(scale) == 1:
        return None
    if tuple(scale) in ((rows,), (rows, 1)):
        return (1, columns)
    known = ((128, 128), (1, 32), (1, 128))
    return next((t for t in known if tuple(scale) == (-(-rows // t[0]), -(-columns // t[1]))), (0, 0))


def _require_one_reading(entries: Mapping[str, Entry]) -> None:
    """Raise PrecisionError for a weight with two scales, or with one although it is no code."""
    for name, entry in entries.items():
        scales = [name + ending for ending in SCALES if name + ending in entries]
        if len(scales) > 1:
            raise PrecisionError(
                f"{name} has two scales, {' and '.join(scales)}.",
                "Which of them its codes are to be multiplied with, no file says.",
                "Give a checkpoint with one of them, or the BF16 one that it was made from.",
            )
        if scales and entry.dtype in VALUES and len(entry.shape) > 1:
            raise PrecisionError(
                f"{name} is {entry.dtype} and has a scale, {scales[0]}.",
                "Codes that were read as numbers look like that, and so does a weight whose scale was left behind; no "
                "file says which it is.",
                "Give the checkpoint with FP8 codes, or the one in BF16 that has no scales.",
            )


# ---------------------------------------------------------------------- files


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint, each with the tensors that an index expects in it (None without an index)."""
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else {path: None}
    if not path.is_dir():
        raise PrecisionError(
            f"There is no checkpoint at {path}.", "It is neither a file nor a folder.", "Check the path."
        )
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
        names = json.loads(index.read_text(), object_pairs_hook=_each_once)["weight_map"]
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
                f"The shard {shard} is missing from {index.parent}.",
                f"{index.name} lists it.",
                "Download it, or the whole folder, again.",
            )
        expected = files.setdefault(index.parent / shard, set())
        assert expected is not None
        expected.add(name)
    return files


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping; raise ValueError if a key is in it twice, of which JSON's readers keep the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is in it twice")
        found[key] = value
    return found


def _entries(file: Path) -> list[Entry]:
    """Return the tensors in a file's header."""
    with _readable(file):
        with safe_open(str(file), framework="pt"):
            pass  # opening checks that the tensors fill the file without gaps and overlaps
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    spans = {name: about["data_offsets"] for name, about in header.items()}
    return [
        Entry(
            name,
            tuple(about["shape"]),
            about["dtype"],
            file,
            8 + length + spans[name][0],
            spans[name][1] - spans[name][0],
        )
        for name, about in header.items()
    ]


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise PrecisionError(
            f"{file} is damaged, or is no safetensors file.", f"{type(error).__name__}: {error}.", _SOUND
        ) from error
