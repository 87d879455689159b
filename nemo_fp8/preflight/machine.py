"""A machine: what is known of this one, or of one that words describe (``described.py``).

A head node has no GPU, so what a machine *is* (this file) is separate from what it *can do* (``support.py``). Three
states, never two: a value, ``ABSENT`` (looked for and not there), None (unknown). An unknown is not guessed.

Nothing here imports torch, TransformerEngine or vLLM, which cost seconds, and in TE's case freeze ``NVTE_*``
variables at import. Versions come from package metadata, torch's CUDA from the text of ``torch/version.py``, cuBLAS
from its wheel or from the file name behind the library's link, and the GPUs from NVML: unlike ``cuInit`` it makes no
CUDA context, so a process may still fork afterwards. The trade-off: NVML ignores CUDA_VISIBLE_DEVICES.

vLLM and NeMo cannot share an environment, so if this one has no vLLM, the rollout environment beside it is searched.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_fp8.contract import SIDES
from nemo_fp8.moved import renamed
from nemo_fp8.preflight.described import ABSENT as ABSENT
from nemo_fp8.preflight.described import facts_of, fields_of, fill_in

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {name: f"nemo_fp8.preflight.described.{name}" for name in ("GPUS", "TORCH_WHEELS")})

# Field of a Machine -> the distribution that has its version.
_DISTRIBUTIONS = {"torch": "torch", "te": "transformer-engine", "mcore": "megatron-core", "bridge": "megatron-bridge"}
_DISTRIBUTIONS |= {"nemo": "nemo-toolkit", "numpy": "numpy"}
_CPU_FLAGS = {"avx512f": "avx512", "avx512_bf16": "avx512_bf16", "amx_tile": "amx"}
_CUDA_LIBRARIES = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found on one machine, or said about it. None is unknown; ``ABSENT`` is known to be missing."""

    source: str = "this machine"
    """The words it was described with."""
    gpu: str | None = None
    """The name of its GPUs; ABSENT where there is none."""
    arch: int | None = None
    """The lowest compute capability among its GPUs, as in sm90."""
    count: int | None = None
    memory: int | None = None
    """Bytes on the smallest GPU."""
    driver: str | None = None
    cuda: str | None = None
    """The CUDA that torch was built with, the one that TransformerEngine checks."""
    cublas: str | None = None
    torch: str | None = None
    te: str | None = None
    te_library: bool | None = None
    """Whether TransformerEngine's compiled library is installed, besides its Python wheel."""
    mcore: str | None = None
    bridge: str | None = None
    nemo: str | None = None
    vllm: str | None = None
    vllm_cpu: bool | None = None
    """Whether vLLM is the CPU build."""
    vllm_looked: tuple[str, ...] = field(default=(), compare=False)
    """The environments that were searched for vLLM; if it was found, in the last of them."""
    numpy: str | None = None
    torchvision_cuda: str | None = None
    python: str | None = None
    cpu: tuple[str, ...] | None = None
    """The names among avx512, avx512_bf16 and amx that the processor has."""
    assumed: tuple[str, ...] = field(default=(), compare=False)
    """Sentences about fields that were filled in because they follow from others."""

    @classmethod
    def here(cls, vllm_python: str | Path | None = None, *, sides: Sequence[str] = SIDES) -> Machine:
        """Examine this machine, and vLLM in the environment of ``vllm_python`` or those of :func:`vllm_pythons`.

        Without ``rollout`` among the ``sides``, vLLM and the processor's units stay unknown: training asks for neither.
        """
        found: dict[str, Any] = {name: _first_version(one) for name, one in _DISTRIBUTIONS.items()}
        cuda = _in_version_file("torch", "cuda") if found["torch"] != ABSENT else ABSENT
        if "rollout" in sides:
            found |= _vllm(vllm_pythons(vllm_python)) | {"cpu": _cpu_flags()}
        return cls(
            **found,
            **_gpus(),
            cuda=cuda,
            cublas=_cublas(cuda) if cuda else None,
            te_library=_te_library() if found["te"] != ABSENT else None,
            python=platform.python_version(),
        )

    @classmethod
    def parse(cls, words: str) -> Machine:
        """Return the machine that words between commas describe; raise PrecisionError for an unknown word."""
        return fill_in(cls(source=words, **fields_of(words)))

    @property
    def has_gpu(self) -> bool | None:
        """Whether there is an NVIDIA GPU; None if unknown."""
        if self.gpu == ABSENT or self.count == 0:
            return False
        return True if self.arch is not None else None

    def without_gpu(self) -> Machine:
        """Return the machine as software built for CPUs sees it."""
        return replace(self, gpu=ABSENT, count=0, arch=None, memory=None)

    def facts(self) -> list[tuple[str, str]]:
        """Return what is known as (heading, words) rows; unknown and absent read differently."""
        return facts_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain value, for JSON."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}


# ---------------------------------------------------------------------- this machine


def vllm_pythons(given: str | Path | None = None) -> list[Path]:
    """Return the Pythons that may have vLLM, in the order of search.

    ``given`` alone, or this Python and those of ``.venv-rollout`` where ``make setup`` may have put it.
    """
    return [Path(given)] if given else pythons_of(".venv-rollout")


def pythons_of(environment: str) -> list[Path]:
    """Return this Python and where that of an environment of ``make setup`` may lie: beside this environment, in the
    current folder, beside this package."""
    beside = (Path(sys.prefix).parent, Path.cwd(), Path(__file__).parents[2])
    return [*dict.fromkeys((Path(sys.executable), *(folder / environment / "bin/python" for folder in beside)))]


def _vllm(pythons: list[Path]) -> dict[str, Any]:
    """Return the first vLLM in these environments, where it was searched, and the torchvision beside it."""
    looked: list[str] = []
    version, folders = ABSENT, None
    for python in pythons:
        root = Path(os.path.abspath(python)).parent.parent  # not resolved: a venv's Python is a link to another Python
        folders = None if root == Path(sys.prefix) else [*map(str, root.glob("lib/python*/site-packages"))]
        looked.append(str(root))
        version = _first_version("vllm", "vllm-cpu", folders=folders)
        if version != ABSENT:
            break
    return {
        "vllm": version,
        "vllm_cpu": version != ABSENT and _first_version("vllm-cpu", folders=folders) != ABSENT,
        "vllm_looked": tuple(looked),
        "torchvision_cuda": _in_version_file("torchvision", "cuda", folders),
    }


def _first_version(*distributions: str, folders: list[str] | None = None) -> str:
    """Return the version of the first of these distributions that is installed, here or in these folders."""
    path = sys.path if folders is None else folders
    found = (one for name in distributions for one in metadata.distributions(name=name, path=path))
    return next((one.version for one in found), ABSENT)


def _in_version_file(package: str, name: str, folders: list[str] | None = None) -> str | None:
    """Read ``name`` from the text of ``package/version.py``; ABSENT if it is None there, None if it is not found."""
    # find_spec does not import a package at the top level.
    spec = (
        importlib.util.find_spec(package)
        if folders is None
        else importlib.machinery.PathFinder.find_spec(package, folders)
    )
    if spec is None or not spec.submodule_search_locations:
        return ABSENT
    path = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    if not path.is_file():
        return None
    found = re.search(rf"^{name}\b[^=\n]*=\s*(None|['\"]([^'\"]+)['\"])", path.read_text(), re.MULTILINE)
    return None if found is None else found[2] or ABSENT


def _cublas(cuda: str) -> str | None:
    """Return cuBLAS's version: of the wheel beside torch, else of the file that the system's link points to."""
    if cuda == ABSENT:
        return ABSENT
    major = cuda.split(".")[0]
    wheel = _first_version(f"nvidia-cublas-cu{major}", "nvidia-cublas")
    if wheel != ABSENT:
        return wheel
    for folder in (*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_CUDA_LIBRARIES):
        link = Path(folder) / f"libcublasLt.so.{major}" if folder else None
        found = re.search(r"\.so\.(\d+\.[\d.]+)$", os.path.realpath(link)) if link and link.exists() else None
        if found:
            return found[1]
    return None


def _te_library() -> bool:
    """Return whether a wheel or a build from source has installed TransformerEngine's compiled library."""
    spec = importlib.util.find_spec("transformer_engine")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folders = (folder for root in roots for folder in (root, root / "wheel_lib", root.parent))
    return any(True for folder in folders for _ in folder.glob("libtransformer_engine*.so"))


def _cpu_flags() -> tuple[str, ...] | None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return None
    with cpuinfo.open() as lines:
        flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())
    return tuple(name for flag, name in _CPU_FLAGS.items() if flag in flags)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpus() -> dict[str, Any]:
    """Return the GPUs and the driver, from NVML."""
    none = {"gpu": ABSENT, "count": 0}
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return none | {"driver": ABSENT}
    status = nvml.nvmlInit_v2()
    if status == 9:  # the driver is not loaded
        return none | {"driver": ABSENT}
    if status != 0:  # it stays unknown, as with 18: driver and library of two versions
        return {"assumed": (f"NVML fails with status {status}.",)}
    try:
        devices = [*_devices(nvml)]
        driver = _text(nvml.nvmlSystemGetDriverVersion)
    finally:
        nvml.nvmlShutdown()
    if not devices:
        return none | {"driver": driver}
    names, archs, memory = zip(*devices, strict=True)
    gpu = " + ".join(dict.fromkeys(names))
    return {"gpu": gpu, "count": len(devices), "arch": min(archs), "memory": min(memory), "driver": driver}


def _devices(nvml: ctypes.CDLL) -> Iterator[tuple[str, int, int]]:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, major, minor, memory = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int(), _Memory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue  # this user has no access to the GPU
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        name = _text(partial(nvml.nvmlDeviceGetName, handle))
        yield name, major.value * 10 + minor.value, memory.total


def _text(call: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    buffer = ctypes.create_string_buffer(96)
    call(buffer, len(buffer))
    return buffer.value.decode()
