"""The compiled CPU kernels against the specification in torch: every code and every scale, to the bit."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import (
    FP8,
    RULES,
    SOURCES,
    TILES,
    build_for,
    compare_statistics,
    jobs_of_every_kind,
    large_results,
    matrices_turned,
    same,
    values,
)

from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import FORMATS, format_of
from nemo_fp8.numerics.kernels import build, cpu, cuda
from nemo_fp8.numerics.quantize import find_scales, quantize_reference
from nemo_fp8.numerics.quantized import Quantized

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")

SHAPES = st.one_of(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.sampled_from([(1, 1), (128, 2048), (129, 2049), (3, 4100), (2, 3, 130), (1, 4096), (256, 1)]),
)


@pytest.mark.parametrize("isa", ["native", "avx2", "plain"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["codes", "halves"])
def test_matrices_are_turned(dtype, isa, monkeypatch):
    build_for(isa, monkeypatch)
    x = matrices_turned(dtype)
    assert not kernels.turn(x.t(), torch.zeros(x.shape, dtype=dtype)), "it reads rows that lie in one piece each"
    assert not kernels.turn(x.double(), x.t().double().contiguous())
    with pytest.raises(ValueError, match=r"\(2080, 2050\) of"):
        kernels.turn(x, torch.zeros(x.shape, dtype=dtype))


@settings(max_examples=120, deadline=None)
@given(
    shape=SHAPES,
    dtype=st.sampled_from(SOURCES),
    kind=st.sampled_from(["gaussian", "magnitudes", "bits", "specials", "zero"]),
    tile=st.sampled_from(TILES),
    rule=st.sampled_from(RULES),
    element=st.sampled_from(FP8),
    statistics=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_codes_and_scales_equal_the_reference(shape, dtype, kind, tile, rule, element, statistics, seed):
    convention, scale_kind = rule
    x = values(shape, dtype, seed, kind)
    fast = kernels.quantize(x, tile, element, scale_kind, convention, statistics)
    slow = quantize_reference(x, tile, format_of(element), scale_kind, convention, statistics)
    assert fast is not None
    same(fast[0], slow[0])
    same(fast[1], slow[1])
    if statistics:
        compare_statistics(fast[2], slow[2], sums=kind == "gaussian")


@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("dtype", SOURCES, ids=str)
@pytest.mark.parametrize("statistics", [False, True])
def test_a_given_scale(dtype, element, statistics):
    x = values((130, 515), dtype, 1, "specials")
    for scale in (1.0, 0.37, 3000.0, 1e-30):
        factor = torch.tensor(scale)
        fast = kernels.quantize(x, None, element, "fp32", "te", statistics, factor)
        slow = quantize_reference(x, None, format_of(element), "fp32", "te", statistics, scale=factor)
        same(fast[0], slow[0])
        same(fast[1], slow[1])
        if statistics:
            compare_statistics(fast[2], slow[2], sums=False)


def test_every_bfloat16_value_is_rounded_as_torch_rounds_it():
    """All 65536 of them, against torch's own cast, which this project did not write."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for element in FP8:
        format = FORMATS[element]
        codes = kernels.quantize(x.view(256, 256), None, element, "fp32", "te", False, torch.tensor(1.0))[0]
        expected = x.float().clamp(-format.max, format.max).to(format.dtype).view(torch.uint8)
        expected = torch.where(x.isnan(), torch.full_like(expected, 0x7F), expected)
        same(codes.view(-1).view(torch.uint8), expected)


@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("rule", RULES, ids="-".join)
def test_every_mantissa_under_every_amax(rule, element):
    """All 128 mantissas of BF16 from an amax down to where codes end, for all 128 mantissas that an amax can have."""
    mantissa = 1 + torch.arange(128) / 128
    below = torch.exp2(-torch.arange(36.0))
    rows = torch.minimum(below[:, None] * mantissa, mantissa[:, None, None])  # amax, how far below it, mantissa
    rows[:, :, 0] = mantissa[:, None]
    rows[:, :, 1::2] *= -1
    for binade in (2.0**-110, 2.0**-3, 2.0**100):
        x = (rows.view(-1, 128) * binade).bfloat16()
        fast, slow = (f(x, (1, 128), element, rule) for f in (_fast, _slow))
        same(fast[0], slow[0])
        same(fast[1], slow[1])


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decode_equals_dequantize(tile, element, dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(300)[: 260 * 290].view(260, 290).view(FORMATS[element].dtype)
    for scale_kind in ("fp32", "e8m0"):
        grid = (1, 1) if tile is None else (-(-260 // tile[0]), -(-290 // tile[1]))
        amax = values(grid, torch.float32, 3, "magnitudes").abs()
        scale_inv = find_scales(amax, FORMATS[element], scale_kind)[1]
        scale_inv = scale_inv.reshape(()) if tile is None else scale_inv
        fast = kernels.decode(codes, scale_inv, tile, dtype)
        slow = Quantized(codes, scale_inv, tile).dequantize(dtype)
        torch.testing.assert_close(fast, slow, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", ["native", *build.OTHERS])
@pytest.mark.parametrize("tile", [(1, 128), (1, 32), (128, 1), (1, 16)], ids=str)
def test_decode_under_scales_at_the_ends_of_fp32(monkeypatch, tmp_path, tile, isa):
    """A scale times 256 may be infinite where the values are not, and values may be subnormal where scales are not."""
    build_for(isa, monkeypatch)
    numbers = {"e4m3": 0x7F, "e5m2": 0x7C}
    for element, end in numbers.items():
        below = torch.arange(end, dtype=torch.uint8)
        codes = torch.cat([below, below | 0x80]).repeat(20)[:4480].view(1, 4480).view(FORMATS[element].dtype)
        for scale in (2.0**127, 2.0**120, 2.0**119, 0.3, 1.1 * 2.0**-126, 2.0**-149):
            scale_inv = torch.full((1, -(-4480 // tile[1])), scale)
            fast = kernels.decode(codes, scale_inv, tile, torch.bfloat16)
            slow = Quantized(codes, scale_inv, tile).dequantize_reference(torch.bfloat16)
            same(fast, slow)


@pytest.mark.parametrize("isa", ["native", *build.OTHERS])
@pytest.mark.parametrize("element", FP8)
def test_decode_under_every_mantissa_of_a_scale_and_beside_the_ends_of_the_tables(monkeypatch, element, isa):
    """Where AVX2 looks codes up: all of them under 256 mantissas, and scales that a table just has or lacks."""
    build_for(isa, monkeypatch)
    end = {"e4m3": 0x7F, "e5m2": 0x7C}[element]
    below = torch.arange(end, dtype=torch.uint8)
    row = torch.cat([below, below | 0x80, below[:16]])[: 2 * end + 16]
    codes = row.repeat(256, 1).view(FORMATS[element].dtype)  # rows that end within a vector
    mantissas = 1 + torch.arange(256) / 256 + 2.0**-20
    for exponent in (-81, -80, -7, 79, 80):
        scale_inv = (mantissas * 2.0**exponent).view(256, 1)
        for tile, scales in (
            ((1, 2048), scale_inv),
            ((1, 128), scale_inv.expand(256, 3)),
            ((128, 2048), scale_inv[::128]),
        ):
            fast = kernels.decode(codes, scales, tile, torch.bfloat16)
            same(fast, Quantized(codes, scales, tile).dequantize_reference(torch.bfloat16))


def test_rows_that_lie_apart():
    """A slice of columns, a transpose: the kernels read what the tensor says, not its storage."""
    big = values((300, 1000), torch.bfloat16, 5, "gaussian")
    for x in (big[:, 100:700], big[::2], big.t(), big[7:8].expand(40, 1000)):
        fast, slow = (f(x, (128, 128)) for f in (_fast, _slow))
        same(fast[0], slow[0])
        same(fast[1], slow[1])


def test_any_number_of_threads():
    x = values((700, 5000), torch.bfloat16, 6, "gaussian")
    threads, expected = torch.get_num_threads(), _slow(x, (128, 128))
    try:
        for n in (1, 2, 7):
            torch.set_num_threads(n)
            same(_fast(x, (128, 128))[0], expected[0])
    finally:
        torch.set_num_threads(threads)


def test_what_the_kernels_do_not_take_is_left_to_torch():
    x = torch.ones(4, 6)
    assert kernels.quantize(x, (1, 3), "e4m3", "fp32") is None
    assert kernels.quantize(torch.ones(0, 128), (1, 128), "e4m3", "fp32") is None
    assert kernels.quantize(x.double(), None, "e4m3", "fp32") is None
    assert kernels.decode(x.to(torch.float8_e4m3fn), torch.ones(()), None, torch.float16) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tile", "rule"), [((128, 128), ("te", "fp32")), ((1, 32), ("te", "e8m0")), ((32, 1), ("te", "pow2"))], ids=str
)
def test_large_results_which_go_past_the_caches(dtype, tile, rule):
    large_results(tile, rule, dtype)


@pytest.mark.parametrize("scale", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_given_scale_that_is_no_scale(scale):
    """Whoever answers, the answer is the specification's."""
    x, factor = values((130, 300), torch.bfloat16, 11, "specials"), torch.tensor(scale)
    fast = kernels.quantize(x, None, "e4m3", "fp32", "te", False, factor)
    if fast is not None:
        same(fast[0], quantize_reference(x, None, FORMATS["e4m3"], "fp32", "te", False, scale=factor)[0])


def test_in_a_process_that_was_forked_off():
    """OpenMP's workers do not live on in the child, which must not wait for them."""
    program = """if True:
        import os, signal, torch
        from nemo_fp8.numerics import kernels
        torch.set_num_threads(2)
        x = torch.randn(1024, 1024).bfloat16()
        expected = kernels.quantize(x, (128, 128), "e4m3", "fp32")[0].view(torch.uint8)
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends the child should it hang
            codes = kernels.quantize(x, (128, 128), "e4m3", "fp32")[0].view(torch.uint8)
            os._exit(0 if bytes(codes.numpy()) == bytes(expected.numpy()) else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_in_a_fork_of_a_process_that_had_not_used_the_kernels():
    program = """if True:
        import os, signal, torch
        from nemo_fp8.numerics import kernels
        torch.set_num_threads(2)
        x = torch.randn(1024, 1024).bfloat16().add_(1)  # torch's own workers have started
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(0 if kernels.quantize(x, (128, 128), "e4m3", "fp32") else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_threads_of_its_own_where_torch_has_no_openmp(monkeypatch):
    x = values((700, 5000), torch.bfloat16, 12, "gaussian")
    monkeypatch.setattr(cpu, "parallel", lambda: None)
    same(_fast(x, (128, 128))[0], _slow(x, (128, 128))[0])


@pytest.mark.parametrize("tile", [(1, 32), (1, 128), (255, 1), (2, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_counters_hold_a_whole_tile(tile, dtype):
    """Small tiles are counted in bytes: all of one tile lost, all of another infinite, all of a third saturated."""
    n = tile[0] * tile[1]
    lost, infinite = torch.full(tile, 1e-20), torch.full(tile, float("inf"))
    lost[0, 0] = 1.0
    x = torch.cat([lost, infinite], 1).to(dtype)
    counted = kernels.quantize(x, tile, "e4m3", "fp32", "te", True)[2]
    assert counted.underflow.tolist() == [[n - 1, 0]]
    assert counted.nonfinite.tolist() == [[0, n]]
    assert counted.saturated.tolist() == [[0, n]]
    assert float(counted.total().underflow) == n - 1


@pytest.mark.parametrize("tile", [(1, 32), (32, 1), (128, 128)], ids=str)
def test_counts_of_zero_take_no_memory(tile):
    """Where every value is a number, nothing saturates: one zero stands for all tiles. With a NaN each is counted."""
    x = values((256, 4096), torch.bfloat16, 13, "gaussian")
    counted = kernels.quantize(x, tile, "e4m3", "fp32", "te", True)[2]
    for zeros in (counted.saturated, counted.nonfinite):
        assert zeros.untyped_storage().nbytes() <= 4
        assert zeros.shape == counted.underflow.shape
        assert not zeros.any()
    x[200, 3000] = float("nan")
    wild = kernels.quantize(x, tile, "e4m3", "fp32", "te", True)[2]
    assert wild.nonfinite.nonzero().tolist() == [[200 // tile[0], 3000 // tile[1]]]
    assert int(wild.nonfinite.sum()) == 1
    assert not wild.saturated.any()


@pytest.mark.long
def test_more_elements_than_32_bits_count():
    """The last rows of two billion elements; needs 5 GB of memory."""
    cols = 1 << 11
    rows = (1 << 31) // cols + 200
    x = values((8, cols), torch.bfloat16, 13, "gaussian").repeat(rows // 8, 1)
    codes, scale_inv, counted = kernels.quantize(x, (1, 128), "e4m3", "fp32", "te", True)
    slow = _slow(x[-8:], (1, 128))
    same(codes[-8:], slow[0])
    same(scale_inv[-8:], slow[1])
    assert int(counted.total().elements) == x.numel() > 1 << 31
    del x, counted
    decoded = kernels.decode(codes, scale_inv, (1, 128), torch.bfloat16)
    torch.testing.assert_close(
        decoded[-8:], Quantized(*slow[:2], (1, 128)).dequantize_reference(torch.bfloat16), rtol=0, atol=0
    )


def test_amax_passes_over_nan():
    x = torch.tensor([[1.0, float("nan"), -3.0]])
    assert kernels.amax(x) == 3.0
    assert kernels.amax(x * float("inf")) == float("inf")


def _fast(x, tile, element="e4m3", rule=("te", "fp32")):
    return kernels.quantize(x, tile, element, rule[1], rule[0], False)


def _slow(x, tile, element="e4m3", rule=("te", "fp32")):
    return quantize_reference(x, tile, FORMATS[element], rule[1], rule[0], False)


# ---------------------------------------------------------------------- building


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    yield tmp_path / "nemo_fp8"
    build.library.cache_clear()


def test_every_file_of_the_kernels_decides_which_library_is_built():
    """Else a library that was built of other lines would be taken for this one."""
    folder = Path(build.__file__).parent
    assert sorted(build.SOURCES) == sorted(folder.glob("*.c"))
    assert sorted(build.HEADERS) == sorted(folder.glob("*.h"))


def test_without_a_compiler_it_says_so_once(cache, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        assert [kernels.quantize(torch.ones(128, 128), (128, 128), "e4m3", "fp32") for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "no C compiler" in caplog.text


def test_a_gpu_without_triton_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    cuda.available.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert cuda.quantize(torch.ones(128, 128), (128, 128), "e4m3", "fp32", "te", False, None, None) is None
    finally:
        cuda.available.cache_clear()
    assert len(caplog.records) == 1
    assert "triton is not installed" in caplog.text


def test_a_compiler_that_fails_is_quoted(cache, monkeypatch, tmp_path):
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho sorry >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/bin")
    with pytest.raises(build.CannotBuild, match="sorry"):
        build.build()
    assert not list(cache.glob("*"))


def test_a_compiler_that_refuses_the_best_flags_is_quoted_and_the_next_are_taken(cache, monkeypatch, tmp_path, caplog):
    picky = tmp_path / "bin" / "cc"
    picky.parent.mkdir()
    best = " ".join(build.MACHINE_FLAGS[0])
    picky.write_text(
        f'#!/bin/sh\ncase "$*" in --version) exit 0;; *"{best}"*) echo sorry >&2; exit 1;; esac\n'
        'for last; do :; done\n: > "$last"\n'
    )
    picky.chmod(0o755)
    monkeypatch.setenv("PATH", f"{picky.parent}:/bin")
    with caplog.at_level(logging.WARNING):
        assert build.build().exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "may be slow" in caplog.text
    assert "sorry" in caplog.text


def test_a_folder_open_to_others_is_refused(cache):
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    with pytest.raises(build.CannotBuild, match="written by others"):
        build.build()


@pytest.mark.parametrize("isa", [*build.OTHERS, "no-shuffles"])
def test_the_rows_that_other_processors_get(monkeypatch, isa):
    """The same source for AVX2, without any of this machine's instructions (no fused multiply-add), and for the first
    processors with AVX-512, which lack what later ones join codes by."""
    build_for(isa, monkeypatch)
    jobs_of_every_kind()
    if isa in build.OTHERS:
        large_results((128, 128), ("te", "fp32"), torch.bfloat16)
    large_results((1, 32), ("te", "e8m0"), torch.bfloat16)


@pytest.mark.parametrize(
    ("machine", "wrong"), [("aarch64", "-mprefer-vector-width"), ("x86_64", "-mcpu"), ("riscv64", "-m")]
)
def test_the_flags_are_those_of_the_machine(machine, wrong):
    """A processor that we do not know gets what its compiler does by itself."""
    flags = build.flags_for(machine)
    assert flags[-1] == ()
    assert not any(flag.startswith(wrong) for one in flags for flag in one)


def test_a_user_without_a_home_is_told(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", no_home)
    with pytest.raises(build.CannotBuild, match="set XDG_CACHE_HOME"):
        build.build()


def test_ranks_that_start_together_build_one_library(cache):
    """With less to optimize: what is compiled is asked elsewhere, and seconds are enough for ranks to meet."""
    program = """
from nemo_fp8.numerics.kernels import build
build.FLAGS = (*build.FLAGS, "-O1")
assert build.library() is not None
"""
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"})
        for _ in range(3)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert len(list(cache.glob("*.so"))) == 1
    assert len(list(cache.iterdir())) == 1
