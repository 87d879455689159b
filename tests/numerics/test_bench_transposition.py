"""The experiment on transposition: its linear multiplies by what an arm says, its tables tell apart what differs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import transposition as bench
from nemo_fp8.numerics.transposition import Copies

ARMS = {(arm.family, arm.name): arm for arm in bench.arms()}
SMALL = replace(bench.QUICK, steps=2, held_out=2)


def _gradients(arm):
    """dx and dw of one linear, with what they were made from."""
    torch.manual_seed(0)
    linear = bench.Linear(64, 128)
    linear.arm = arm
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 128)
    y = linear(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad, x.detach(), dy, linear.weight.detach()


def test_without_casts_it_is_a_linear():
    y, dx, dw, x, dy, weight = _gradients(ARMS["no cast", "FP32"])
    for found, exact in ((y, x @ weight.t()), (dx, dy @ weight), (dw, dy.t() @ x)):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(("name", "dose"), [("1x16, same codes", 0), ("1x16, transposed", 1), ("1x16, 8 times", 8)])
def test_only_the_backwards_weight_depends_on_the_arm(name, dose):
    arm = ARMS["NVFP4 weights", name]
    y, dx, dw, x, dy, weight = _gradients(arm)
    forward, backward = replace(arm.copies, shared=False).values(weight)
    assert not torch.equal(forward, backward)
    torch.testing.assert_close(y, x @ forward.t())
    torch.testing.assert_close(dx, dy @ (forward + dose * (backward - forward)))
    torch.testing.assert_close(dw, dy.t() @ x)


def test_a_mixed_error_has_the_same_elements_elsewhere_in_every_step():
    weight = torch.randn(32, 64)
    arm, generator = ARMS["NVFP4 weights", "1x16, 8 times, mixed"], torch.Generator().manual_seed(0)
    forward, backward = arm.copies.values(weight)
    first, second = (bench._copies(weight, arm, generator)[1] - forward for _ in range(2))
    assert not torch.allclose(first, second)
    expected = (arm.dose * (backward - forward)).flatten().sort().values
    torch.testing.assert_close(first.flatten().sort().values, expected, atol=1e-5, rtol=0)


def test_activations_are_quantized_where_the_family_says_so():
    _, _, dw, x, dy, _ = _gradients(ARMS["NVFP4", "16x16"])
    assert not torch.allclose(dw, dy.t() @ x)
    error = (dw - dy.t() @ x).norm() / (dy.t() @ x).norm()
    assert 0.05 < error < 0.25


def test_runs_of_one_seed_begin_alike_and_the_meter_says_what_the_arm_is():
    same, turned = (bench.run(ARMS["NVFP4 weights", f"1x16, {name}"], 1, SMALL) for name in ("same codes", "8 times"))
    assert same["curve"][0] == pytest.approx(turned["curve"][0], rel=0.02)
    assert same["weights"]["distance"] == same["gradients"]["distance"] == same["whole"]["distance"] == 0
    assert turned["weights"]["distance"] == pytest.approx(8 * 0.13, rel=0.05)
    assert turned["gradients"]["distance"] > 0.5
    assert turned["whole"]["cosine"] < 0.95
    again = bench.run(ARMS["NVFP4 weights", "1x16, 8 times"], 1, SMALL)
    assert {**again, "seconds": 0} == {**turned, "seconds": 0}


def test_an_interval_is_student_s():
    assert bench.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3, 1.963), abs=1e-3)


def _runs(gap):
    """Runs in which transposed weights cost ``gap`` percent, with noise of a percent."""
    numbers = {"differ_percent": 1.0, "gain": 0.0, "cosine": 1.0}
    runs = []
    for seed, noise in enumerate((-1, -0.5, 0, 0.5, 1), 1):
        for arm in bench.arms():
            costs = gap if "transposed" in arm.name else 0
            loss = 1.0 + seed / 10
            loss *= 1 if arm.reference else 1 + (costs + noise) / 100
            of = {"distance": 0.1 if "transposed" in arm.name else 0.0, **numbers}
            runs.append(
                {"family": arm.family, "arm": arm.name, "seed": seed, "loss": loss, "weights": of, "gradients": of}
                | {"whole": of, "stays": {"cosine": 1.0}}
            )
    return runs


@pytest.mark.parametrize(("gap", "apart"), [(5.0, True), (0.2, False)])
def test_the_table_tells_apart_what_differs_and_nothing_else(gap, apart):
    rows = {(row["family"], row["arm"]): row for row in bench.compared(_runs(gap))}
    turned = rows["FP8 weights", "1x128, transposed"]
    assert turned["gap"] == pytest.approx(gap)
    assert turned["half"] == pytest.approx(0.98, abs=0.01)
    assert (abs(turned["gap"]) > turned["half"]) == apart
    told = next(line for line in bench.tables(_runs(gap)).splitlines() if line.startswith("| FP8 weights | 1x128, t"))
    assert f"{gap:+.2f} %" in told
    strong = bench.correlation([row for (family, _), row in rows.items() if family == "FP8 weights"])
    assert (strong > 0.9) == apart


def test_the_page_is_of_its_record():
    record = json.loads(bench.PAGE.with_suffix(".json").read_text())
    assert bench.page(record) == bench.PAGE.read_text()
    assert len({run["seed"] for run in record["runs"]}) >= 5


def test_no_reference_has_a_distance():
    for arm in bench.arms():
        copies: Copies = arm.copies
        assert not arm.reference or copies.are_one
