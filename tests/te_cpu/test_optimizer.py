"""TE's FusedAdam and FusedSGD over our kernels against torch's own optimizers."""

import pytest
import torch
import transformer_engine.pytorch as te


def _trained(make, parameters, steps=5):
    optimizer = make(parameters)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return parameters


@pytest.mark.parametrize(("value", "flag"), [(3e38, 0), (torch.inf, 1), (-torch.inf, 1), (torch.nan, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scaled_in_place_and_flagged_by_what_came_in(value, flag, dtype):
    """Clipping gives the gradients as source and target: what only the scale makes infinite is no fault of theirs."""
    grads = [torch.randn(5, 7).to(dtype), torch.zeros(0, dtype=dtype), torch.full((3,), 0.1, dtype=dtype)]
    grads[0][2, 3] = value
    expected = [(grad.float() * 1.7).to(dtype) for grad in grads]
    found = torch.zeros(1, dtype=torch.int32)
    te.optimizers.multi_tensor_applier(te.optimizers.multi_tensor_scale, found, [grads, grads], 1.7)
    assert found.item() == flag
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("adam_w", [False, True])
def test_adam(adam_w):
    def fresh():
        torch.manual_seed(0)
        return [torch.nn.Parameter(torch.randn(n, 8)) for n in (3, 5)]

    arguments = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    ours = _trained(lambda p: te.optimizers.FusedAdam(p, adam_w_mode=adam_w, **arguments), fresh())
    theirs = _trained(lambda p: (torch.optim.AdamW if adam_w else torch.optim.Adam)(p, **arguments), fresh())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("remainders", [False, True])
def test_adam_on_bf16_parameters_keeps_their_fp32_masters(remainders):
    """The parameter is its master rounded: 40 steps of a rate that BF16 alone would round away."""
    torch.manual_seed(0)
    start = torch.randn(16, 8)
    mine, reference = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.bfloat16().float())
    ours = te.optimizers.FusedAdam([mine], lr=1e-4, master_weights=True, store_param_remainders=remainders)
    theirs = torch.optim.AdamW([reference], lr=1e-4, weight_decay=0.0)
    for step in range(40):
        grad = torch.full_like(start, 1.0 if step % 3 else -0.5)
        mine.grad, reference.grad = grad.bfloat16(), grad
        ours.step()
        theirs.step()
    torch.testing.assert_close(mine.detach(), reference.detach().bfloat16(), rtol=2**-8, atol=0)
    assert (mine.detach() == reference.detach().bfloat16()).float().mean() > 0.97
    assert not torch.equal(mine.detach(), start.bfloat16())


def test_sgd():
    def fresh():
        torch.manual_seed(0)
        return [torch.nn.Parameter(torch.randn(4, 8))]

    arguments = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    ours = _trained(lambda p: te.optimizers.FusedSGD(p, **arguments), fresh())
    theirs = _trained(lambda p: torch.optim.SGD(p, **arguments), fresh())
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
