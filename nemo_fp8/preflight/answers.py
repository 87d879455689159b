"""Answer whether a machine can run a recipe, from the table in ``support.py``.

A machine's field is a value, ``ABSENT`` or unknown (None), so a need holds, fails or is open. The first way that holds
gives the verdict. If none holds and one is open, the verdict is ``unknown``, and the answer names what would decide it.
If all fail, the answer gives the reasons of the nearest way. An unknown version of one of the ``HOSTS`` leaves no way
open: the verdict stands on the condition that it is new enough, and names it.

Versions are compared as versions; TE's own ``float(torch.version.cuda)`` reads 12.10 as 12.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.preflight.machine import ABSENT, Machine
from nemo_fp8.preflight.support import HOSTS, NATIVE, NEEDS, RECIPES, TE, UNKNOWN, UNSUPPORTED, WAYS, Need, Way


@dataclass(frozen=True)
class Answer:
    """The verdict of a machine on a recipe. ``depends`` lists unknown things that would decide or confirm it.

    Of every verdict but ``native``, :func:`nemo_fp8.preflight.lint.support_findings` makes a finding.
    """

    recipe: str
    way: str
    verdict: str
    reason: str
    remedy: str
    depends: tuple[str, ...] = ()


def answer(recipe: str, machine: Machine, by: Collection[str] | None = None) -> Answer:
    """Return the verdict of a machine on a recipe, a name of ``RECIPES``; raise PrecisionError for another name.

    With ``by`` only the needs that one of these states count, such as ``TE_CHECK``.
    """
    if recipe not in RECIPES:
        raise PrecisionError([unknown("recipe", recipe, RECIPES)])
    tried = [_try(way, recipe, machine, by) for way in WAYS if recipe in way.recipes]
    for found in tried:
        if not found.failed and not found.open:
            return _holds(found, tried[0], recipe, machine)
    undecided = [found for found in tried if not found.failed]
    if undecided:
        # If a yes and a no depend on the same unknown (AMX's kernel, or none), it is listed once.
        depends = tuple(
            dict.fromkeys(in_words(need).removeprefix("not ") for found in undecided for need in found.open)
        )
        return Answer(
            recipe, undecided[0].way.name, UNKNOWN, f"It depends on {_list(depends)}, not known here.", _SAY, depends
        )
    # The nearest way: one that neither GPU nor CPU rules out, else one that the GPU does not rule out, else the first.
    nearest = min(
        tried,
        key=lambda found: [any(need.field in ruled for need in found.failed) for ruled in (("arch",), _CPU_FIELDS)],
    )
    return Answer(
        recipe, nearest.way.name, UNSUPPORTED, _reasons(nearest.failed, machine), _remedies(nearest.failed, machine)
    )


def in_words(need: Need) -> str:
    """Return a need in words: ``CUDA >= 12.9``."""
    return condition(need.field, need.spec)


def condition(field: str, spec: str) -> str:
    """Return ``field`` in ``spec`` in words."""
    name = _FIELD_WORDS.get(field, field)
    if spec in ("==1", "==0"):
        return name if spec == "==1" else f"not {name}"
    return " or ".join(_spec_words(name, alternative) for alternative in spec.split("|"))


# ---------------------------------------------------------------------- reading the table

_NO_GPU = "There is no GPU."
_CPU_FIELDS = ("amx", "avx512")
_SAY = "Describe the machine in full, as in --for h200,cuda12.9,te2.9."
_FIELD_WORDS = {
    "arch": "a GPU of sm",
    "cuda": "CUDA",
    "cublas": "cuBLAS",
    "te": "TransformerEngine",
    "te_library": "TransformerEngine's compiled library",
    "mcore": "megatron-core",
    "nemo": "NeMo",
    "vllm": "vLLM",
    "vllm_cpu": "vLLM's CPU build",
    "amx": "a CPU with AMX",
    "avx512": "a CPU with AVX-512 or AMX",
}


@dataclass(frozen=True)
class _Try:
    way: Way
    failed: tuple[Need, ...]
    open: tuple[Need, ...]
    provided: tuple[Need, ...]


def needs_of(way: str, recipe: str) -> Iterator[Need]:
    """Yield the rows of the table for one way of one recipe."""
    return (need for need in NEEDS if need.way == way and recipe in need.recipes)


def _try(way: Way, recipe: str, machine: Machine, by: Collection[str] | None) -> _Try:
    needs = [need for need in needs_of(way.name, recipe) if by is None or need.by in by]
    held = [(need, _holds_on(need, machine)) for need in needs]
    not_known = [need for need, holds in held if holds is None]
    return _Try(
        way,
        failed=tuple(need for need, holds in held if holds is False),
        open=tuple(need for need in not_known if need.by not in HOSTS),
        provided=tuple(need for need in not_known if need.by in HOSTS),
    )


def _holds_on(need: Need, machine: Machine) -> bool | None:
    holds = _lies_in(need.spec, _value(machine, need.field))
    if holds or need.when is None:
        return holds
    applies = _lies_in(need.when[1], _value(machine, need.when[0]))
    return holds if applies else True if applies is False else None


def _value(machine: Machine, field: str) -> str | None:
    """Return a field as a version, ABSENT or None, so that one comparison serves all fields."""
    if field == "arch" and machine.has_gpu is False:
        return ABSENT
    if field in _CPU_FIELDS:
        enough = _CPU_FIELDS if field == "avx512" else (field,)
        value = None if machine.cpu is None else any(has in machine.cpu for has in enough)
    else:
        value = getattr(machine, field)
    return None if value is None else str(int(value)) if isinstance(value, (bool, int)) else value


@lru_cache(maxsize=4096)
def _lies_in(spec: str, value: str | None) -> bool | None:
    if value is None:
        return None
    alternatives = spec.split("|")
    if value == ABSENT:
        return ABSENT in alternatives
    try:
        version = Version(value)
    except InvalidVersion:
        return None
    return any(SpecifierSet(s).contains(version, prereleases=True) for s in alternatives if s != ABSENT)


def _holds(found: _Try, first: _Try, recipe: str, machine: Machine) -> Answer:
    depends = tuple(in_words(need) for need in found.provided if need.by != "installation" and need.spec != ">=0")
    reason = found.way.says + (f" Provided {_list(depends)} (not known here)." if depends else "")
    if found is first or found.way.verdict == NATIVE:
        return Answer(recipe, found.way.name, found.way.verdict, reason, "", depends)
    # If the first choice does not hold, say why.
    decisive = [need for need in first.failed if need.field == "arch"] or first.failed
    because = " ".join(_NO_GPU if machine.has_gpu is False else need.why for need in decisive[:1])
    return Answer(
        recipe, found.way.name, found.way.verdict, f"{because} {reason}", _remedies(decisive, machine), depends
    )


def _reasons(needs: Collection[Need], machine: Machine) -> str:
    def found(need: Need) -> str:
        value = _value(machine, need.field)
        if value == ABSENT and need.field == "arch":
            return f"{_NO_GPU} It needs {in_words(need)}."
        if need.spec in ("==1", "==0"):
            return need.why
        here = "absent" if value == ABSENT else f"sm{value}" if need.field == "arch" else value
        return f"{need.why} It needs {in_words(need)}; here it is {here}."

    return " ".join(dict.fromkeys(map(found, needs)))


def _remedies(needs: Collection[Need], machine: Machine) -> str:
    if machine.has_gpu is False and any(need.way == TE for need in needs):
        gpu = _FIELD_WORDS["arch"]
        which = _list([in_words(need).removeprefix(f"{gpu} ") for need in needs if need.field == "arch"])
        return f"For speed, {gpu} {which}; for numerics, the emulation does, which engine='auto' takes."
    return " ".join(dict.fromkeys(need.remedy for need in needs if need.remedy))


def _spec_words(name: str, spec: str) -> str:
    if spec == ABSENT:
        return "no GPU"  # the only need of an absence is that of a GPU
    if spec == ">=0":
        return f"{name} (any)"
    return f"{name} " + " and ".join(_operator_words(part) for part in spec.split(","))


def _operator_words(part: str) -> str:
    version = part.lstrip("<>=")
    operator = part[: len(part) - len(version)]
    return version if operator == "==" else f"{operator} {version}"


def _list(words: Collection[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last
