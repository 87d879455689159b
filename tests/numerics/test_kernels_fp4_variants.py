"""What a training step in NVFP4 needs beside the plain cast, in the compiled CPU kernels, against the specification in
torch: columns, the Hadamard transform, rounding by chance, 4 over 6. Every code and every scale."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import FOUR_BIT_KINDS as KINDS
from support.kernel_cases import SOURCES, build_for, same, values
from support.kernel_cases import four_bit_source as source

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import kernels, nvfp4
from nemo_fp8.numerics.kernels import build, cpu_fp4

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")
ROW, SQUARE = Operand("e2m1", (1, 16), "e4m3"), Operand("e2m1", (16, 16), "e4m3")
# name: operand, signs of the transform, whether the matrix lies turned, whether errors are compared before they are
# scaled back
SOME_SIGNS = (1, -1, -1, 1) * 4
VARIANTS = {
    "columns": (ROW, None, True, False),
    "columns of squares": (SQUARE, None, True, False),
    "columns, each scaled": (replace(ROW, row_scaled=True), None, True, False),
    "transform": (ROW, nvfp4.SIGNS, True, False),
    "transform, other signs": (ROW, SOME_SIGNS, True, False),
    "transform, each scaled": (replace(ROW, row_scaled=True), nvfp4.SIGNS, True, False),
    "chance": (replace(ROW, stochastic=True), None, False, False),
    "chance in squares": (replace(SQUARE, stochastic=True), None, False, False),
    "chance after the transform": (replace(ROW, stochastic=True), nvfp4.SIGNS, True, False),
    "4 over 6": (replace(ROW, four_over_six="mae"), None, False, False),
    "4 over 6 by squares": (replace(ROW, four_over_six="mse", largest_scale=256), None, False, False),
    "4 over 6 in 16x16": (replace(SQUARE, four_over_six="mae"), None, False, False),
    "4 over 6 in 16x16, columns": (replace(SQUARE, four_over_six="mse"), None, True, False),
    "4 over 6, rows scaled": (
        replace(ROW, four_over_six="mae", row_scaled=True, largest_scale=256),
        None,
        False,
        False,
    ),
    "4 over 6, scaled errors": (replace(SQUARE, four_over_six="mse"), None, False, True),
}


def hold(x, variant, amax=None):
    """The kernel takes the matrix, and its amax, codes and scales are the specification's, by the same chance."""
    operand, signs, turned, scaled = VARIANTS[variant]
    matrix = x.t() if turned else x
    plain = nvfp4.transformed(matrix, signs)
    found = nvfp4.amax_of(matrix, operand, signs)
    same(found, nvfp4.scales.amax_of(plain, (1,) if operand.row_scaled else None))
    amax = found if amax is None else amax
    torch.manual_seed(7)
    chance = nvfp4.chance_of(matrix) if operand.stochastic else None
    state = torch.get_rng_state()
    torch.manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvfp4, "cast_reference", lambda *a, **k: pytest.fail("there was no kernel"))
        fast = nvfp4.cast_rows(matrix, operand, amax, signs=signs, scaled_errors=scaled)
    assert torch.equal(torch.get_rng_state(), state)
    slow = nvfp4.cast_reference(plain, operand, amax, chance=chance, scaled_errors=scaled)
    same(fast[1], slow[1])
    same(fast[0], slow[0])


def shape_for(variant, contracted, others):
    return (contracted, others) if VARIANTS[variant][2] else (others, contracted)


def dtype_for(variant, dtype):
    return torch.bfloat16 if VARIANTS[variant][1] else dtype


def jobs_of_every_kind(kinds=KINDS):
    for seed, (variant, dtype, kind) in enumerate(itertools.product(VARIANTS, SOURCES, kinds)):
        if dtype == dtype_for(variant, dtype):
            hold(source(shape_for(variant, 560, 67), dtype, seed, kind), variant)


@settings(max_examples=200, deadline=None)
@given(
    others=st.integers(1, 70),
    blocks=st.sampled_from([3, 4, 7, 8, 9, 31, 32, 33, 64, 65, 129]),
    variant=st.sampled_from(list(VARIANTS)),
    dtype=st.sampled_from(SOURCES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1 << 30),
)
def test_codes_and_scales_equal_the_specification(others, blocks, variant, dtype, kind, seed):
    kind = "specials" if others < 49 and kind in ("tiny blocks", "large blocks") and VARIANTS[variant][2] else kind
    hold(source(shape_for(variant, 16 * blocks, others), dtype_for(variant, dtype), seed, kind), variant)


@pytest.mark.parametrize("isa", ["native", *build.OTHERS])
def test_the_rows_that_other_processors_get(monkeypatch, isa):
    """The same source for AVX2, and without any of this machine's instructions."""
    build_for(isa, monkeypatch)
    jobs_of_every_kind()
    every_chance()


def every_chance():
    """Values on and between all codes, by chances that are as near to what decides as FP32 knows."""
    steps = torch.linspace(0, 6, 193)[:192]  # in 32nds, and the amax in each block, so that factors are 1
    x = torch.stack([steps.view(-1, 12), -steps.view(-1, 12)]).view(-1, 12)
    x = torch.cat([x, torch.tensor([6.0, -6.0, 0.0, -0.0]).expand(len(x), 4)], 1)
    grid = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    part = x.abs() / grid % 1
    for chance in (
        part,
        torch.nextafter(part, torch.ones(())),
        torch.nextafter(part, -torch.ones(())),
        part * 0,
        1 - 2**-24 + part * 0,
    ):
        chance = chance.clamp(0, 1 - 2**-24).contiguous()
        encode = torch.ones(1)
        fast = kernels.quantize_fp4(x, encode, 1, chance=chance)
        slow = nvfp4.cast_reference(x, replace(ROW, stochastic=True), torch.tensor(2688.0), chance=chance)
        same(fast[0], slow[0])
        same(fast[1], slow[1])


@pytest.mark.parametrize("variant", ["columns", "columns of squares", "chance", "chance after the transform"])
def test_large_results_which_go_past_the_caches(variant):
    for contracted, others in ((4112, 2067), (4096, 2304)):
        x = values(shape_for(variant, contracted, others), torch.bfloat16, 3, "gaussian")
        x[700, 2000] = float("nan")
        hold(x, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_number_of_threads(variant):
    x = values(shape_for(variant, 1104, 700), torch.bfloat16, 6, "gaussian")
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 7):
            torch.set_num_threads(n)
            hold(x, variant)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("amax", [1e-30, 0.3, 1e6, float("inf")])
def test_an_amax_that_was_given(variant, amax):
    """Of a tensor that this one is a shard of, or from calibration."""
    operand = VARIANTS[variant][0]
    for kind in ("gaussian", "specials"):
        x = source(shape_for(variant, 288, 50), torch.bfloat16, 2, kind)
        hold(x, variant, torch.full((50,) if operand.row_scaled else (), amax))


def test_columns_of_what_lies_apart():
    big = values((320, 300), torch.bfloat16, 5, "gaussian")
    for x in (big[:, 96:204], big[::2], big[:, 7:8].expand(320, 40), big[:160, 3:4]):
        for variant in ("columns", "columns of squares", "transform"):
            hold(x, variant)


def test_infinities_whose_differences_are_nan():
    """Sums of two infinities are infinite, which is the amax; their differences enter none, nor does what is finite."""
    x = values((32, 40), torch.bfloat16, 9, "gaussian")
    x[[3, 9], 5] = float("inf")
    assert nvfp4.transformed(x.t(), nvfp4.SIGNS)[5, :16].isnan().any()
    assert nvfp4.amax_of(x.t(), ROW, nvfp4.SIGNS) == float("inf")
    hold(x, "transform")
    x[4, 5] = float("nan")
    assert nvfp4.amax_of(x.t(), ROW, nvfp4.SIGNS).isfinite()
    hold(x, "transform")


def test_without_a_compiler_one_seed_gives_the_same(monkeypatch):
    """The kernel and torch round by the same chance, by rows and then by columns, from any generator."""
    x = values((160, 96), torch.bfloat16, 8, "gaussian")
    operand = replace(ROW, stochastic=True, hadamard=True)

    def both():
        chance = torch.Generator().manual_seed(5)
        return [nvfp4.quantize(x, operand, usage=usage, generator=chance, statistics=True) for usage in ("row", "col")]

    fast = both()
    monkeypatch.setattr(build, "library", lambda: None)
    for ours, theirs in zip(fast, both(), strict=True):
        same(ours.data, theirs.data)
        same(ours.scale_inv, theirs.scale_inv)
        assert ours.statistics.summary() == theirs.statistics.summary()


def test_what_the_kernels_do_not_take_is_left_to_torch():
    one, x = torch.ones(1), torch.ones(32, 64)
    assert cpu_fp4.transformed_amax(x.t(), nvfp4.SIGNS) is None  # GPUs transform BF16 only
    assert kernels.quantize_fp4(x.t(), one, 1, signs=nvfp4.SIGNS) is None
    assert kernels.quantize_fp4(x.bfloat16(), one, 1, signs=nvfp4.SIGNS) is None  # as no GEMM has it
    assert kernels.quantize_fp4(x[:, ::2], one, 1) is None  # neither rows nor columns lie in one piece
    assert nvfp4.cast_rows(x[:, ::2], ROW, one)[0].shape == (32, 16)
