"""Moving rows about: padding of groups, transposes, dropout, offsets, and the sums of groups of rows.

TE pads the rows of each expert to a multiple of 16 or 32, since FP8 GEMMs ask for that, and takes the padding off
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_fp8.te_cpu import device, nvfp4, quantized


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Return parts of a matrix, of ``split_sections`` rows each, every one quantized by its own quantizer."""
    parts = torch.split(tensor.detach().reshape(-1, tensor.shape[-1]), [int(n) for n in split_sections])
    return [quantized.quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """Return every tensor, quantized by the quantizer at the same place of the other list."""
    return [
        quantized.quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)
    ]


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """Return a quantized tensor that holds nothing yet."""
    return quantized.create(quantizer, shape, dtype, device, pin_memory)


def bulk_allocate(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: Any = None,
    alignments: Any = None,
    *more: Any,
) -> list[torch.Tensor]:
    """Allocate several tensors. A GPU takes their memory in one piece, for the sake of launches; here there is nothing
    to gain."""
    return [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


@torch.no_grad()
def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return codes [.., K] as [K, ..]."""
    shape = (input.shape[-1], *input.shape[:-1])
    turned = (
        input.reshape(-1, input.shape[-1]).t().contiguous().view(shape) if input.numel() else input.new_empty(shape)
    )
    return turned if out is None else out.copy_(turned.view(out.shape))


nvfp4_data_transpose = nvfp4.data_transpose
nvfp4_2d_scale_transpose = nvfp4.scales_2d_transpose


@torch.no_grad()
def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor [a, b, ..] as [b, a, ..]."""
    turned = tensor.transpose(0, 1).contiguous()
    return turned if out is None else out.copy_(turned)


@torch.no_grad()
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Write each group's rows to the beginning of its padded place, with zeros after them."""
    read = write = 0
    for rows, padded in zip(input_row_list, padded_input_row_list, strict=True):
        output[write : write + rows].copy_(input[read : read + rows])
        output[write + rows : write + padded].zero_()
        read, write = read + rows, write + padded


@torch.no_grad()
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Write the first rows of every padded place one after the other, without the padding."""
    read = write = 0
    for padded, rows in zip(input_row_list, unpadded_input_row_list, strict=True):
        output[write : write + rows].copy_(input[read : read + rows])
        read, write = read + padded, write + rows


@torch.no_grad()
def dropout_fwd(input: torch.Tensor, dropout_probability: float, out: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return [output, mask]. The mask is not drawn by Philox."""
    keep = torch.rand(input.shape, generator=device.CHANCE) >= dropout_probability
    y = input * keep / (1 - dropout_probability)
    return [y if out is None else out.copy_(y), keep.to(torch.uint8)]


@torch.no_grad()
def dropout_bwd(
    grad_output: torch.Tensor, mask: torch.Tensor, dropout_probability: float, grad_input: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient, where the mask kept the value, and zero elsewhere."""
    g = grad_output * mask.view(grad_output.shape) / (1 - dropout_probability)
    return g if grad_input is None else grad_input.copy_(g)


def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """Return where each group begins, in elements, and where the last one ends."""
    return _offsets(first_dims.long(), logical_last_dim, True)


def splits_to_offsets_multi(
    split_sizes: torch.Tensor, device: Any, strides: Sequence[int], include_leading_zero: Sequence[bool], dtypes:
    Sequence[torch.dtype], bulk_allocate: bool = False, ) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Return the sizes as INT64, and offsets for several lengths of a row at once, each with or without the zero before
    the first group."""
    sizes = split_sizes.long()
    rows = zip(strides, include_leading_zero, dtypes, strict=True)
    return sizes, [_offsets(sizes, stride, zero).to(dtype) for stride, zero, dtype in rows]


def _offsets(sizes: torch.Tensor, stride: int, leading_zero: bool) -> torch.Tensor:
    ends = (sizes * stride).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]) if leading_zero else ends


@torch.no_grad()
def pad_columnwise_scale_inv(inp: torch.Tensor) -> torch.Tensor:
    """Return scales with zeros after them, to multiples of 128 rows and 4 columns."""
    return torch.nn.functional.pad(inp, (0, -inp.shape[1] % 4, 0, -inp.shape[0] % 128))


def _groups(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the group of each row; rows behind the last group belong to none, numbered after it."""
    return torch.bucketize(torch.arange(rows), offsets[1:].contiguous(), right=True)


@torch.no_grad()
def compute_grouped_dbias(
    dy: torch.Tensor, offsets: torch.Tensor, num_groups: int, dbias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the bias gradients of groups of rows, added to ``dbias`` where there is one."""
    return _add_groups(dy.float(), offsets, num_groups, dbias)


@torch.no_grad()
def compute_grouped_dbias_dscales(
    dy: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor,
    dbias: torch.Tensor | None = None, dscales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the bias gradients where a row's bias was multiplied by its scale, and the scales' gradients."""
    g = dy.float()
    of = torch.nn.functional.pad(bias.float(), (0, 0, 0, 1))[_groups(offsets, len(dy))]
    found = (g * of).sum(1)
    return _add_groups(g * scales[:, None], offsets, bias.shape[0], dbias), found if dscales is None else dscales.add_(
        found
    )


def _add_groups(g: torch.Tensor, offsets: torch.Tensor, groups: int, total: torch.Tensor | None) -> torch.Tensor:
    found = torch.zeros(groups + 1, g.shape[1]).index_add_(0, _groups(offsets, len(g)), g)[:groups]
    return found if total is None else total.add_(found)
