"""``torch.autocast`` on one device with two names: torch's operators and TE's modules obey it alike, the extension
never sees it."""

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import Float8CurrentScaling


def _step(device):
    torch.manual_seed(0)
    module = te.Linear(64, 96, params_dtype=torch.float32)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16), te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        y, plain = module(x), torch.nn.functional.linear(x, module.weight)
    y.float().sin().sum().backward()
    return y, plain, x.grad, module.weight.grad


def test_by_either_name_it_is_the_same():
    """Accelerate made its choice of a device before TE was imported, and says "cpu"; on a GPU it is "cuda"."""
    by_cuda, by_cpu = _step("cuda"), _step("cpu")
    assert by_cuda[0].dtype == by_cuda[1].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(by_cuda, by_cpu, strict=True))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_afterwards_it_is_as_before(device):
    def state():
        return [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda")]

    before = state()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert state() == [(True, torch.bfloat16)] * 2
        with torch.autocast("cuda", enabled=False):
            assert [enabled for enabled, _ in state()] == [False, False]
        assert state() == [(True, torch.bfloat16)] * 2
    assert state() == before


def test_the_extension_multiplies_as_it_does_without():
    """Else its FP32 arithmetic would run in BF16, on a CPU and nowhere else."""
    a, b = torch.randn(64, 32), torch.randn(48, 32)

    def product():
        return tex.generic_gemm(a, True, b, False, None, None, tex.DType.kFloat32, None, tex.DType.kFloat32, False,
        None, False, torch.empty(0), 0, False, False)[0]  # fmt: skip

    expected = product()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (b @ a.t()).dtype == torch.bfloat16
        assert torch.equal(product(), expected)
