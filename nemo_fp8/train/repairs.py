"""Repair what NeMo 2.7.3 breaks in mixed precision, from inside the plugin.

Each repair does nothing unless its bug applies to the run; ``tests/train/test_repairs.py`` shows NeMo failing
and this plugin not, for every one. They touch configs and hooks only, and replace no code of NeMo's or Megatron's.

FP16 loss is never scaled    NeMo builds Megatron's gradient scaler and divides the gradients by it, but never sets
                             ``config.grad_scale_func``, so the loss is never multiplied: training stands still.
FP16 aborts on overflow      ``check_for_nan_in_grad`` ends the run at the first overflow, which is how dynamic loss
                             scaling finds its scale.
Delayed scaling freezes      An overflow writes inf into the amax history, and ``max`` keeps it for a whole history:
                             tensors are cast with stale scales for 1024 steps. Entries that overflowed become zero.
                             FP16 overflows on purpose while it looks for its loss scale, so that starts lower.
Delayed scaling's amaxes     Those of a validation count as training's, and a resumed run loses those of other ranks.
                             See ``delayed_amaxes.py``.
MXFP8 + overlapped gather    The gather reads the gradient buffer, which NeMo has zeroed since the optimizer wrote the
                             weights there: they become zero. See ``mxfp8_gather.py``.
A second fit trains nothing  The distributed optimizer writes new weights into a buffer, of which parameters are views.
                             After a fit Lightning calls ``module.cpu()``, and NeMo moves parameters to the GPU again
                             before the next: to other memory. They are copied back. FP8 weights have no first values
                             left: see ``first_weights.py``.
Optimizer flags              ``OptimizerConfig`` derives flags from ``fp8_recipe`` before the plugin sets it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from nemo_fp8.contract import Precision
from nemo_fp8.train.amax_histories import amax_histories
from nemo_fp8.train.checks import Run
from nemo_fp8.train.delayed_amaxes import AgreeBeforeSaving, ForgetValidation
from nemo_fp8.train.linears import codes_of
from nemo_fp8.train.mxfp8_gather import Mxfp8Gather, Mxfp8Start

logger = logging.getLogger("nemo_fp8")

# Where FP16 with delayed scaling starts: gradients of a healthy model do not overflow at 2**16 (Apex's old default).
GENTLE_LOSS_SCALE = 65536.0


def before_ddp(p: Precision, run: Run) -> None:
    """Repair the configs, before DDP and the optimizer are built from them."""
    if run.optimizer is not None and hasattr(run.optimizer, "use_precision_aware_optimizer_no_fp8_or_ds_fp8"):
        run.optimizer.__post_init__()
    if p.compute != "fp16":
        return
    if getattr(run.ddp, "check_for_nan_in_grad", False):
        run.ddp.check_for_nan_in_grad = False
        logger.info(
            "FP16: check_for_nan_in_grad is off, since dynamic loss scaling meets overflows on purpose and skips them."
        )
    if (
        _overflow_stays(p)
        and p.loss_scale is None
        and getattr(run.optimizer, "initial_loss_scale", 0) > GENTLE_LOSS_SCALE
    ):
        run.optimizer.initial_loss_scale = GENTLE_LOSS_SCALE
        logger.warning(
            "FP16 with delayed scaling: the loss scale starts at %g and not at %g, whose overflows would stay in the "
            "amax history for %d steps.",
            GENTLE_LOSS_SCALE,
            p.initial_loss_scale,
            p.amax_history_len,
        )


def before_training(p: Precision, model: Any, optimizers: list[Any]) -> None:
    """Repair the built model and optimizer, before the first step."""
    from megatron.core.utils import get_model_config

    megatron_optimizer = getattr(optimizers[0], "mcore_optimizer", None)
    if megatron_optimizer is None:
        return
    _back_into_buffers(model)
    if p.compute == "fp16":
        for chunk in model:
            get_model_config(chunk.module).grad_scale_func = megatron_optimizer.scale_loss
    if p.scaling == "delayed":
        model.trainer.callbacks += [ForgetValidation(), AgreeBeforeSaving()]
    if p.scaling == "mxfp8" and p.fp8_param:
        model.trainer.callbacks.append(Mxfp8Start())
        if getattr(model.ddp_config, "overlap_param_gather", False):
            gather = Mxfp8Gather()
            model.trainer.callbacks.append(gather)
            model.callbacks.add(gather)


def after_step(p: Precision, model: Any, optimizer: Any) -> None:
    """Repair what an optimizer step left wrong."""
    if _overflow_stays(p):
        with torch.no_grad():
            for history in amax_histories(model):
                history.masked_fill_(~torch.isfinite(history), 0.0)


def _overflow_stays(p: Precision) -> bool:
    """Return whether an overflow affects later steps: it does if scales come from the largest of several amaxes."""
    return p.scaling == "delayed" and p.amax_compute_algo == "max" and p.amax_history_len > 1


def _back_into_buffers(model: Any) -> None:
    """Put every parameter back of which Megatron's DDP holds a view; on a first fit all are there."""
    from megatron.core.fp8_utils import is_float8tensor, modify_underlying_storage

    moved = 0
    for parameter, view in _views(model):
        codes = codes_of(parameter)
        if (parameter if codes is None else codes).data_ptr() == view.data_ptr():
            continue
        if is_float8tensor(parameter):
            modify_underlying_storage(parameter, view)  # it copies the codes
        else:
            view.copy_(parameter.detach())
            parameter.data = view
        moved += 1
    if moved:
        logger.info("%d parameters lay outside of the buffer that the optimizer updates, and are in it again.", moved)


def _views(model: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import BufferType

    for chunk in model:
        ddp = chunk.module
        if not isinstance(ddp, DistributedDataParallel) or ddp.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            continue  # without DDP there is no buffer, and MXFP8's holds no weights between two steps
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            if buffer.param_data is not None:
                for parameter, (start, _, _) in buffer.param_index_map.items():
                    yield parameter, buffer._get(parameter.shape, start, BufferType.PARAM)
