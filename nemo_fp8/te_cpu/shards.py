"""FP8 parameters from shards of master weights, as a distributed optimizer holds them: a slice of the flattened matrix.

    1. every rank: the amaxes of its slice, laid out as the whole matrix has them, zero elsewhere
    2. an all-reduce takes their maximum, and scales are made of it
    3. every rank: its slice's codes, with the scales of the blocks that it touches

so that the codes are those of the whole matrix quantized at once, to the bit, although nobody ever holds it in high
precision. NVFP4's weights have 16x16 blocks and a scale of the whole tensor above theirs; TE makes their columns of the
gathered codes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_fp8.numerics import nvfp4
from nemo_fp8.numerics.formats import cast, decode_e8m0, format_of
from nemo_fp8.numerics.nvfp4_tensor import BLOCK, unpack
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.nvfp4 import data_transpose, scales_2d_transpose
from nemo_fp8.te_cpu.tensors import amax_of

_MX = 32


def _rows_of(shard: torch.Tensor, columns: int, start: int) -> tuple[torch.Tensor, int, int]:
    """Return the whole rows that the shard touches, zeros where it has nothing; the first of them, and the one after
    the last."""
    first, last = start // columns, -(-(start + shard.numel()) // columns)
    rows = torch.zeros((last - first) * columns, dtype=torch.float32)
    at = start - first * columns
    rows[at : at + shard.numel()] = shard.reshape(-1).float()
    return rows.view(last - first, columns), first, last


def _slice_of(codes: torch.Tensor, shard: torch.Tensor, columns: int, start: int, first: int) -> torch.Tensor:
    at = start - first * columns
    return codes.view(torch.uint8).reshape(-1)[at : at + shard.numel()]


@torch.no_grad()
def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the amaxes of square blocks, as far as this shard knows them."""
    amax.zero_()
    if not tensor.numel():
        return
    rows, first, last = _rows_of(tensor, w, start_offset)
    top = first // block_len
    blocks = torch.nn.functional.pad(rows, (0, -w % block_len, first - top * block_len, -last % block_len)).abs()
    found = blocks.view(-1, block_len, blocks.shape[1] // block_len, block_len).amax((1, 3))
    amax[top : top + found.shape[0], : found.shape[1]] = found


@torch.no_grad()
def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: Any,
) -> None:
    """Write the codes of this shard, with the scales of square blocks."""
    if not inp.numel():
        return
    rows, first, last = _rows_of(inp, w, start_offset)
    factor = scale[torch.arange(first, last) // block_len].repeat_interleave(block_len, 1)[:, :w]
    out.copy_(
        _slice_of(cast(rows * factor, format_of(torch_dtype(out_dtype))), inp, w, start_offset, first).view(out.shape)
    )


@torch.no_grad()
def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor, amax_rowwise: torch.Tensor, amax_colwise: torch.Tensor, rows: int, cols: int, start_offset: int
) -> None:
    """Write the amaxes of 1x32 and of 32x1 blocks, as far as this shard knows them."""
    amax_rowwise.zero_()
    amax_colwise.zero_()
    if not input.numel():
        return
    x, first, last = _rows_of(input, cols, start_offset)
    x = x.abs()
    amax_rowwise[first:last, : cols // _MX] = x.view(last - first, cols // _MX, _MX).amax(2).to(amax_rowwise.dtype)
    top = first // _MX
    blocks = torch.nn.functional.pad(x, (0, 0, first - top * _MX, -last % _MX))
    found = blocks.view(-1, _MX, cols).amax(1)
    amax_colwise[top : top + found.shape[0], :cols] = found.to(amax_colwise.dtype)


@torch.no_grad()
def mxfp8_scaling_partial_cast(
    input: torch.Tensor, output_rowwise: torch.Tensor, output_colwise: torch.Tensor, scale_inv_rowwise: torch.Tensor,
    scale_inv_colwise: torch.Tensor, rows: int, cols: int, start_offset: int,
) -> None:  # fmt: skip
    """Write the codes of this shard, with the scales of 1x32 and of 32x1 blocks."""
    if not input.numel():
        return
    x, first, last = _rows_of(input, cols, start_offset)
    by_rows = _factors(scale_inv_rowwise[first:last, : cols // _MX]).repeat_interleave(_MX, 1)
    by_columns = _factors(scale_inv_colwise[torch.arange(first, last) // _MX, :cols])
    for out, factor in ((output_rowwise, by_rows), (output_colwise, by_columns)):
        out.copy_(_slice_of(cast(x * factor, format_of("e4m3")), input, cols, start_offset, first).view(out.shape))


def _factors(codes: torch.Tensor) -> torch.Tensor:
    """Return what values are multiplied with, from the E8M0 codes of what codes are multiplied with."""
    return decode_e8m0((254 - codes.int()).clamp_min(0).to(torch.uint8))


# ---------------------------------------------------------------------- NVFP4


@torch.no_grad()
def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: Sequence[torch.Tensor], partial_amax_list: Sequence[torch.Tensor],
    global_amax_list: Sequence[torch.Tensor],
    h_list: Sequence[int], w_list: Sequence[int], start_offset_list: Sequence[int], block_len: int,
) -> None:  # fmt: skip
    """Write the amaxes of square blocks and of everything, as far as these shards know them."""
    lists = (master_weight_list, partial_amax_list, global_amax_list, h_list, w_list, start_offset_list)
    for shard, blocks, whole, h, w, start in zip(*lists, strict=True):
        fp8_block_scaling_compute_partial_amax(shard, blocks, h, w, start, block_len)
        whole.copy_(amax_of(shard).reshape(whole.shape))


@torch.no_grad()
def nvfp4_compute_global_scale(global_amax: torch.Tensor, global_scale: torch.Tensor) -> None:
    """Write each tensor's own scale, from its amax."""
    global_scale.copy_(nvfp4.encode_scale(global_amax))


@torch.no_grad()
def nvfp4_multi_tensor_fused_scale(
    block_amax_list: Sequence[torch.Tensor], global_amax_list: Sequence[torch.Tensor],
    per_block_scale_list: Sequence[torch.Tensor],
    target_scale_list: Sequence[torch.Tensor], target_amax_list: Sequence[torch.Tensor], tile_rows_list: Sequence[int],
    tile_cols_list: Sequence[int], rows_padded_list: Sequence[int], block_len: int,
) -> None:  # fmt: skip
    """Write the blocks' scales: in FP32 for the casts, as E4M3 codes for each row of the tensors, whose amaxes are
    written with them."""
    lists = (block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list)
    for blocks, whole, scales, target, target_amax in zip(*lists, strict=True):
        scales.copy_(nvfp4.block_scale(blocks, nvfp4.encode_scale(whole)))
        codes = cast(scales, format_of("e4m3")).view(torch.uint8).repeat_interleave(block_len, 0)[: target.shape[0]]
        target.zero_()
        target[: codes.shape[0], : codes.shape[1]] = codes
        target_amax.copy_(whole.reshape(target_amax.shape))


@torch.no_grad()
def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: Sequence[torch.Tensor], out_list: Sequence[torch.Tensor], scale_list: Sequence[torch.Tensor],
    global_scale_list: Sequence[torch.Tensor], h_list: Sequence[int], w_list: Sequence[int],
    start_offset_list: Sequence[int], block_len: int,
) -> None:  # fmt: skip
    """Write the codes of these shards, two a byte. A shard may begin or end in the middle of one; the other half stays
    as it is."""
    lists = (inp_list, out_list, scale_list, global_scale_list, w_list, start_offset_list)
    for shard, out, scale, whole, w, start in zip(*lists, strict=True):
        rows, first, last = _rows_of(shard, w, start)
        of_blocks = cast(scale[torch.arange(first, last) // block_len], format_of("e4m3")).float()
        factor = nvfp4.factor(of_blocks, torch.where(whole > 0, whole, 1.0)).repeat_interleave(block_len, 1)[:, :w]
        codes = unpack(out)
        codes[start % 2 : start % 2 + shard.numel()] = _slice_of(nvfp4.nearest(rows * factor), shard, w, start, first)
        out.copy_(codes[0::2] | (codes[1::2] << 4))


@torch.no_grad()
def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[torch.Tensor], columnwise_data_list: Sequence[torch.Tensor],
    rowwise_scale_inv_list: Sequence[torch.Tensor], columnwise_scale_inv_list: Sequence[torch.Tensor],
    M_list: Sequence[int], K_list: Sequence[int],
) -> None:  # fmt: skip
    """Write the columns of weights whose rows are there: a square block serves both."""
    lists = (rowwise_data_list, columnwise_data_list, rowwise_scale_inv_list, columnwise_scale_inv_list, M_list, K_list)
    for rows, columns, row_scales, column_scales, m, k in zip(*lists, strict=True):
        data_transpose(rows, out=columns)
        scales_2d_transpose(row_scales, column_scales, -(-m // BLOCK), -(-k // BLOCK))
