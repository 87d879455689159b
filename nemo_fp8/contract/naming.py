"""Read a precision as a person names it: a preset or a YAML file, with ``field=value`` changes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError


def load(name: str, changes: list[str] | None = None) -> Precision:
    """Return the contract of a preset's name or a YAML file, with ``field=value`` changes applied.

    Raises PrecisionError if there is no such preset or file, or if the result is no valid contract.
    """
    from nemo_fp8.contract.presets import preset

    p = from_file(name) if is_file(name) else preset(name)
    changed = changes_of(changes)
    return p.replace(**changed) if changed else p


def given(precision: Precision | str) -> Precision:
    """Return a contract that is given as itself, or by the name of a preset or of a YAML file.

    Raises PrecisionError if it is neither, or if there is no such preset or file.
    """
    if isinstance(precision, str):
        return load(precision)
    if not isinstance(precision, Precision):
        raise PrecisionError(
            f"{precision!r} is no contract.",
            "A contract is a Precision, or the name of a preset or of a YAML file.",
            "Give nemo_fp8.preset(NAME), or such a name.",
        )
    return precision


def from_file(name: str) -> Precision:
    """Return the contract in a YAML file; without a name of its own it is named after the file.

    Raises PrecisionError if the file cannot be read, or holds no valid contract.
    """
    p = Precision.from_yaml(read_text(name))
    return p.replace(name=label_of(name)) if p.name == "custom" else p


def label_of(name: str) -> str:
    """Return the heading of a contract's column in a table."""
    return Path(name).stem if is_file(name) else name


def settings_of(name: str, changes: list[str] | None = None) -> dict[str, Any]:
    """Return the settings of such a contract as plain values. They need not be valid; ``lint`` says what is wrong.

    Raises PrecisionError if there is no such preset or file, or if the file holds no mapping.
    """
    from nemo_fp8.contract.yaml import load_mapping

    if is_file(name):
        return load_mapping(read_text(name), "a precision contract") | changes_of(changes)
    try:
        return load(name, changes).to_dict()
    except PrecisionError:
        return load(name).to_dict() | changes_of(changes)


def changes_of(changes: list[str] | None) -> dict[str, Any]:
    """Parse ``field=value`` words. Raises PrecisionError for a word of another form."""
    pairs = [change.partition("=") for change in changes or []]
    for field, equals, _ in pairs:
        if not equals:
            raise PrecisionError(
                f"--set {field} has no value.", "A change is a field and its new value.", f"Write --set {field}=VALUE."
            )
    return {field: _value(field, value) for field, _, value in pairs}


def _value(field: str, text: str) -> Any:
    """Parse a value as YAML, or as a tuple as remedies write it. Raises PrecisionError if it is neither."""
    import yaml

    from nemo_fp8.contract.yaml import UNREADABLE

    try:
        return ast.literal_eval(text) if text.startswith("(") else yaml.safe_load(text)
    except (*UNREADABLE, SyntaxError, MemoryError) as error:
        raise PrecisionError(
            f"--set {field}={text} cannot be read.",
            f"It is read as YAML, or as a tuple of Python's: {str(error).splitlines()[0]}.",
            """Quote patterns inside of lists, and the word for the shell: --set "keep=['*.linear_proj']".""",
        ) from None


def is_file(name: str) -> bool:
    """Return whether a name is that of a YAML file."""
    return Path(name).suffix in (".yaml", ".yml")


def read_text(name: str) -> str:
    """Return a file's text. Raises PrecisionError if it is missing or is not text."""
    if not Path(name).is_file():
        raise PrecisionError(
            f"There is no file {name}.", "A name that ends in .yaml is read as a file.", "Check the path."
        )
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrecisionError(f"{name} cannot be read.", f"{error}.", "Give a file of YAML, in UTF-8.") from error
