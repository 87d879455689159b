"""Compile the CPU kernels on the machine that runs them, once, and keep the library.

The files of ``SOURCES`` are plain C. They are compiled for the processor at hand (AVX-512, AVX2, NEON: as the compiler
detects) at the first quantization, side by side on all cores (twenty seconds of one, of which the longest file takes a
third), and loaded through ctypes. Why not an extension module: the package stays one wheel for every platform and
Python, an editable install and a fresh clone need no build step, and the compiler may use every instruction of the
machine. The trade-off: a machine without a C compiler quantizes with torch, to the same bits but more slowly, and one
line in the log says so. (Triton and TorchInductor make the same choice.)
``python -m nemo_fp8.numerics.kernels.build`` builds ahead of time, for a container image.

The library lies in the user's cache (``$XDG_CACHE_HOME/nemo_fp8``), under a hash of everything it depends on: the
source, the compiler and its flags, the processor. Of ranks that start together one builds it. It is written to a
temporary name and renamed, so that no process loads half a file. A folder that others may write to is refused.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_fp8.own_folder import own_folder

# What takes longest begins first.
_NAMES = (
    "fp8_quantize.c", "fp8_multiply.c", "fp4_quantize.c", "fp8_patch.c", "fp8_sums.c", "fp8_decode.c",
    "bf16_multiply.c", "fp4_count.c", "fp4_decode.c", "fp8_turn.c", "fp8_accumulate.c",
)  # fmt: skip
SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES)
_SHARED = (
    "fp8.h", "fp8_job.h", "fp8_tops.h", "fp8_rows.h", "fp8_bf16.h", "fp8_avx512.h", "fp8_avx2.h", "fp8_tables.h",
    "fp8_sums.h", "fp8_amx.h", "fp8_positions.h", "fp4_turn.h", "turn_eight.h", "product.h",
)  # fmt: skip
HEADERS = tuple(Path(__file__).with_name(name) for name in _SHARED)
FLAGS = (
    "-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing",
    "-fopenmp-simd", "-fPIC", "-pthread",
)  # fmt: skip
_BEST = {
    "x86_64": (("-march=native", "-mprefer-vector-width=512"), ("-march=native",)),
    "aarch64": (("-mcpu=native",), ("-march=native",), ("-march=armv8-a",)),
}


def flags_for(machine: str) -> tuple[tuple[str, ...], ...]:
    """Return compiler flags for a machine, the best first; the last ones are accepted by every compiler."""
    return (*_BEST.get(machine, ()), ())


MACHINE_FLAGS = flags_for(platform.machine())
OTHERS = {
    "avx2": ("-march=haswell",),
    "plain": (),
}  # lesser instruction sets that an x86 processor can be restricted to, for tests and benchmarks
COMPILERS = ("cc", "gcc", "clang")

log = logging.getLogger(__name__)


class CannotBuild(Exception):
    """The compiled kernels cannot be built on this machine; the message says why."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled kernels; return None if they cannot be built, and log why, once."""
    try:
        return ctypes.CDLL(str(build()))
    except (CannotBuild, OSError) as error:
        log.warning("FP8 casts run in torch on this CPU, with the same bits but more slowly: %s", error)
        return None


def build() -> Path:
    """Compile the kernels and return the library's path; do nothing if it exists for this source and processor.

    Raises CannotBuild, with the reason, without a compiler or a folder to write to, or if the compiler fails.
    """
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise CannotBuild("there is no C compiler (install gcc to have the fast kernels)")
    try:
        place = own_folder() / f"fp8-{_identity(compiler)}.so"
    except OSError as error:
        raise CannotBuild(f"{error} (set XDG_CACHE_HOME to a folder of your own)") from error
    if not place.exists():
        with _one_at_a_time(place.parent):
            if not place.exists():
                _compile(compiler, place)
    return place


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one of several processes build at a time, if the file system can lock a folder; else each of them builds."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(compiler: str, place: Path) -> None:
    """Compile with the best flags that the compiler takes; warn where those were not the best there are."""
    with tempfile.TemporaryDirectory(dir=place.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        made = Path(folder) / place.name
        objects = {str(source): str(made.with_name(f"{source.stem}.o")) for source in SOURCES}
        refused: list[str] = []
        for machine in MACHINE_FLAGS:
            flags = [compiler, *FLAGS, *machine]
            each = [[*flags, "-c", source, "-o", to] for source, to in objects.items()]
            joined = [*flags, "-shared", *objects.values(), "-o", str(made)]
            problem = next(filter(None, [*threads.map(_problem_of, each)]), "") or _problem_of(joined)
            if not problem:
                os.replace(made, place)
                log.info("built %s", place)
                if refused:
                    log.warning("The kernels may be slow on this CPU: %s", refused[0])
                return
            refused.append(problem)
    raise CannotBuild(refused[-1])


def _problem_of(command: Sequence[str]) -> str:
    """Run a compiler; return what it refused, or nothing."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}" if done.returncode else ""


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
    """Return what identifies the kind of processor: machines of different kinds may share a home folder."""
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
