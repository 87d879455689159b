"""One shape for everything reported about a setting, a machine or a tensor, and one error type for the package.

An error message needs three sentences, in this order: what is wrong, why, and what to do. Every refusal is a
:class:`PrecisionError` of :class:`Problem` rows. Every finding of lint, doctor, ``check`` and the gate is a
:class:`Problem` that was not raised, so that the same words serve an exception, a report and ``--json`` output.

There is one scale of severity:

    error    the run fails, or computes something else than the contract says
    warning  it runs, but something that was asked for does not happen, or costs more than it has to
    info     worth knowing
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

SEVERITIES = ("error", "warning", "info")
"""The scale, the gravest first."""


@dataclass(frozen=True)
class Problem:
    """What is wrong, why, and what to do about it; each a sentence. Raises PrecisionError for another severity."""

    what: str
    why: str
    remedy: str
    severity: str = "error"
    code: str = ""
    """The row of :data:`nemo_fp8.findings.RULES` with the words; empty if they are written where it is raised."""
    where: str = ""
    """The field, layer, package or tensor concerned."""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise PrecisionError([unknown("severity", self.severity, SEVERITIES)])

    def to_dict(self) -> dict[str, str]:
        """Return plain values for ``--json``, with the same keys for every finding."""
        return {
            "severity": self.severity,
            "code": self.code,
            "what": self.what,
            "why": self.why,
            "remedy": self.remedy,
            "where": self.where,
        }

    def __str__(self) -> str:
        return f"{self.what}\n  why:    {self.why}\n  remedy: {self.remedy}"


class PrecisionError(ValueError):
    """A setting, a machine or a tensor does not do what the contract says.

    ``problems`` holds every problem found, not only the first, so that one run shows all that is to be fixed.
    """

    def __init__(self, what: str | Iterable[Problem], why: str = "", remedy: str = "") -> None:
        self.problems = (Problem(what, why, remedy),) if isinstance(what, str) else tuple(what)
        super().__init__("\n".join(str(p) for p in self.problems))

    def __reduce__(self) -> tuple[type[PrecisionError], tuple[tuple[Problem, ...]]]:
        # Exceptions are rebuilt from their arguments when they are sent between processes (torchrun, Ray).
        return type(self), (self.problems,)


def unknown(kind: str, given: object, known: Iterable[object]) -> Problem:
    """Return the problem of an unknown name, with the nearest known one as the remedy."""
    names = [str(name) for name in known]
    close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return Problem(
        f"Unknown {kind} {given!r}.",
        f"It is none of the {len(names)} known names.",
        f"{hint}Choose one of: {', '.join(names)}.",
    )
