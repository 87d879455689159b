"""A cast that sums up what it does, against the cast and the sums that it takes the place of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import SOURCES, build_for, same, values

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.kernels import build
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


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.sampled_from([1, 7, 128, 130, 2048, 2052, 4100]),
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
@pytest.mark.parametrize("columns", [4096, 4104], ids=["whole lines", "ragged"])
def test_each_part_of_a_stack_has_its_own_totals(isa, tile, columns, monkeypatch):
    """In as many strips and threads as a large matrix takes, and with values that need the slow way in one part."""
    build_for(isa, monkeypatch)
    x = values((1024, columns), torch.bfloat16, 3, "gaussian")
    x[5:7, ::3] *= 2.0**-30  # nothing is left of these
    compare(x, tile, "fp32", 8)
    x[300, 5], x[301, 4000], x[302, :64] = float("inf"), float("nan"), 0
    compare(x, tile, "fp32", 8)
    totals = kernels.quantize_summed(x, tile, "e4m3", "fp32", room_for(x.shape, tile, "fp32"), 8).totals
    assert totals[:, TOTALS.index("nonfinite")].tolist() == [0, 0, 2, 0, 0, 0, 0, 0]


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
