"""NVFP4 against TE's own Python reference and vLLM's, bit for bit; chance by its mean and its variance."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.kernel_cases import SOURCES, same, values

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import Quantized, nvfp4, nvfp4_tensor, quantize, quantize_into, quantize_pair

TE = oracles.te_nvfp4()
VLLM = oracles.vllm_nvfp4()
KINDS = ["gaussian", "magnitudes", "zero", "finite bits"]
ROWS, SQUARE = Operand("e2m1", (1, 16), "e4m3"), Operand("e2m1", (16, 16), "e4m3")
# Every variant that has one answer.
VARIANTS = {
    "1x16": ROWS,
    "16x16": SQUARE,
    "row-scaled": replace(ROWS, row_scaled=True),
    **{
        f"4over6 {error} {largest} {operand.block}{' row-scaled' * operand.row_scaled}": replace(
            operand, four_over_six=error, largest_scale=largest
        )
        for error, largest, operand in itertools.product(
            ("mae", "mse"), (448, 256), (ROWS, SQUARE, replace(ROWS, row_scaled=True))
        )
    },
}


def source(shape, dtype, seed, kind):
    x = values(shape, dtype, seed, "bits" if kind == "finite bits" else kind)
    return x.nan_to_num(nan=0.0)


def te(operand, *, columns=False, fast=False):
    """TE's reference quantizer of this operand."""
    return TE.NVFP4QuantizerRef(
        None, rowwise=not columns or operand.row_scaled, columnwise=columns, quant_tile_shape=operand.block,
        row_scaled_nvfp4=operand.row_scaled, nvfp4_use_4over6=operand.four_over_six is not None,
        nvfp4_e4m3_max=operand.largest_scale, nvfp4_4over6_err_mode=operand.four_over_six or "MAE",
        nvfp4_4over6_err_use_fast_math=fast, with_rht=operand.hadamard,
    )  # fmt: skip


def hold(x, operand, usage="row"):
    """Codes, scales and amaxes are the oracle's."""
    found = te(operand, columns=usage == "col")._quantize(x)
    codes, scales, amax = (found[i] for i in ((0, 1, 4) if usage == "row" else (2, 3, 5)))
    ours = quantize(x, operand, usage=usage)
    same(ours.matrix, codes.to(torch.uint8))
    same(ours.scale_inv, scales[: len(ours.scale_inv)])
    same(ours.amax.reshape(-1), amax.reshape(-1))


# ---------------------------------------------------------------------- TE's reference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SOURCES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_codes_scales_and_amax_are_those_of_the_reference(name, dtype, kind):
    operand = VARIANTS[name]
    for usage in ("row", "col"):
        hold(source((64, 96), dtype, 0, kind), operand, usage)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 9),
    dtype=st.sampled_from(SOURCES),
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(sorted(VARIANTS)),
    seed=st.integers(0, 1 << 30),
)
def test_any_number_of_rows(rows, blocks, dtype, kind, name, seed):
    hold(source((rows, 16 * blocks), dtype, seed, kind), VARIANTS[name])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    power=st.integers(-149, 127),
    name=st.sampled_from(sorted(VARIANTS)),
    infinities=st.sampled_from([0, 1, 40]),
)
def test_amaxes_of_every_size(seed, power, name, infinities):
    """Beneath 2**-120 the tensor's scale overflows, and beneath 2**-126 values are subnormal."""
    x = torch.ldexp(values((32, 64), torch.float32, seed, "gaussian"), torch.tensor(power))
    at = torch.randint(0, x.numel(), (infinities,), generator=torch.Generator().manual_seed(seed))
    x.view(-1)[at] = float("inf") * (1 - 2 * (at % 2))
    hold(x.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf")), VARIANTS[name])


@pytest.mark.parametrize("operand", [o for o in VARIANTS.values() if o.four_over_six], ids=Operand.words)
def test_four_over_six_by_the_errors_of_fast_math(operand):
    """TE's environment variable lets its kernels compare products instead of values."""
    picked = []
    for kind, dtype in itertools.product(KINDS, SOURCES):
        x = source((64, 96), dtype, 3, kind)
        codes, scales, *_, amax, _ = te(operand, fast=True)._quantize(x)
        ours = nvfp4.cast_reference(x, operand, amax, scaled_errors=True)
        same(ours[0], codes.to(torch.uint8))
        same(ours[1], scales)
        plain = nvfp4.cast_reference(x, operand, amax)
        picked.append(bool((plain[0] != ours[0]).any()))
    assert any(picked) or operand.four_over_six == "mae", "both ways of counting agree everywhere"


def test_four_over_six_takes_both_ways():
    x = values((64, 256), torch.bfloat16, 0, "gaussian")
    plain, better = quantize(x, ROWS), quantize(x, replace(ROWS, four_over_six="mse"))
    changed = (plain.scale_inv.view(torch.uint8) != better.scale_inv.view(torch.uint8)).float().mean()
    assert 0.2 < changed < 0.8
    assert (better.dequantize() - x).square().mean() < 0.95 * (plain.dequantize() - x).square().mean()


@pytest.mark.parametrize("shape", [(64, 96), (16, 16), (4, 8, 32), (33, 1, 16)])
def test_the_hadamard_transform_of_columns(shape):
    operand = replace(ROWS, hadamard=True)
    x = values(shape, torch.bfloat16, 4, "gaussian")
    if x.shape[:-1].numel() % 16 == 0:
        hold(x.reshape(-1, shape[-1]), operand, "col")
        assert quantize(x, operand, usage="col").hadamard
    plain, rows = quantize(x, ROWS), quantize(x, operand)
    same(rows.data, plain.data)  # rows are not transformed
    assert not rows.hadamard


def test_the_transform_is_the_matrix_and_its_own_way_back():
    matrix = TE.NVFP4QuantizerRef._build_hadamard_matrix(16, torch.device("cpu"), torch.float32) / 4
    unit = torch.eye(16)
    same(nvfp4_tensor.hadamard(unit), matrix)
    assert torch.equal(nvfp4_tensor.hadamard_back(nvfp4_tensor.hadamard(unit)), unit)
    assert not torch.equal(nvfp4_tensor.hadamard(unit, (1,) * 16), matrix)
    outlier = torch.zeros(1, 16)
    outlier[0, 3] = 8.0
    assert nvfp4_tensor.hadamard(outlier).abs().unique().tolist() == [2.0]


def test_every_code_at_every_threshold():
    """Each midpoint and its neighbours, each with both signs: TE's table of ranges, and ml_dtypes."""
    middle = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 1e30, float("inf")])
    near = torch.stack([middle, middle.nextafter(torch.tensor(9.0)), middle.nextafter(torch.tensor(-9.0))])
    x = torch.cat([near.flatten(), -near.flatten(), torch.linspace(-7, 7, 4096)])
    x = x.reshape(-1, 2)
    same(nvfp4_tensor.pack(nvfp4.nearest(x)), TE.cast_to_fp4x2(x))
    theirs = x.numpy().clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    codes = nvfp4.nearest(x)
    ours = nvfp4._decoded(codes)
    assert torch.equal(ours, torch.from_numpy(theirs))
    same(TE.cast_from_fp4x2(nvfp4_tensor.pack(codes), torch.float32), ours)


# ---------------------------------------------------------------------- vLLM's reference


def ref_nvfp4_quant(x, global_scale):
    """vLLM's codes, two a byte, and E4M3 scales. It keeps FP32 values; a sign survives in -0."""
    numbers, scales = VLLM.ref_nvfp4_quant(x.clone(), global_scale, 16)
    codes = torch.from_numpy(numbers.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    return nvfp4_tensor.pack(codes), scales.to(torch.float8_e4m3fn)


@pytest.mark.skipif(VLLM is None, reason="no rollout environment: make setup")
@pytest.mark.parametrize("kind", ["gaussian", "magnitudes", "zero"])
@pytest.mark.parametrize("dtype", SOURCES, ids=str)
def test_codes_and_scales_are_those_of_vllm(dtype, kind):
    for seed in range(8):
        x = source((64, 256), dtype, seed, kind).clamp(-6e4, 6e4)
        ours = quantize(x, ROWS, convention="vllm")
        # What a checkpoint holds is input_scale = amax / 2688, and vLLM takes its reciprocal.
        codes, scales = ref_nvfp4_quant(x, torch.where(ours.amax > 0, 1.0 / ours.weight_scale_2, 1.0))
        same(ours.scale_inv, scales)
        same(ours.matrix, codes)


@pytest.mark.skipif(VLLM is None, reason="no rollout environment: make setup")
def test_the_two_conventions_part_where_a_scale_is_halfway_between_two():
    """Every BF16 mantissa of a block's amax beneath every one of a tensor's: for some an ulp decides, and both answers
    are their oracles'."""
    mantissa = 1 + torch.arange(128) / 128
    differ = 0
    for amax in mantissa:
        x = torch.zeros(128, 16)
        x[:, 5] = torch.minimum(mantissa, amax) * 0.75
        x[0, 0] = amax
        x = x.bfloat16()
        te, vllm = quantize(x, ROWS), quantize(x, ROWS, convention="vllm")
        codes, scales = ref_nvfp4_quant(x, 1.0 / vllm.weight_scale_2)
        same(vllm.scale_inv, scales)
        same(vllm.matrix, codes)
        hold(x, ROWS)
        differ += int((te.scale_inv.view(torch.uint8) != vllm.scale_inv.view(torch.uint8)).sum())
    assert 0 < differ < 128 * 128 / 10


@pytest.mark.skipif(VLLM is None, reason="no rollout environment: make setup")
def test_where_vllms_reference_has_no_answer_ours_is_that_of_te():
    """A scale beneath that is subnormal has an infinite reciprocal, and a NaN is its block's scale there."""
    for power in range(-149, -110):
        x = torch.ldexp(values((32, 64), torch.float32, 150 + power, "gaussian"), torch.tensor(power))
        ours = quantize(x, ROWS, convention="vllm")
        scale = 1.0 / ours.weight_scale_2
        assert bool(scale.isinf()) == (ours.amax < 2.0**-128 * 2688)
        if scale.isinf():
            hold(x, ROWS)
            assert ours.dequantize().isfinite().all()
        else:
            codes, scales = ref_nvfp4_quant(x, scale)
            same(ours.scale_inv, scales)
            same(ours.matrix, codes)
    x[3, 7] = float("nan")
    _, scales = VLLM.ref_nvfp4_quant(x, torch.tensor(1.0), 16)
    assert scales.view(32, -1).isnan().nonzero().tolist() == [[3, 0]]


# ---------------------------------------------------------------------- what is no number, and what is not there


@pytest.mark.parametrize("name", [name for name in VARIANTS if "4over6" not in name])
def test_nan_enters_no_amax_and_becomes_six(name):
    operand = VARIANTS[name]
    x = values((64, 96), torch.bfloat16, 5, "gaussian")
    x[3, 7], x[40, 80] = float("nan"), -float("nan")
    without = x.nan_to_num(nan=0.0)
    ours, plain = quantize(x, operand), quantize(without, operand)
    same(ours.amax, plain.amax)
    same(ours.scale_inv, plain.scale_inv)
    changed = ours.codes() != plain.codes()
    assert changed.nonzero().tolist() == [[3, 7], [40, 80]]
    assert ours.codes()[changed].tolist() == [7, 7]


def test_a_tensor_of_nan():
    found = quantize(torch.full((2, 32), float("nan")), ROWS)
    assert found.amax == 0
    assert found.dequantize().tolist() == torch.zeros(2, 32).tolist()


def test_nothing_at_all():
    kinds = itertools.product(((0, 32), (32, 0), (0, 0)), (ROWS, SQUARE), ("row", "col"), (False, True))
    for shape, operand, usage, statistics in kinds:
        found = quantize(torch.empty(shape), operand, usage=usage, statistics=statistics)
        assert (found.shape, found.dequantize().shape, float(found.amax)) == (shape, shape, 0.0)


def test_infinity_has_the_largest_code_and_the_largest_scale():
    x = torch.ones(1, 32)
    x[0, 3] = -float("inf")
    found = quantize(x, ROWS)
    assert found.amax == float("inf")
    assert found.codes()[0, 3] == 15
    assert found.scale_inv.float()[0].tolist() == [448.0, 0.171875]


@pytest.mark.parametrize(
    ("operand", "shape", "usage", "words"),
    [
        (ROWS, (16, 40), "row", "40 columns are no whole blocks of 16"),
        (ROWS, (40, 16), "col", "40 rows are no whole blocks of 16"),
        (SQUARE, (16, 8), "row", "8 columns are no whole blocks"),
        (ROWS, (16,), "row", "Cannot quantize a 1-D tensor in 1x16 tiles"),
        (SQUARE, (16,), "row", "Cannot quantize a 1-D tensor in 16x16 tiles"),
        (Operand("e2m1", (1, 32), "e4m3"), (16, 32), "row", "blocks of .1, 32. with e4m3 scales"),
        (Operand("e2m1", (1, 16), "fp32"), (16, 32), "row", "with fp32 scales"),
        (replace(ROWS, four_over_six="max"), (16, 32), "row", "error of 4 over 6"),
        (replace(ROWS, largest_scale=100), (16, 32), "row", "largest scale"),
        (replace(ROWS, largest_scale=256), (16, 32), "row", "contradicts itself"),
        (replace(ROWS, four_over_six="mae", stochastic=True), (16, 32), "row", "contradicts itself"),
        (replace(SQUARE, row_scaled=True), (16, 32), "row", "contradicts itself"),
        (replace(SQUARE, hadamard=True), (16, 32), "row", "contradicts itself"),
        (replace(ROWS, hadamard=True), (16, 32), "col", "Hadamard transform of a torch.float32 tensor"),
    ],
)
def test_what_nobody_has_arithmetic_for_is_refused(operand, shape, usage, words):
    with pytest.raises(PrecisionError, match=words):
        quantize(torch.ones(shape), operand, usage=usage)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scale": torch.ones(())}, "A given scale"),
        ({"epsilon": 1e-6}, "an epsilon"),
        ({"amax": torch.ones(2)}, "An amax of shape"),
        ({"convention": "deepgemm"}, "scale convention"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(PrecisionError, match=words):
        quantize(torch.ones(16, 32), ROWS, **arguments)
    with pytest.raises(PrecisionError):
        quantize(torch.ones(16, 32), Operand("e4m3", None, "fp32"), generator=torch.Generator())
    with pytest.raises(PrecisionError, match="Given memory"):
        quantize_into(torch.ones(16, 32), ROWS, torch.empty(16, 16), torch.empty(16, 2))


# ---------------------------------------------------------------------- a given amax


def test_a_given_amax_is_taken():
    x = values((64, 96), torch.bfloat16, 6, "gaussian")
    for operand, amax in ((ROWS, torch.tensor([9.5])), (VARIANTS["row-scaled"], torch.linspace(0.1, 60, 64))):
        ours = quantize(x, operand, amax=amax)
        codes, scales = TE.NVFP4QuantizerRef._quantize_blockwise_reference(
            x, amax, 16, 1, pow_2_scales=False, row_scaled_nvfp4=operand.row_scaled, eps=0.0
        )
        same(ours.matrix, codes.to(torch.uint8))
        same(ours.scale_inv, scales)
        same(ours.amax.reshape(-1), amax)


# ---------------------------------------------------------------------- the tensor


def test_values_are_code_times_scale_times_amax():
    x = values((2, 16, 96), torch.float32, 7, "gaussian")
    for name, operand in VARIANTS.items():
        for usage in ("row", "col"):
            q = quantize(x, operand, usage=usage)
            assert isinstance(q, Quantized)
            assert (q.shape, q.format.name, q.usage, q.block) == (x.shape, "e2m1", usage, operand.block)
            numbers = TE.cast_from_fp4x2(q.matrix, torch.float32)
            decode = q.scale_inv.float() * q.amax.reshape(-1, 1) * (1 / torch.tensor(q.largest))
            expected = numbers * decode.repeat_interleave(16, 1)
            got = q.dequantize().view(-1, 96)
            assert torch.equal(got if usage == "row" else got.t(), expected), name
            same(q.dequantize(torch.bfloat16), q.dequantize().bfloat16())
            assert (q.dequantize() - x).norm() < 0.12 * x.norm()
            assert torch.equal(q.scaled(), numbers * q.scale_inv.float().repeat_interleave(16, 1))


def test_transformed_columns_come_back():
    x = values((64, 96), torch.bfloat16, 8, "gaussian")
    x[5, 5] = 60.0
    operand = replace(ROWS, hadamard=True)
    plain, better = quantize(x, ROWS, usage="col"), quantize(x, operand, usage="col")
    errors = [(q.dequantize() - x.float()).norm() / x.float().norm() for q in (plain, better)]
    assert errors[1] < 0.12
    wrong = replace(better, hadamard=False)
    assert (wrong.dequantize() - x.float()).norm() > x.float().norm()


def test_a_square_serves_both_usages():
    x = values((48, 96), torch.bfloat16, 9, "gaussian")
    row, col = quantize_pair(x, SQUARE)
    expected = quantize(x, SQUARE, usage="col")
    same(col.data, expected.data)
    same(col.scale_inv, expected.scale_inv)
    same(col.dequantize(), row.dequantize())
    assert col.usage == "col"
    same(col.used_as("row").data, row.data)
    turned = row.t()
    same(turned.data, quantize(x.t(), SQUARE).data)
    same(turned.dequantize(), row.dequantize().t())
    assert turned.shape == (96, 48)
    rows, columns = quantize_pair(x, ROWS)
    same(rows.data, quantize(x, ROWS).data)
    same(columns.data, quantize(x, ROWS, usage="col").data)
    for turn in (lambda q: q.t(), lambda q: q.used_as("col")):
        with pytest.raises(PrecisionError, match="quantized in 1x16 tiles cannot be"):
            turn(rows)
    with pytest.raises(PrecisionError, match="no whole blocks"):
        quantize(x[:40], SQUARE).used_as("col")


def test_modelopts_view_and_the_way_back():
    """ModelOpt divides amax by 6 * 448, and keeps codes and scales as they are."""
    x = values((32, 64), torch.bfloat16, 10, "gaussian")
    q = quantize(x, SQUARE)
    same(q.weight_scale_2, q.amax / torch.tensor(2688.0))
    again = type(q).from_modelopt(q.data, q.scale_inv, q.weight_scale_2)
    same(again.amax, q.amax)
    same(again.dequantize(), q.dequantize())
    with pytest.raises(PrecisionError, match="neither padded nor swizzled"):
        type(q).from_modelopt(q.data, torch.ones(128, 4).to(torch.float8_e4m3fn), q.weight_scale_2)


@pytest.mark.parametrize("largest", [448, 256])
def test_the_way_back_is_exact_for_every_mantissa(largest):
    amax = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)
    scale_2 = nvfp4_tensor.weight_scale_2(amax, largest)
    back = nvfp4_tensor.amax_of_scale_2(scale_2, largest)
    same(nvfp4_tensor.weight_scale_2(back, largest), scale_2)


# ---------------------------------------------------------------------- chance

SEED = 20260923


def chances(operand, x, times):
    """Mean and variance of every element's values over many draws, from a named seed."""
    generator = torch.Generator().manual_seed(SEED)
    total, squares = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for _ in range(times):
        value = quantize(x, operand, generator=generator).dequantize().double()
        total += value
        squares += value.square()
    mean = total / times
    return mean, squares / times - mean.square()


def expected_of(x):
    """Neighbours of each value, and the variance between them."""
    plain = quantize(x, ROWS)
    scale = plain.scale_inv_fp32.double().repeat_interleave(16, 1)
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    grid = torch.cat([-grid.flip(0)[:-1], grid])
    y = (x.double() / scale).clamp(-6, 6)
    above = grid[torch.searchsorted(grid, y)]
    below = grid[torch.searchsorted(grid, y, right=True) - 1]
    return y * scale, (above - y) * (y - below) * scale.square(), (above - below) * scale


def test_chances_are_uniform_and_know_nothing_of_their_neighbours():
    """Four of them come from one draw: none may be told from the others."""
    chance = nvfp4.chance_of(torch.empty(1024, 1021), torch.Generator().manual_seed(SEED)).double()
    n = chance.numel()
    assert 0 < chance.min() < 1e-4 < 1 - 1e-4 < chance.max() < 1
    counts = torch.histc(chance.float(), 256, 0, 1).double()
    assert 150 < ((counts - n / 256).square() / (n / 256)).sum() < 380  # chi-squared: 255, and 5.5 times its deviation
    flat = chance.view(-1) - 0.5
    for apart in range(1, 9):
        assert abs((flat[apart:] * flat[:-apart]).mean()) < 5 / 12 / n**0.5
    for place in range(4):
        assert abs(flat[place::4].mean()) < 5 / (12 * n / 4) ** 0.5
    for shape in ((), (1,), (3, 1), (0, 16), (5, 7)):
        assert nvfp4.chance_of(torch.empty(shape)).shape == shape


@pytest.mark.parametrize(("operand", "holds"), [(replace(ROWS, stochastic=True), True), (ROWS, False)])
def test_chance_keeps_the_mean_and_has_the_variance_between_neighbours(operand, holds):
    """z of each mean is standard normal, so the sum of its squares has a mean of 1; rounding to nearest fails both."""
    x, times = values((32, 64), torch.float32, 11, "gaussian"), 1000
    mean, variance = chances(operand, x, times)
    wanted, between, step = expected_of(x)
    inside = between > 1e-3 * step.square()  # a variance of next to nothing is measured by next to no draws
    assert inside.float().mean() > 0.9
    z = ((mean - wanted) / (between / times).sqrt())[inside]
    share = (variance / between)[inside].mean()
    n = inside.sum()
    assert (abs(z.mean()) < 4 / n**0.5 and 0.8 < z.square().mean() < 1.2 and z.abs().max() < 5) == holds
    assert (abs(share - 1) < 0.02) == holds
    exact = between == 0
    torch.testing.assert_close(mean[exact], wanted[exact], rtol=1e-6, atol=0)


def test_chance_takes_only_neighbours_and_follows_its_seed():
    x = values((64, 256), torch.bfloat16, 12, "gaussian")
    operand = replace(ROWS, stochastic=True)
    first, again, other = (
        quantize(x, operand, generator=torch.Generator().manual_seed(seed)) for seed in (SEED, SEED, SEED + 1)
    )
    same(first.data, again.data)
    assert not torch.equal(first.data, other.data)
    plain = quantize(x, ROWS)
    same(first.scale_inv, plain.scale_inv)
    _, _, step = expected_of(x)
    most = 6 * first.scale_inv_fp32.repeat_interleave(16, 1)
    lost = first.dequantize().double() - x.float().clamp(-most, most).double()
    assert (lost.abs() <= step * 1.00001).all()
    assert (lost.abs() > step / 2).float().mean() > 0.1  # which the nearest code never is
    torch.manual_seed(SEED)
    drawn = quantize(x, operand)
    torch.manual_seed(SEED)
    same(quantize(x, operand).data, drawn.data)


# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize("name", ["1x16", "16x16", "row-scaled", "4over6 mse 256 (1, 16)"])
def test_statistics_count_what_was_lost(name):
    x = values((32, 64), torch.float32, 13, "gaussian")
    x[0, :16] = 0.0
    x[1, 3] = 1e-20
    x[2, 5] = float("nan")
    q = quantize(x, VARIANTS[name], statistics=True)
    counted, finite = q.statistics, x.isfinite()
    error = torch.where(finite, q.dequantize() - x, 0.0).double().view(32, 4, 16)
    torch.testing.assert_close(counted.noise, error.square().sum(-1), rtol=1e-6, atol=0)
    assert counted.elements.sum() == x.numel()
    lost = ((q.dequantize() == 0) & (x != 0) & finite).sum()
    assert int(counted.underflow.sum()) == int(lost) > 0
    assert int(counted.nonfinite.sum()) == int((~finite).sum())
    summary = counted.summary()
    assert 0 < summary["range_used_percent"] <= 100
    assert summary["scale_inv_max"] == q.scale_inv_fp32.max()


@pytest.mark.parametrize("rows", [0, 15, 16, 75])
@pytest.mark.parametrize("name", ["1x16", "16x16", "row-scaled"])
def test_statistics_are_the_same_however_many_rows_are_counted_at_a_time(name, rows, monkeypatch):
    """In torch, which counts where there is no kernel; of squares the last one is cut off."""
    monkeypatch.setattr("nemo_fp8.numerics.kernels.count_fp4", lambda *_: None)
    x = values((75, 64), torch.bfloat16, 13, "gaussian")[:rows].contiguous()
    told = []
    for at_once in (1 << 18, 20 * 64, 1):
        monkeypatch.setattr("nemo_fp8.numerics.nvfp4._AT_ONCE", at_once)
        told.append(quantize(x, VARIANTS[name], statistics=True).statistics)
    for name in (field.name for field in fields(told[0]) if field.name != "format"):
        whole, *strips = (getattr(statistics, name) for statistics in told)
        for some in strips:
            same(some, whole)
