"""Find the checkpoints that a run can resume from, say what is wrong with the others, and resume from the newest.

While NeMo writes a checkpoint, a file ``NAME-unfinished`` lies beside it. Megatron writes ``common.pt`` first, then the
shards ``*.distcp``, then ``.metadata``, which says where in which shard every tensor lies, and ``metadata.json`` last.
So

    complete  =  no marker,  all three index files can be read,  every shard is as long as .metadata says

This reads no data of a shard. Each tensor is a zip record with a CRC, which torch writes but does not compare when it
loads, so a byte that changed on the disk goes unnoticed. ``contents=True`` compares the CRCs, and reads the whole
checkpoint for it.

The newest checkpoint is the one of the highest step, not of the latest date: copies have the date of the copy.
"""

from __future__ import annotations

import io
import json
import logging
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("train")

import torch
from nemo.lightning.ckpt_utils import WEIGHTS_PATH
from nemo.lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from nemo.lightning.resume import AutoResume
from nemo.utils.app_state import AppState
from nemo.utils.msc_utils import is_multistorageclient_url
from torch.distributed.checkpoint.filesystem import FileSystemReader

from nemo_fp8.errors import PrecisionError, Problem

logger = logging.getLogger("nemo_fp8")

COMMON, INDEX, CONFIG = "common.pt", ".metadata", "metadata.json"
TORCH_DIST = "torch_dist"


@dataclass(frozen=True)
class Checkpoint:
    """A NeMo checkpoint, given as its folder or as the ``weights`` in it."""

    folder: Path

    @classmethod
    def at(cls, path: str | Path) -> Checkpoint:
        """Return the checkpoint at a path, which may also name its ``weights`` folder."""
        path = Path(path)
        return cls(path.parent if path.name == WEIGHTS_PATH else path)

    @property
    def weights(self) -> Path:
        """The folder with the shards and their index."""
        inside = self.folder / WEIGHTS_PATH
        return inside if inside.is_dir() else self.folder

    @property
    def unfinished(self) -> bool:
        """Whether NeMo's marker says that the run ended while it wrote or deleted the checkpoint."""
        return bool(ModelCheckpoint.is_checkpoint_unfinished(self.folder))

    def step(self) -> float:
        """Return the number of optimizer steps before it; infinity if neither its name nor its content tells."""
        try:
            return float(torch.load(self.weights / COMMON, map_location="cpu", weights_only=False)["global_step"])
        except Exception:  # whatever a damaged pickle may raise: problems() says what
            named = re.search(r"step=(\d+)", self.folder.name)
            return int(named[1]) + 1 if named else inf  # NeMo counts from 0 in names

    def objects(self, pattern: str) -> list[Any]:
        """Read the objects (no tensors of parameters) under the first name that ``pattern`` matches.

        The list is empty if ``torch_dist`` has no such name or cannot be read; :meth:`problems` says why.
        """
        index, _ = _read(self.weights / INDEX, lambda path: FileSystemReader(path.parent).read_metadata())
        places = (
            {item.fqn: place for item, place in index.storage_data.items() if re.search(pattern, item.fqn)}
            if index
            else {}
        )
        if not places:
            return []
        place = places[min(places)]

        def read(path: Path) -> Any:
            with path.open("rb") as file:
                file.seek(place.offset)
                return torch.load(io.BytesIO(file.read(place.length)), weights_only=True)

        found, _ = _read(self.weights / place.relative_path, read)
        return found if isinstance(found, list) else []

    def problems(self, *, contents: bool = False) -> list[Problem]:
        """Return everything that is wrong with it; ``contents`` also reads and compares every byte."""
        return list(self._problems(contents))

    def _problems(self, contents: bool) -> Iterator[Problem]:
        if not self.folder.is_dir():
            yield _damaged(self.folder, "there is no such folder", "It was never written, or it was moved or deleted.")
        elif self.unfinished:
            marker = ModelCheckpoint.format_checkpoint_unfinished_marker_path(self.folder)
            yield _damaged(
                marker,
                "this marker says that the checkpoint is half-written",
                "NeMo removes it when a save has come to its end.",
            )
        elif not (self.weights / CONFIG).exists():
            why = "Megatron writes this file last, so the save did not come to its end, or a copy lacks it."
            yield _damaged(self.weights / CONFIG, "the file is missing", why)
        else:
            found, problem = _read(self.weights / CONFIG, lambda path: json.loads(path.read_text())["sharded_backend"])
            if problem:
                yield problem
            elif found == TORCH_DIST:
                yield from _torch_dist(self.weights, contents)


def _torch_dist(weights: Path, contents: bool) -> Iterator[Problem]:
    _, problem = _read(weights / COMMON, _check_zip)
    if problem:
        yield problem
    index, problem = _read(weights / INDEX, lambda path: FileSystemReader(path.parent).read_metadata())
    if problem:
        yield problem
        return
    shards: dict[str, list[tuple[str, Any]]] = {}
    for item, place in index.storage_data.items():
        shards.setdefault(place.relative_path, []).append((item.fqn, place))
    for name, items in sorted(shards.items()):
        path = weights / name
        needed = max(place.offset + place.length for _, place in items)
        if not path.exists():
            yield _damaged(path, "the file is missing", f"{INDEX} says that {len(items)} tensors lie in it.")
        elif (size := path.stat().st_size) < needed:
            yield _damaged(
                path, f"the file has {size:,} of {needed:,} bytes", f"It was cut short: {INDEX} says how long it was."
            )
        elif contents:
            yield from _changed(path, items)


def _changed(path: Path, items: Iterable[tuple[str, Any]]) -> Iterator[Problem]:
    """Yield a problem for every tensor whose bytes do not match their checksum."""
    with path.open("rb") as file:
        for name, place in items:
            file.seek(place.offset)
            try:
                _check_zip(io.BytesIO(file.read(place.length)))
            except (zipfile.BadZipFile, OSError) as error:
                where = f"the bytes of {name} at {place.offset:,} are not those that were written"
                yield _damaged(path, where, f"Their checksum differs ({error}): the disk or a copy changed them.")


def _check_zip(file: Any) -> None:
    with zipfile.ZipFile(file) as archive:
        record = archive.testzip()
    if record:
        raise zipfile.BadZipFile(f"bad CRC-32 in {record}")


def _read(path: Path, read: Any) -> tuple[Any, Problem | None]:
    """Return what ``read`` makes of a file, and None; or None and the problem with the file."""
    if not path.exists():
        return None, _damaged(path, "the file is missing", "The checkpoint cannot be read without it.")
    try:
        return read(path), None
    except Exception as error:  # a damaged pickle may raise anything
        return None, _damaged(
            path, f"the file of {path.stat().st_size:,} bytes cannot be read", f"{type(error).__name__}: {error}"
        )


def _damaged(path: Path, what: str, why: str) -> Problem:
    return Problem(
        f"{path}: {what}.", why, "Resume from another checkpoint; delete this one or write it again from its source."
    )


# ---------------------------------------------------------------------- many of them


def checkpoints_in(folder: str | Path) -> list[Checkpoint]:
    """Return all checkpoints in a folder, complete or not, the highest step first."""
    found = [
        Checkpoint(path)
        for path in Path(folder).glob("*")
        if (path / WEIGHTS_PATH).is_dir() or (path / CONFIG).exists()
    ]
    # Of two of the same step NeMo's "last" is the one that was written last.
    return sorted(found, key=lambda c: (c.step(), c.folder.name.endswith("last"), c.folder.name), reverse=True)


def newest_usable(folder: str | Path, *, contents: bool = False) -> Checkpoint | None:
    """Return the complete checkpoint of the highest step in a folder; None if there is none."""
    return next((c for c in checkpoints_in(folder) if not c.problems(contents=contents)), None)


def require_usable(path: str | Path, *, contents: bool = False) -> None:
    """Raise PrecisionError if a run cannot resume from this checkpoint: why, and which one beside it is usable."""
    checkpoint = Checkpoint.at(path)
    problems = checkpoint.problems(contents=contents)
    if problems:
        raise _refusal(problems, newest_usable(checkpoint.folder.parent, contents=contents))


def _refusal(problems: Iterable[Problem], usable: Checkpoint | None) -> PrecisionError:
    remedy = (
        f"Resume from {usable.folder} (after step {usable.step():.0f}), which is complete."
        if usable
        else "There is no complete checkpoint beside it: start anew, or bring one back from a copy."
    )
    return PrecisionError(Problem(problem.what, problem.why, remedy) for problem in problems)


# ---------------------------------------------------------------------- resuming


@dataclass(kw_only=True)
class Resume(AutoResume):
    """NeMo's ``AutoResume``, which checks a checkpoint before it loads it.

    A checkpoint that a killed save left incomplete is skipped, with a line in the log, for the newest complete one.
    A checkpoint that claims to be complete and is damaged raises PrecisionError, since the disk may be losing data.
    """

    fall_back: bool = False
    """Pass over damaged checkpoints as well, with a warning, and lose the steps since the newest complete one."""
    contents: bool = False
    """Compare every byte with its checksum. Each rank reads the whole checkpoint."""

    def get_trainer_ckpt_path(self, model: Any = None) -> Path | None:
        """Return the checkpoint to resume from; None to start anew. Raises PrecisionError if it is damaged."""
        if self.resume_from_path and not is_multistorageclient_url(self.resume_from_path):
            require_usable(self.resume_from_path, contents=self.contents)
        found: Path | None = super().get_trainer_ckpt_path(model)
        return found

    def _find_trainer_ckpt_path(self) -> Path | None:
        folder = self._folder()
        found = checkpoints_in(folder) if folder else []
        finished_run = any(c.folder.match("*end") and not c.unfinished for c in found)
        if not found or (finished_run and not self.resume_past_end):
            theirs: Path | None = (
                super()._find_trainer_ckpt_path()
            )  # nothing to choose from: NeMo's own rules and words
            return theirs
        passed: list[tuple[Checkpoint, list[Problem]]] = []
        for checkpoint in found:
            problems = checkpoint.problems(contents=self.contents)
            if not problems:
                return self._take(checkpoint, passed)
            passed.append((checkpoint, problems))
        if self.resume_ignore_no_checkpoint and all(c.unfinished for c, _ in passed):
            logger.warning(
                "No save into %s came to its end, so there is nothing to resume from: training from the beginning.",
                folder,
            )
            return None
        raise _refusal([problem for _, problems in passed for problem in problems], None)

    def _take(self, usable: Checkpoint, passed: list[tuple[Checkpoint, list[Problem]]]) -> Path:
        """Return the folder of ``usable``; raise PrecisionError if a newer one is damaged and may not be skipped."""
        # A damaged twin of the same step ("last" beside the one it was made with) costs nothing.
        damaged = [p for c, problems in passed if not c.unfinished and c.step() > usable.step() for p in problems]
        if damaged and not self.fall_back:
            raise _refusal(damaged, usable)
        for _, problems in passed:
            for problem in problems:
                logger.warning("Passed over: %s %s", problem.what, problem.why)
        logger.info("Resuming from %s, after step %d.", usable.folder, usable.step())
        return usable.folder

    def _folder(self) -> Path | None:
        """Return the folder in which NeMo looks for checkpoints; None if it cannot be known before NeMo looks."""
        if self.resume_from_directory:
            return None if is_multistorageclient_url(self.resume_from_directory) else Path(self.resume_from_directory)
        log_dir = AppState().log_dir
        return None if log_dir is None else Path(log_dir) / "checkpoints"
