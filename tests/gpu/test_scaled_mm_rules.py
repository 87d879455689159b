"""Which operands go to torch's FP8 GEMM: the rules that torch checks on a GPU, asked of an H200 that is not there."""

from __future__ import annotations

import pytest
import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import scaled_mm
from nemo_fp8.numerics.quantize import quantize

ROW, SQUARE = Operand("e4m3", (1, 128), "fp32"), Operand("e4m3", (128, 128), "fp32")


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def recipes(a: Operand, b: Operand, rows: int = 128) -> tuple[str, str] | None:
    x, w = torch.ones(rows, 256, dtype=torch.bfloat16), torch.ones(128, 256, dtype=torch.bfloat16)
    return scaled_mm._recipes(quantize(x, a), quantize(w, b))


def test_tiles_of_e4m3():
    assert recipes(ROW, SQUARE) == ("BlockWise1x128", "BlockWise128x128")
    assert recipes(ROW, ROW) == ("BlockWise1x128", "BlockWise1x128")


def test_tiles_of_e5m2_are_emulated():
    # torch refuses them; NeMo's blockwise recipes are hybrid, with gradients of this type.
    assert recipes(Operand("e5m2", (1, 128), "fp32"), SQUARE) is None
    assert recipes(ROW, Operand("e5m2", (1, 128), "fp32")) is None


def test_whole_tensors_may_mix_types():
    assert recipes(Operand("e5m2", None, "fp32"), Operand("e4m3", None, "fp32")) == ("TensorWise", "TensorWise")


@pytest.mark.parametrize(("rows", "runs"), [(4, True), (130, False), (131, False), (132, True)])
def test_scales_by_columns_begin_on_sixteen_bytes(rows, runs):
    assert (recipes(ROW, SQUARE, rows) is not None) == runs
