"""Tables of another program's names for contract fields, and how to read and write through them.

A row says which field a name sets, what the program does if the name is absent, and which values it spells
differently. Both directions use the same table, so they always agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import Problem, unknown


@dataclass(frozen=True)
class Setting:
    """One setting of another program, and the contract field that it sets."""

    field: str
    """The contract field that it sets."""
    default: Any = None
    """The value that the program takes if the name is not given."""
    values: Mapping[Any, Any] | None = None
    """Their value -> ours, if only some are allowed; of several for one of ours, the first is written."""
    alias: bool = False
    """A second name for a field: it is read, never written."""

    def read(self, value: Any) -> Any:
        """Return the contract's value for the program's."""
        return value if self.values is None else self.values[value]

    def write(self, value: Any) -> Any:
        """Return the program's value for the contract's; its default for one that it has no word for, which is lost."""
        if self.values is None:
            return value
        return next((theirs for theirs, ours in self.values.items() if ours == value), self.default)


def same(*values: Any) -> dict[Any, Any]:
    """Return a table of values that are spelt alike on both sides, which allows no others."""
    return {value: value for value in values}


def write(settings: Mapping[str, Setting], precision: Precision) -> dict[str, Any]:
    """Return every setting's value for a contract, under the program's names."""
    return {name: s.write(getattr(precision, s.field)) for name, s in settings.items() if not s.alias}


def read(settings: Mapping[str, Setting], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the contract fields that the given settings set, and problems with their values."""
    changes: dict[str, Any] = {}
    said: dict[str, str] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        setting = settings[name]
        wrong = [*_wrong_value(name, value, setting)]
        problems += wrong
        if wrong:
            continue
        ours = setting.read(value)
        first = said.setdefault(setting.field, name)
        if changes.setdefault(setting.field, ours) != ours and first != name:  # NaN is not even itself
            problems.append(
                Problem(
                    f"{first}={given[first]!r} and {name}={value!r} contradict each other.",
                    f"Both set {setting.field!r} of the contract: they are one setting under two names.",
                    f"Give only one of them, best {_best_name(settings, setting.field)!r}.",
                )
            )
    return changes, problems


def _wrong_value(name: str, value: Any, setting: Setting) -> Iterator[Problem]:
    if setting.values is not None and value not in tuple(setting.values):
        yield unknown(f"value for {name}:", value, [str(v) for v in setting.values if v is not None])


def _best_name(settings: Mapping[str, Setting], field: str) -> str:
    return next(name for name, s in settings.items() if s.field == field and not s.alias)
