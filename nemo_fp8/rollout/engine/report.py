"""Report on the layers of a worker: which are quantized, on which kernel, in which blocks; why others are not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from nemo_fp8.rollout.engine.experts import Quantizing
from nemo_fp8.rollout.engine.linear import NemoFp8LinearMethod


@dataclass(frozen=True)
class LayerReport:
    """How one linear is stored, or the experts of one layer."""

    stored: str
    """``fp8``, ``nvfp4``, or the compute dtype."""
    why: str | None = None
    """Why it is not quantized."""
    kernel: str | None = None
    block: tuple[int, int] | None = None
    """The block that shares a scale; None if the weight has one scale, or is not quantized."""
    other_blocks: str | None = None
    """Why this worker's blocks are not those of the unsharded weight. A trainer's own codes do not fit then."""


def grid_report(model: torch.nn.Module) -> dict[str, LayerReport]:
    """Return a report for every layer of a model that the contract decides about, by vLLM's name."""
    found = {}
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, (NemoFp8LinearMethod, Quantizing)):
            found[name] = LayerReport(
                method.config.precision.rollout, None, _kernel(method), method.operand.block, method.other_blocks
            )
        elif method is not None and hasattr(method, "nemo_fp8_reason"):
            found[name] = LayerReport(_dtype(layer), method.nemo_fp8_reason)
    return found


def plain_report(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return :func:`grid_report` as plain values, which every executor can send."""
    return {name: asdict(report) for name, report in grid_report(model).items()}


def _kernel(method: NemoFp8LinearMethod | Quantizing) -> str:
    if isinstance(method, NemoFp8LinearMethod):
        return type(method.fp8_linear).__name__
    experts = getattr(method, "experts_cls", None)
    return type(method).__name__ if experts is None else experts.__name__


def _dtype(layer: torch.nn.Module) -> str:
    return str(getattr(layer, "params_dtype", torch.bfloat16)).removeprefix("torch.")
