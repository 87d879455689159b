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
    one. ``fp32_scales`` is a setting that TE has no argument for."""

    recipe: str
    arguments: dict[str, Any]
    precision: Precision | None = None
    archs: tuple[int, ...] = (90, 100)
    fp32_scales: bool = False

    def build(self) -> Any:
        from transformer_engine.common import recipe

        built = getattr(recipe, self.recipe)(**self.arguments)
        if self.fp32_scales:
            for role in ("fwd_inp", "fwd_weight", "bwd_grad"):
                setattr(built, f"fp8_quant_{role}", recipe.QParams(power_2_scale=False))
        return built


_HISTORY = {"amax_history_len": 4, "amax_compute_algo": "max"}
_POW2 = {"weight_scale": "pow2", "activation_scale": "pow2"}
_FP32 = {"weight_scale": "fp32", "activation_scale": "fp32"}
CASES = {
    "delayed": Case("DelayedScaling", _HISTORY, Precision(format="hybrid", scaling="delayed", **_HISTORY)),
    "tensorwise": Case("Float8CurrentScaling", {}, Precision(format="hybrid", scaling="tensorwise")),
    "blockwise": Case("Float8BlockScaling", {}, Precision(format="e4m3", scaling="blockwise", **_POW2)),
    "mxfp8": Case("MXFP8BlockScaling", {}, Precision(format="e4m3", scaling="mxfp8"), archs=(100,)),
    "nvfp4": Case("NVFP4BlockScaling", {}, archs=(100,)),
}
BITS = {name: case for name, case in CASES.items() if case.precision} | {
    "blockwise.fp32": Case(
        "Float8BlockScaling",
        {},
        Precision(format="e4m3", scaling="blockwise", **_FP32),
        archs=(90,),
        fp32_scales=True,
    ),
    "nvfp4.nearest": Case(
        "NVFP4BlockScaling",
        {"disable_stochastic_rounding": True},
        Precision(format="e2m1", scaling="nvfp4", stochastic_rounding=False),
        archs=(100,),
    ),
}
"""Those whose bits :mod:`nemo_fp8.numerics` tells: nothing in them is drawn at random."""
