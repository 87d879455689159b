"""No cast of a push makes its host wait for the device: nothing is copied from one to the other, and no value is read.

A wait for each of a model's weights costs more than their casts. Tensors here are torch's meta tensors, which run every
line but the kernels, on any machine.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.numerics import kernels, scales
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.kernels import cuda, cuda_fp4, out
from nemo_fp8.numerics.modelopt import amax_of, four_bits
from nemo_fp8.numerics.nvfp4_tensor import weight_scale_2
from nemo_fp8.numerics.quantize import quantize, quantize_into

FOUR_BITS = Precision(rollout="nvfp4").operand("weight", "rollout")
BLOCKS, MX = Operand("e4m3", (128, 128), "fp32"), Operand("e4m3", (1, 32), "e8m0")


READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"}
MAKES = {"tensor", "as_tensor"}


class Waits(TorchFunctionMode):
    """Write down every call that reads a value of the device, or hands it numbers of the host."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")  # where the CPU stands for a GPU, torch's functions are others
        if name in READS or (name in MAKES and kwargs.get("device") is not None):
            self.seen.append(name)
        return function(*args, **kwargs)


@pytest.fixture
def gpu(monkeypatch):
    launched = []
    for module in (cuda, cuda_fp4):
        monkeypatch.setattr(module, "_start", launched.append)
        monkeypatch.setattr(module, "available", lambda: True)
    monkeypatch.setattr(out, "_overlap", lambda a, b: False)  # nothing here has an address
    monkeypatch.setattr(kernels, "_device", lambda x: cuda)
    monkeypatch.setattr(kernels, "_fp4_device", lambda x: cuda_fp4)
    with Waits() as waits:
        yield waits, launched


def weight(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


CASTS = {
    "blocks": lambda: quantize(weight(256, 512), BLOCKS),
    "blocks into memory": lambda: quantize_into(
        weight(256, 512), BLOCKS, weight(256, 512).to(torch.float8_e4m3fn), torch.empty(2, 4, device="meta")
    ),
    "blocks by DeepGEMM's rule": lambda: quantize(weight(256, 512), BLOCKS, convention="deepgemm"),
    "MX": lambda: quantize(weight(256, 512), MX),
    "a whole tensor": lambda: quantize(weight(256, 512), Operand("e4m3", None, "fp32")),
    "a whole tensor by DeepGEMM's rule": lambda: quantize(
        weight(256, 512), Operand("e4m3", None, "fp32"), convention="deepgemm"
    ),
    "NVFP4": lambda: four_bits(weight(256, 512), FOUR_BITS, amax_of(weight(256, 512))),
    "NVFP4's stack": lambda: four_bits(weight(3, 256, 512), FOUR_BITS, amax_of(weight(3, 256, 512))),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_waits_for_nothing(gpu, cast):
    waits, launched = gpu
    cast()
    assert launched
    assert waits.seen == []


def test_scales_wait_for_nothing(gpu):
    waits, _ = gpu
    amax = torch.empty(4, device="meta")
    weight_scale_2(amax)
    scales.e8m0_from_amax(amax, FORMATS["e4m3"])
    scales.deepgemm_scale_inv(amax, FORMATS["e4m3"])
    assert waits.seen == []


WAITS = {
    "a number of the host": lambda t: t * torch.tensor(2.0, device=t.device),
    "a value": lambda t: t.amax().item(),
    "a copy": lambda t: t.cpu(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_is_seen(gpu, wait):
    waits, _ = gpu
    with contextlib.suppress(NotImplementedError, RuntimeError):  # nothing here has values
        wait(torch.empty(4, device="meta"))
    assert len(waits.seen) == 1
