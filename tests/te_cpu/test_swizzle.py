"""Scales in the order of the tensor cores: TE's own formula says where each lies, and a GEMM reads the same values from
it."""

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from support.te_cases import ARCH
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from nemo_fp8.te_cpu import swizzle

pytestmark = pytest.mark.skipif(ARCH < 100, reason="block scales of Blackwell")


def test_where_each_scale_lies():
    row, column = torch.meshgrid(torch.arange(256), torch.arange(12), indexing="ij")
    place = ((row // 128) * 3 + column // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    for scales in (row.to(torch.uint8), column.to(torch.uint8)):  # both tell where each came from
        expected = torch.empty(256 * 12, dtype=torch.uint8)
        expected[place.view(-1)] = scales.reshape(-1)
        assert torch.equal(swizzle.swizzled(scales.contiguous()).view(-1), expected)
        assert torch.equal(swizzle.plain(swizzle.swizzled(scales.contiguous())), scales)


def _quantizer(name):
    if name == "mxfp8":
        return MXFP8Quantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True)
    return NVFP4Quantizer(te.DType.kFloat4E2M1, rowwise=True, columnwise=True, with_2d_quantization=True)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(256, 128), (96, 160)])
def test_a_swizzled_tensor_is_the_plain_one_to_everybody_who_reads_it(name, shape):
    torch.manual_seed(0)
    x = torch.randn(shape).bfloat16()
    plain, swizzled = _quantizer(name), _quantizer(name)
    swizzled.optimize_for_gemm = True
    expected, found = plain(x), swizzled(x)
    assert (expected._with_gemm_swizzled_scales, found._with_gemm_swizzled_scales) == (False, True)
    assert not torch.equal(found._rowwise_scale_inv, expected._rowwise_scale_inv)
    for side in ("row", "column"):
        assert torch.equal(swizzle.scales_of(found, side), getattr(expected, f"_{side}wise_scale_inv"))
    assert torch.equal(found.dequantize(), expected.dequantize())
    # Written again its padding is clean, and a quantizer that does not ask for it makes it plain.
    swizzled.update_quantized(2 * x, found)
    assert torch.equal(swizzle.scales_of(found, "column"), plain(2 * x)._columnwise_scale_inv)
    plain.update_quantized(x, found)
    assert not found._with_gemm_swizzled_scales
    assert torch.equal(found._rowwise_scale_inv, expected._rowwise_scale_inv)
    tex.swizzle_scales_for_gemm_(found)
    assert torch.equal(found._rowwise_scale_inv, swizzled(x)._rowwise_scale_inv)
