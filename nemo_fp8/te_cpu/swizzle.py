"""The order in which Blackwell's tensor cores read the scales of MXFP8 and NVFP4 tensors, and the way back.

    plain       [128 m, 4 n] row by row
    swizzled    m x n tiles of 512 scales; within one, the scale of row r and column c lies at (r % 32) * 16 + (r / 32)
                * 4 + c

The order holds no information, and the GEMM here reads the plain one. It is kept all the same where TE asks for it (a
quantizer's ``optimize_for_gemm``), because the tensor then says so, and TE's Python refuses what such a tensor cannot
do: gathers, FSDP's hooks, copies between tensors of different order. MXFP8's columns are swizzled turned round, as the
tensor cores contract them; NVFP4's lie so.

Four scales that lie side by side do so in both orders: they are moved as one word, which takes a quarter of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_fp8.te_cpu.tensors import turn

_SIDES = ("row", "column")


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Return plain scales in the order of the tensor cores, in the same shape."""
    return _moved(scales, (scales.shape[0] // 128, 4, 32, scales.shape[1] // 4))


def plain(scales: torch.Tensor) -> torch.Tensor:
    """Put swizzled scales back into rows and columns."""
    return _moved(scales, (scales.shape[0] // 128, scales.shape[1] // 4, 32, 4))


def _moved(scales: torch.Tensor, words: tuple[int, int, int, int]) -> torch.Tensor:
    """Return the scales with the second and the last dimension of their ``words`` exchanged."""
    moved = scales.reshape(-1).view(torch.int32).view(words).permute(0, 3, 2, 1).reshape(-1)
    return moved.view(scales.dtype).view(scales.shape)


def _turn(scales: torch.Tensor) -> torch.Tensor:
    turned = scales.new_empty(scales.shape[::-1])
    turn(scales, turned)
    return turned


def _turned(tensor: Any, side: str) -> bool:
    """Return whether these scales are held turned round from how a tensor core reads them: NVFP4's amax tells its
    tensors from MXFP8's."""
    return side == "column" and not hasattr(tensor, "_amax_columnwise")


def is_swizzled(tensor: Any) -> bool:
    """Return whether the tensor says that its scales are swizzled."""
    return getattr(tensor, "_with_gemm_swizzled_scales", False)


def scales_of(tensor: Any, side: str) -> torch.Tensor:
    """Return the scales of a side, plain, however the tensor holds them."""
    scales: torch.Tensor = getattr(tensor, f"_{side}wise_scale_inv")
    if not is_swizzled(tensor):
        return scales
    return _turn(plain(scales.view(scales.shape[::-1]))) if _turned(tensor, side) else plain(scales)


def swizzle(tensor: Any) -> None:
    """Bring the tensor's scales into the order of the tensor cores, in their own memory, unless they are in it."""
    if hasattr(tensor, "_with_gemm_swizzled_scales") and not is_swizzled(tensor):
        multi_tensor_swizzle_scales_for_gemm_unchecked_([tensor], True, True)
        tensor._with_gemm_swizzled_scales = True


def clear(tensor: Any) -> None:
    """Make swizzled scales plain ones that hold nothing, for a new cast: padding is not where it was."""
    if is_swizzled(tensor):
        for side in _SIDES:
            scales = getattr(tensor, f"_{side}wise_scale_inv")
            if scales is not None:
                scales.zero_()
        tensor._with_gemm_swizzled_scales = False


# ---------------------------------------------------------------------- the extension's own


swizzle_scales_for_gemm_ = swizzle


def multi_tensor_swizzle_scales_for_gemm_unchecked_(tensors: Sequence[Any], rowwise: bool, columnwise: bool) -> None:
    """Swizzle one side or both of many tensors, whatever they say of themselves."""
    for tensor in tensors:
        for side, wanted in zip(_SIDES, (rowwise, columnwise), strict=True):
            scales = getattr(tensor, f"_{side}wise_scale_inv")
            if wanted and scales is not None:
                ordered = swizzled(_turn(scales) if _turned(tensor, side) else scales)
                scales.copy_(ordered.view(scales.shape))


multi_tensor_swizzle_scales_for_gemm_ = multi_tensor_swizzle_scales_for_gemm_unchecked_
