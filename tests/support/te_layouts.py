"""TE's quantized tensors in the layout of ``numerics.Quantized``: moved, cut and turned round, and never computed."""

from typing import Any

import torch

from nemo_fp8.te_cpu import swizzle

Copy = tuple[torch.Tensor, ...] | None


def copies(tensor: Any) -> dict[str, Copy]:
    """Codes and scales of a matrix, and NVFP4's amax, by the usage that they serve; None for what it does not keep."""
    kind = type(tensor).__name__.removesuffix("Storage")
    if kind == "Float8Tensor":
        scale = tensor._scale_inv.reshape(())
        turned = None if tensor._transpose is None or tensor._transpose_invalid else tensor._transpose.t()
        return {"row": (tensor._data, scale), "col": None if turned is None else (turned, scale)}
    if kind == "NVFP4Tensor":
        return {"row": _of_nvfp4(tensor, "row"), "col": _of_nvfp4(tensor, "column")}
    scales = {"MXFP8Tensor": _of_mxfp8, "Float8BlockwiseQTensor": _of_blocks}[kind]
    of_columns = tensor._columnwise_data
    if of_columns is not None and kind == "Float8BlockwiseQTensor":
        of_columns = of_columns.t()
    return {
        usage: None if codes is None else (codes, scales(tensor, usage, *codes.shape))
        for usage, codes in (("row", tensor._rowwise_data), ("col", of_columns))
    }


def _of_nvfp4(tensor: Any, side: str) -> Copy:
    codes = getattr(tensor, f"_{side}wise_data")
    if codes is None:
        return None
    scales = swizzle.scales_of(tensor, side)[: codes.shape[0], : codes.shape[1] // 8]
    return codes, scales, getattr(tensor, f"_amax_{side}wise").reshape(())


def _of_mxfp8(tensor: Any, usage: str, m: int, k: int) -> torch.Tensor:
    held = swizzle.scales_of(tensor, {"row": "row", "col": "column"}[usage])
    return held[:m, : k // 32] if usage == "row" else held[: m // 32, :k]


def _of_blocks(tensor: Any, usage: str, m: int, k: int) -> torch.Tensor:
    held = tensor._rowwise_scale_inv if usage == "row" else tensor._columnwise_scale_inv
    if tensor._is_2D_scaled:
        return (held if usage == "row" else held.t())[: -(-m // 128), : -(-k // 128)]
    return held[:, :m].t() if usage == "row" else held[:, :k]
