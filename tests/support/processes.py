"""Everything below a process, whether it has ended, and what it shared; and where it can listen."""

import itertools
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

# Below the numbers that a system gives to connections (from 32768 on): a server needs many seconds before it listens,
# and a connection of another test would take its port meanwhile. No number is given twice, and each worker has its own.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.count(20_000 + _WORKER % 4 * 3_000 + os.getpid() % 1_000)


def free_port():
    """A port of this machine on which nobody listens, and which no connection is given."""
    return next(port for port in _PORTS if _is_free(port))


def _is_free(port):
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def below(process):
    """All processes below one of ``subprocess``'s."""
    return psutil.Process(process.pid).children(recursive=True)


def wait_for(what, seconds=60):
    """What is asked for, as soon as there is some."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def left_of(processes, seconds=15):
    """Those that run still, after so long."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in processes if _runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def shared_memory(processes):
    """Names in /dev/shm that processes have mapped."""
    names = set()
    for process in processes:
        with suppress(OSError):
            names |= set(re.findall(r"/dev/shm/(\S+)$", Path(f"/proc/{process.pid}/maps").read_text(), re.M))
    return names


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
