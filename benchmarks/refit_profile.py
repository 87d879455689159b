"""Where the time of a push goes, on both sides: the functions of a push and what each of them cost in all.

A worker of this class profiles its own part: vLLM takes the class by name (``worker_extension_cls``), and
``collective_rpc`` switches the profiler on and reads it. Python's profiler makes Python itself slower, by about a
microsecond for each call, and leaves the kernels as they are; so shares are those of a push that is somewhat slower.
"""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

from nemo_fp8.rollout.engine.worker import NemoFp8Worker

# What is told of a side: words, and the functions whose time they are, by file and name. A function's time contains
# that of what it calls, so rows that begin with "of it" lie within the row above them.
SENDER = (
    ("manifest of the tensors", "manifest.py", "of"),
    ("calls of the workers (begin, open, finish, cache)", "alive.py", "answered"),
    ("casts into the buffers", "casting.py", "put"),
    ("copies into the buffers", "wire.py", "_copy"),
    ("waits until a buffer is free, or all is written", "channel.py", "wait"),
    ("messages", "channel.py", "send"),
    ("receipt", "receipt.py", "receipt"),
)
WORKER = (
    ("begin: manifest, plan, checks", "session.py", "nemo_fp8_refit_begin"),
    ("write", "session.py", "write"),
    ("of it, codes that came, copied and fingerprinted", "arrived.py", "write"),
    ("of it, what came whole, by one call", "whole.py", "write"),
    ("of it, quantize", "quantize.py", "quantize_into"),
    ("of it, within the compiled kernel", "cpu.py", "_run"),
    ("of it, copies, fingerprints and magnitudes", "fingerprint.py", "add"),
    ("of it, packing and gathering", "staged.py", "_process"),
    ("waits for a message", "socket.socket", "recv"),
    ("finish", "session.py", "nemo_fp8_refit_finish"),
    ("of it, sums and one transfer of all counts", "layouts.py", "settle"),
    ("of it, packed copies beside the model", "plan.py", "packed_beside"),
)


class ProfiledWorker(NemoFp8Worker):
    """A worker that can say where its time went."""

    def profile_begin(self) -> None:
        """Switch the profiler on."""
        self.push_profile = cProfile.Profile()
        self.push_profile.enable()

    def profile_end(self) -> list[list[Any]]:
        """Switch it off; return the rows of ``WORKER`` that took time."""
        self.push_profile.disable()
        return rows_of(self.push_profile, WORKER)


def rows_of(profiler: cProfile.Profile, wanted: tuple[tuple[str, str, str], ...]) -> list[list[Any]]:
    """Return (words, seconds, calls) of the functions in a profile."""
    found: list[list[Any]] = []
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for words, file, function in wanted:
        rows = [row for (where, _, name), row in stats.items() if _is(where, name, file, function)]
        if rows:
            found.append([words, sum(row[3] for row in rows), sum(row[1] for row in rows)])
    return found


def _is(where: str, name: str, file: str, function: str) -> bool:
    # A method in C has no file, and its name says whose it is: <method 'recv' of '_socket.socket' objects>.
    return (where.endswith(f"/{file}") and name == function) or (where == "~" and file in name and function in name)


def page(sides: dict[str, list[list[Any]]], seconds: dict[str, float]) -> list[str]:
    """Return the lines of a table: what took how long, of pushes that took so many seconds under the profiler."""
    out = ["", "| side | what | ms | calls | of the push |", "|---|---|---:|---:|---:|"]
    for side, rows in sides.items():
        whole = seconds[side]
        out += [f"| {side} | {words} | {1e3 * t:.1f} | {calls} | {t / whole:.0%} |" for words, t, calls in rows]
    return out
