"""The control that has one scale for a tensor: its numbers against ml_dtypes, and TE's own linear under it."""

from types import SimpleNamespace

import ml_dtypes
import pytest
import torch

from nemo_fp8.experiments.one_scale import InOneScale, rounded  # first: it brings TransformerEngine

# isort: split
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import NVFP4BlockScaling


@pytest.mark.parametrize("largest", [6.0, 6.1, 11.9, 3.0, 448.0, 1e-3, 3e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_are_those_of_e2m1_under_one_power_of_two(dtype, largest):
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    x = (x * (largest / x.abs().amax())).to(dtype)
    x[0, :8] = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 5.0]) * (float(x.abs().amax()) / 6)
    amax = float(x.abs().amax().float())
    step = next(2.0**e for e in range(-150, 150) if 6 * 2.0**e >= amax)
    wanted = (x.float().numpy() / step).astype(ml_dtypes.float4_e2m1fn).astype("float32") * step
    assert torch.equal(rounded(x).float(), torch.from_numpy(wanted))
    assert rounded(x).dtype == dtype
    assert torch.equal(rounded(rounded(x)), rounded(x))


def test_what_is_small_beside_the_largest_becomes_zero():
    x = torch.tensor([6.0, 0.26, 0.24, -0.24, -0.26])
    assert rounded(x).tolist() == [6.0, 0.5, 0.0, 0.0, -0.5]
    assert rounded(1000 * torch.cat([x, torch.tensor([48.0])])).abs().tolist() == [4096.0, 0, 0, 0, 0, 49152.0]
    assert rounded(torch.zeros(3)).tolist() == [0, 0, 0]


def test_a_linear_that_would_run_in_nvfp4_multiplies_these():
    torch.manual_seed(1)
    linear = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(48, 32, dtype=torch.bfloat16)

    def run():
        x.grad = linear.weight.grad = None
        with te.autocast(enabled=True, recipe=NVFP4BlockScaling()):
            y = linear(x)
        y.backward(dy)
        return y.detach(), x.grad, linear.weight.grad

    in_nvfp4 = run()
    InOneScale().on_train_start(SimpleNamespace(model=torch.nn.ModuleList([torch.nn.Sequential(linear)])), None)
    w, a, g = (rounded(t.detach()).float() for t in (linear.weight, x, dy))
    wanted = (a @ w.t(), g @ w, g.t() @ a)
    for found, exact, before in zip(run(), wanted, in_nvfp4, strict=True):
        torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-2)
        assert (before.float() - exact).abs().max() > 0.1
    torch.testing.assert_close(linear(x).float(), x.detach().float() @ linear.weight.detach().float().t(), rtol=2**-7,
                               atol=1e-2)  # fmt: skip
