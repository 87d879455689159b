"""Read a NeMo checkpoint in Hugging Face's form: names, shapes, config and tokenizer, and one tensor at a time.

    source = NemoCheckpoint.open("step=99-last")          # a folder with weights/ and context/, of any layout of ranks
    for name in source.tensors: (matrix,) = source.matrices(name)

It is a source for ``nemo_fp8.export``. Weights come from ``torch_dist`` (:mod:`nemo_fp8.storage.torch_dist`), so the
model is never built, and memory holds one of Megatron's tensors. The model is described in ``context/model.yaml``, as
plain YAML; nothing of the context is unpickled or imported. FP8 primary weights lie in a checkpoint as their BF16
values, and are exported as those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from nemo_fp8.errors import PrecisionError
from nemo_fp8.storage.safetensors import DTYPES, Described, bytes_of
from nemo_fp8.storage.torch_dist import TorchDist, layers_of
from nemo_fp8.train import byte_tokenizer
from nemo_fp8.train.hf_names import Names, Part, in_order

MODEL_YAML = "model.yaml"
SHARD = 5 * 10**9
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
# Where NeMo puts the files of a Hugging Face tokenizer.
_TOKENIZERS = ("nemo_tokenizer", "tokenizer")
_ANOTHER = "Give another checkpoint of the run."


class NemoCheckpoint:
    """A NeMo checkpoint under Hugging Face's names."""

    def __init__(
        self,
        folder: Path,
        stored: TorchDist,
        names: Names,
        config: Mapping[str, Any],
        tokenizer: Mapping[str, bytes | Path],
    ) -> None:
        self.name, self.folder, self.names = str(folder), folder, names
        self._stored, self._tokenizer = stored, tokenizer
        self._at = dict(_in_order(stored))
        self._parts: dict[str, Part] = {}
        self.tensors: Mapping[str, Described] = self._describe()
        if names.vocabulary is None:  # the padding is not known, and stays
            self.names = replace(names, vocabulary=self.tensors["model.embed_tokens.weight"].shape[0])
        self._last: tuple[str, torch.Tensor] | None = None
        self._model = config

    @classmethod
    def open(cls, path: str | Path) -> NemoCheckpoint:
        """Open the checkpoint at a path: the folder that holds ``weights`` and ``context``, or its ``weights``.

        Raises PrecisionError if there is none, or one that is half-written.
        """
        path = Path(path)
        folder = path.parent if path.name == "weights" else path
        description = folder / "context" / MODEL_YAML
        if not (folder / "weights").is_dir() or not description.is_file():
            raise PrecisionError(
                f"{path} is no NeMo checkpoint.",
                "One is a folder with weights/ (torch_dist) and context/model.yaml in it.",
                "Give the folder of one step, such as checkpoints/model_name--step=99-last.",
            )
        if folder.with_name(folder.name + "-unfinished").exists():
            raise PrecisionError(
                f"{folder} is half-written.",
                "NeMo puts the file NAME-unfinished beside a checkpoint while it writes it, and that file is there.",
                "Give an earlier checkpoint of the run.",
            )
        model = _plain_yaml(description)
        config = model.get("config") or {}
        files, size = _tokenizer_of(folder / "context", model.get("tokenizer") or {})
        names = Names.of(str(model.get("_target_", "")).rpartition(".")[2], config, config.get("vocab_size") or size)
        return cls(folder, TorchDist.open(folder / "weights", "module."), names, config, files)

    # ------------------------------------------------------------------ a source for the exporter

    @property
    def shards(self) -> Mapping[str, Sequence[str]]:
        """The files to write, as name -> tensors, of at most 5 GB each, unless one tensor is larger."""
        groups: list[list[str]] = [[]]
        size = 0
        for name, about in self.tensors.items():
            if groups[-1] and size + about.bytes > SHARD:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += about.bytes
        if len(groups) == 1:
            return {"model.safetensors": groups[0]}
        return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of the model."""
        dtype = self.tensors["model.embed_tokens.weight"].dtype
        tokens = {"bos_token_id": byte_tokenizer.BOS, "eos_token_id": byte_tokenizer.EOS} if self._is_bytes else {}
        return self.names.config(self._model, str(DTYPES[dtype]).removeprefix("torch."), tokens)

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about the checkpoint for the person who exports it."""
        if self._tokenizer:
            return ()
        return (
            "The checkpoint holds no tokenizer's files; copy tokenizer.json and tokenizer_config.json into the folder "
            "to generate text.",
        )

    def matrices(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the tensor itself: a NeMo checkpoint holds no stacks."""
        part = self._parts[name]
        if self._last is None or self._last[0] != part.megatron:
            self._last = None  # before the next one is read
            key, at = self._at[part.megatron]
            self._last = part.megatron, self._stored.read(key, at)
        yield self.names.take(part, self._last[1])

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor."""
        for matrix in self.matrices(name):
            yield bytes_of(matrix)

    def files(self) -> Iterator[tuple[str, bytes | Path]]:
        """Yield the tokenizer's files, as (name, content or path)."""
        yield from self._tokenizer.items()

    def identity(self) -> dict[str, Any]:
        """Return values that differ between checkpoints, so that an interrupted export continues with the same one."""
        weights = [path for path in sorted((self.folder / "weights").iterdir()) if path.is_file()]
        return {
            path.name: [(about := path.stat()).st_size, about.st_mtime_ns]
            for path in [*weights, self.folder / "context" / MODEL_YAML]
        }

    # ------------------------------------------------------------------ inside

    @property
    def _is_bytes(self) -> bool:
        return self._tokenizer.get("tokenizer.json") == byte_tokenizer.files()["tokenizer.json"]

    def _describe(self) -> dict[str, Described]:
        found = {}
        for megatron, (key, at) in self._at.items():
            stored = self._stored.tensors[key]
            for part in self.names.parts(megatron):
                self._parts[part.name] = part
                found[part.name] = Described.of(self.names.shape(part, stored.shape[len(at) :]), _WORDS[stored.dtype])
        return found


def _in_order(stored: TorchDist) -> list[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Return Megatron's names with where they are stored: the embedding, then layer by layer, then the rest."""
    found = []
    for key, tensor in stored.tensors.items():
        found += [(name, (key, at)) for name, at in layers_of({key: tensor})]

    return sorted(found, key=lambda item: in_order(item[0]))


def _plain_yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PrecisionError(f"{path} cannot be read.", f"{type(error).__name__}: {error}.", _ANOTHER) from error
    if not isinstance(found, dict):
        raise PrecisionError(f"{path} holds no mapping.", "A model's description is one.", _ANOTHER)
    return found


def _tokenizer_of(context: Path, described: Mapping[str, Any]) -> tuple[dict[str, bytes | Path], int | None]:
    """Return the tokenizer's files and its number of tokens; no files and None if only NeMo could build it."""
    if described.get("_target_") in byte_tokenizer.TARGETS:
        return dict(byte_tokenizer.files()), byte_tokenizer.SIZE
    for name in _TOKENIZERS:
        folder = context / name
        paths = [path for path in sorted(folder.glob("*")) if path.is_file() and not path.is_symlink()]
        if paths:
            return {path.name: path for path in paths}, _tokens(folder / "tokenizer.json")
    return {}, None


def _tokens(path: Path) -> int | None:
    """Count the tokens of a tokenizer.json, added ones included."""
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    vocabulary = found.get("model", {}).get("vocab", {})
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    return max([*ids, *(token["id"] for token in found.get("added_tokens", ()))], default=-1) + 1 or None
