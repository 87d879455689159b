"""Define what every renderer returns, and find the fields that the other program cannot express.

A renderer writes a contract for one program, reads its own output back, and compares. A field that comes back with
another value is one that the program cannot express, and the rendering's notes name it. So no renderer can leave a
field out by mistake. The trade-off: every renderer needs a reader; the tests need one anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.moved import renamed

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__, {"ROLLOUT_FIELDS": "nemo_fp8.contract.operands.ROLLOUT_FIELDS"})


@dataclass(frozen=True)
class Rendering:
    """One contract in another program's settings."""

    to: str
    """The name of the outside format, a key of ``RENDERERS``."""
    text: str
    """Text to paste: YAML, flags, a Python call, ``export`` lines."""
    data: dict[str, Any]
    """The settings as plain values, for ``--json``."""
    notes: tuple[str, ...] = ()
    """Sentences on what the program does differently from the contract."""
    lost: tuple[str, ...] = field(default=())
    """The contract fields that the program cannot express. ``notes`` names each."""

    def require_whole(self) -> Rendering:
        """Return self. Raises PrecisionError with every field that the rendering lost."""
        if self.lost:
            why = f"The {self.to} rendering would not do what the contract says."
            raise PrecisionError(
                Problem(note, why, "Change the contract, or carry it another way.") for note in self.notes
            )
        return self


Rules = tuple[tuple[str, str], ...]


def names_and_rules(rules: Iterable[tuple[str, str]], compute: str) -> tuple[tuple[str, ...], Rules]:
    """Split rules that were read into names to keep, the first ones if they say the compute dtype, and the others."""
    every = tuple(rules)
    kept = tuple(pattern for pattern, _ in itertools.takewhile(lambda rule: rule[1] == compute, every))
    return kept, every[len(kept) :]


def leading_as_kept(precision: Precision) -> Precision:
    """Return the same contract with its first rules among the names to keep, if they say the compute dtype."""
    kept, rules = names_and_rules(precision.modules, precision.compute)
    return precision.replace(keep=(*precision.keep, *kept), modules=rules) if kept else precision


def lost_fields(
    precision: Precision, read_back: Precision, reasons: Mapping[str, str], side: str, carried: Container[str] = ()
) -> tuple[tuple[str, ...], list[str]]:
    """Return the fields that came back different, and sentences on them; fields with one reason share a sentence.

    Those that are ``carried`` come back in other words.
    """
    lost = tuple(name for name in precision.diff(read_back) if name not in carried)
    by_reason: dict[str, list[str]] = {}
    for name in lost:
        by_reason.setdefault(reasons.get(name, f"{side} has no word for it."), []).append(name)
    return lost, [f"Not said here: {_values(precision, names)}. {reason}" for reason, names in by_reason.items()]


def _values(precision: Precision, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={getattr(precision, name)!r}" for name in names)


def python_call(function: str, arguments: Mapping[str, Any], first: Iterable[str] = ()) -> str:
    """Write a Python call with one argument to a line."""
    lines = [*first, *(f"{name}={python_value(value)}" for name, value in arguments.items())]
    return f"{function}(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def python_value(value: Any) -> str:
    """Write a value as Python source; ``"torch.bfloat16"`` becomes a name and not a string."""
    return value if isinstance(value, str) and value.startswith("torch.") else repr(value)
