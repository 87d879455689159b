"""Jobs that are kept for the pieces of a matrix: what each leaves is what a call for that piece alone does."""

import multiprocessing

import numpy as np
import pytest
import torch
from support.kernel_cases import build_for, same, values

from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.kernels import Order, build
from nemo_fp8.numerics.kernels import pieces as kept
from nemo_fp8.numerics.kernels.cpu import cast_job
from nemo_fp8.numerics.kernels.pieces import CastPieces, SummedPieces

ISAS = ["native", "avx2", "plain"]
TILES = {"fp32": (128, 128), "pow2": (128, 128), "e8m0": (1, 32)}
ROWS, COLUMNS = 640, 384
CUTS = [[(0, 640)], [(0, 256), (256, 384)], [(0, 128), (128, 128), (256, 384)], [(0, 256), (256, 384)]]

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("isa", ISAS)
def test_pieces_are_cast_as_by_a_call_for_each(isa, kind, monkeypatch):
    build_for(isa, monkeypatch)
    tile, scale_type = TILES[kind], torch.float8_e8m0fnu if kind == "e8m0" else torch.float32
    meta = [torch.empty(ROWS, COLUMNS, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
    grid = torch.empty(ROWS // tile[0], COLUMNS // tile[1], dtype=scale_type, device="meta")
    pieces = CastPieces(cast_job(meta[0], tile, "e4m3", kind, grid, meta[1]))
    for seed, cuts in enumerate(CUTS):
        x = values((ROWS, COLUMNS), torch.bfloat16, seed, "specials" if seed == 1 else "gaussian")
        for threads, (row, rows) in enumerate(cuts):
            made = [torch.zeros(rows, COLUMNS, dtype=torch.float8_e4m3fn) for _ in range(2)]
            scales = [torch.zeros(rows // tile[0], COLUMNS // tile[1], dtype=scale_type) for _ in range(2)]
            part, parts = x[row : row + rows], rows // 128
            where = part.data_ptr(), made[0].data_ptr(), scales[0].data_ptr()
            totals = pieces.put(row, rows, parts, threads or None, *where)
            alone = kernels.quantize_summed(part, tile, "e4m3", kind, (made[1], scales[1]), parts)
            same(made[0], made[1])
            same(scales[0], scales[1])
            np.testing.assert_array_equal(totals, alone.totals.numpy())


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("isa", ISAS)
def test_pieces_are_copied_and_summed_up_as_a_whole_matrix_is(isa, order, monkeypatch):
    build_for(isa, monkeypatch)
    wide = torch.zeros(ROWS + 2, COLUMNS, dtype=torch.uint8)
    live = wide[1:-1]  # what lies before and behind it stays
    pieces = SummedPieces(live, order)
    for seed, cuts in enumerate([[(0, 128)], *CUTS]):  # the first one ends in the midst
        x = torch.randint(256, (ROWS, COLUMNS), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        live.zero_()
        for row, rows in cuts:
            pieces.put(row, rows, x[row : row + rows].data_ptr())
        if sum(rows for _, rows in cuts) == ROWS:
            expected = torch.zeros_like(live)
            of_rows, of_columns, _ = kernels.sums(x, expected, False, order)
            assert torch.equal(live, expected)
            assert pieces.taken().tolist() == [*of_rows.tolist(), *of_columns.tolist()]
            assert len(pieces.taken()) == 0  # they have no memory beside the model
    assert not wide[0].any()
    assert not wide[-1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("isa", ISAS)
def test_values_are_copied_and_their_largest_is_known(isa, dtype, monkeypatch):
    build_for(isa, monkeypatch)
    live = torch.zeros(ROWS, COLUMNS, dtype=dtype)
    pieces = SummedPieces(live, Order.ROWS)
    for bad, cuts in zip((None, float("-inf"), float("nan"), None), CUTS, strict=True):
        x = values((ROWS, COLUMNS), dtype, len(cuts), "gaussian")
        x[300, 7] = -8.5 if bad is None else bad
        for row, rows in cuts:
            pieces.put(row, rows, x[row : row + rows].data_ptr())
        same(live, x)
        of_rows, of_columns, _ = kernels.sums(x)
        assert str(pieces.largest()) == {None: "8.5"}.get(bad, str(abs(bad or 0)))
        assert pieces.taken().tolist() == [*of_rows.tolist(), *of_columns.tolist()]


def test_a_forked_process_puts_pieces_of_which_its_parent_kept_the_jobs():
    """It has none of the threads that worked there, and would wait for them for ever."""
    live, like = torch.zeros(4096, 1024, dtype=torch.uint8), torch.empty(4096, 1024, dtype=torch.bfloat16)
    x, codes = torch.ones_like(live), torch.empty_like(live).view(torch.float8_e4m3fn)
    scales, like = torch.empty(32, 8), like.normal_(generator=torch.Generator().manual_seed(0))
    sums = SummedPieces(live, Order.ROWS)
    casts = CastPieces(cast_job(like.to("meta"), (128, 128), "e4m3", "fp32", scales.to("meta"), codes.to("meta")))

    def put():
        sums.put(0, 4096, x.data_ptr())
        casts.put(0, 4096, 1, None, like.data_ptr(), codes.data_ptr(), scales.data_ptr())

    put()
    child = multiprocessing.get_context("fork").Process(target=put)
    child.start()
    child.join(30)
    child.kill()
    child.join()
    assert child.exitcode == 0


def test_a_matrix_that_is_cut_otherwise_each_time_keeps_few_pieces(monkeypatch):
    monkeypatch.setattr(kept, "MOST", 3)
    live = torch.zeros(64, 32, dtype=torch.uint8)
    pieces, x = SummedPieces(live, Order.ROWS), torch.arange(2048).to(torch.uint8).view(64, 32)
    for rows in range(1, 64):
        pieces.put(0, rows, x.data_ptr())
        pieces.put(rows, 64 - rows, x[rows:].data_ptr())
        assert len(pieces._kept) <= 3
        of_rows, of_columns, _ = kernels.sums(x)
        assert pieces.taken().tolist() == [*of_rows.tolist(), *of_columns.tolist()]
    assert torch.equal(live, x)


def test_memory_that_no_kernel_fills_piece_by_piece_is_not_taken():
    good, group = torch.zeros(64, 32, dtype=torch.uint8), 32
    assert SummedPieces.takes(good, Order.AMX, group)
    assert SummedPieces.takes(good, Order.AMX, 2 * group)
    assert SummedPieces.takes(good[:40], Order.ROWS, 1)
    assert not SummedPieces.takes(good[:40], Order.AMX, group)
    assert not SummedPieces.takes(good, Order.AMX, 16)
    assert not SummedPieces.takes(good[:, :16], Order.ROWS, group)
    assert not SummedPieces.takes(good.view(torch.int16), Order.ROWS, group)
    assert SummedPieces.takes(good.view(torch.bfloat16), Order.ROWS, 1)
    assert not SummedPieces.takes(good.view(torch.bfloat16), Order.AMX, group)
    assert not SummedPieces.takes(good[:0], Order.ROWS, group)
    assert not SummedPieces.takes(good.to("meta"), Order.ROWS, group)
