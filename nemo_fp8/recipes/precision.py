"""The types of a recipe's ``precision`` argument, and the plugin that each stands for."""

from __future__ import annotations

from typing import Any, Optional, TypeAlias, Union

import nemo_run as run

from nemo_fp8.contract import Precision
from nemo_fp8.factories import plugin_config
from nemo_fp8.train.plugin import MixedPrecision

# nemo-run parses its command line by annotations, tries the members of a Union in their order, and reads neither ``str
# | None`` nor annotations that are strings: recipes must not import ``annotations`` from ``__future__``.
PrecisionLike: TypeAlias = Union[str, Precision, run.Config[Any]]  # noqa: UP007
Folder: TypeAlias = Optional[str]  # noqa: UP045


def plugin_of(precision: PrecisionLike) -> run.Config[MixedPrecision]:
    """Return a Config of our plugin for a preset's name, a YAML file, a contract, or such a Config.

    Raises PrecisionError if there is no such preset or file.
    """
    if isinstance(precision, run.Config):
        return precision
    return plugin_config(precision)
