"""FP8 precision for NeMo / Megatron training and vLLM rollout: one contract, obeyed on both sides.

``import nemo_fp8`` loads the standard library only. Every public name is found when it is first used, so that
torch and NeMo (ten seconds) are paid for by those who need them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from nemo_fp8.moved import OldNames

__version__ = "0.1.0"

# public name -> the module that holds it
_HOMES = {
    "Precision": "nemo_fp8.contract",
    "PrecisionError": "nemo_fp8.errors",
    "PRESETS": "nemo_fp8.presets",
    "preset": "nemo_fp8.presets",
    "check": "nemo_fp8.agreement",
    "autocast": "nemo_fp8.numerics.autocast",
    "capture": "nemo_fp8.numerics.capture",
    "MixedPrecision": "nemo_fp8.train.plugin",
}


if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
    sys.meta_path.append(OldNames())


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        from nemo_fp8.presets import PRESETS

        if name in PRESETS:
            return getattr(importlib.import_module("nemo_fp8.factories"), name)
    raise AttributeError(f"module 'nemo_fp8' has no attribute {name!r}")


def __dir__() -> list[str]:
    from nemo_fp8.presets import PRESETS

    return sorted([*globals(), *_HOMES, *PRESETS])
