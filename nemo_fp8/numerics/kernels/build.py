"""The compiled CPU kernels: built on the machine that runs them, once, and kept.

`fp8_quantize.c`, `fp8_decode.c` and `fp8_accumulate.c` are plain C that is compiled for the processor at hand
(AVX-512, AVX2, NEON: detected by the compiler, never assumed) the first time somebody quantizes, in about four
seconds, and loaded through ctypes. Why not an extension module: the package stays one wheel for every platform and
Python, an editable install and a fresh clone need no build step, and the compiler may use every instruction the
machine has. The trade-off is that a machine without a C compiler quantizes with torch: the same bits, more slowly,
and said once in the log. (Triton and TorchInductor make the same choice.) ``python -m nemo_fp8.numerics.kernels.build``
builds ahead, for an image.

The library lies in the user's cache (``$XDG_CACHE_HOME/nemo_fp8``), under a name that hashes everything it depends on:
the source, the compiler and its flags, the processor. One of the ranks that start together builds it; it is written
beside its place and renamed into it, so that nobody ever loads half a file. A folder that others may write to is
refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nemo_fp8.own_folder import own_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("fp8_quantize.c", "fp8_decode.c", "fp8_accumulate.c"))
HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("fp8.h", "fp8_rows.h", "fp8_bf16.h", "fp8_avx512.h", "fp8_avx2.h")
)
FLAGS = (
    "-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fopenmp-simd",
    "-shared", "-fPIC", "-pthread",
)  # fmt: skip
_BEST = {
    "x86_64": (("-march=native", "-mprefer-vector-width=512"), ("-march=native",)),
    "aarch64": (("-mcpu=native",), ("-march=native",), ("-march=armv8-a",)),
}


def flags_for(machine: str) -> tuple[tuple[str, ...], ...]:
    """From the best down to what every compiler accepts, which is what it does by itself."""
    return (*_BEST.get(machine, ()), ())


MACHINE_FLAGS = flags_for(platform.machine())
OTHERS = {
    "avx2": ("-march=haswell",),
    "plain": (),
}  # what a better x86 processor can be made to do, to test and to measure it
COMPILERS = ("cc", "gcc", "clang")

log = logging.getLogger(__name__)


class CannotBuild(Exception):
    """Why there are no compiled kernels on this machine."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had, which is said once."""
    try:
        return ctypes.CDLL(str(build()))
    except (CannotBuild, OSError) as error:
        log.warning("FP8 casts run in torch on this CPU, with the same bits but more slowly: %s", error)
        return None


def build() -> Path:
    """Compile the kernels, unless that has been done for this source, compiler and processor."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise CannotBuild("there is no C compiler (install gcc to have the fast kernels)")
    try:
        place = own_folder() / f"fp8-{_identity(compiler)}.so"
    except OSError as error:
        raise CannotBuild(str(error)) from error
    if not place.exists():
        with _one_at_a_time(place.parent):
            if not place.exists():
                _compile(compiler, place)
    return place


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Ranks that start together wait for the first, where the file system can lock a folder; elsewhere each
    compiles."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(compiler: str, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder) / place.name
        for machine in MACHINE_FLAGS:
            command = [compiler, *FLAGS, *machine, *map(str, SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.replace(made, place)
                log.info("built %s", place)
                return
    raise CannotBuild(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")


def _identity(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (
        *(path.read_text() for path in (*HEADERS, *SOURCES)),
        compiler,
        version,
        repr((FLAGS, MACHINE_FLAGS)),
        platform.platform(),
        _processor(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """What tells one kind of processor from another: homes are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log.info("%s", build())
