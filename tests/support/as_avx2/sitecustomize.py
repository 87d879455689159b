"""A processor with AVX2 and nothing newer, on one that has more: what it has beyond is hidden from every Python
process.

    NEMO_FP8_TESTS_AS=avx2 .venv-rollout/bin/python -m pytest tests/rollout

vLLM picks its compiled library (``_C``, ``_C_AVX512``, ``_C_AVX2``), its kernels and its attention by ``torch.cpu``,
which asks ``torch._C._cpu._get_cpu_capability``; this package and others read ``/proc/cpuinfo``. Both answer without
AVX-512 and AMX here, and oneDNN and ATen are told by their own variables. ``tests/conftest.py`` imports this file, and
``demo/run.sh`` names its folder where ``ONEDNN_MAX_CPU_ISA`` asks for AVX2. It puts that folder first on
``PYTHONPATH``: Python imports it at the start of each process that is started then, before anything else, and after it
the next ``sitecustomize`` of the path.

vLLM's own AVX2 library runs then, and ``bin/cc``, first on ``PATH``, compiles this package's kernels for AVX2. What
another compiled library reads from the processor itself (CPUID) cannot be hidden from here.
"""

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
VARIABLES = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
CPUINFO = "/proc/cpuinfo"


def newer(name):
    """Whether this is the name of an instruction set that an AVX2 machine does not have."""
    return name.startswith(("avx512", "avx10", "amx"))


class _BeforeTorchCpu(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch.cpu":
            hide_from_torch()


def hide_from_torch():
    """Wrap the one function that everything of ``torch.cpu`` asks; torch's compiled half must have been loaded."""
    probe = sys.modules["torch._C"]._cpu
    if not hasattr(probe._get_cpu_capability, "whole"):
        whole = probe._get_cpu_capability

        def without_newer():
            return {name: has and not newer(name) for name, has in whole().items()}

        without_newer.whole = whole
        probe._get_cpu_capability = without_newer


def _open(file, *arguments, **named):
    if isinstance(file, (str, os.PathLike)) and os.fspath(file) == CPUINFO:
        with _really_open(CPUINFO) as lines:
            return io.StringIO("".join(_without_newer(line) for line in lines))
    return _really_open(file, *arguments, **named)


def _without_newer(line):
    head, _, words = line.partition(":")
    return (
        f"{head}: {' '.join(word for word in words.split() if not newer(word))}\n" if head.strip() == "flags" else line
    )


def _next_one():
    """Run the ``sitecustomize`` that Python would have imported without this one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path[sys.path.index(HERE) + 1 :])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_really_open = io.open
builtins.open = io.open = _open
os.environ.update(VARIABLES)
for variable, folder in (("PYTHONPATH", HERE), ("PATH", str(Path(HERE) / "bin"))):
    if folder not in (paths := os.environ.get(variable, "").split(os.pathsep)):
        os.environ[variable] = os.pathsep.join([folder, *filter(None, paths)])
sys.meta_path.insert(0, _BeforeTorchCpu())
if "torch.cpu" in sys.modules:
    sys.modules["torch.cpu"].get_capabilities.cache_clear()
    hide_from_torch()
if __name__ == "sitecustomize":
    _next_one()
