"""Amaxes and scales of whole models at once: delayed scaling's update, and the scales of many tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.scales import delayed_scale, e8m0_from_amax, scale_from_amax
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.tensors import amax_of, overwrite


@torch.no_grad()
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor, amax_histories: Sequence[torch.Tensor], scales: Sequence[torch.Tensor],
    amax_compute_algo: str, fp8_dtype: Any, margin: float,
) -> None:  # fmt: skip
    """Roll each history, newest at its end and row 0 cleared for the next step, and take the scale of what it then
    holds.

    An amax of zero was not seen in this step: the history and the scale stay as they are.
    """
    format = format_of(torch_dtype(fp8_dtype))
    reduced = torch.split(amax_reduction_buffer, [scale.numel() for scale in scales])
    for found, history, scale in zip(reduced, amax_histories, scales, strict=True):
        last = torch.where(found != 0, found, history[0])
        seen = last != 0
        rolled = torch.cat([history[1:], last[None]])
        most = rolled.nan_to_num(nan=0.0, posinf=float("inf")).amax(0) if amax_compute_algo == "max" else last
        overwrite(scale, delayed_scale(torch.where(seen, most, 0.0), scale, format, margin))  # type: ignore[arg-type]
        rolled[0] = 0.0
        overwrite(history, torch.where(seen, rolled, history))


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of ``input`` to ``amax``."""
    overwrite(amax, amax_of(input.detach()).reshape(amax.shape))


_FORMAT_OF_MAX = {448.0: "e4m3", 57344.0: "e5m2"}


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int, noop_flag: Any, tensor_lists: Any, max_fp8: float, force_pow_2_scales: bool, epsilon: float
) -> None:
    """Write current scaling's scales, and their reciprocals, of many amaxes."""
    format = format_of(_FORMAT_OF_MAX[max_fp8])
    for amax, scale, inverse in zip(*tensor_lists, strict=True):
        scale.copy_(scale_from_amax(amax.contiguous(), format, epsilon=epsilon, pow2=bool(force_pow_2_scales)))
        inverse.copy_(torch.reciprocal(scale))


@torch.no_grad()
def multi_tensor_compute_scale_inv_e8m0(chunk_size: int, noop_flag: Any, tensor_lists: Any) -> None:
    """Write MXFP8's scales of many blocks of amaxes."""
    for amax, inverse in zip(*tensor_lists, strict=True):
        inverse.copy_(e8m0_from_amax(amax.float(), format_of("e4m3")).view(inverse.shape))
