"""Matrices that are cast, or copied and summed up, by one call, against a call for each: small ones, and two that all
threads work at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernel_cases import build_for, same, values

from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.kernels import Order, build
from nemo_fp8.numerics.kernels.cpu import MAGNITUDES, cast_job, sums_job
from nemo_fp8.numerics.kernels.several import Casts, Sums

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")

ISAS = ["native", "avx2", "plain"]
SHAPES = [(128, 128), (1, 128), (300, 130), (1536, 2056), (128, 4104), (7, 1), (512, 2048), (4100, 1032)]
PARTS = [1, 1, 1, 3, 1, 1, 4, 1]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["fp32", "pow2", "e8m0"])
def test_casts_are_those_of_a_call_for_each(isa, kind, monkeypatch):
    """Of all, and then of some in another order whose values lie elsewhere; one has values that need the slow way, and
    two are of parts that are told of one by one."""
    build_for(isa, monkeypatch)
    tile, scale_type = (128, 128), torch.float8_e8m0fnu if kind == "e8m0" else torch.float32
    grids = [tuple(-(-n // 128) for n in shape) for shape in SHAPES]
    wide = [torch.zeros(rows, columns + 64, dtype=torch.float8_e4m3fn) for rows, columns in SHAPES]
    codes = [memory[:, :columns] for memory, (_, columns) in zip(wide, SHAPES, strict=True)]
    scales = [torch.empty(grid, dtype=scale_type) for grid in grids]
    like = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in SHAPES]
    jobs = [cast_job(x, tile, "e4m3", kind, s, codes=c) for x, c, s in zip(like, codes, scales, strict=True)]
    casts = Casts(jobs, PARTS)
    for seed, numbers in ((0, range(len(SHAPES))), (1, [5, 3, 2, 0])):
        x = {n: values(SHAPES[n], torch.bfloat16, seed + n, "specials" if n == 2 else "gaussian") for n in numbers}
        casts.run(numbers, [x[n].data_ptr() for n in numbers])
        for n in numbers:
            out = torch.empty(SHAPES[n], dtype=torch.float8_e4m3fn), torch.empty(grids[n], dtype=scale_type)
            alone = kernels.quantize_summed(x[n], tile, "e4m3", kind, out, PARTS[n])
            same(codes[n], out[0])
            same(scales[n], out[1])
            assert casts.sums(n).tolist() == [*alone.of_rows.tolist(), *alone.of_columns.tolist()]
            np.testing.assert_array_equal(casts.totals(n), alone.totals.numpy())
    assert not any(memory[:, columns:].float().any() for memory, (_, columns) in zip(wide, SHAPES, strict=True))


@pytest.mark.parametrize("isa", ISAS)
def test_casts_arranged_for_amx_are_those_of_a_call_for_each(isa, monkeypatch):
    """Large ones, between which no thread waits for another, and a small one."""
    build_for(isa, monkeypatch)
    shapes, tile = [(2048, 1536), (256, 512), (1280, 2048)], (128, 128)
    x = [values(shape, torch.bfloat16, n, "gaussian") for n, shape in enumerate(shapes)]
    codes, scales = [torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in shapes], [grid_of(s) for s in shapes]
    jobs = [
        cast_job(one.to("meta"), tile, "e4m3", "fp32", s, c, Order.AMX)
        for one, s, c in zip(x, scales, codes, strict=True)
    ]
    casts = Casts(jobs, [1, 1, 2])
    for _ in range(2):
        casts.run(range(3), [one.data_ptr() for one in x])
        for n, shape in enumerate(shapes):
            out = torch.empty(shape, dtype=torch.float8_e4m3fn), grid_of(shape)
            alone = kernels.quantize_summed(x[n], tile, "e4m3", "fp32", out, [1, 1, 2][n], Order.AMX)
            same(codes[n], out[0])
            same(scales[n], out[1])
            assert casts.sums(n).tolist() == [*alone.of_rows.tolist(), *alone.of_columns.tolist()]
            np.testing.assert_array_equal(casts.totals(n), alone.totals.numpy())


def grid_of(shape):
    return torch.empty([n // 128 for n in shape])


@pytest.mark.parametrize("isa", ISAS)
def test_copies_are_those_of_a_call_for_each(isa, monkeypatch):
    build_for(isa, monkeypatch)
    types = [torch.bfloat16, torch.float16, torch.float32, torch.bfloat16] * 2
    x = [values(shape, dtype, 5, "gaussian") for shape, dtype in zip(SHAPES, types, strict=True)]
    x[1][0, 3], x[2][4, 5], x[5][6, 0] = float("-inf"), float("nan"), -1e4
    into = [torch.zeros_like(one) for one in x]
    jobs = [sums_job(one.to("meta"), to, MAGNITUDES[one.dtype]) for one, to in zip(x, into, strict=True)]
    sums, numbers = Sums(jobs, types), [7, 6, 0, 1, 2, 3, 5]
    sums.run(numbers, [x[n].data_ptr() for n in numbers])
    largest = dict(zip(numbers, sums.largest(numbers), strict=True))
    for n in numbers:
        of_rows, of_columns, tops = kernels.sums(x[n])
        same(into[n], x[n])
        assert sums.sums(n).tolist() == [*of_rows.tolist(), *of_columns.tolist()]
        torch.testing.assert_close(largest[n], tops.amax().double(), rtol=0, atol=0, equal_nan=True)
    assert not into[4].any()
    assert largest[1] == float("inf")
    assert largest[2].isnan()


def test_sums_alone_copy_nothing():
    x = values((128, 4104), torch.float32, 0, "gaussian")
    sums = Sums([sums_job(x, None, 0)])
    sums.run([0], [x.data_ptr()])
    assert sums.sums(0).tolist() == [n for found in kernels.sums(x)[:2] for n in found.tolist()]


def test_nothing_is_prepared_of_nothing():
    for jobs in (Casts([], []), Sums([]), Sums([], [])):
        jobs.run([], [])
    assert len(Sums([], []).largest([])) == 0
