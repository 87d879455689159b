"""The one name of Megatron that has to be replaced before Bridge 0.3.1 starts from PyPI's wheels.

Megatron's wheel holds its compiled index builder and no Makefile, and Bridge compiles the builder at every start:
``make`` finds nothing to do and fails, and Megatron ends the process, on a GPU as well. Where the library is there and
the Makefile is not, nothing is left to compile. The name stays replaced until the process ends.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path

from nemo_fp8.train.patching import Patch, is_patched, patched

FOR_THE_PROCESS = ExitStack()
"""Contexts that nobody closes, FP16's products among them: a process that trains with Bridge goes on to do so."""


def compile_helpers() -> None:
    """Compile nothing: the library is there."""


TABLE = (
    Patch(
        "megatron.bridge.training.initialize",
        "compile_helpers",
        compile_helpers,
        "it runs make in a folder without a Makefile, and ends the process when make fails.",
    ),
)


def replace_for_bridge() -> None:
    """Replace the name, once, where Megatron comes from a wheel; raise PrecisionError if it is not the tested one."""
    if _is_compiled_already() and not is_patched(TABLE):
        FOR_THE_PROCESS.enter_context(patched(TABLE, "Starting Megatron-Bridge"))


def _is_compiled_already() -> bool:
    library = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    origin = library.origin if library else None
    return origin is not None and not Path(origin).with_name("Makefile").exists()
