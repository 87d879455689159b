"""Products from the rows of a BF16 weight, on every kind of processor that the kernel knows: against sums in FP64."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.kernel_cases import OF_PRODUCTS, build_for, same

from nemo_fp8.numerics.kernels import cpu


@pytest.fixture(params=OF_PRODUCTS)
def isa(request, monkeypatch):
    """Kernels of each kind, of processors as far as this one is more than they are."""
    build_for(request.param, monkeypatch)
    if cpu.multiply_rows(matrix(1, 32), matrix(1, 32)) is None:
        pytest.skip("no kernel of rows for this processor")
    return request.param


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def wide(x, weight, bias=None):
    return cpu.multiply_rows(x, weight, bias, torch.float32)


def compare(found, x, weight, bias=None):
    """Each sum within what FP32 may lose in it."""
    sizes, sums = x.double().abs() @ weight.double().abs().t(), x.double() @ weight.double().t()
    if bias is not None:
        sizes, sums = sizes + bias.double().abs(), sums + bias.double()
    assert ((found.double() - sums).abs() <= 2.0**-22 * sizes).all()


def test_odd_shapes(isa):
    """Rows and tokens that fill no whole block of sums."""
    for rows, columns, count in itertools.product((1, 2, 3, 4, 5, 131), (32, 96, 1024), (1, 2, 3, 4, 5, 7, 9)):
        x, weight = matrix(count, columns, 1), matrix(rows, columns)
        compare(wide(x, weight), x, weight)


def test_a_result_in_bf16_is_rounded_once(isa):
    x, weight, bias = matrix(7, 384, 1), matrix(131, 384), torch.randn(131)
    for added in (None, bias, bias.bfloat16()):
        sums = wide(x, weight, added)
        compare(sums, x, weight, added)
        same(cpu.multiply_rows(x, weight, added), sums.bfloat16())


def test_a_token_has_the_same_sums_among_others(isa):
    x, weight = matrix(9, 256, 1), matrix(131, 256)
    alone = torch.cat([wide(token[None], weight) for token in x])
    for count in range(1, 10):
        same(wide(x[:count], weight), alone[:count])


@pytest.mark.parametrize("count", [1, 8])
def test_threads_share_the_rows(isa, count):
    x, weight, before = matrix(count, 512, 1), matrix(1027, 512), torch.get_num_threads()
    assert weight.numel() > cpu.ELEMENTS_FOR_THREADS
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(wide(x, weight))
    finally:
        torch.set_num_threads(before)
    compare(found[0], x, weight)
    same(found[1], found[0])
    same(found[2], found[0])


def test_every_column_is_multiplied_by_its_own(isa):
    weight = torch.arange(1, 257).float().bfloat16()[None] * torch.tensor([1.0, -2.0, 0.5])[:, None].bfloat16()
    same(wide(torch.eye(256).bfloat16(), weight), weight.float().t().contiguous())


def test_what_is_huge_or_no_number_stays_so(isa):
    x, weight = matrix(3, 64, 1).abs(), matrix(5, 64).abs()
    x[1, 17], x[2, 63] = float("inf"), float("nan")
    weight[3] = 3e38
    found = wide(x, weight)
    compare(found[0, :3], x[:1], weight[:3])
    assert found[0, 3].isinf()
    assert found[1].isinf().all()
    assert found[2].isnan().all()


def test_subnormal_numbers_count_but_in_dot_products(isa):
    """Whatever the process has set for its own arithmetic."""
    dots = isa == "native" and torch.cpu._is_avx512_bf16_supported()
    weight = torch.full((4, 64), 2.0**-130).bfloat16()
    assert torch.set_flush_denormal(True)
    try:
        found = wide(torch.full((3, 64), 2.0**100).bfloat16(), weight)
        assert not torch.tensor([1e-39]) * 1.0, "the caller's setting is as it was"
    finally:
        torch.set_flush_denormal(False)
    assert (found == (0.0 if dots else 2.0**-24)).all()


def test_what_there_is_no_kernel_for(isa):
    assert cpu.multiply_rows(matrix(1, 40), matrix(8, 40)) is None
    assert cpu.multiply_rows(matrix(1, 64), matrix(64, 8).t()) is None
    assert cpu.multiply_rows(matrix(1, 64).half(), matrix(8, 64).half()) is None
    with pytest.raises(ValueError, match="times a weight"):
        cpu.multiply_rows(matrix(1, 32), matrix(8, 64))
