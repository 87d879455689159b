"""TE's grouped tensors: the members of a group, quantized each by itself, in buffers that they share.

    data [sum of elements]        members one after the other, each of its own rows or columns
    scales, amaxes                theirs in the same order, each padded as it is alone

A GPU casts a group in one kernel, which learns the members' sizes on the device. Here TE's own Python lays the buffers out and cuts
them into views, and a member is what the same quantizer makes of it alone, to the bit. TE asks for grouped tensors where cuBLAS
multiplies them, from 13.3 on, which is not stood for; whoever calls these functions gets them all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.scales import scale_from_amax
from nemo_fp8.te_cpu import quantized
from nemo_fp8.te_cpu.enumerations import torch_dtype

_BUFFERS = "rowwise_data columnwise_data scale_inv columnwise_scale_inv amax columnwise_amax scale".split()


def _make(
    quantizer: Any, dtype: torch.dtype, num_tensors: int, shape: Any, first_dims: Any, last_dims: Any, tensor_offsets: Any
) -> tuple[Any, list[Any]]:
    """An empty group and its members, views of its buffers. Padding is compared: everything begins as zeros."""
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

    group = GroupedTensorStorage.make_grouped_tensor(num_tensors, first_dims, last_dims, *shape, quantizer=quantizer, dtype=dtype)
    for name in _BUFFERS:
        if getattr(group, name) is not None:
            getattr(group, name).zero_()
    if tensor_offsets is not None:
        group.tensor_offsets = tensor_offsets
    group._with_gemm_swizzled_scales = False
    return group, _members(group)


def _members(group: Any) -> list[Any]:
    members: list[Any] = group.quantized_tensors or group.split_into_quantized_tensors()
    for member in members:
        if hasattr(member, "_with_gemm_swizzled_scales"):
            member._with_gemm_swizzled_scales = False
    return members


def _check(tensor: torch.Tensor, quantizer: Any, first_dims: Any, last_dims: Any) -> None:
    """Refuse what the extension refuses, in its words."""
    name = type(quantizer).__name__
    if tensor.dim() != 2:
        raise RuntimeError("Tensor must be 2D")
    if name not in ("MXFP8Quantizer", "NVFP4Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer"):
        raise RuntimeError("group_quantize: only supports MXFP8, NVFP4, Float8CurrentScalingQuantizer, or Float8Blockwise quantizer.")
    if name == "Float8CurrentScalingQuantizer" and first_dims is not None and last_dims is not None:
        raise RuntimeError("FP8 current-scaling grouped quantization does not support varying both first and last dimensions.")
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
    """The members' values: each lies in one piece, one after the other, whatever their shapes are."""
    shapes = [tuple(member.size()) for member in members]
    sizes = [quantized.as_matrix_shape(shape)[0] * shape[-1] for shape in shapes]
    flat = tensor.detach().contiguous().view(-1)
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@torch.no_grad()
def group_quantize(
    tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: torch.Tensor | None, last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None, noop_flag: torch.Tensor | None = None, output: Any = None,
) -> Any:  # fmt: skip
    """A group of the members of ``tensor``, or ``output`` written again; nothing is written where ``noop_flag`` holds a 1."""
    _check(tensor, quantizer, first_dims, last_dims)
    if output is None:
        group, members = _make(quantizer, tensor.dtype, num_tensors, tensor.shape, first_dims, last_dims, tensor_offsets)
    else:
        group, members = output, _members(output)
        if group.num_tensors != num_tensors or tuple(group.logical_shape) != tuple(tensor.shape) or group.quantizer is not quantizer:
            raise RuntimeError("group_quantize: output has another number of tensors, shape or quantizer.")
    if noop_flag is not None and noop_flag.item() == 1:
        return group
    for i, (x, member) in enumerate(zip(_values(tensor, members), members, strict=True)):
        amax = None
        if group.scale is not None:  # one scale a member, kept beside its reciprocal, 1 where a member is empty
            amax = quantized.reduced(quantizer, quantized.amax_of(x).reshape(1))
            format = format_of(torch_dtype(quantizer.dtype))
            scale = scale_from_amax(amax, format, epsilon=quantizer.amax_epsilon, pow2=quantizer.force_pow_2_scales)
            group.amax[i], group.scale[i] = amax[0], scale[0]
            member._scale_inv.copy_(torch.reciprocal(scale).view(member._scale_inv.shape))
        quantized.fill(quantizer, x, member, amax)
    return group


@torch.no_grad()
def bgrad_group_quantize(
    tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: torch.Tensor | None, last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:  # fmt: skip
    """The same, and the bias gradient of every member."""
    if last_dims is not None:
        raise RuntimeError("bgrad_group_quantize: varying last dim is not supported: a bias has one width.")
    if type(quantizer).__name__ not in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        raise RuntimeError("bgrad_group_quantize: only MXFP8 and FP8 block-scaling quantizers are supported.")
    group = group_quantize(tensor, quantizer, num_tensors, first_dims, None, tensor_offsets)
    sums = [x.float().sum(0) for x in _values(tensor, _members(group))]
    return group, torch.stack(sums).to(tensor.dtype)


@torch.no_grad()
def group_dequantize(input: Any, otype: Any) -> Any:
    """A group of the members' values."""
    shape, dtype = tuple(input.logical_shape), torch_dtype(otype)
    dims = (input.first_dims, input.last_dims, input.tensor_offsets)
    group, members = _make(None, dtype, input.num_tensors, shape, *dims)
    for member, codes in zip(members, _members(input), strict=True):
        if member.numel():
            member.copy_(quantized.dequantize(codes, dtype))
    return group
