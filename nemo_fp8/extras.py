"""The modules that parts of the package need beyond the core, and how to install them.

    __needs__ = require("numerics")      in a module that users import, before it imports torch

Without this the first import would fail with "No module named 'torch'", which says neither which part needs it nor how
to install it. Only missing modules are reported: an import that fails inside of an installed package, or of this one,
raises its own error.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

from nemo_fp8.errors import PrecisionError, unknown


@dataclass(frozen=True)
class Extra:
    """A part of the package: the modules that it imports, why the core does without them, and how to install them."""

    part: str
    modules: tuple[str, ...]
    why: str
    remedy: str


_TORCH = ("torch", "numpy", "safetensors")
_TRAIN = (
    "Run `make setup` in a checkout and use .venv/bin, or pip install --constraint constraints/training.txt "
    "'nemo-fp8[train]'."
)
EXTRAS = {
    "numerics": Extra(
        "FP8 arithmetic on tensors",
        _TORCH,
        "They are an extra, so that the contract, the doctor and the renderers stay light.",
        "pip install 'nemo-fp8[numerics]'.",
    ),
    "report": Extra(
        "A report with plots",
        ("matplotlib",),
        "It is an extra, so that the light core stays light.",
        "pip install 'nemo-fp8[report]', or ask for the table or --json only.",
    ),
    "train": Extra(
        "Training",
        (*_TORCH, "nemo", "nemo_run", "lightning", "megatron", "fiddle"),
        "NeMo and Megatron live in the training environment.",
        _TRAIN,
    ),
    "bridge": Extra(
        "Training with Megatron-Bridge",
        (*_TORCH, "megatron.core", "megatron.bridge"),
        "Megatron-Bridge 0.3.1 needs megatron-core 0.16, and NeMo 2.7.3 does not train with it, so it lives in an "
        "environment of its own.",
        "Run this there: `make setup` builds .venv-bridge over .venv; without it, pip install --no-deps --requirement "
        "constraints/bridge.txt beside torch and TransformerEngine.",
    ),
    "rl": Extra(
        "GRPO",
        (*_TORCH, "nemo", "lightning", "megatron", "ray"),
        "Its driver and its ranks run in the training environment, under Ray.",
        _TRAIN,
    ),
    "rollout": Extra(
        "FP8 rollout",
        (*_TORCH, "vllm"),
        "vLLM lives in an environment of its own, without NeMo.",
        "Run this there (make setup builds .venv-rollout; .venv-rollout/bin/nemo-fp8 serve ...), "
        "or pip install 'nemo-fp8[rollout]' where a vLLM is.",
    ),
}


class NotInstalled(PrecisionError, ImportError):
    """A needed module is not installed. It is an ImportError as well, for code that guards an import."""


def require(name: str) -> str:
    """Return the extra's name. Raises NotInstalled if modules of the extra are missing, and names all of them."""
    if name not in EXTRAS:
        raise PrecisionError([unknown("extra", name, EXTRAS)])
    extra = EXTRAS[name]
    missing = [module for module in extra.modules if not _is_installed(module)]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise NotInstalled(
            f"{extra.part} needs {', '.join(missing)}, which {verb} not installed.",
            f"{extra.why} This is {sys.executable}.",
            extra.remedy,
        )
    return name


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module without a spec, such as a test's stand-in
        return module in sys.modules
    except ModuleNotFoundError:  # of a package that is not there
        return False
