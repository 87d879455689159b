"""The folder that this package keeps things in for one user: ``$XDG_CACHE_HOME/nemo_fp8``, or ``~/.cache/nemo_fp8``.

Code is loaded from it and secrets are read from it, so it must be that user's, and nobody else's to write to.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def own_folder(below: str = "") -> Path:
    """That folder, or one below it, made if need be. Raises an OSError that says what is wrong with it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_fp8"
    except RuntimeError as error:  # a user without an entry in passwd, as in many containers
        raise OSError(f"there is no folder to keep them in: {error} (set XDG_CACHE_HOME)") from error
    return private(private(cache) / below) if below else private(cache)


def private(folder: Path) -> Path:
    """A folder, made if need be, that belongs to this user and that nobody else can write to."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} belongs to another user or can be written by others (chmod 700 it)")
    return folder
