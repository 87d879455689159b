"""Linears of TransformerEngine that stay in the compute dtype: those that a contract keeps by name, and those whose shape FP8 cannot hold.

Megatron opens TE's autocast around whole layers, and megatron-core 0.15.3's TE layers take no recipe of their own. A kept linear closes
the autocast around its own forward, through torch's hooks:

    forward_pre_hook    te.autocast(enabled=False) opens
    forward_hook        it closes, an error included

Backward needs nothing: TE decides in forward how a GEMM's operands are stored. A kept weight that was made in FP8 becomes one in the
compute dtype again, with the values that it was initialized with, before DDP and the optimizer see it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from nemo_fp8 import alignment
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem

logger = logging.getLogger("nemo_fp8")


def keep_modules(model: Any, precision: Precision) -> None:
    """Take out of FP8 what the contract keeps by name, and, unless it is strict, what does not fit."""
    if not precision.is_fp8:
        return
    from nemo_fp8.train.monitor import linear_names

    linears = linear_names(model)  # layers are counted over all pipeline stages, as a person counts them
    kept = {name for name in linears if precision.keep and precision.keeps(name)}
    _require_any(kept, linears, precision)
    _require_fit({name: linear for name, linear in linears.items() if name not in kept}, precision)
    misfits = {} if precision.strict else {name: shape for name, linear in linears.items() if (shape := _misfit(linear, precision))}
    for name, shape in misfits.items():
        if name not in kept:
            least = alignment.GEMM[str(precision.scaling)]
            told = "%s: a weight of shape %s stays in %s and not in FP8: not a multiple of %d."
            logger.warning(told, name, shape, precision.compute, least)
    for name in kept | set(misfits):
        _keep(linears[name])


def _keep(linear: torch.nn.Module) -> None:
    from transformer_engine.pytorch import autocast

    left: list[Any] = []

    def leave_fp8(module: torch.nn.Module, args: Any) -> None:
        left.append(autocast(enabled=False))
        left[-1].__enter__()

    def enter_fp8(module: torch.nn.Module, args: Any, output: Any) -> None:
        left.pop().__exit__(None, None, None)

    for name, weight in list(linear.named_parameters(recurse=False)):
        if hasattr(weight, "_quantizer"):
            setattr(linear, name, _in_compute_dtype(weight))
    linear.register_forward_pre_hook(leave_fp8)
    linear.register_forward_hook(enter_fp8, always_call=True)


def _in_compute_dtype(weight: Any) -> torch.nn.Parameter:
    """The same weight unquantized, with what Megatron has written on it."""
    first = weight.get_high_precision_init_val() if hasattr(weight, "get_high_precision_init_val") else None
    plain = torch.nn.Parameter(weight.dequantize() if first is None else first.to(weight.dtype))
    own = {name: value for name, value in vars(weight).items() if not name.startswith("_") and "high_precision" not in name}
    plain.__dict__.update(own)
    return plain


def _shapes(linear: torch.nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for name, p in linear.named_parameters(recurse=False) if name.startswith("weight")]


def _misfit(linear: torch.nn.Module, precision: Precision) -> tuple[int, ...] | None:
    """The shape of a weight that an FP8 GEMM of this recipe cannot take, if there is one."""
    least = alignment.GEMM[str(precision.scaling)]
    return next((shape for shape in _shapes(linear) if any(n % least for n in shape)), None)


def _require_any(kept: set[str], linears: dict[str, torch.nn.Module], precision: Precision) -> None:
    from megatron.core import parallel_state

    alone = not parallel_state.model_parallel_is_initialized() or parallel_state.get_pipeline_model_parallel_world_size() == 1
    if precision.keep and not kept and alone:  # another pipeline stage may hold what is meant
        raise PrecisionError(
            f"keep={list(precision.keep)} names no linear of this model.",
            "A pattern that matches nothing is a typing error, or is meant for another model.",
            f"Its linears have names such as {', '.join(list(linears)[:3])!r}.",
        )


def _require_fit(linears: dict[str, torch.nn.Module], precision: Precision) -> None:
    least = alignment.GEMM[str(precision.scaling)]
    problems = [
        Problem(
            f"{name}: a weight of shape {shape} under {precision.scaling} scaling.",
            f"Its GEMMs take dimensions that are multiples of {least}.",
            f"Choose sizes that stay multiples of {least} after the tensor-parallel split, or strict=False to keep such layers.",
        )
        for name, linear in linears.items()
        if precision.strict and (shape := _misfit(linear, precision))
    ]
    if problems:
        raise PrecisionError(problems)
