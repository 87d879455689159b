"""``nemo_fp8.check(train=..., rollout=...)`` under its own module's name; the work is in ``agreement.py``.

A submodule, once imported, takes the place of a function of the same name on its package, so this one answers calls
itself. With ``"check": "nemo_fp8.agreement"`` among the package's public names this file can go.
"""

from __future__ import annotations

import sys
from types import ModuleType

from nemo_fp8.agreement import Agreement, check
from nemo_fp8.contract import Precision


class _Check(ModuleType):
    def __call__(self, *, train: Precision, rollout: Precision) -> Agreement:
        return check(train=train, rollout=rollout)


sys.modules[__name__].__class__ = _Check

__all__ = ["check"]
