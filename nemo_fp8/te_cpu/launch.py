"""Run a command with :mod:`nemo_fp8_hook` in every Python process that it starts, where no .pth file of ours is read.

Python reads .pth files in its site-packages only: not in a checkout or a ``pip install --target`` folder on PYTHONPATH.
There the folder ``nemo_fp8_hook/path`` goes first on PYTHONPATH, which children inherit, and Python imports its
``sitecustomize`` as it starts.
"""

from __future__ import annotations

import os
import site
from collections.abc import Mapping, Sequence
from pathlib import Path

import nemo_fp8_hook
from nemo_fp8 import lifetime
from nemo_fp8.errors import PrecisionError
from nemo_fp8.te_cpu.switch import KNOWN


def nothing_to_do(arch: int | None, variables: Mapping[str, str]) -> str | None:
    """Return why a command needs no hook; None if it needs one."""
    if nemo_fp8_hook.has_driver():
        return "There is a GPU: nothing is stood in for."
    if arch is None and variables.get(nemo_fp8_hook.VARIABLE) == nemo_fp8_hook.OFF:
        return f"{nemo_fp8_hook.VARIABLE}={nemo_fp8_hook.OFF}: nothing is stood in for."
    return None


def variables_for(arch: int | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what to set in the environment ``variables`` of a command, so that its processes have the hook.

    Raises PrecisionError for an ``arch`` that no CPU stands for.
    """
    if arch is not None and arch not in nemo_fp8_hook.ARCHITECTURES:
        raise PrecisionError(
            f"--arch {arch}.", "No GPU of that architecture can be stood for.", f"Give one of {KNOWN}."
        )
    home = Path(nemo_fp8_hook.__file__).parents[1]
    ours, theirs = [str(home / "nemo_fp8_hook" / "path")], [str(home)]
    if str(home) in (
        *site.getsitepackages(),
        site.getusersitepackages(),
    ):  # which a child has by itself, and another Python must not
        theirs = []
    before = [
        folder
        for folder in variables.get("PYTHONPATH", "").split(os.pathsep)
        if folder and folder not in (*ours, *theirs)
    ]
    named = {} if arch is None else {nemo_fp8_hook.VARIABLE: str(arch)}
    return {"PYTHONPATH": os.pathsep.join([*ours, *before, *theirs]), **named}


def run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command until it ends, with these variables added, and return its exit code as a shell tells it.

    Nothing that it started is left.
    """
    with lifetime.running(command, env={**os.environ, **variables}) as process:
        code = process.wait()
    return code if code >= 0 else 128 - code
