"""What the fallback multiplies: the same values on every processor, in BF16 where it has units for them and they are
exact."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import quantize
from nemo_fp8.rollout.engine import ops


class Multiplied(TorchDispatchMode):
    """The type of the matrices that are multiplied."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtype = args[-1].dtype
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_decoded_weights_multiply_in_bf16_only_on_units_for_it(monkeypatch, scale, units, bias):
    monkeypatch.setattr(ops, "multiplies_bf16", lambda: units)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (6, 256), generator=g).bfloat16()
    q = quantize(torch.randint(-4, 5, (128, 256), generator=g).bfloat16(), Operand("e4m3", (128, 128), scale))
    added = torch.randint(-4, 5, (128,), generator=g).bfloat16() if bias else None
    with Multiplied() as multiplied:
        out = ops.decoded_linear._init_fn(x, q.data, q.scale_inv, added, [128, 128], torch.bfloat16)
    assert multiplied.dtype is (torch.bfloat16 if units and scale == "pow2" else torch.float32)
    exact = F.linear(x.double(), q.dequantize_reference().double(), None if added is None else added.double())
    if scale == "pow2":  # every sum is exact: there is one right answer
        assert torch.equal(out, exact.bfloat16())
    assert (out.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


def test_emulated_activations_in_fp32_are_not_rounded():
    """Decoded activations with FP32 scales have more bits than BF16 holds."""
    q = quantize(torch.eye(128).bfloat16(), Operand("e4m3", (128, 128), "pow2"))
    x = torch.full((1, 128), 1 + 2.0**-20)
    with Multiplied() as multiplied:
        ops.decoded_linear._init_fn(x, q.data, q.scale_inv, None, [128, 128], torch.bfloat16)
    assert multiplied.dtype is torch.float32
