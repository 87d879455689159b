"""Say what a machine can do with each recipe, and what is wrong with what is installed on it.

The answers come from the table in ``support.py``, which ``engine.py`` asks about one contract. Each combination of
packages, drivers and environment variables that is known to fail has a row in ``findings.py``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from nemo_fp8.contract.te_variables import VARIABLES, late_variables
from nemo_fp8.errors import Problem
from nemo_fp8.findings import finding
from nemo_fp8.moved import renamed
from nemo_fp8.preflight.answers import Answer, answer
from nemo_fp8.preflight.machine import ABSENT, Machine
from nemo_fp8.preflight.support import RECIPES, TE_ON_CPU

if not TYPE_CHECKING:  # see nemo_fp8.moved
    _TO_ENGINE = (*("recipes_of", "require", "resume_findings", "backward_findings", "ALLOW_PICKLE"),)
    _TO_LINT = ("support_findings", "first_weight_findings", "bridge_findings")
    __getattr__ = renamed(
        __name__,
        {name: f"nemo_fp8.preflight.engine.{name}" for name in _TO_ENGINE}
        | {name: f"nemo_fp8.preflight.lint.{name}" for name in _TO_LINT}
        | {name: f"nemo_fp8.contract.te_variables.{name}" for name in ("unread_variables", "TE_RECIPES")},
    )

# Variable -> what it does. TransformerEngine reads its own at import.
ENVIRONMENT = {name: f"TransformerEngine {variable.says}." for name, variable in VARIABLES.items()} | {
    "VLLM_USE_DEEP_GEMM": "vLLM takes DeepGEMM kernels (1) or refuses them (0), over the contract's deep_gemm.",
    "VLLM_TEST_FORCE_FP8_MARLIN": "vLLM keeps activations in BF16, with FP8 weights alone, on every GPU.",
}

ONEDNN_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep oneDNN to some instructions; it reads the second where the first is not set."""

# CUDA major version -> the oldest driver that runs it.
DRIVERS = {"12": "525", "13": "580"}

COMPILES = 10
"""Minutes within which an extension of torch's is compiled, and a lock is not asked about."""


def doctor(machine: Machine) -> list[Answer]:
    """Return the verdict on every recipe that a contract can name."""
    return [answer(recipe, machine) for recipe in RECIPES]


def sanity(
    machine: Machine, environment: Mapping[str, str] | None = None, modules: Mapping[str, ModuleType] | None = None
) -> list[Problem]:
    """Return what is wrong with the packages on a machine and, if given, with the environment.

    With ``modules`` (``sys.modules``) it also finds variables that were set after TransformerEngine had been imported.
    """
    found = [*_packages(machine)]
    if environment is not None:
        found += late_variables(environment, modules or {})
        found += [
            finding("environment-set", name, name=name, value=environment[name], meaning=meaning)
            for name, meaning in ENVIRONMENT.items()
            if name in environment
        ]
        found += _abandoned_locks(environment)
        if machine.vllm_cpu and "amx" in (machine.cpu or ()):
            found += kept_from_amx(environment)
    return found


def kept_from_amx(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a finding if a variable keeps oneDNN from AMX: vLLM on a processor that has it would end with an abort."""
    for name in ONEDNN_ISA:
        if value := environment.get(name, ""):
            if "AMX" not in value.upper() and value.upper() not in ("ALL", "DEFAULT"):
                yield finding("onednn-kept-from-amx", name, name=name, value=value)
            return


def _abandoned_locks(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a finding for each lock of torch's compiled extensions that nobody holds, and that none will let go."""
    folder, home = environment.get("TORCH_EXTENSIONS_DIR"), environment.get("HOME")
    cache = environment.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    locks = Path(folder).glob("*/lock") if folder else Path(cache, "torch_extensions").glob("*/*/lock") if cache else ()
    for lock in sorted(locks):
        with contextlib.suppress(FileNotFoundError):  # let go just now
            minutes = int((time.time() - lock.stat().st_mtime) / 60)
            if minutes >= COMPILES and not _is_held(lock):
                yield finding("extension-lock", "torch", path=lock, minutes=minutes)


def _is_held(file: Path) -> bool:
    """Return whether a process has it open, as far as processes can be seen: torch keeps a lock open while it
    compiles."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if descriptor.samefile(file):
                return True
    return False


def _packages(m: Machine) -> Iterator[Problem]:
    nemo, mcore, bridge, te, numpy, driver = (_version(v) for v in (m.nemo, m.mcore, m.bridge, m.te, m.numpy, m.driver))
    if nemo and nemo.major >= 3:
        yield finding("nemo-3", "nemo-toolkit", nemo=m.nemo)
    elif nemo and mcore and nemo.release[:2] == (2, 7) and mcore.release[:2] != (0, 15):
        # Beside Megatron-Bridge that is a choice, and NeMo is only not to be trained with here.
        yield finding("nemo-mcore", "megatron-core", severity="info" if bridge else None, nemo=m.nemo, mcore=m.mcore)
    if bridge and mcore and bridge.release[:2] == (0, 3) and mcore.release[:2] < (0, 16):
        yield finding("bridge-mcore", "megatron-core", bridge=m.bridge, mcore=m.mcore)
    if m.te_library is False and m.has_gpu is not False:
        yield finding("te-library-missing", "transformer-engine", te=m.te)
    elif m.te_library is False and m.te not in TE_ON_CPU:
        yield finding("te-not-stood-for", "transformer-engine", te=m.te, tested=TE_ON_CPU[0])
    if m.has_gpu and m.te == ABSENT and mcore:
        yield finding("te-absent", "transformer-engine")
    if m.te == ABSENT and nemo and nemo.major == 2:
        yield finding("mock-data", "nemo-toolkit")
    if te and m.has_gpu is not False and m.python and Version("3.11") <= Version(m.python) < Version("3.12"):
        yield finding("te-dtype-pickle", "transformer-engine", te=m.te)
    if te and te >= Version("2.21"):
        yield finding("te-newer", "transformer-engine", te=m.te)
    if numpy and mcore and numpy.major >= 2 and mcore.release[:2] == (0, 15):
        yield finding("numpy-mcore", "numpy", numpy=m.numpy, mcore=m.mcore)
    if m.vllm_cpu and m.torchvision_cuda not in (None, ABSENT):
        yield finding("torchvision-vllm-cpu", "torchvision")
    major = (m.cuda or "").split(".")[0]
    if driver and major in DRIVERS and driver < Version(DRIVERS[major]):
        yield finding("driver", "driver", driver=m.driver, cuda=m.cuda, major=major, least=DRIVERS[major])


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:  # ABSENT, or not a plain number
        return None
