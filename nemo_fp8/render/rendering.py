"""What every renderer returns, and how it finds out what it could not say.

A renderer writes a contract for one outside program, reads its own output back, and compares. Whatever came back
different is a field that the program has no word for, and is named in the rendering's notes: so no field can be
forgotten by forgetting to mention it. The price is that every renderer needs a reader; the tests need one anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem

ROLLOUT_FIELDS = ("rollout", "rollout_block", "activation_scheme", "kv_cache", "deep_gemm", "importance_sampling")


@dataclass(frozen=True)
class Rendering:
    """One contract in another program's words."""

    to: str
    """The name of the outside format, a key of ``RENDERERS``."""
    text: str
    """What a person pastes: YAML, flags, a Python call, ``export`` lines."""
    data: dict[str, Any]
    """The same as plain values, for ``--json``."""
    notes: tuple[str, ...] = ()
    """What this side does not do as the contract says, a sentence each."""
    lost: tuple[str, ...] = field(default=())
    """The contract fields that this side has no word for. Each is named in ``notes``."""

    def require_whole(self) -> Rendering:
        """The same rendering, or an error that names every field it lost."""
        if self.lost:
            why = f"The {self.to} rendering would not do what the contract says."
            raise PrecisionError(
                Problem(note, why, "Change the contract, or carry it another way.") for note in self.notes
            )
        return self


def lost_fields(
    precision: Precision, read_back: Precision, reasons: Mapping[str, str], side: str
) -> tuple[tuple[str, ...], list[str]]:
    """The fields that did not survive a rendering, and a sentence for each; fields with one reason share a sentence."""
    lost = tuple(precision.diff(read_back))
    by_reason: dict[str, list[str]] = {}
    for name in lost:
        by_reason.setdefault(reasons.get(name, f"{side} has no word for it."), []).append(name)
    return lost, [f"Not said here: {_values(precision, names)}. {reason}" for reason, names in by_reason.items()]


def _values(precision: Precision, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={getattr(precision, name)!r}" for name in names)


def python_call(function: str, arguments: Mapping[str, Any], first: Iterable[str] = ()) -> str:
    """A Python call, an argument to a line; names of torch objects stand bare."""
    lines = [*first, *(f"{name}={python_value(value)}" for name, value in arguments.items())]
    return f"{function}(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def python_value(value: Any) -> str:
    """A value as Python source; ``"torch.bfloat16"`` is a name and not a text."""
    return value if isinstance(value, str) and value.startswith("torch.") else repr(value)
