"""One error type for the whole package: what is wrong, why, and what to do about it.

A person who meets an error at three in the morning needs three sentences, in this order. Every refusal in
this package is a :class:`PrecisionError` built from :class:`Problem` rows, so that the same words serve an
exception, a lint finding and ``--json`` output.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, its cause, and its remedy; each a sentence."""

    what: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}\n  why:    {self.why}\n  remedy: {self.remedy}"


class PrecisionError(ValueError):
    """A setting, a machine or a tensor that would not do what it says.

    ``problems`` holds every problem found, not only the first, so that one run shows all there is to mend.
    """

    def __init__(self, what: str | Iterable[Problem], why: str = "", remedy: str = "") -> None:
        self.problems = (Problem(what, why, remedy),) if isinstance(what, str) else tuple(what)
        super().__init__("\n".join(str(p) for p in self.problems))

    def __reduce__(self) -> tuple[type[PrecisionError], tuple[tuple[Problem, ...]]]:
        # Exceptions are rebuilt from their arguments when they cross a process (torchrun, Ray).
        return type(self), (self.problems,)


def unknown(kind: str, given: object, known: Iterable[str]) -> Problem:
    """A name nobody knows, with the nearest known one as the remedy."""
    names = [str(name) for name in known]
    close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return Problem(
        f"Unknown {kind} {given!r}.",
        f"It is none of the {len(names)} known names.",
        f"{hint}Choose one of: {', '.join(names)}.",
    )
