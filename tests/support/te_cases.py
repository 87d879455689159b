"""TE's recipes beside the contracts that say the same, and which architectures run them."""

import os
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision

ARCH = int(os.environ.get("NEMO_FP8_TE_TESTS_ARCH", "100"))
"""The architecture that this process stands for."""
VERSIONS = os.environ.get("NEMO_FP8_TE_TESTS_VERSIONS", "").split()
"""Versions of TE to try besides those that are known to fit."""


@dataclass(frozen=True)
class Case:
    """A recipe of TE's by its class and arguments; ``precision`` is ours of the same meaning, where the contract has
    one."""

    recipe: str
    arguments: dict[str, Any]
    precision: Precision | None = None
    least_arch: int = 90

    def build(self) -> Any:
        from transformer_engine.common import recipe

        return getattr(recipe, self.recipe)(**self.arguments)


_HISTORY = {"amax_history_len": 4, "amax_compute_algo": "max"}
_POW2 = {"weight_scale": "pow2", "activation_scale": "pow2"}
CASES = {
    "delayed": Case("DelayedScaling", _HISTORY, Precision(format="hybrid", scaling="delayed", **_HISTORY)),
    "tensorwise": Case("Float8CurrentScaling", {}, Precision(format="hybrid", scaling="tensorwise")),
    "blockwise": Case("Float8BlockScaling", {}, Precision(format="e4m3", scaling="blockwise", **_POW2)),
    "mxfp8": Case("MXFP8BlockScaling", {}, Precision(format="e4m3", scaling="mxfp8"), least_arch=100),
    "nvfp4": Case("NVFP4BlockScaling", {}, least_arch=100),
}
