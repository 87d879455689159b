"""A machine in words: read from what ``--for`` takes (``8xh200,cuda12.9,te2.9``), and written as rows of a table.

    GPUs        h200, 8xh100, a10080gb, sm90; ``cpu`` for none
    versions    cuda12.8, cublas12.9, torch2.9, te2.9, mcore0.15, ...; ``novllm`` for none
    processor   amx, avx512; ``avx2`` for neither

What no word says is unknown, unless it follows from one: PyTorch's wheel fixes its CUDA. That is filled in, and
``assumed`` says so.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from packaging.version import VERSION_PATTERN

from nemo_fp8.errors import PrecisionError, Problem, unknown

if TYPE_CHECKING:
    from nemo_fp8.preflight.machine import Machine

ABSENT = "none"
"""The value of a field that is known to be missing; None is unknown."""
VERSIONS = ("driver", "cuda", "cublas", "torch", "te", "mcore", "bridge", "nemo", "vllm", "numpy", "python")
"""The fields of a Machine that hold a version."""

# GPU name -> (architecture, usable memory in GiB; None where the name covers several sizes).
GPUS: dict[str, tuple[int, float | None]] = {
    "v100": (70, None),
    "t4": (75, 15),
    "a100": (80, None),
    "a800": (80, None),
    "a10": (86, 22),
    "a40": (86, 45),
    "rtx3090": (86, 24),
    "rtxa6000": (86, 48),
    "l4": (89, 22),
    "l20": (89, 45),
    "l40": (89, 45),
    "l40s": (89, 45),
    "rtx4090": (89, 24),
    "rtx6000ada": (89, 48),
    "h20": (90, 95),
    "h100": (90, 79),
    "h800": (90, 79),
    "h200": (90, 140),
    "gh200": (90, None),
    "b100": (100, None),
    "b200": (100, 179),
    "gb200": (100, 185),
    "b300": (103, None),
    "gb300": (103, None),
    "rtx5090": (120, 31),
    "rtxpro6000": (120, 95),
    "gb10": (121, None),
}

# PyTorch series -> what its wheels on PyPI bring: (CUDA, cuBLAS; None where cuda-toolkit decides).
TORCH_WHEELS: dict[str, tuple[str, str | None]] = {
    "2.6": ("12.4", "12.4.5.8"),
    "2.7": ("12.6", "12.6.4.1"),
    "2.8": ("12.8", "12.8.4.1"),
    "2.9": ("12.8", "12.8.4.1"),
    "2.10": ("12.8", "12.8.4.1"),
    "2.11": ("13.0.2", "13.1.0.3"),
    "2.12": ("13.0.2", "13.1.0.3"),
    "2.13": ("13.0.3", None),
    "2.14": ("13.0.3", None),
    "2.15": ("13.2.2", None),
}

_ALIASES = {
    "cu": "cuda",
    "cublaslt": "cublas",
    "transformerengine": "te",
    "megatroncore": "mcore",
    "megatronbridge": "bridge",
    "nemotoolkit": "nemo",
    "py": "python",
}
# Word -> the units of a CPU; avx2 means neither AVX-512 nor AMX.
_CPU_WORDS: dict[str, tuple[str, ...]] = {"avx2": (), "avx512": ("avx512",), "amx": ("avx512", "amx")}


def facts_of(machine: Machine) -> list[tuple[str, str]]:
    """Return what is known of a machine as (heading, words) rows; unknown and absent read differently."""
    m = machine
    gib = f", {m.memory / 2**30:.0f} GiB" if m.memory else ""
    gpu = {True: f"{m.count or 1} x {m.gpu or 'GPU'} (sm{m.arch}{gib})", False: "none", None: "unknown"}[m.has_gpu]
    versions = {name: getattr(m, name) or "unknown" for name in VERSIONS} | {"vllm": _vllm_in_words(m)}
    cpu = "unknown" if m.cpu is None else ", ".join(m.cpu) or "neither AVX-512 nor AMX"
    rows = [("machine", m.source), ("GPU", gpu), *versions.items(), ("CPU", cpu)]
    return rows + [("assumed", sentence) for sentence in m.assumed]


def _vllm_in_words(machine: Machine) -> str:
    looked = machine.vllm_looked
    if machine.vllm == ABSENT and looked:
        return f"none; looked in {', '.join(looked)}"
    return f"{machine.vllm or 'unknown'}{f', in {looked[-1]}' if len(looked) > 1 else ''}"


def fields_of(words: str) -> dict[str, Any]:
    """Return the fields of a Machine that the words set.

    Raises PrecisionError if there are none, and with a problem for each that means nothing or contradicts another.
    """
    said: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in filter(None, (w.strip() for w in words.split(","))):
        meant = _read_word(re.sub(r"[\s_-]", "", word.lower()))
        if meant is None:
            problems.append(_unknown_word(word))
            continue
        if "cpu" in meant:
            meant["cpu"] = (*said.pop("cpu", ()), *meant["cpu"])
        clash = sorted(name for name in meant.keys() & said.keys() if said[name] != meant[name])
        if clash:
            what, why = (
                f"{word!r} contradicts an earlier word in {words!r}.",
                f"Both say what {' and '.join(clash)} is.",
            )
            problems.append(Problem(what, why, "Describe one machine at a time."))
        said |= meant
    if problems:
        raise PrecisionError(problems)
    if not said:
        raise PrecisionError(
            "The machine is described by no word.",
            "There is nothing to answer for.",
            "Say --for h200,cuda12.8,te2.9.",
        )
    return said


def _read_word(word: str) -> dict[str, Any] | None:
    """Return the fields that one word sets; None if it has no meaning."""
    if word in ("cpu", "nogpu"):
        return {"gpu": ABSENT, "count": 0, "driver": ABSENT}
    if word in _CPU_WORDS:
        return {"cpu": _CPU_WORDS[word]}
    if found := re.fullmatch(r"sm(\d{2,3})a?", word):
        return {"arch": int(found[1])}
    if found := re.fullmatch(r"no([a-z]+)", word):
        name = _ALIASES.get(found[1], found[1])
        return {name: ABSENT} if name in VERSIONS else None
    if found := re.fullmatch(r"([a-z]+)[=v]*(\d[\w.+]*)", word):
        name = _ALIASES.get(found[1], found[1])
        version = re.sub(r"^(\d+)(\d)$", r"\1.\2", found[2]) if found[1] == "cu" else found[2]
        if name in VERSIONS and re.fullmatch(VERSION_PATTERN, version, re.VERBOSE):
            return {name: version, **({"te_library": True} if name == "te" else {})}
    return _read_gpu(word)


def _read_gpu(word: str) -> dict[str, Any] | None:
    """Read a GPU's name with a count before or after it and a size behind it: ``8xh100``, ``a10080gb``, ``h200x4``."""
    names = "|".join(sorted(GPUS, key=len, reverse=True))
    found = re.fullmatch(rf"(?:(\d+)x)?(?:nvidia)?({names})(?:sxm\d?|pcie|nvl)?(?:(\d+)gi?b)?(?:x(\d+))?", word)
    if found is None:
        return None
    before, gpu, size, after = found.groups()
    arch, usual = GPUS[gpu]
    gib, count = float(size) if size else usual, before or after
    said: dict[str, Any] = {"gpu": gpu, "arch": arch}
    return said | ({"memory": int(gib * 2**30)} if gib else {}) | ({"count": int(count)} if count else {})


def _unknown_word(word: str) -> Problem:
    return unknown(
        "word in the description of a machine",
        word,
        [*GPUS, "smNN", "cpu", *_CPU_WORDS, *(f"{n}X.Y" for n in VERSIONS)],
    )


def fill_in(machine: Machine) -> Machine:
    """Fill in the CUDA of a PyTorch's wheel and the cuBLAS of a CUDA, each with a sentence in ``assumed``."""
    changes: dict[str, Any] = {}
    assumed: list[str] = []
    if machine.torch and machine.torch != ABSENT and machine.cuda is None:
        series, _, local = machine.torch.partition("+")
        wheel = TORCH_WHEELS.get(".".join(series.split(".")[:2]))
        if local == "cpu":
            changes |= {"cuda": ABSENT, "cublas": ABSENT}
        elif tag := re.fullmatch(r"cu(\d+)(\d)", local):
            changes["cuda"] = f"{tag[1]}.{tag[2]}"
        elif wheel and machine.has_gpu is not False:
            changes["cuda"] = wheel[0]
            if wheel[1] and machine.cublas is None:
                changes["cublas"] = wheel[1]
            assumed.append(f"torch {machine.torch} is PyPI's wheel, which carries CUDA {wheel[0]}.")
    cuda = changes.get("cuda", machine.cuda)
    if cuda and cuda != ABSENT and machine.cublas is None and "cublas" not in changes:
        changes["cublas"] = ".".join(cuda.split(".")[:2])
        assumed.append(f"cuBLAS is the one that CUDA {cuda} ships; say cublasX.Y if it is another.")
    return replace(machine, **changes, assumed=tuple(assumed))
