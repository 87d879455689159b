"""TE's grouped tensors: the members of a group, quantized each by itself, in buffers that they share.

    data [sum of elements]        members one after the other, each of its own rows or columns
    scales, amaxes                theirs in the same order, each padded as it is alone

A GPU casts a group in one kernel, and multiplies two in one call, which learn the members' sizes on the device. Here
TE's own Python lays the buffers out and cuts them into views, and a member is what the same quantizer makes of it
alone, to the bit. TE asks for grouped tensors where cuBLAS multiplies them, from 13.3 on, which is not stood for;
whoever calls these functions gets them all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.scales import scale_from_amax
from nemo_fp8.te_cpu import float8, nvfp4, quantized, swizzle, tensors
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.gemm import generic_gemm

_BUFFERS = "rowwise_data columnwise_data scale_inv columnwise_scale_inv amax columnwise_amax scale".split()


def _make(
    quantizer: Any,
    dtype: torch.dtype,
    num_tensors: int,
    shape: Any,
    first_dims: Any,
    last_dims: Any,
    tensor_offsets: Any,
) -> tuple[Any, list[Any]]:
    """Return an empty group and its members, views of its buffers. Padding is compared: everything begins as zeros."""
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

    group = GroupedTensorStorage.make_grouped_tensor(
        num_tensors, first_dims, last_dims, *shape, quantizer=quantizer, dtype=dtype
    )
    for name in _BUFFERS:
        if getattr(group, name) is not None:
            getattr(group, name).zero_()
    if tensor_offsets is not None:
        group.tensor_offsets = tensor_offsets
    group._with_gemm_swizzled_scales = False
    return group, _members(group)


def _members(group: Any) -> list[Any]:
    """Return a group's members, as views, or a list's own; their scales lie as the group says."""
    if isinstance(group, (list, tuple)):
        return list(group)
    members: list[Any] = group.quantized_tensors or group.split_into_quantized_tensors()
    for member in members:
        if hasattr(member, "_with_gemm_swizzled_scales"):
            member._with_gemm_swizzled_scales = group._with_gemm_swizzled_scales
    return members


def _check(tensor: torch.Tensor, quantizer: Any, first_dims: Any, last_dims: Any) -> None:
    """Refuse what the extension refuses, in its words."""
    name = type(quantizer).__name__
    if tensor.dim() != 2:
        raise RuntimeError("Tensor must be 2D")
    if name not in ("MXFP8Quantizer", "NVFP4Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer"):
        raise RuntimeError(
            "group_quantize: only supports MXFP8, NVFP4, Float8CurrentScalingQuantizer, or Float8Blockwise quantizer."
        )
    if name == "Float8CurrentScalingQuantizer" and first_dims is not None and last_dims is not None:
        raise RuntimeError(
            "FP8 current-scaling grouped quantization does not support varying both first and last dimensions."
        )
    if name == "NVFP4Quantizer":
        if last_dims is not None:
            raise RuntimeError("group_quantize: varying last dim is not supported with NVFP4.")
        if quantizer.with_2d_quantization:
            raise RuntimeError("2D scaling grouped quant kernel is not ready yet")
        if quantizer.nvfp4_use_4over6:
            raise RuntimeError("NVFP4 4over6 quantization is not supported for grouped quantization.")
        if not quantizer.with_rht:
            raise RuntimeError("graph safe grouped quant kernel for non-RHT path is not ready yet")


def _values(tensor: torch.Tensor, members: list[Any]) -> list[torch.Tensor]:
    """Return the members' values: each lies in one piece, one after the other, whatever their shapes are."""
    shapes = [tuple(member.size()) for member in members]
    sizes = [tensors.as_matrix_shape(shape)[0] * shape[-1] for shape in shapes]
    flat = tensor.detach().contiguous().view(-1)
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@torch.no_grad()
def group_quantize(
    tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None, noop_flag: torch.Tensor | None = None, output: Any = None,
) -> Any:  # fmt: skip
    """Quantize the members of ``tensor`` into a new group, or into ``output``; write nothing where ``noop_flag`` holds
    a 1. Raises RuntimeError for what TE's kernel refuses, and for an ``output`` that is another group."""
    _check(tensor, quantizer, first_dims, last_dims)
    if output is None:
        group, members = _make(
            quantizer, tensor.dtype, num_tensors, tensor.shape, first_dims, last_dims, tensor_offsets
        )
    else:
        group, members = output, _members(output)
        if (
            group.num_tensors != num_tensors
            or tuple(group.logical_shape) != tuple(tensor.shape)
            or group.quantizer is not quantizer
        ):
            raise RuntimeError("group_quantize: output has another number of tensors, shape or quantizer.")
    if noop_flag is not None and noop_flag.item() == 1:
        return group
    for i, (x, member) in enumerate(zip(_values(tensor, members), members, strict=True)):
        amax, write = None, None
        if group.scale is not None:  # one scale a member, kept beside its reciprocal, 1 where a member is empty
            amax = tensors.reduced(quantizer, tensors.amax_of(x).reshape(1))
            format = format_of(torch_dtype(quantizer.dtype))
            scale = scale_from_amax(amax, format, epsilon=quantizer.amax_epsilon, pow2=quantizer.force_pow_2_scales)
            group.amax[i], group.scale[i] = amax[0], scale[0]
            member._scale_inv.copy_(torch.reciprocal(scale).view(member._scale_inv.shape))
            write = float8.write_member
        quantized.fill(quantizer, x, member, amax, write=write)
    group._with_gemm_swizzled_scales = all(map(swizzle.is_swizzled, members))
    return group


@torch.no_grad()
def nvfp4_quantize_with_amax(
    tensor: torch.Tensor, quantizer: Any, rowwise_amax: torch.Tensor, columnwise_amax: torch.Tensor
) -> Any:
    """Quantize into a new tensor with these amaxes, which stay the caller's memory: they are reduced over the
    quantizer's group where it has one. Raises RuntimeError if tensor or amaxes do not fit."""
    if tensor.dim() < 2:
        raise RuntimeError("Tensor must be at least 2D")
    nvfp4.check_amaxes("nvfp4_quantize_with_amax", quantizer, (rowwise_amax, columnwise_amax), 1)
    x = tensor.detach().contiguous()
    out = quantized.create(quantizer, x.shape, x.dtype)
    for name, amax in (("_amax_rowwise", rowwise_amax), ("_amax_columnwise", columnwise_amax)):
        if getattr(out, name) is not None:
            setattr(out, name, tensors.reduced(quantizer, amax))
    quantized.fill(quantizer, x, out, write=nvfp4.write_with_its_amaxes)
    return out


@torch.no_grad()
def nvfp4_group_quantize_with_amax(
    tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None, *,
    rowwise_amax: torch.Tensor, columnwise_amax: torch.Tensor, tensor_offsets: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Quantize into a group whose members' amaxes are known and stay the caller's memory: they are reduced over the
    quantizer's group where it has one. Raises RuntimeError if tensor or amaxes do not fit."""
    if last_dims is not None:
        raise RuntimeError("nvfp4_group_quantize_with_amax: varying last dim is not supported with NVFP4.")
    nvfp4.check_amaxes("nvfp4_group_quantize_with_amax", quantizer, (rowwise_amax, columnwise_amax), num_tensors)
    _check(tensor, quantizer, first_dims, None)
    group, _ = _make(quantizer, tensor.dtype, num_tensors, tensor.shape, first_dims, None, tensor_offsets)
    for name, amax in (("amax", rowwise_amax), ("columnwise_amax", columnwise_amax)):
        if getattr(group, name) is not None:
            setattr(group, name, tensors.reduced(quantizer, amax))
    group.quantized_tensors = None  # views of what was
    members = _members(group)
    for x, member in zip(_values(tensor, members), members, strict=True):
        quantized.fill(quantizer, x, member, write=nvfp4.write_with_its_amaxes)
    group._with_gemm_swizzled_scales = all(map(swizzle.is_swizzled, members))
    return group


@torch.no_grad()
def bgrad_group_quantize(
    tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None, tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:  # fmt: skip
    """Quantize as :func:`group_quantize`, and return the bias gradient of every member with the group.

    Raises RuntimeError for a varying last dimension, and for other recipes than MXFP8 and blockwise.
    """
    if last_dims is not None:
        raise RuntimeError("bgrad_group_quantize: varying last dim is not supported: a bias has one width.")
    if type(quantizer).__name__ not in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        raise RuntimeError("bgrad_group_quantize: only MXFP8 and FP8 block-scaling quantizers are supported.")
    group = group_quantize(tensor, quantizer, num_tensors, first_dims, None, tensor_offsets)
    sums = [x.float().sum(0) for x in _values(tensor, _members(group))]
    return group, torch.stack(sums).to(tensor.dtype)


@torch.no_grad()
def group_dequantize(input: Any, otype: Any) -> Any:
    """Return a group in ``otype`` with the dequantized values of every member."""
    shape, dtype = tuple(input.logical_shape), torch_dtype(otype)
    dims = (input.first_dims, input.last_dims, input.tensor_offsets)
    group, members = _make(None, dtype, input.num_tensors, shape, *dims)
    for member, codes in zip(members, _members(input), strict=True):
        if member.numel():
            member.copy_(quantized.dequantize(codes, dtype))
    return group


@torch.no_grad()
def grouped_swizzle_for_gemm(tensor: Any, rowwise: bool, columnwise: bool) -> None:
    """Bring MXFP8 scales into the order of the tensor cores, in new buffers; a side that is not asked for loses its
    scales."""
    if type(tensor.quantizer).__name__ != "MXFP8Quantizer" or tensor._with_gemm_swizzled_scales:
        return
    sides = {"scale_inv": rowwise, "columnwise_scale_inv": columnwise}
    held = {
        name: getattr(tensor, name) for name, wanted in sides.items() if wanted and getattr(tensor, name) is not None
    }
    if not any(scales.numel() for scales in held.values()):
        return
    for name in sides:
        setattr(tensor, name, held[name].clone() if name in held else None)
    tensor.quantized_tensors = None  # views of what was
    swizzle.multi_tensor_swizzle_scales_for_gemm_unchecked_(
        [m for m in _members(tensor) if m.numel()], rowwise, columnwise
    )
    tensor._with_gemm_swizzled_scales = True


@torch.no_grad()
def group_requantize_inplace(
    grouped_x: Any, quantizer: Any, num_tensors: int, first_dims: torch.Tensor | None, otype: Any,
    tensor_offsets: torch.Tensor | None = None, return_dequantized: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """Make a group that came with rows only, in MXFP8, ready for both GEMMs: columns from its values, and scales
    swizzled. Raises RuntimeError, with the reason, for a group that cannot be."""
    columns_wanted, has_columns = quantizer.columnwise_usage, grouped_x.columnwise_data is not None
    swizzled = grouped_x._with_gemm_swizzled_scales
    of_input = grouped_x.quantizer
    reasons = {
        "Grouped input has no rowwise data and scales for the GEMM to consume.": grouped_x.rowwise_data is None,
        "Grouped input and the op disagree on quantization format.": type(of_input) is not type(quantizer),
        "Grouped input and the quantizer disagree on the FP8 dtype.": of_input.dtype != quantizer.dtype,
        (
            "Swizzled scales and no columns: they cannot be rebuilt, since only scales in compact format are "
            "dequantized."
        ): swizzled and columns_wanted and not has_columns,
        "Only scales in compact format are dequantized, and these are swizzled.": swizzled and return_dequantized,
        "Grouped input already has columnwise data but unswizzled scales.": has_columns and not swizzled,
        "Requantizing a grouped input is only supported for MXFP8.": type(quantizer).__name__ != "MXFP8Quantizer"
        and not swizzled,
        "Requantizing a grouped input requires dims that are multiples of 128.": not swizzled
        and any(n % 128 for n in grouped_x.logical_shape),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RuntimeError(reason)
    if swizzled:
        return None
    values = group_dequantize(grouped_x, otype).rowwise_data.view(tuple(grouped_x.logical_shape))
    grouped_swizzle_for_gemm(grouped_x, True, False)
    if columns_wanted:
        of_columns = quantizer.copy()
        of_columns.set_usage(rowwise=False, columnwise=True)
        columns = group_quantize(values, of_columns, num_tensors, first_dims, None, tensor_offsets)
        grouped_x.columnwise_data, grouped_x.columnwise_scale_inv = (
            columns.columnwise_data,
            columns.columnwise_scale_inv,
        )
    return values if return_dequantized else None


# ---------------------------------------------------------------------- products


@torch.no_grad()
def te_general_grouped_gemm_for_grouped_tensor(
    A: Any, transA: bool, B: Any, transB: bool, D: Any, bias: Any, bias_scale: torch.Tensor | None, alpha: torch.Tensor,
    beta: torch.Tensor, workspace_setup: Any, workspace_cublas: Any, use_split_accumulator: bool, math_sm_count: int,
) -> Any:  # fmt: skip
    """Compute ``D = alpha op(B) @ op(A) + beta D`` of each member, rounded, and then add a bias, times a weight of each
    row where there are some. Raises RuntimeError if the groups have not the same number of members."""
    members = [_members(group) for group in (A, B, D)]
    if not members[0] or len({len(found) for found in members}) != 1:
        raise RuntimeError("Grouped GEMM requires A, B and D to have the same num_tensors, and some.")
    factors = [factor.expand(len(members[0])).tolist() for factor in (alpha, beta)]
    biases = _members(bias) if bias is not None else [None] * len(members[0])
    row = 0
    for a, b, d, scale, kept, add in zip(*members, *factors, biases, strict=True):
        if not d.numel():
            continue
        generic_gemm(
            a, transA, b, transB, d, None, None, None, None, False, None, False, None, 0, kept != 0,
            use_split_accumulator, alpha=scale, beta=kept,
        )  # fmt: skip
        if add is not None:
            weights = 1.0 if bias_scale is None else bias_scale[row : row + len(d), None]
            d.copy_(d.float() + add.float().view(1, -1) * weights)
        row += len(d)
    return D


te_general_grouped_gemm_for_discrete_in = te_general_grouped_gemm_for_grouped_tensor
te_general_grouped_gemm_for_discrete_out = te_general_grouped_gemm_for_grouped_tensor


# ---------------------------------------------------------------------- addresses, for kernels that are given a list of
# them

_SWIZZLES = {"mxfp8_rowwise": (1, 32), "mxfp8_columnwise": (32, 1), "nvfp4": (1, 16)}
"""The block that one scale stands for, by the extension's name of the layout."""


def copy_data_ptrs_to_device(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    """Return the addresses of the tensors' values, as INT64."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


@torch.no_grad()
def swizzle_scales_and_pack_ptrs_for_discrete_weights(
    data_tensors: Sequence[torch.Tensor], scale_tensors: Sequence[torch.Tensor], swizzle_type: str, device: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where the weights' codes lie, where their swizzled scales lie, and the buffer of these, whose padding is
    zeros.

    All weights have the shape of the first. Raises RuntimeError if lists, scales or the swizzle do not fit.
    """
    if len(data_tensors) != len(scale_tensors):
        sizes = f"{len(data_tensors)} and {len(scale_tensors)}"
        raise RuntimeError(f"Expected data_tensors and scale_tensors to have matching sizes, but got {sizes}.")
    if swizzle_type not in _SWIZZLES:
        raise RuntimeError(f"Unsupported swizzle type ({swizzle_type}). Expected one of: {', '.join(_SWIZZLES)}.")
    if not data_tensors:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
    if scale_tensors[0].dim() != 2:
        raise RuntimeError(f"Expected 2D scale tensor, but got shape={tuple(scale_tensors[0].shape)}.")
    rows, columns = tensors.as_matrix_shape(data_tensors[0].shape)
    high, wide = _SWIZZLES[swizzle_type]
    filled = rows // high, columns * (2 if swizzle_type == "nvfp4" else 1) // wide  # NVFP4 packs two codes a byte
    buffer = torch.stack([_swizzled(scales.view(torch.uint8), filled, high > 1) for scales in scale_tensors])
    return copy_data_ptrs_to_device(data_tensors, device), copy_data_ptrs_to_device([*buffer], device), buffer.view(-1)


def _swizzled(scales: torch.Tensor, filled: tuple[int, int], turned: bool) -> torch.Tensor:
    """Return padded scales in the order of the tensor cores, which contract MXFP8's columns turned round, in one
    row."""
    clean = torch.zeros_like(scales)
    clean[: filled[0], : filled[1]] = scales[: filled[0], : filled[1]]
    return swizzle.swizzled(clean.t().contiguous() if turned else clean).reshape(-1)
