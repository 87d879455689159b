"""Run Megatron and NeMo on a machine without a GPU: TransformerEngine on its CPU extension, and three patches.

The same code decides what a run does on a CPU and on a GPU: Megatron's layers of TransformerEngine, TE's own Python,
and below it ``nemo_fp8.te_cpu`` in the place of TE's compiled extension. From TE's import until the process ends,
``te_cpu`` also stands in for the CUDA device, so nothing of Megatron has to be replaced for lack of CUDA. What remains
are two names that gloo or a build of torch without CUDA cannot serve, and the one of ``first_weights.py``. They are
replaced while a run lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nemo_fp8 import te_cpu
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.train import first_weights
from nemo_fp8.train.patching import Patch, is_patched, patched

NO_FUSIONS = {"apply_rope_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False}
"""A model's arguments that switch off the kernels which Megatron has for GPUs only."""


def hold_cpu(contexts: ExitStack, precision: Precision) -> None:
    """Without a GPU, let Megatron run on the CPU until ``contexts`` close, whichever accelerator the Trainer has."""
    if not te_cpu.has_gpu():
        contexts.enter_context(megatron_on_cpu())
    hold_products(contexts, precision)


def hold_products(contexts: ExitStack, precision: Precision) -> None:
    """Without a GPU, let products of a contract in FP16 run on what is fastest here, until ``contexts`` close."""
    if precision.compute == "fp16" and not te_cpu.has_gpu():
        from nemo_fp8.numerics.bf16 import fp16_products

        contexts.enter_context(fp16_products())


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let Megatron run on the CPU until the context closes. A nested context changes nothing.

    Raises PrecisionError if Megatron was imported without TE, or if its version does not fit the table.
    """
    require_te_on_cpu()
    if is_patched(TABLE):
        yield
        return
    with patched(TABLE, "Running Megatron on a CPU"):
        yield


def require_te_on_cpu() -> None:
    """Install TE's CPU extension; raise PrecisionError if Megatron or TE was imported before, without it."""
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
