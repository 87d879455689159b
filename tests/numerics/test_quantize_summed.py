"""A cast that sums up what it does, against the cast and the sums that it takes the place of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import SOURCES, build_for, same, values

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.kernels import GROUP, Order, build
from nemo_fp8.numerics.statistics import TOTALS

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")

TILES = ((128, 128), (1, 128), (1, 32), (32, 32))


def room_for(shape, tile, kind):
    grid = tuple(-(-n // side) for n, side in zip(shape, tile, strict=True))
    scale = torch.float8_e8m0fnu if kind == "e8m0" else torch.float32
    return torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(grid, dtype=scale)


def compare(x, tile, kind, parts):
    out = room_for(x.shape, tile, kind)
    summed = kernels.quantize_summed(x, tile, "e4m3", kind, out, parts)
    codes, scales, statistics = kernels.quantize(x, tile, "e4m3", kind, "te", True)
    same(out[0], codes)
    same(out[1], scales)
    rows, columns, _ = kernels.sums(codes)
    assert torch.equal(summed.of_rows, rows)
    assert torch.equal(summed.of_columns, columns)
    torch.testing.assert_close(summed.totals, statistics.totals(parts), rtol=1e-12, atol=0, equal_nan=True)
    other = room_for(x.shape, tile, kind)
    alone = kernels.quantize_summed(x, tile, "e4m3", kind, other, parts, with_sums=False)
    same(other[0], codes)
    same(other[1], scales)
    assert alone.of_rows.numel() == alone.of_columns.numel() == 0
    torch.testing.assert_close(alone.totals, summed.totals, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.sampled_from([1, 7, 128, 130, 256, 384, 2048, 2052, 4100]),
    dtype=st.sampled_from(SOURCES),
    values_of=st.sampled_from(["gaussian", "specials", "zero"]),
    tile=st.sampled_from(TILES),
    kind=st.sampled_from(["fp32", "pow2", "e8m0"]),
    seed=st.integers(0, 1 << 30),
)
def test_a_matrix_is_summed_up_as_after_the_cast(rows, columns, dtype, values_of, tile, kind, seed):
    compare(values((rows, columns), dtype, seed, values_of), tile, kind, 1)


@pytest.mark.parametrize("isa", ["native", "avx2", "plain"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("columns", [128, 256, 4096, 4104], ids=["narrow", "two", "whole lines", "ragged"])
def test_each_part_of_a_stack_has_its_own_totals(isa, tile, columns, monkeypatch):
    """In as many strips and threads as a large matrix takes, and with values that need the slow way in one part."""
    build_for(isa, monkeypatch)
    x = values((1024, columns), torch.bfloat16, 3, "gaussian")
    x[5:7, ::3] *= 2.0**-30  # nothing is left of these
    compare(x, tile, "fp32", 8)
    x[300, 5], x[301, columns - 96], x[302, :64] = float("inf"), float("nan"), 0
    compare(x, tile, "fp32", 8)
    totals = kernels.quantize_summed(x, tile, "e4m3", "fp32", room_for(x.shape, tile, "fp32"), 8).totals
    assert totals[:, TOTALS.index("nonfinite")].tolist() == [0, 0, 2, 0, 0, 0, 0, 0]


def for_amx(codes):
    """Codes in plain order, as the docstring of ``Order.AMX`` says where they lie."""
    rows, columns = codes.shape
    pairs = codes.view(torch.uint8).view(rows // GROUP, GROUP, columns // 2, 2)
    return pairs.transpose(1, 2).contiguous().view(codes.dtype).view(rows, columns)


@pytest.mark.parametrize("isa", ["native", "avx2", "plain"])
def test_codes_are_left_in_the_order_of_amx(isa, monkeypatch):
    """With the bits, sums and totals of the plain order: past the caches, in several strips, lines that are half used,
    and a last row of tiles that is lower."""
    build_for(isa, monkeypatch)
    for shape, parts in (((1024, 4160), 8), ((1056, 2), 1), ((32, 130), 1), ((96, 2062), 1), ((2048, 2304), 1)):
        for dtype in SOURCES:
            x = values(shape, dtype, 3, "gaussian")
            x[5, ::3], x[7, 0] = 0, float("inf")
            plain, turned = room_for(shape, (128, 128), "fp32"), room_for(shape, (128, 128), "fp32")
            wanted = kernels.quantize_summed(x, (128, 128), "e4m3", "fp32", plain, parts)
            found = kernels.quantize_summed(x, (128, 128), "e4m3", "fp32", turned, parts, Order.AMX)
            same(turned[0], for_amx(plain[0]))
            same(turned[1], plain[1])
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("isa", ["native", "avx2", "plain"])
@pytest.mark.parametrize("shape", [(32, 2), (96, 130), (64, 2062), (4096, 2048), (2048, 2304)], ids=str)
def test_codes_that_are_copied_into_the_order_of_amx_are_read_once(isa, shape, monkeypatch):
    """With the sums and magnitudes of a plain copy, from rows that lie apart, and past the caches."""
    build_for(isa, monkeypatch)
    codes = torch.randint(0, 256, (shape[0], shape[1] + 6), dtype=torch.uint8).view(torch.float8_e4m3fn)[:, : shape[1]]
    plain, turned = (torch.zeros(shape, dtype=codes.dtype) for _ in range(2))
    wanted, found = kernels.sums(codes, plain), kernels.sums(codes, turned, order=Order.AMX)
    same(turned, for_amx(plain))
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


def test_what_cannot_be_copied_into_the_order_of_amx_is_left_to_the_caller():
    def done(shape, dtype=torch.uint8, into=None):
        x = torch.zeros(shape, dtype=dtype)
        return kernels.sums(x, torch.ones_like(x) if into is None else into, order=Order.AMX)

    assert done((64, 64)) is not None
    assert done((48, 64)) is None
    assert done((64, 63)) is None
    assert done((64, 64), torch.bfloat16) is None
    apart = torch.ones(64, 128, dtype=torch.uint8)[:, :64]
    assert done((64, 64), into=apart) is None
    assert bool((apart == 1).all())
    assert kernels.sums(apart, order=Order.AMX) is None


@pytest.mark.parametrize("threads", [1, 2, None])
def test_a_cast_takes_no_more_threads_than_it_is_given(threads, monkeypatch):
    """And leaves the same, whoever else computes meanwhile."""
    from nemo_fp8.numerics.kernels import cpu

    teams, job = [], cpu._job
    monkeypatch.setattr(cpu, "_job", lambda *a, **more: (made := job(*a, **more), teams.append(made.threads))[0])
    x = values((1024, 4096), torch.bfloat16, 3, "gaussian")
    out, wanted = room_for(x.shape, (128, 128), "fp32"), room_for(x.shape, (128, 128), "fp32")
    found = kernels.quantize_summed(x, (128, 128), "e4m3", "fp32", out, 2, threads=threads)
    expected = kernels.quantize_summed(x, (128, 128), "e4m3", "fp32", wanted, 2)
    assert teams == [threads or torch.get_num_threads(), torch.get_num_threads()]
    same(out[0], wanted[0])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), columns=st.sampled_from([2, 8, 30, 64, 130, 1024]), groups=st.integers(1, 9))
def test_sums_of_codes_for_amx_are_those_of_the_plain_order(data, columns, groups):
    """Of some groups, the last of which may be a part of one, and of some columns."""
    codes = torch.randint(0, 256, (groups * GROUP, columns), dtype=torch.uint8)
    left = 2 * data.draw(st.integers(0, columns // 2 - 1))
    right = left + 2 * data.draw(st.integers(1, (columns - left) // 2))
    first = GROUP * data.draw(st.integers(0, groups - 1))
    last = data.draw(st.integers(first + 1, len(codes)))
    found = kernels.sums_of_amx(for_amx(codes)[first:last], (left, right))
    wanted = kernels.sums(codes[first:last, left:right], magnitudes=False)[:2]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_sums_of_wide_rows_for_amx_wrap_like_the_plain_ones():
    """More pairs in a row than 32 bits can add up, all of them the largest."""
    codes = torch.full((64, 1 << 20), 255, dtype=torch.uint8)
    codes[40, 77] = 3
    found, wanted = kernels.sums_of_amx(for_amx(codes), (0, 1 << 20)), kernels.sums(codes, magnitudes=False)[:2]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_cannot_lie_in_the_order_of_amx_is_left_to_the_caller():
    def done(shape, tile=(128, 128), out=None):
        room = room_for(shape, tile, "fp32")
        codes = room[0] if out is None else out
        return kernels.quantize_summed(torch.ones(shape), tile, "e4m3", "fp32", (codes, room[1]), 1, Order.AMX)

    assert done((128, 256)) is not None
    assert done((144, 256)) is None
    assert done((128, 257)) is None
    assert done((128, 256), tile=(1, 128)) is None
    assert done((128, 256), out=torch.empty(128, 512, dtype=torch.float8_e4m3fn)[:, :256]) is None
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    assert kernels.sums_of_amx(codes, (0, 63)) is None
    assert kernels.sums_of_amx(codes[:, :32], (0, 32)) is None
    assert kernels.sums_of_amx(codes.to("meta"), (0, 32)) is None


def test_what_no_kernel_takes_is_left_to_the_caller():
    x = torch.ones(256, 128)
    assert kernels.quantize_summed(x, (128, 128), "e4m3", "fp32", room_for(x.shape, (128, 128), "fp32"), 4) is None
    assert kernels.quantize_summed(x.t(), (128, 128), "e4m3", "fp32", room_for((128, 256), (128, 128), "fp32")) is None
    assert kernels.quantize_summed(x.to("meta"), (128, 128), "e4m3", "fp32", (x, x)) is None


@pytest.mark.parametrize("wrong", ["codes", "scales", "type"])
def test_memory_that_does_not_fit_is_refused_before_anything_is_written(wrong):
    """As scales that a newer vLLM keeps in another type would be."""
    x = values((256, 256), torch.bfloat16, 0, "gaussian")
    codes, scales = room_for(x.shape, (128, 128), "fp32")
    out = {"codes": (codes[:128], scales), "scales": (codes, scales[:1]), "type": (codes, scales.bfloat16())}[wrong]
    with pytest.raises(PrecisionError, match=r"(scale_inv|codes)="):
        kernels.quantize_summed(x, (128, 128), "e4m3", "fp32", out)
