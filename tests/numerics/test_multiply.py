"""Products from codes, on every kind of processor that the kernel knows: against sums in FP64 of what the codes say."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from support.kernel_cases import OF_PRODUCTS, build_for, same

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import quantize
from nemo_fp8.numerics.kernels import cpu
from nemo_fp8.numerics.quantized import Quantized

KINDS = {
    "blocks": ((128, 128), "fp32"),
    "pow2": ((128, 128), "pow2"),
    "rows": ((1, 128), "fp32"),
    "mx": ((1, 32), "e8m0"),
    "small": ((16, 64), "fp32"),
}
WIDTHS = {"mx": (32, 96, 480), "small": (64, 320)}


@pytest.fixture(params=OF_PRODUCTS)
def isa(request, monkeypatch):
    """Kernels of each kind, of processors as far as this one is more than they are."""
    build_for(request.param, monkeypatch)
    if multiply(torch.ones(1, 128), weight(1, 128, "blocks")) is None:
        pytest.skip("no kernel of codes for this processor")
    return request.param


@functools.cache
def weight(rows, columns, kind, seed=0):
    tile, scale = KINDS[kind]
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5
    return quantize(values.bfloat16(), Operand("e4m3", tile, scale))


def tokens_of(count, columns, dtype=torch.bfloat16):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def multiply(x, q, bias=None, dtype=torch.float32):
    return cpu.multiply(x, q.data, q.scale_inv, q.block, bias, dtype)


def compare(found, x, q, bias=None):
    """Each sum within what FP32 may lose in it."""
    exact, values = x.double(), q.dequantize_reference().double()
    sizes, sums = exact.abs() @ values.abs().t(), exact @ values.t()
    if bias is not None:
        sizes, sums = sizes + bias.double().abs(), sums + bias.double()
    assert ((found.double() - sums).abs() <= 2.0**-22 * sizes).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_odd_shapes(isa, kind, dtype):
    widths = WIDTHS.get(kind, (128, 384))
    for rows, columns, count in itertools.product((1, 2, 3, 131), widths, (1, 2, 3, 5, 8)):
        q, x = weight(rows, columns, kind), tokens_of(count, columns, dtype)
        compare(multiply(x, q), x, q)


@pytest.mark.parametrize("kind", ["blocks", "mx"])
def test_a_result_in_bf16_is_rounded_once(isa, kind):
    q, x, bias = weight(131, 384, kind), tokens_of(7, 384), torch.randn(131)
    for added in (None, bias, bias.bfloat16()):
        wide = multiply(x, q, added)
        compare(wide, x, q, added)
        same(multiply(x, q, added, torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize("count", [1, 8])
def test_threads_share_the_rows(isa, count):
    q, x, before = weight(1027, 512, "blocks"), tokens_of(count, 512), torch.get_num_threads()
    assert q.data.numel() > cpu.ELEMENTS_FOR_THREADS
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(multiply(x, q))
    finally:
        torch.set_num_threads(before)
    compare(found[0], x, q)
    same(found[1], found[0])
    same(found[2], found[0])


def test_every_code_has_its_value_in_every_column(isa):
    columns = torch.arange(128, dtype=torch.uint8)
    codes = (torch.arange(256, dtype=torch.uint8)[:, None] + columns).view(torch.float8_e4m3fn)
    codes.view(torch.uint8)[codes.isnan()] = 1
    q = Quantized(codes, torch.full((2, 1), 2.0**-3), (128, 128))
    for dtype in (torch.bfloat16, torch.float32):
        same(multiply(torch.eye(128, dtype=dtype), q), codes.float().t() * 2.0**-3 + 0.0)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_code_that_is_no_number_spoils_its_row_alone(isa, count):
    q, x = weight(131, 256, "blocks"), torch.zeros(count, 256).bfloat16()
    clean = multiply(x, q)
    for row, column, code in ((0, 0, 0x7F), (5, 255, 0xFF), (64, 130, 0x7F), (130, 31, 0xFF)):
        codes = q.data.view(torch.uint8).clone()
        codes[row, column] = code
        found = multiply(x, Quantized(codes.view(torch.float8_e4m3fn), q.scale_inv, q.block))
        assert found[:, row].isnan().all()
        found[:, row] = clean[:, row]
        same(found, clean)


def test_tokens_that_are_huge_tiny_or_no_numbers(isa):
    """Where a token's elements are multiplied by a power of two on the way, each has its own."""
    q, x = weight(131, 256, "blocks"), tokens_of(6, 256)
    x *= torch.tensor([1, 2.0**100, 2.0**-80, 0, 1, 1])[:, None]
    x[4, 17], x[5, 200] = float("inf"), float("nan")
    for given in (x, x.float()):
        found = multiply(given, q)
        compare(found[:4], given[:4], q)
        assert not found[3].any()
        same(found[4].isnan(), q.data[:, 17].float() == 0)
        assert not found[4].isfinite().any()
        assert found[5].isnan().all()


def test_scales_of_mx_at_their_ends(isa):
    q, x = weight(5, 96, "mx"), tokens_of(2, 96).float()
    exponents = q.scale_inv.view(torch.uint8).clone()
    exponents[0, 2], exponents[1] = 0xFF, 0
    found = multiply(x, Quantized(q.data, exponents.view(torch.float8_e8m0fnu), q.block))
    assert found[:, 0].isnan().all()
    assert (found[:, 1].abs() < 2.0**-110).all()
    assert found[:, 1].any()
    compare(found[:, 2:], x, Quantized(q.data[2:], q.scale_inv[2:], q.block))


def test_small_codes_count_where_a_process_flushes_subnormal_numbers(isa):
    codes = torch.full((4, 128), 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    q = Quantized(codes, torch.ones(1, 1), (128, 128))
    assert torch.set_flush_denormal(True)
    try:
        found = multiply(torch.ones(3, 128), q)
        assert not torch.tensor([1e-39]) * 1.0, "the caller's setting is as it was"
    finally:
        torch.set_flush_denormal(False)
    assert (found == 128 * 2.0**-9).all()


def test_tiles_that_are_no_whole_vectors_have_no_kernel(isa):
    assert multiply(tokens_of(1, 200), weight(8, 200, "blocks")) is None
    q = quantize(torch.randn(8, 96).bfloat16(), Operand("e4m3", (1, 16), "fp32"))
    assert multiply(tokens_of(1, 96), q) is None
