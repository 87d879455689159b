"""The folder in which this package keeps things for one user: ``$XDG_CACHE_HOME/nemo_fp8`` or ``~/.cache/nemo_fp8``.

Code is loaded from it and secrets are read from it, so it must belong to that user, and nobody else may write to it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def own_folder(below: str = "") -> Path:
    """Return the folder, or one below it, created if need be. Raises OSError if it is not private."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_fp8"
    except RuntimeError as error:  # a user without an entry in passwd, as in many containers
        raise OSError(f"there is no folder to keep them in: {error}") from error
    return private(private(cache) / below) if below else private(cache)


def private(folder: Path) -> Path:
    """Create a folder if need be, and return it. Raises OSError if it is not this user's, or others can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} belongs to another user or can be written by others (chmod 700 it)")
    return folder
