"""The source of an export: names, shapes and bytes of tensors, and the files that belong to the model.

:class:`Source` is the interface that the exporter needs. A Hugging Face checkpoint has it here, NeMo's in
``nemo_fp8.train``. A checkpoint that is quantized already is a source, too: its weights are dequantized and rounded to
BF16, and its scales are left out.

A downloaded folder is not trusted. An index or a link that leads out of the folder is refused, since the link's target
would be copied into the export and published with it. Links to the ``blobs`` of Hugging Face's cache are the exception,
as its folders consist of them. Pickled weights are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.export.codings import in_compute
from nemo_fp8.storage.safetensors import CODES, INDEX, SCALE_2, SCALES, VALUES, Checkpoint, Described, bytes_of

RECEIPT = "nemo_fp8_export.json"
# Weights in other formats, which would be a second model in the same folder.
_OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".tflite",
    ".distcp",
    ".nemo",
)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_FOLDERS = ("additional_chat_templates",)
# Settings in a config.json that describe the quantization of the source, and are left out of the export.
_QUANTIZATION = ("quantization_config", "compression_config")


class Source(Protocol):
    """What the exporter needs of a source of weights."""

    @property
    def name(self) -> str:
        """The name of the source in messages."""

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every tensor, in the best order for reading."""

    @property
    def shards(self) -> Mapping[str, Sequence[str]]:
        """The files to write, with the names of their tensors; each tensor is in one file."""

    @property
    def config(self) -> dict[str, Any] | None:
        """The model's config.json without settings of quantization; None if there is none."""

    @property
    def notes(self) -> Sequence[str]:
        """Remarks about the source for the user."""

    def matrices(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor, or each matrix of a stack; raise PrecisionError for codes whose values are not finite."""

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in parts."""

    def files(self) -> Iterator[tuple[str, bytes | Path]]:
        """Yield names and contents of the other files of the model, such as its tokenizer and license.

        Raises PrecisionError for a link that leads out of the model's folder.
        """

    def identity(self) -> dict[str, Any]:
        """Return plain values that change when the source changes; they are compared again during the export."""


class HuggingFace:
    """A Hugging Face checkpoint: a safetensors file, or a folder of shards."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        self._entries = checkpoint.entries
        self._files = list(dict.fromkeys(entry.file for entry in self._entries.values()))
        self._config = _read_config(folder)
        packed = {name for name in self._entries if checkpoint.is_nvfp4(name)}
        scales = {name + ending for name in packed for ending in SCALES}
        self._codes = {name for name, entry in self._entries.items() if entry.dtype in CODES} - scales | packed
        self.name = str(checkpoint.path)
        consumed = self._consumed()
        self.tensors: Mapping[str, Described] = {
            name: Described.of(checkpoint.shape_of(name), "BF16")
            if name in self._codes
            else Described(entry.shape, entry.dtype, entry.bytes)
            for name, entry in self._entries.items()
            if name not in consumed
        }

    @classmethod
    def open(cls, path: str | Path) -> HuggingFace:
        """Open a safetensors file, a folder of them, or a folder with an index.

        Raises PrecisionError if weights are pickled, or a file is damaged or lies outside of the folder.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        if path.suffix in _PICKLED or (path.is_dir() and not [*path.glob("*.safetensors")] and _pickled(path)):
            raise _no_pickles(path)
        checkpoint = Checkpoint.open(path)
        found = cls(checkpoint, folder)
        if path.is_dir():
            _stay_inside(folder, found._files)
        return found

    @property
    def shards(self) -> Mapping[str, Sequence[str]]:
        if len(self._files) == 1:
            return {"model.safetensors": [*self.tensors]}
        by_file: dict[str, list[str]] = {}
        for name in self.tensors:
            by_file.setdefault(self._entries[name].file.relative_to(self._folder).as_posix(), []).append(name)
        return by_file

    @property
    def config(self) -> dict[str, Any] | None:
        return None if self._config is None else {k: v for k, v in self._config.items() if k not in _QUANTIZATION}

    @property
    def notes(self) -> Sequence[str]:
        notes = []
        if self._codes:
            notes.append(
                f"{len(self._codes)} weights of the source are quantized already; they were dequantized to BF16 first."
            )
        if self._config is None:
            notes.append(
                "There is no config.json beside the weights; what it should say of quantization lies in "
                "nemo_fp8_export.json."
            )
        if others := self._checkpoint.unlisted:
            notes.append(
                f"{len(others)} tensors in its files are left out, {others[0]} among them: {INDEX} does not list them."
            )
        return notes

    @property
    def bf16_folder(self) -> Path | None:
        """The folder, if an engine can load it as it is."""
        return self._folder if self._config is not None and not self._codes and self._checkpoint.path.is_dir() else None

    def matrices(self, name: str) -> Iterator[torch.Tensor]:
        for matrix in self._checkpoint.matrices(name):
            yield in_compute(matrix, "bf16", name) if name in self._codes else matrix

    def chunks(self, name: str) -> Iterator[memoryview]:
        if name not in self._codes:
            yield from self._checkpoint.chunks(name)
            return
        for matrix in self.matrices(name):
            yield bytes_of(matrix)

    def files(self) -> Iterator[tuple[str, bytes | Path]]:
        found = [path for path in sorted(self._folder.iterdir()) if self._belongs(path)]
        for folder in _FOLDERS:
            found += sorted(path for path in (self._folder / folder).glob("*") if path.is_file())
        _stay_inside(self._folder, found)
        for path in found:
            yield path.relative_to(self._folder).as_posix(), path

    def identity(self) -> dict[str, Any]:
        files = [*self._files, *([self._folder / "config.json"] if self._config is not None else [])]
        return {
            path.relative_to(self._folder).as_posix(): [(about := path.stat()).st_size, about.st_mtime_ns]
            for path in files
        }

    def _consumed(self) -> set[str]:
        """Return the names of the scales of weights that are FP8 already, which are no tensors of the source."""
        stems = {name.removesuffix("_packed") for name in self._codes}
        modules = {name.removesuffix(".weight") for name in stems}
        found = {stem + ending for stem in stems for ending in (*SCALES, SCALE_2)}
        return found | {
            f"{module}.{activation}" for module in modules for activation in ("input_scale", "activation_scale")
        }

    def _belongs(self, path: Path) -> bool:
        weights = path.suffix in _OTHER_WEIGHTS or path.name.endswith(".index.json")
        return (
            path.is_file()
            and not weights
            and not path.name.startswith(".")
            and path.name not in ("config.json", "hf_quant_config.json", RECEIPT)
        )


def require_quantizable(source: Source, names: Sequence[str]) -> None:
    """Raise PrecisionError for weights whose elements are no floats, such as packed integers."""
    wrong = [name for name in names if source.tensors[name].dtype not in VALUES]
    if wrong:
        raise PrecisionError(
            Problem(
                f"{name} has elements of type {source.tensors[name].dtype}.",
                f"FP8 is made from {', '.join(VALUES)}; this weight is packed in another way.",
                "Give the BF16 checkpoint that it was made from.",
            )
            for name in wrong[:5]
        )


# ---------------------------------------------------------------------- checks of what is not trusted


def _read_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    _stay_inside(folder, [path])
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PrecisionError(
            f"{path} cannot be read.", f"{type(error).__name__}: {error}.", "Copy or download the folder again."
        ) from error
    if not isinstance(config, dict):
        raise PrecisionError(
            f"{path} holds no mapping.", "A model's config is one.", "Copy or download the folder again."
        )
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in (None, "fp8", "compressed-tensors", "modelopt"):
        raise PrecisionError(
            f"The source is quantized already, with {method!r}.",
            "What can be dequantized here is FP8, or ModelOpt's NVFP4, with scales beside the codes.",
            "Give the BF16 checkpoint that it was made from.",
        )
    return config


def _stay_inside(folder: Path, paths: Sequence[Path]) -> None:
    """Raise PrecisionError for links that lead out of the folder, other than those of Hugging Face's cache."""
    root = folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in paths:
        target = path.resolve()
        if not any(target.is_relative_to(allowed) for allowed in roots):
            raise PrecisionError(
                f"{path.name} in {folder} is a link to {target}, outside of the folder.",
                "What it leads to would be copied into the export, and be published with it.",
                "Copy the file into the folder if it belongs there, or give the folder where it lies; else do not "
                "trust this checkpoint.",
            )


def _pickled(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in _PICKLED]


def _no_pickles(path: Path) -> PrecisionError:
    return PrecisionError(
        f"{path} holds pickled weights.",
        "A pickle runs whatever code lies in it when it is loaded, and cannot be read tensor by tensor.",
        "Download the safetensors of the same model; or, if you trust the file, load it in transformers and "
        "model.save_pretrained(folder, safe_serialization=True).",
    )
