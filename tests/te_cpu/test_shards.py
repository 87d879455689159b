"""Weights from shards of their masters: the codes and scales of the whole, to the bit. No rank quantizes the whole."""

import itertools

import pytest
import torch
import torch.multiprocessing
import transformer_engine_torch as tex
from support.te_cases import ARCH
from support.te_ranks import CUTS, SOURCES, buffers, master, shards, weight_quantizers
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from nemo_fp8.contract import Precision

ELSEWHERE = ("mxfp8", "nvfp4") if ARCH < 100 else ("blockwise.fp32",)
"""What the other architecture has."""
QUANTIZERS = {name: build for name, build in weight_quantizers().items() if name not in ELSEWHERE}
CASES = list(itertools.product(QUANTIZERS, SOURCES, range(len(CUTS))))
ONE_SCALE = [case for case in CASES if case[0].partition(".")[0] in ("delayed", "tensorwise")]


@pytest.fixture(scope="module")
def cast_by_three_ranks(tmp_path_factory):
    """The folder in which TE's own cast of every case lies, done by three ranks over gloo."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(shards, (3, folder / "store", ARCH, CASES, folder), nprocs=3)
    return folder


@pytest.fixture(scope="module")
def cast_along_rows(tmp_path_factory):
    """The same as our plugin has it done, of those that it mends."""
    folder = tmp_path_factory.mktemp("rows")
    mended = Precision(format="hybrid", scaling="delayed", fp8_param=True)
    torch.multiprocessing.spawn(shards, (3, folder / "store", ARCH, ONE_SCALE, folder, mended), nprocs=3)
    return folder


@pytest.mark.parametrize(("recipe", "source", "cut"), CASES)
def test_ranks_make_what_the_whole_would_be(cast_by_three_ranks, recipe, source, cut):
    held_to_the_whole(cast_by_three_ranks, recipe, source, cut)


@pytest.mark.parametrize(("recipe", "source", "cut"), ONE_SCALE)
def test_ranks_make_it_without_transposes_of_their_shares(cast_along_rows, recipe, source, cut):
    held_to_the_whole(cast_along_rows, recipe, source, cut)


def held_to_the_whole(folder, recipe, source, cut):
    found = torch.load(folder / f"{recipe}-{source}-{cut}")
    expected = buffers(QUANTIZERS[recipe]()(master(source).bfloat16()))
    assert found.keys() == expected.keys()
    assert len(found) >= 2
    for name, whole in expected.items():
        assert torch.equal(found[name], whole), name


@pytest.mark.skipif(ARCH < 100, reason="NVFP4 begins with Blackwell")
@pytest.mark.parametrize("cuts", [[0, 48 * 80], [0, 1000, 2002, 48 * 80], [0, 1, 33, 1001, 48 * 80]])
@pytest.mark.parametrize("source", ["normal", "zeros", "outliers"])
def test_shards_make_the_whole(cuts, source):
    torch.manual_seed(0)
    h, w = 48, 80
    master = {
        "normal": torch.randn(h, w),
        "zeros": torch.zeros(h, w),
        "outliers": torch.randn(h, w) * torch.logspace(-15, 15, w),
    }[source]
    quantizer = NVFP4Quantizer(with_2d_quantization=True)
    whole = quantizer(master)
    found = quantizer(torch.randn(h, w))
    shards = [master.view(-1)[a:b] for a, b in itertools.pairwise(cuts)]
    blocks, amax = torch.zeros(3, 5), torch.zeros(1)
    for shard, start in zip(shards, cuts, strict=False):  # what an all-reduce would do
        part, largest = torch.zeros(3, 5), torch.zeros(1)
        tex.nvfp4_multi_tensor_compute_partial_amax([shard], [part], [largest], [h], [w], [start], 16)
        blocks, amax = torch.maximum(blocks, part), torch.maximum(amax, largest)
    scales, encode = torch.empty(3, 5), torch.empty(1)
    tex.nvfp4_compute_global_scale(amax, encode)
    target = found._rowwise_scale_inv
    tex.nvfp4_multi_tensor_fused_scale(
        [blocks], [amax], [scales], [target], [found._amax_rowwise], [3], [5], [target.shape[0]], 16
    )
    codes = found._rowwise_data.view(-1)
    for shard, (start, end) in zip(shards, itertools.pairwise(cuts), strict=True):
        piece = codes[start // 2 : -(-end // 2)]
        tex.nvfp4_multi_tensor_2d_partial_cast([shard], [piece], [scales], [encode], [h], [w], [start], 16)
    assert torch.equal(found._rowwise_data, whole._rowwise_data)
    assert torch.equal(found._rowwise_scale_inv, whole._rowwise_scale_inv)
    assert torch.equal(found._amax_rowwise, whole._amax_rowwise)
    tex.nvfp4_2d_multi_tensor_transpose(
        [found._rowwise_data],
        [found._columnwise_data],
        [found._rowwise_scale_inv],
        [found._columnwise_scale_inv],
        [h],
        [w],
    )
    assert torch.equal(found._columnwise_data, whole._columnwise_data)
    assert torch.equal(found._columnwise_scale_inv, whole._columnwise_scale_inv)
