"""The choice of the engine refuses what TransformerEngine would not do, before anything is built."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.contract.te_variables import TE_RECIPES
from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.engine import choose_engine
from nemo_fp8.preflight.machine import Machine

B200 = Machine.parse("b200,cuda12.9,te2.20.2")


def _start(precision: Precision) -> None:
    assert choose_engine(precision, "te", B200) == "te"


@pytest.mark.parametrize(
    "settings", [{"row_scaled": True}, {"four_over_six": "weights"}, {"backward": "dequantized"}], ids=str
)
def test_training_is_refused_if_te_is_too_old_to_read_what_the_contract_says(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """A TransformerEngine from before these settings: its NVFP4 has three of the fields and no others."""
    older = ModuleType(TE_RECIPES)
    known = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    older.NVFP4BlockScaling = dataclasses.make_dataclass(  # type: ignore[attr-defined]
        "NVFP4BlockScaling", [(name, bool, False) for name in known]
    )
    monkeypatch.setitem(sys.modules, TE_RECIPES, older)
    p = preset("bf16_with_nvfp4_mixed")
    _start(p)
    with pytest.raises(PrecisionError, match="no such setting") as caught:
        _start(p.replace(**settings))
    ((name, value),) = settings.items()
    assert f"{name}={value!r}" in caught.value.problems[0].what
    _start(p.replace(**{name: getattr(p, name)}))
    # With a backward of its own, each linear is handed its recipe, which refuses what it does not know.
    if name != "backward":
        _start(p.replace(**settings, backward_scaling="mxfp8", weight_block="1x16"))
