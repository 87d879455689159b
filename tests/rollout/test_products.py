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


# ---------------------------------------------------------------------- from the codes themselves
# What the kernel computes is held by tests/numerics/test_multiply.py.


def _weight(rows, columns, seed=0):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5
    return quantize(weight.bfloat16(), Operand("e4m3", (128, 128), "fp32"))


def _from_codes(x, q):
    return ops._from_codes(x, q.data, q.scale_inv, list(q.block), 1000)


needs_kernel = pytest.mark.skipif(
    _from_codes(torch.ones(1, 128), _weight(8, 128)) is None, reason="no kernel of codes for this processor"
)


@needs_kernel
def test_sums_that_are_exact_are_the_same_from_codes():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (6, 256), generator=g).bfloat16()
    q = quantize(torch.randint(-4, 5, (128, 256), generator=g).bfloat16(), Operand("e4m3", (128, 128), "pow2"))
    bias = torch.randint(-4, 5, (128,), generator=g).bfloat16()
    both = [ops.decoded_linear._init_fn(x, q.data, q.scale_inv, bias, [128, 128], torch.bfloat16, n) for n in (0, 6)]
    assert torch.equal(*both)


@needs_kernel
def test_few_tokens_take_codes_and_many_decode(monkeypatch):
    q, decoded = _weight(256, 512), []
    plain = ops.Quantized.dequantize
    monkeypatch.setattr(ops.Quantized, "dequantize", lambda self, *a: decoded.append(1) or plain(self, *a))
    for tokens, direct, decodes in ((4, 4, 0), (5, 4, 1), (1, 0, 1)):
        decoded.clear()
        x = torch.randn(tokens, 512).bfloat16()
        out = ops.decoded_linear._init_fn(
            x.view(1, tokens, 512), q.data, q.scale_inv, None, [128, 128], x.dtype, direct
        )
        assert out.shape == (1, tokens, 256)
        assert len(decoded) == decodes


@needs_kernel
@pytest.mark.parametrize("group", [0, 128])
def test_experts_take_codes_too(monkeypatch, group):
    stack = [_weight(512, 256, seed) for seed in range(4)], [_weight(256, 256, 9 + i) for i in range(4)]
    w13, w2 = (torch.stack([q.data.view(torch.uint8) for q in part]).view(torch.float8_e4m3fn) for part in stack)
    s13, s2 = (torch.stack([q.scale_inv for q in part]) for part in stack)
    x, share = torch.randn(6, 256, generator=torch.Generator().manual_seed(2)).bfloat16(), torch.rand(6, 2)
    ids = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 3], [1, 0], [3, 1]])
    few, many = (
        ops.decoded_experts._init_fn(x, w13, s13, w2, s2, share, ids, None, [128, 128], group, "fp32", direct)
        for direct in (32, 0)
    )
    assert (
        few.float() - many.float()
    ).norm() < 2e-3 * many.float().norm()  # BF16 between the GEMMs, rounded the other way
    assert few.any()


def test_what_does_not_fit_is_refused():
    q = _weight(128, 256)
    with pytest.raises(ValueError, match="scales"):
        ops._from_codes(torch.ones(1, 256), q.data, q.scale_inv[:, :1], [128, 128], 1)
    with pytest.raises(ValueError, match="times"):
        ops._from_codes(torch.ones(1, 128), q.data, q.scale_inv, [128, 128], 1)
    odd = _weight(128, 200)  # no whole tiles: decoded instead
    assert _from_codes(torch.ones(1, 200), odd) is None
