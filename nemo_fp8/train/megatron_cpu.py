"""Megatron and NeMo on a machine without a GPU: the CPU that TransformerEngine stands on, and two names of theirs.

What a run does on a CPU is decided by the code that decides it on a GPU: Megatron's layers of TransformerEngine, TE's
own Python, and beneath it ``nemo_fp8.te_cpu`` in the place of TE's compiled extension. That stands in for the CUDA
device too, from the moment TE is imported until the process ends, so nothing of Megatron's is replaced for want of
CUDA. What is left are two names that gloo or a CPU build of torch cannot serve, and the one of ``first_weights.py``,
replaced for as long as a run lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemo_fp8 import te_cpu
from nemo_fp8.errors import PrecisionError
from nemo_fp8.train import first_weights
from nemo_fp8.train.patching import Patch, is_patched, patched


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Megatron takes the CPU for its GPU until the context closes. Entered again inside, it changes nothing."""
    require_te_on_cpu()
    if is_patched(TABLE):
        yield
        return
    with patched(TABLE, "Running Megatron on a CPU"):
        yield


def require_te_on_cpu() -> None:
    """Refuse a process whose Megatron does not stand on TE's CPU implementation: its layers would know no FP8, and no
    CUDA device."""
    if te_cpu.is_installed():
        return
    import sys

    if "transformer_engine" in sys.modules or "megatron.core" in sys.modules:
        raise PrecisionError(
            "Megatron was imported without TransformerEngine, or before the CPU stood in for its GPU.",
            "Megatron decides at its import whether TransformerEngine is there; on a CPU nemo_fp8 puts it on an "
            "extension of its own.",
            "pip install 'nemo-fp8[train]', which installs TE's Python, and leave NEMO_FP8_TE_CPU alone; "
            "or call nemo_fp8.te_cpu.install() before anything imports megatron or nemo.",
        )
    te_cpu.install()


def _no_timers(
    self: object, names: list[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
) -> str | None:
    return None


def _unchanged(ckpt: dict[str, Any]) -> dict[str, Any]:
    return ckpt


TABLE = (
    Patch(
        "megatron.core.timers:Timers",
        "get_all_timers_string",
        _no_timers,
        "NeMo's progress printer asks for it on rank 0 alone, and gloo waits forever for the other ranks' part of the "
        "gather",
    ),
    Patch(
        "nemo.lightning.io.pl",
        "_fix_tensors_device",
        _unchanged,
        "it makes a CUDA device of a device, which torch refuses",
    ),
    *first_weights.TABLE,
)
