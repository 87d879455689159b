"""How far the backward's weight is from the forward's: known numbers, plain arithmetic, and cases that are not 0."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.numerics import quantize
from nemo_fp8.numerics.transposition import ONE, Copies, Transposition

BLOCKWISE = Operand("e4m3", (128, 128), "pow2")
ROWS_OF_128 = Operand("e4m3", (1, 128), "fp32")
MX = Operand("e4m3", (1, 32), "e8m0")
SQUARES = Operand("e2m1", (16, 16), "e4m3")
ROWS_OF_16 = Operand("e2m1", (1, 16), "e4m3")


def _gaussian(rows=1024, columns=1024, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()


def _measured(operand, weight, backward=None):
    """The measurement of two casts, also where the same codes are known to serve both."""
    return Transposition.of(weight, *Copies(operand, backward or operand).values(weight))


# What was measured on N(0, 0.02) by other code: the share that differs in percent, and the distance.
@pytest.mark.parametrize(
    ("operand", "differ", "distance"),
    [
        (BLOCKWISE, 0, 0),
        (replace(BLOCKWISE, scale="fp32"), 0, 0),
        (MX, 0, 0),
        (ROWS_OF_128, 98.3, 0.036),
        (SQUARES, 0, 0),
        (ROWS_OF_16, 76.7, 0.130),
    ],
)
def test_gaussian_weights_have_the_known_numbers(operand, differ, distance):
    found = _measured(operand, _gaussian())
    assert found.differ_percent == pytest.approx(differ, abs=0.3)
    assert found.distance == pytest.approx(distance, abs=0.0005)


@pytest.mark.parametrize("operand", [BLOCKWISE, SQUARES, Operand("e4m3", None, "fp32")])
def test_square_blocks_and_whole_tensors_give_exactly_nothing(operand):
    weight = _gaussian(256, 384)
    copies = Copies(operand, operand)
    assert copies.are_one
    assert torch.equal(*copies.values(weight))
    found = copies.measure(weight)
    assert (found.differing, found.distance, found.gain, found.cosine) == (0, 0, 0, 1)
    assert found.elements == weight.numel()
    assert found.source == pytest.approx(float(weight.double().square().sum()), rel=1e-6)


def _nvfp4_rows(weight):
    """NVFP4 in 1x16 blocks in numpy and ml_dtypes."""
    x = weight.float().numpy()
    blocks = x.reshape(x.shape[0], -1, 16)
    encode = np.float32(448 * 6) / np.abs(x).max()
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = (amax * encode / np.float32(6)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = (blocks * encode / scale).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (codes * scale / encode).reshape(x.shape)


def test_four_bits_are_what_plain_arithmetic_gives():
    weight = _gaussian(64, 128)
    forward, backward = Copies(ROWS_OF_16, ROWS_OF_16).values(weight)
    of_rows, of_columns = _nvfp4_rows(weight), _nvfp4_rows(weight.t()).T
    for mine, plain in ((forward, of_rows), (backward, of_columns)):
        # Another order of the divisions sends a value that lies halfway to its other neighbour: there are a few.
        assert np.isclose(mine.numpy(), plain, rtol=1e-5).mean() > 0.998
    found = Transposition.of(weight, forward, backward)
    far = np.linalg.norm(of_columns - of_rows) / np.linalg.norm(weight.float().numpy())
    assert found.distance == pytest.approx(far, rel=1e-2)
    gain = ((of_columns - of_rows) * of_rows).sum(dtype=np.float64) / np.square(of_rows).sum(dtype=np.float64)
    assert found.gain == pytest.approx(gain, rel=2e-2)
    turned = (of_columns * of_rows).sum() / np.linalg.norm(of_columns) / np.linalg.norm(of_rows)
    assert found.cosine == pytest.approx(turned, rel=1e-4)


def test_a_known_gain_and_a_known_turn_are_found():
    w = torch.randn(50, 30, dtype=torch.float64).float()
    longer = Transposition.of(w, w, 1.1 * w)
    assert (longer.gain, longer.distance, longer.cosine) == pytest.approx((0.1, 0.1, 1), rel=1e-5)
    assert longer.differ_percent == 100
    against = Transposition.of(w, w, -w)
    assert (against.gain, against.distance, against.cosine) == pytest.approx((-2, 2, -1), rel=1e-5)
    across = torch.randn(50, 30)
    across -= w * (across * w).sum() / w.square().sum()
    turned = Transposition.of(w, w, w + across)
    assert turned.gain == pytest.approx(0, abs=1e-6)
    assert turned.cosine == pytest.approx(float(w.norm() / (w.norm() ** 2 + across.norm() ** 2).sqrt()), rel=1e-5)
    one = w.clone()
    one[3, 4] += 1
    assert Transposition.of(w, w, one).differing == 1


def test_independent_errors_have_half_the_square_of_the_distance_as_gain():
    found = _measured(ROWS_OF_16, _gaussian())
    assert found.gain == pytest.approx(-(found.distance**2) / 2, rel=0.05)


def test_the_distance_is_the_relative_error_of_dx_for_independent_gradients():
    weight, copies = _gaussian(512, 256), Copies(ROWS_OF_16, ROWS_OF_16)
    dy = torch.randn(2048, 512, generator=torch.Generator().manual_seed(1))
    by_weight, by_gradient = copies.measure(weight), copies.of_gradient(weight, dy)
    relative = math.sqrt(by_weight.difference / by_weight.forward)
    assert by_gradient.distance == pytest.approx(relative, rel=0.01)
    assert by_gradient.cosine == pytest.approx(by_weight.cosine, abs=1e-3)


def test_a_gradient_may_see_more_than_the_weight_says():
    """A dy that has one component alone sees one row, where one outlier hides all but itself."""
    weight = _gaussian(128, 128)
    weight[7, 3] = 4.0
    copies = Copies(ROWS_OF_128, ROWS_OF_128)
    dy = torch.zeros(1, 128)
    dy[0, 7] = 1
    values = copies.values(weight)
    dx = dy @ values[1] - dy @ values[0]
    assert copies.of_gradient(weight, dy).difference == pytest.approx(float(dx.square().sum()), rel=1e-5)
    assert copies.of_gradient(weight, dy).elements == 128


def test_powers_of_two_differ_where_small_values_meet_large_ones():
    """On Gaussian weights MX blocks agree; a column far above its neighbours pushes these into subnormal codes."""
    weight = _gaussian(128, 128)
    weight[:, 5] *= 2.0**14
    found = _measured(MX, weight)
    assert 1 < found.differ_percent < 50
    assert Copies(MX, MX).are_one is False


def test_sums_of_parts_are_those_of_the_whole():
    weight, operand = _gaussian(96, 64), ROWS_OF_16
    forward, backward = Copies(operand, operand).values(weight)
    whole = Transposition.of(weight, forward, backward)
    parts = Transposition.together(
        Transposition.of(weight[i : i + 32], forward[i : i + 32], backward[i : i + 32]) for i in (0, 32, 64)
    )
    assert parts.to_dict() == pytest.approx(whole.to_dict(), rel=1e-5)


def test_what_is_not_finite_is_left_out():
    weight = _gaussian(64, 64)
    clean = weight.clone()
    weight[3, 4], weight[9, 9] = float("nan"), float("inf")
    found = Copies(ROWS_OF_128, ROWS_OF_128).measure(weight)
    assert all(value is None or math.isfinite(value) for value in found.to_dict().values())
    assert found.elements < clean.numel()
    assert math.isfinite(Copies(BLOCKWISE, BLOCKWISE).measure(weight).source)


def test_zeros_differ_in_nothing():
    found = Copies(ROWS_OF_16, ROWS_OF_16).measure(torch.zeros(32, 32))
    assert (found.differ_percent, found.distance, found.gain, found.cosine) == (0, 0, 0, 1)


# ---------------------------------------------------------------------- contracts

NVFP4 = preset("bf16_with_nvfp4_mixed")
CONTRACTS = {
    "delayed": (preset("bf16_with_fp8_mixed"), 0),
    "tensorwise": (preset("bf16_with_fp8_current_scaling_mixed"), 0),
    "blockwise": (preset("bf16_with_fp8_blockwise_mixed"), 0),
    "mxfp8": (preset("bf16_with_mxfp8_mixed"), 0),
    "nvfp4": (NVFP4, 0),
    "nvfp4 1x16": (NVFP4.replace(weight_block="1x16"), 0.130),
    "nvfp4 1x16, dequantized": (NVFP4.replace(weight_block="1x16", backward="dequantized"), 0),
    # The backward multiplies by the weight itself: the distance is what the forward's cast lost.
    "nvfp4, high precision": (NVFP4.replace(backward="high_precision"), 0.1113),
    "nvfp4 1x16, high precision": (NVFP4.replace(weight_block="1x16", backward="high_precision"), 0.0951),
    # Cast from the forward's codes, so that MXFP8's own error is all.
    "nvfp4, mxfp8 behind": (NVFP4.replace(backward_scaling="mxfp8"), 0.0299),
    "bf16": (preset("bf16_mixed"), 0),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_contract_has_the_distance_of_its_two_casts(name):
    precision, distance = CONTRACTS[name]
    assert Copies.under(precision).measure(_gaussian()).distance == pytest.approx(distance, abs=0.002)


def test_a_dequantized_backward_reads_the_forwards_codes_and_no_others():
    weight = _gaussian(64, 64)
    copies = Copies.under(NVFP4.replace(weight_block="1x16", backward="dequantized"))
    forward, backward = copies.values(weight)
    assert forward is backward
    assert torch.equal(forward, Copies(ROWS_OF_16, ROWS_OF_16).values(weight)[0])
    assert copies.measure(weight).differing == 0


def test_blocks_that_are_the_same_only_by_their_numbers_of_rows_are_not_one():
    assert not Copies(SQUARES, replace(SQUARES, largest_scale=256)).are_one
    assert not Copies(BLOCKWISE, SQUARES).are_one
    assert not Copies.under(Precision(format="e2m1", scaling="nvfp4", weight_block="1x16")).are_one


def test_a_backward_with_a_recipe_of_its_own_is_nearly_the_forwards():
    """It is cast from the forward's codes; from the master weight it would be as far as NVFP4's own error."""
    p = Precision(format="e2m1", scaling="nvfp4", weight_block="1x16", backward_scaling="mxfp8")
    copies = Copies.under(p)
    weight = (torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    assert copies.measure(weight).distance < 0.03 < 0.08 < replace(copies, of_codes=False).measure(weight).distance


def test_an_element_differs_where_its_code_times_its_scale_does():
    """3 beneath a scale of 4 is 6 beneath 2. With the amax first they were an ulp apart."""
    copies = Copies(ROWS_OF_16, ROWS_OF_16)
    for seed in range(4):
        weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(seed)).bfloat16()
        by_rows, by_columns = (quantize(weight, ROWS_OF_16, usage=usage).scaled() for usage in ("row", "col"))
        differ = (by_rows != by_columns.t()).float().mean()
        assert copies.measure(weight).differ_percent == pytest.approx(100 * float(differ), abs=1e-4)


@pytest.mark.parametrize("size", [2.0**-90, 2.0**-70, 2.0**70, 2.0**100])
def test_weights_whose_squares_are_beyond_fp32_have_the_same_distance(size):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    usual, other = (Copies(ROWS_OF_16, ROWS_OF_16).measure(weight * by) for by in (1.0, size))
    assert other.distance == pytest.approx(usual.distance, rel=0.02)
    assert other.gain == pytest.approx(usual.gain, rel=0.2)
    assert Copies(ROWS_OF_16, None).measure(weight * size).distance == pytest.approx(0.095, abs=0.01)


@pytest.mark.parametrize("copies", [ONE, Copies(ROWS_OF_16, ROWS_OF_16)])
def test_nothing_is_said_of_a_weight_without_a_finite_element(copies):
    found = copies.measure(torch.full((16, 16), math.nan))
    assert found.elements == 0
    assert {*found.to_dict().values()} == {None}
