"""Read YAML as plain data: a mapping at the top, no key twice, no tags that construct objects.

PyYAML's ``safe_load`` keeps the last of two equal keys without a warning, so that the first setting is lost.
"""

from __future__ import annotations

from typing import Any

import yaml

from nemo_fp8.errors import PrecisionError

UNREADABLE = (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError)
"""What PyYAML raises for a text that it cannot read: 2001-13-45 is a ValueError, thousands of brackets are too deep."""


class _UniqueKeys(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in seen:
                line = key_node.start_mark.line + 1
                raise PrecisionError(
                    f"The key {key!r} stands twice in one mapping (line {line}).",
                    "YAML keeps the last one in silence, so the first would be ignored.",
                    "Remove one of them.",
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_mapping(text: str, what: str) -> dict[str, Any]:
    """Return the mapping in ``text``; ``what`` names the text in errors. Raises PrecisionError if there is none."""
    try:
        value = yaml.load(text, Loader=_UniqueKeys)
    except PrecisionError:
        raise
    except UNREADABLE as error:
        raise PrecisionError(
            f"This is not YAML, where {what} was expected.", " ".join(str(error).split()), "Correct the YAML."
        ) from error
    if not isinstance(value, dict):
        raise PrecisionError(
            f"The YAML for {what} is a {type(value).__name__}, not a mapping.",
            "Settings are read by their keys.",
            "Write 'key: value' lines.",
        )
    return value
