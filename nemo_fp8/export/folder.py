"""Write the folder of an export so that no file is incomplete under its own name, and a killed export can resume.

    NAME.part                   a file while it is written; it gets its name when all of its bytes are on the disk
    .nemo_fp8_export.json       the identity of the export, from the beginning to the end
    config.json                 written after all weights: until then no engine takes the folder for a model
    nemo_fp8_export.json        the receipt, written last: with it the export is complete

A file counts as complete if its length and its header are those of the plan. The header has the plan's fingerprint, so
files of another source or contract are never mixed in. The folder is locked while the process lives. The trade-off: a
killed export writes the file again that it was writing.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from nemo_fp8.errors import PrecisionError
from nemo_fp8.export.plan import Plan, Shard
from nemo_fp8.export.source import RECEIPT
from nemo_fp8.storage.safetensors import INDEX

STATE = ".nemo_fp8_export.json"
PART = ".part"


class Destination:
    """The folder of one export."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    # ------------------------------------------------------------------ begin and end

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder until the context ends or the process dies.

        Raises PrecisionError if it is no folder, or another export holds the lock.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise PrecisionError(
                f"{self.folder} is no folder.", "A checkpoint is several files.", "Give the name of a new folder."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise PrecisionError(
                f"Cannot write into {self.folder}.", f"{error}.", "Give the name of a folder that can be made."
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise PrecisionError(
                f"Another export is writing into {self.folder}.",
                "It holds the folder's lock.",
                "Wait for it, or give another folder.",
            ) from error
        finally:
            os.close(handle)

    def begin(self, plan: Plan, *, restart: bool = False) -> bool:
        """Prepare the folder for writing or resuming; return whether the export is complete already.

        One of which files are gone since, or were cut, is resumed.

        ``restart`` deletes the files of an earlier export first. Raises PrecisionError if the folder holds an export of
        something else, or other files, or the disk has too little space.
        """
        receipt, state = self._load(RECEIPT), self._load(STATE)
        began = receipt is not None or state is not None
        if restart and began:
            self._clear()
            receipt = state = None
        if receipt is not None:
            self._require_same(plan, receipt, "a finished export")
            if self._is_whole(plan, receipt):
                (self.folder / STATE).unlink(missing_ok=True)
                return True
        if state is not None:
            self._require_same(plan, state, "an unfinished export")
        elif not began and (strangers := sorted({path.name for path in self.folder.iterdir()} - {STATE + PART})):
            raise PrecisionError(
                f"{self.folder} holds "
                f"{strangers[0]}{f' and {len(strangers) - 1} more' if len(strangers) > 1 else ''}, and no export.",
                "An export goes into a folder of its own, so that it never mixes with another model's files.",
                "Give a new or an empty folder.",
            )
        else:
            files = [
                *(shard.file for shard in plan.shards),
                INDEX,
                "config.json",
                *plan.beside,
                *(name for name, _ in plan.source.files()),
            ]
            self.write(STATE, _text({"fingerprint": plan.fingerprint, "identity": plan.identity, "files": files}))
        for name in () if receipt is None else (RECEIPT, "config.json"):  # files are gone: it is finished no longer
            (self.folder / name).unlink(missing_ok=True)
        self._require_space(plan)
        return False

    def finish(self, receipt: dict[str, Any]) -> None:
        """Write the receipt, which marks the export as complete; raises PrecisionError as :meth:`writing` does."""
        self.write(RECEIPT, _text(receipt))
        (self.folder / STATE).unlink(missing_ok=True)

    @property
    def receipt(self) -> dict[str, Any]:
        """The receipt of a complete export. Raises PrecisionError if there is none."""
        found = self._load(RECEIPT)
        if found is None:
            raise PrecisionError(
                f"{self.folder} holds no finished export.",
                f"{RECEIPT} is written last, and is not there.",
                "Run the export to its end first.",
            )
        return found

    # ------------------------------------------------------------------ files

    def has(self, shard: Shard) -> bool:
        """Return whether a weights file is complete and belongs to this plan."""
        path = self.folder / shard.file
        if not path.is_file() or path.is_symlink() or path.stat().st_size != shard.size:
            return False
        with path.open("rb") as file:
            return file.read(len(shard.header)) == shard.header

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file, which gets its name when the context ends without an error.

        Raises PrecisionError if it cannot be written.
        """
        path = self.folder / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + PART)
        part.unlink(missing_ok=True)
        try:
            with part.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            _sync_folder(path.parent)
        except OSError as error:
            raise PrecisionError(
                f"Cannot write {path}.",
                f"{error}.",
                "Free what is missing, and run the same command again: it goes on from here.",
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file, from bytes or from another file; raises PrecisionError as :meth:`writing` does."""
        with self.writing(name) as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file)
            else:
                file.write(content)

    # ------------------------------------------------------------------ checks

    def _load(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise PrecisionError(f"{path} is damaged.", f"{error}.", "Delete the folder, and export anew.") from error
        return found if isinstance(found, dict) else {}

    def _is_whole(self, plan: Plan, receipt: dict[str, Any]) -> bool:
        """Return whether all files of a finished export are still there, those with weights as long as they were."""
        others = {str(name) for name in receipt.get("files", ())} - {shard.file for shard in plan.shards}
        return all(map(self.has, plan.shards)) and all((self.folder / name).is_file() for name in others)

    def _require_same(self, plan: Plan, found: dict[str, Any], what: str) -> None:
        if found.get("fingerprint") == plan.fingerprint:
            return
        theirs = found.get("identity") or {}
        changed = [
            _difference(key, theirs.get(key), mine) for key, mine in plan.identity.items() if theirs.get(key) != mine
        ]
        raise PrecisionError(
            f"{self.folder} holds {what} of something else: {'; '.join(changed) or 'its own words are damaged'}.",
            "Files of two exports would make a model that nobody asked for.",
            "Give another folder, ask for what was asked for then, or add --restart, which deletes that export and "
            "begins anew.",
        )

    def _clear(self) -> None:
        """Delete the files that an export wrote, and nothing else."""
        written = {RECEIPT, STATE, "config.json", INDEX}
        for name in (STATE, RECEIPT):
            written |= {str(file) for file in (self._load(name) or {}).get("files", ())}
        for name in written:
            path = PurePosixPath(name)
            if not path.is_absolute() and ".." not in path.parts:
                (self.folder / path).unlink(missing_ok=True)
                (self.folder / path).with_name(path.name + PART).unlink(missing_ok=True)

    def _require_space(self, plan: Plan) -> None:
        needed = sum(shard.size for shard in plan.shards if not self.has(shard))
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise PrecisionError(
                f"{self.folder} has room for {free / 1e6:,.1f} MB, and {needed / 1e6:,.1f} MB are still to be written.",
                "The disk would be full before the end.",
                "Free some space, or give a folder on another disk.",
            )


def _difference(key: str, theirs: Any, mine: Any) -> str:
    if key == "precision" and isinstance(theirs, dict):
        fields = [
            f"{name}={theirs.get(name)!r} was, {value!r} is"
            for name, value in mine.items()
            if theirs.get(name) != value
        ]
        return f"another precision ({', '.join(fields)})"
    return "the source has changed since" if key == "source" else f"{key} was {theirs!r}, and is {mine!r}"


def _text(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _sync_folder(folder: Path) -> None:
    """Make sure that a file's new name is on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
