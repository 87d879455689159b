"""Cast master weights to FP8 weights with one scale along rows alone, while a run lasts.

After each step the distributed optimizer has TransformerEngine cast every rank's share of a master weight, n elements
in one row, into the codes of the weight:

    TE     codes[start : start + n] = cast(share * scale), and its transpose, n rows of one element, which nobody reads
    here   codes[start : start + n] = cast(share * scale)

The weight's own transpose is made from the gathered codes, after this. On Hopper and Ada, whose GEMMs read transposes,
the quantizer asks for one by default. On an H100 the kernel that makes both took 64 of the 161 ms of a step under
tensorwise scaling (docs/upstream/te_master_weight_transposes.md); elsewhere TE makes none, and nothing changes.

TE asks a function of its own whether a share is written already, which is so where a weight holds its transpose alone.
Ours answers that it is after it has written the share. The codes, the scales and the amaxes are the same bits; that is
shown on a CPU which stands for Hopper. It has not run on a GPU: how much of the 64 ms it saves is not measured.

The trade-off: one name of TE's is replaced for the length of a run, for contracts with such weights only. Where the
installed TE has no such function, or one of other parameters, nothing is replaced and TE casts as it does. Shares of
Megatron's FSDP are left to TE.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.preflight.support import PER_TENSOR
from nemo_fp8.train.patching import Patch, patched

logger = logging.getLogger("nemo_fp8")

Write = Callable[[Any, Any, Any, Any], bool]


def hold_row_casts(contexts: ExitStack, precision: Precision) -> None:
    """Cast along rows alone until ``contexts`` close, if the contract has FP8 weights with one scale."""
    if not precision.fp8_param or not any(own.scaling in PER_TENSOR for own in precision.variants()):
        return
    patch = _patch()
    if (misfit := patch.misfit()) is not None:
        logger.info("Master weights are cast to FP8 as the installed TransformerEngine does it: %s.", misfit)
        return
    contexts.enter_context(patched((patch,), "Casting master weights to FP8"))


def _patch() -> Patch:
    target = "transformer_engine.pytorch.tensor.utils"
    try:
        theirs = getattr(importlib.import_module(target), "_update_transpose_only_float8_flat_fragment", None)
    except ImportError:  # the row says so
        theirs = None
    return Patch(
        target,
        "_update_transpose_only_float8_flat_fragment",
        _written_by_rows(theirs or _never),
        "it is where a share of a master weight can be written without a transpose that nobody reads",
    )


def _never(model_weight: Any, master_weight: Any, start_offset: Any, quantizer: Any) -> bool:
    return False


def _written_by_rows(theirs: Write) -> Write:
    """Return what writes a share into codes that lie by rows, and leaves other weights to TransformerEngine."""

    def _update_transpose_only_float8_flat_fragment(
        model_weight: Any, master_weight: Any, start_offset: Any, quantizer: Any
    ) -> bool:
        from transformer_engine.pytorch import Float8Quantizer, Float8Tensor

        codes = getattr(model_weight, "_data", None)
        if codes is None or not isinstance(model_weight, Float8Tensor):
            return theirs(model_weight, master_weight, start_offset, quantizer)
        by_rows = Float8Quantizer(quantizer.scale, quantizer.amax, quantizer.dtype, columnwise=False)
        # A tensor around the same memory: what is written into it is written into the weight. Its scale is its own, as
        # that of the weight follows from all ranks' amaxes.
        share = codes.view(-1)[start_offset : start_offset + master_weight.numel()].view(1, -1)
        by_rows.update_quantized(
            master_weight.reshape(1, -1), by_rows.create_tensor_from_data(share, model_weight.dtype)
        )
        return True

    return _update_transpose_only_float8_flat_fragment
