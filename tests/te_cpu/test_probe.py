"""What the monitor's probe says of the weight that TE's dgrad multiplies by is what TE's own tensors hold."""

from types import SimpleNamespace

import pytest
import torch
import transformer_engine.pytorch as te
from support.te_cases import ARCH, CASES

from nemo_fp8.numerics.transposition import Transposition
from nemo_fp8.te_cpu import mxfp8
from nemo_fp8.te_cpu.quantized import watching_casts
from nemo_fp8.train.measure import TOKENS, Probe


def _watched(name, weight, dy):
    """The probe's measurements of one step of a linear, and the weight that TE quantized for it."""
    module = te.Linear(*reversed(weight.shape), bias=False, params_dtype=torch.bfloat16)
    casts = []

    def see(quantizer, x, quantized):
        if x.data_ptr() == module.weight.data_ptr():
            casts.append(quantized)

    with torch.no_grad():
        module.weight.copy_(weight)
    probe = Probe({"linear": module}, [])
    x = torch.randn(len(dy), weight.shape[1]).bfloat16().requires_grad_()
    with watching_casts(see), te.autocast(enabled=True, recipe=CASES[name].build()):
        module(x).backward(dy)
    (quantized,) = casts
    return {role: m.numbers() for (_, role), m in probe.close().items()}, quantized


@pytest.fixture
def weight():
    """Gaussian, with a column far above the others: in blocks of 1x32 along the rows it hides its neighbours."""
    made = (torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    made[:, 5] *= 2.0**14
    return made


@pytest.mark.skipif(ARCH < 100, reason="MXFP8 needs architecture 100")
def test_the_distance_is_that_of_the_two_copies_that_te_holds(weight):
    dy = torch.randn(2 * TOKENS, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    numbers, quantized = _watched("mxfp8", weight, dy)
    forward, backward = (mxfp8.operand(quantized, by_rows).dequantize() for by_rows in (True, False))
    expected = Transposition.of(weight, forward, backward)
    assert expected.differ_percent > 1
    assert {name: numbers["weight"][name] for name in expected.to_dict()} == pytest.approx(expected.to_dict())
    dx = dy[:TOKENS].float() @ forward
    of_dx = Transposition.of(dx, dx, dy[:TOKENS].float() @ backward).to_dict()
    assert numbers["grad"]["distance"] == pytest.approx(of_dx["distance"], rel=1e-4)
    assert numbers["grad"]["distance"] > 0
    assert numbers["input"]["distance"] is None


@pytest.mark.skipif(ARCH < 100, reason="NVFP4 needs architecture 100")
@pytest.mark.parametrize(("turned", "distance"), [(True, 0.13), (False, 0.0)])
def test_four_bits_in_rows_are_far_apart_and_in_squares_one(turned, distance, monkeypatch):
    from transformer_engine.common.recipe import NVFP4BlockScaling

    case = SimpleNamespace(build=lambda: NVFP4BlockScaling(disable_2d_quantization=turned))
    monkeypatch.setitem(CASES, "nvfp4 in question", case)
    gaussian = (torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    numbers, _ = _watched("nvfp4 in question", gaussian, torch.randn(64, 256).bfloat16())
    for role in ("weight", "grad"):
        assert numbers[role]["distance"] == pytest.approx(distance, abs=0.01)


def test_square_blocks_are_one(weight):
    numbers, _ = _watched("blockwise", weight, torch.randn(64, 128).bfloat16())
    for role in ("weight", "grad"):
        assert (numbers[role]["distance"], numbers[role]["gain"], numbers[role]["cosine"]) == (0, 0, 1)
