"""The compiled CPU kernels of NVFP4 against the specification in torch: every code, every scale, every value."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import FOUR_BIT_KINDS as KINDS
from support.kernel_cases import SOURCES, build_for, same, values
from support.kernel_cases import four_bit_source as source

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels, modelopt, nvfp4, nvfp4_tensor
from nemo_fp8.numerics.kernels import build, cpu, cpu_fp4
from nemo_fp8.numerics.statistics import TOTALS

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")
OPERANDS = {1: Operand("e2m1", (1, 16), "e4m3"), 16: Operand("e2m1", (16, 16), "e4m3")}


def hold(x, tile_rows, encode=None, convention="te"):
    """The kernel's codes and scales are the specification's."""
    operand = OPERANDS[tile_rows]
    amax = nvfp4.amax_of(x, operand) if encode is None else None
    encode = nvfp4.encode_scale(amax, convention=convention).reshape(-1) if encode is None else encode
    fast = kernels.quantize_fp4(x, encode, tile_rows, convention)
    assert fast is not None
    slow = specification(x, operand, encode, convention)
    same(fast[0], slow[0])
    same(fast[1], slow[1])
    return fast


def specification(x, operand, encode, convention):
    """``cast_reference`` beneath a given scale."""
    rows, columns = x.shape
    blocks = x.float().reshape(rows, columns // 16, 16)
    most = nvfp4.largest_of_tiles(nvfp4.scales.amax_of(blocks, (2,)), operand)
    scale = nvfp4.cast(nvfp4.block_scale(most, encode.reshape(-1, 1), convention), nvfp4.SCALE)
    factor = nvfp4.factor(scale.float(), encode.reshape(-1, 1), convention)
    return nvfp4_tensor.pack(nvfp4.nearest(blocks * factor[:, :, None]).view(rows, columns)), scale


def jobs_of_every_kind(kinds=KINDS):
    for seed, (dtype, tile_rows, kind) in enumerate(itertools.product(SOURCES, OPERANDS, kinds)):
        x = source((19, 4208), dtype, seed, kind)
        codes, scales = hold(x, tile_rows)
        for target, amax in itertools.product((torch.bfloat16, torch.float32), (None, torch.tensor(3.3))):
            hold_decode(codes, scales, amax, target)


def hold_decode(codes, scales, amax, dtype):
    fast = kernels.decode_fp4(codes, scales, amax, 2688.0, dtype)
    source = torch.Size((codes.shape[0], codes.shape[1] * 2))
    whole = torch.tensor(2688.0) if amax is None else amax
    q = nvfp4_tensor.QuantizedNVFP4(codes, scales, (1, 16), amax=whole, source=source)
    slow = q._times(scales.float() if amax is None else q.scale_inv_fp32).to(dtype)
    torch.testing.assert_close(fast, slow, rtol=0, atol=0, equal_nan=True)
    number = ~slow.isnan()
    same(fast[number], slow[number])  # zeros have their signs


@pytest.mark.parametrize("isa", ["native", *build.OTHERS])
def test_decode_under_every_scale_and_beside_the_ends_of_the_tables(monkeypatch, isa):
    """Where vectors look values up: every code under every scale, and amaxes that a table just has or lacks."""
    build_for(isa, monkeypatch)
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # rows of 32 blocks
    every = torch.arange(256, dtype=torch.uint8).view(256, 1)
    positive = (every % 127).repeat(1, 32)
    positive[::3, 5] = 0  # a block of zeros beside others
    normal = positive.clamp_min(8)
    for scales, exponent in itertools.product(
        (every.expand(256, 32), positive, normal), (-126, -115, -114, 0, 110, 111, 119)
    ):
        amax = torch.tensor(2688 * 1.37 * 2.0**exponent)
        hold_decode(codes, scales.contiguous().view(torch.float8_e4m3fn), amax, torch.bfloat16)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 70),
    blocks=st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 127, 128, 129, 260]),
    dtype=st.sampled_from(SOURCES),
    kind=st.sampled_from(KINDS),
    tile_rows=st.sampled_from([1, 16]),
    convention=st.sampled_from(["te", "vllm"]),
    seed=st.integers(0, 1 << 30),
)
def test_codes_and_scales_equal_the_specification(rows, blocks, dtype, kind, tile_rows, convention, seed):
    x = source((rows, 16 * blocks), dtype, seed, kind) if blocks > 2 else values((rows, 16 * blocks), dtype, seed, kind)
    hold(x, tile_rows, convention=convention)


@pytest.mark.parametrize("isa", ["native", *build.OTHERS])
def test_the_rows_that_other_processors_get(monkeypatch, isa):
    """The same source for AVX2, and without any of this machine's instructions."""
    build_for(isa, monkeypatch)
    jobs_of_every_kind()
    every_mantissa()


def counted(x, operand, count, monkeypatch):
    """The statistics of a cast, counted by this function or, where it has no answer, by torch."""
    told = []

    def asked(*arguments):
        told.append(count(*arguments))
        return told[0]

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "count_fp4", asked)
        statistics = nvfp4.quantize(x, operand, statistics=True).statistics
    assert (told[0] is None) == (count is not kernels.count_fp4)
    return statistics


@pytest.mark.parametrize("isa", ["native", *build.OTHERS])
def test_statistics_are_those_of_torch(monkeypatch, isa):
    """Counts and extremes to the bit, and sums of squares but for their order."""
    build_for(isa, monkeypatch)
    operands = (*OPERANDS.values(), Operand("e2m1", (1, 16), "e4m3", row_scaled=True))
    for seed, (dtype, operand, kind) in enumerate(itertools.product(SOURCES, operands, KINDS)):
        x = source((19, 4208), dtype, seed, kind)
        fast, slow = (counted(x, operand, count, monkeypatch) for count in (kernels.count_fp4, lambda *_: None))
        for name in (field.name for field in fields(fast) if field.name != "format"):
            close = {"rtol": 1e-12 if "norm" in name else 0, "atol": 0, "equal_nan": True}
            one, other = (getattr(s, name).double() for s in (fast, slow))
            torch.testing.assert_close(one, other, **close, msg=lambda told, name=name: f"{name}: {told}")


def totals_of_every_kind(kinds=KINDS):
    """Counts and the largest magnitude to the bit, and sums to six digits; of parts of matrices, too."""
    for seed, (dtype, kind) in enumerate(itertools.product(SOURCES, kinds)):
        whole = torch.stack([source((6, 2112), dtype, 7 * seed + i, kind) for i in range(3)])
        amax = torch.stack([nvfp4.amax_of(x, OPERANDS[1]) for x in whole])
        amax[2] /= 4  # of calibration, say: codes saturate
        held = modelopt.four_bits(whole, OPERANDS[1], amax)
        for rows, columns in ((slice(0, 6), slice(0, 2112)), (slice(2, 5), slice(16, 1072))):
            x = whole[:, rows, columns]
            codes = held.weight[:, rows, columns.start // 2 : columns.stop // 2]
            scales = held.weight_scale[:, rows, columns.start // 16 : columns.stop // 16]
            fast = kernels.total_fp4(x, codes, scales, held.weight_scale_2, nvfp4.FORMAT.saturates_above)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "total_fp4", lambda *_: None)
                slow = nvfp4.totals(x, codes, scales, held.weight_scale_2)
            assert fast.shape == slow.shape == (3, len(TOTALS))
            for i, name in enumerate(TOTALS):
                close = {"rtol": 2e-6 if name in ("signal", "noise") else 0, "atol": 0, "equal_nan": True}
                torch.testing.assert_close(
                    fast[:, i], slow[:, i], **close, msg=lambda told, at=(dtype, kind, name): f"{at}: {told}"
                )


@pytest.mark.parametrize("isa", ["native", *build.OTHERS])
def test_totals_are_those_of_every_16_values(monkeypatch, isa):
    build_for(isa, monkeypatch)
    totals_of_every_kind()


def test_totals_see_what_a_cast_did():
    x = torch.tensor([6.0, 4.9, 0.1, -0.1, 7.0, float("inf"), float("nan")]).repeat(1, 1, 16)[:, :, :16].bfloat16()
    codes = torch.zeros(1, 1, 8, dtype=torch.uint8)
    scales = torch.ones(1, 1, 1, dtype=torch.float8_e4m3fn)
    told = dict(zip(TOTALS, nvfp4.totals(x, codes, scales, torch.ones(1))[0].tolist(), strict=True))
    finite = x[x.isfinite()].double()
    assert told["signal"] == told["noise"] == pytest.approx(float(finite.square().sum()))
    assert (told["underflow"], told["nonfinite"], told["amax"]) == (len(finite), 16 - len(finite), float("inf"))
    assert told["saturated"] == int((x.nan_to_num(nan=0).abs() > nvfp4.FORMAT.saturates_above).sum())


@pytest.mark.parametrize("tile_rows", OPERANDS)
@pytest.mark.parametrize("rows", [16, 19, 48])
def test_a_stack_is_cast_as_its_matrices_are(monkeypatch, tile_rows, rows):
    """Several in one cast, as many as fit, and one by one where squares would run into the next."""
    monkeypatch.setattr(modelopt, "_AT_ONCE", 2 * rows * 64)
    stack = torch.stack([source((rows, 64), torch.bfloat16, seed, KINDS[0]) * 2.0**seed for seed in range(5)])
    amax = modelopt.amax_of(stack)
    stack[3, 2, 5] = amax[3] = float("nan")
    made = modelopt.four_bits(stack, OPERANDS[tile_rows], amax)
    live = modelopt.FourBits(*(torch.zeros_like(t) for t in made))
    assert modelopt.four_bits(stack, OPERANDS[tile_rows], amax, live) is live
    for i, (x, largest) in enumerate(zip(stack, amax, strict=True)):
        codes, scales = nvfp4.cast_reference(x, OPERANDS[tile_rows], largest)
        for held in (made, live):
            same(held.weight[i], codes)
            same(held.weight_scale[i], scales)
            torch.testing.assert_close(
                held.weight_scale_2[i], nvfp4_tensor.weight_scale_2(largest), rtol=0, atol=0, equal_nan=True
            )


def test_a_weight_in_modelopts_layout_has_no_scales_of_rows():
    with pytest.raises(PrecisionError, match="one FP32 scale for a matrix"):
        modelopt.four_bits(torch.ones(16, 16), Operand("e2m1", (1, 16), "e4m3", row_scaled=True), torch.ones(16))


def every_mantissa():
    """All mantissas of BF16 from an amax down to where codes end, beneath all that an amax can have; both signs."""
    mantissa = 1 + torch.arange(128) / 128
    below = torch.exp2(-torch.arange(6.0))
    rows = torch.minimum(below[:, None] * mantissa, mantissa[:, None, None])  # amax, how far below it, mantissa
    rows[:, :, ::16] = mantissa[:, None, None]
    rows[:, :, 1::2] *= -1
    for binade in (2.0**-100, 2.0**-3, 2.0**30, 2.0**100):
        for encode in (1.0, 2688 / 2.0 / binade, 600.0):
            hold((rows.reshape(-1, 128) * binade).bfloat16(), 1, torch.tensor([encode]))


def test_scales_that_are_rounded_down_far():
    """A subnormal scale may be so much smaller than it should be that values reach 7, 8 and beyond."""
    for step in torch.linspace(1.0, 1.6, 25):
        x = torch.linspace(-1, 1, 16).repeat(2, 8) * 6 * step * 2.0**-9
        hold(x.bfloat16(), 1, torch.ones(1))


@pytest.mark.parametrize(
    ("convention", "encode", "first"), [("vllm", 2688.0, 32), ("te", 2.0**-20, 34), ("vllm", 2.0**-20, 34)]
)
def test_what_becomes_zero_when_it_is_multiplied_loses_its_sign(convention, encode, first):
    """By vLLM's factor for a scale of 0, or by that of a huge amax; nothing else in the row is unusual."""
    for tile_rows in OPERANDS:
        x = torch.linspace(0.5, 1, 256).repeat(16, 1) / encode * 2688
        x[:, first:48] = -(2.0**-126)
        codes, _ = hold(x.bfloat16(), tile_rows, torch.tensor([encode]), convention)
        assert not codes[:, first // 2 : 24].any()


def test_a_scale_for_each_row():
    x = source((50, 96), torch.bfloat16, 1, "gaussian")
    hold(x, 1, torch.linspace(0.1, 4000, 50))


@pytest.mark.parametrize("encode", [1e-30, 1e-3, 1.0, 1e5, 3.4028235e38, float("inf")])
def test_any_scale_of_the_tensor(encode):
    for dtype, kind, tile_rows in itertools.product(SOURCES, ("gaussian", "magnitudes", "specials"), OPERANDS):
        hold(source((20, 288), dtype, 2, kind), tile_rows, torch.tensor([encode]))


def test_every_byte_and_every_scale_decoded():
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(16, 128).repeat(1, 9)
    scales = torch.arange(256, dtype=torch.uint8).repeat(9).view(16, 144).view(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float32):
        for amax in (None, torch.tensor(1e-38), torch.tensor(3e38), torch.linspace(1e-40, 9, 16)):
            hold_decode(codes, scales, amax, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tile_rows", OPERANDS)
def test_large_results_which_go_past_the_caches(dtype, tile_rows):
    """Some rows begin on a cache line and some do not; one value is NaN."""
    for shape in ((2052, 4112), (2048, 4352)):
        x = values(shape, dtype, 3, "gaussian")
        x[700, 4100] = float("nan")
        codes, scales = hold(x, tile_rows)
        hold_decode(codes, scales, torch.tensor(4.0), torch.bfloat16)


def test_rows_that_lie_apart_and_memory_that_is_given():
    big = values((300, 1024), torch.bfloat16, 5, "gaussian")
    for x in (big[:, 96:704], big[::2], big[7:8].expand(40, 1024)):
        hold(x, 1)
        hold(x, 16)
    encode = torch.tensor([600.0])
    expected = kernels.quantize_fp4(big, encode, 1)
    out = torch.empty(300, 512, dtype=torch.uint8), torch.empty(300, 64, dtype=torch.float8_e4m3fn)
    found = kernels.quantize_fp4(big, encode, 1, out=out)
    assert found[0] is out[0]
    same(out[0], expected[0])
    same(out[1], expected[1])
    values_there = torch.empty(300, 1024, dtype=torch.bfloat16)
    assert kernels.decode_fp4(*found, None, 2688.0, torch.bfloat16, values_there) is values_there
    for wrong in ((out[0][:, :64], out[1]), (out[0], out[1].view(torch.uint8)), (out[0].t(), out[1])):
        with pytest.raises(PrecisionError):
            kernels.quantize_fp4(big, encode, 1, out=wrong)
    with pytest.raises(PrecisionError, match="not contiguous"):
        kernels.decode_fp4(*found, None, 2688.0, torch.bfloat16, torch.empty(1024, 300, dtype=torch.bfloat16).t())


def test_any_number_of_threads(monkeypatch):
    x = values((700, 5008), torch.bfloat16, 6, "gaussian")
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 7):
            torch.set_num_threads(n)
            hold(x, 1)
            hold(x, 16)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(cpu_fp4, "parallel", lambda: None)
    hold(x, 16)


def test_what_the_kernels_do_not_take_is_left_to_torch():
    one = torch.ones(1)
    assert kernels.quantize_fp4(torch.ones(4, 16, dtype=torch.float64), one, 1) is None
    assert kernels.quantize_fp4(torch.ones(4, 32)[:, ::2], one, 1) is None
    assert kernels.quantize_fp4(torch.ones(0, 16), one, 1) is None
    assert kernels.quantize_fp4(torch.ones(4, 16), one * float("nan"), 1) is None
    codes, scales = kernels.quantize_fp4(torch.ones(4, 16), one, 1)
    assert kernels.decode_fp4(codes, scales, None, 2688.0, torch.float16) is None


def test_the_public_function_and_the_class_come_here(monkeypatch):
    """Casts and their decoding are the kernel's work; what it does not take is the specification's."""
    calls = []
    monkeypatch.setattr(kernels, "quantize_fp4", lambda *a, **k: calls.append("quantize"))
    monkeypatch.setattr(kernels, "decode_fp4", lambda *a, **k: calls.append("decode"))
    x = values((32, 64), torch.bfloat16, 7, "gaussian")
    found = nvfp4.quantize(x, OPERANDS[1])
    found.dequantize()
    assert calls == ["quantize", "decode"]
    nvfp4.quantize(x, Operand("e2m1", (1, 16), "e4m3", stochastic=True))
    nvfp4.quantize(x, Operand("e2m1", (1, 16), "e4m3", four_over_six="mae"))
    assert calls[2:] == ["quantize"] * 2
    nvfp4.quantize(x, OPERANDS[1], usage="col")
    assert calls[4:] == ["quantize"] * 2  # as it lies, and turned
    assert cpu.SOURCES.keys() == set(SOURCES)
