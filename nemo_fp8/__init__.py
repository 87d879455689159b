"""FP8 precision for NeMo / Megatron training and vLLM rollout: one contract, obeyed on both sides.

``import nemo_fp8`` loads the standard library only. Every public name is imported at its first use, so that a program
that needs neither torch nor NeMo does not wait ten seconds for them. Type checkers and editors read ``__init__.pyi``,
which ``tools/make_docs.py`` writes from the same tables.
"""

from nemo_fp8.moved import OldNames as _OldNames

__version__ = "0.2.0"

# public name -> the module that holds it
_HOMES = {
    "Precision": "nemo_fp8.contract",
    "PrecisionError": "nemo_fp8.errors",
    "PRESETS": "nemo_fp8.contract.presets",
    "preset": "nemo_fp8.contract.presets",
    "check": "nemo_fp8.preflight.agreement",
    "autocast": "nemo_fp8.numerics.autocast",
    "capture": "nemo_fp8.numerics.capture",
    "MixedPrecision": "nemo_fp8.train.plugin",
}


_OldNames.find_when_nothing_else_does()


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        from nemo_fp8.contract.presets import PRESETS

        if name in PRESETS:
            return getattr(import_module("nemo_fp8.factories"), name)
    raise AttributeError(f"module 'nemo_fp8' has no attribute {name!r}")


def __dir__() -> list[str]:
    from nemo_fp8.contract.presets import PRESETS

    return sorted({*globals(), *_HOMES, *PRESETS})
