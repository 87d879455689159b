"""Keep the token that ``nemo-fp8 serve`` draws for pushes in a file that only its user can read.

    ~/.cache/nemo_fp8/servers/<machine>-<address>-<port>

The process that serves holds a lock on the file, which the kernel drops when the process dies. So a file without a lock
is stale: nobody takes a token from it, and the next server writes it anew. ``Refit(url)`` reads the file, so the same
user on the same machine can push without giving the token. The machine is in the name because several may share a home.

A file is checked before it is read or written: a regular file and no link, of this user, closed to others.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from nemo_fp8.errors import PrecisionError
from nemo_fp8.own_folder import own_folder
from nemo_fp8.rollout.access import LOOPBACK, TOKEN, is_loopback

LONGEST = 100


@contextmanager
def drawn_token(host: str, port: int) -> Iterator[tuple[str, Path]]:
    """Draw a token for a server at this address; yields it with the file that holds it while the context lasts.

    Raises PrecisionError if the file cannot be made, is not private, or belongs to another running server.
    """
    try:
        path = _path(host, port)
        file = _locked(path)
    except OSError as error:
        raise PrecisionError(
            f"A token for {host}:{port} cannot be kept in a file that only you can read.",
            str(error),
            f"Mend that, set {TOKEN} to a token of your own, or say --no-token: every user of this machine may push "
            "then.",
        ) from error
    try:
        token = secrets.token_urlsafe(32)
        os.ftruncate(file, 0)
        os.write(file, token.encode())
        yield token, path
    finally:
        with suppress(OSError):
            path.unlink()  # while it is locked: afterwards it may be another server's
        os.close(file)


def token_of(url: str) -> str | None:
    """Return the token of a server that this user runs on this machine; None if there is none."""
    try:
        address = urlsplit(url)
        if not is_loopback(address.hostname or ""):
            return None
        file = os.open(_path(address.hostname or "", address.port or 80), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.read(file, LONGEST).decode() if _is_private(file) and _is_held(file) else None
    finally:
        os.close(file)


def _path(host: str, port: int) -> Path:
    address = LOOPBACK if host == "localhost" else host
    return own_folder("servers") / f"{socket.gethostname()}-{address.replace(':', '_')}-{port}"


def _locked(path: Path) -> int:
    """Open the file and lock it; of two processes that try at once only one succeeds."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not _is_private(file):
                raise PermissionError(f"{path} is no file of your own that is closed to others; remove it")
            if not _lock(file):
                raise FileExistsError(f"{path} is held by another server of yours, which listens there")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its server has removed it meanwhile: try again


def _lock(file: int) -> bool:
    for _ in range(5):  # a process that checks a stale file locks it for a moment
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def _is_private(file: int) -> bool:
    about = os.fstat(file)
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def _is_held(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
