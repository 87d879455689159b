"""Hyper-connections beside their formulas in FP64, forward and backward."""

import pytest
import torch
from transformer_engine.pytorch.triton import mhc

N = 4
TYPES = [torch.float32, torch.bfloat16]


def _leaves(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def _exact(leaves):
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def _agree(formula, exact_formula, leaves):
    """Outputs and gradients, to half a unit in the last place of what holds them, and FP32's sums."""
    exact = _exact(leaves)
    found, expected = formula(*leaves), exact_formula(*exact)
    grads = [torch.randn_like(out) for out in found]
    mine = torch.autograd.grad(found, leaves, grads)
    theirs = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    for a, b in zip((*found, *mine), (*expected, *theirs), strict=True):
        half = 2**-8 if a.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(a.double(), b.detach(), rtol=half + 1e-5, atol=2e-5)


def _projected(x, phi, w=None):
    return x @ (phi if w is None else phi * w).T, x.square().mean(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weighed", [False, True])
def test_projection(dtype, weighed):
    leaves = _leaves((6, 40), (24, 40), *[(40,)] * weighed, dtype=dtype)

    def formula(x, phi, w=None):
        H, ms = mhc.mhc_fused_projection(x, phi, norm_weight=w)
        assert H.shape == (6, 32)
        assert not H[:, 24:].any()
        assert H.dtype == ms.dtype == torch.float32
        return H[:, :24], ms

    _agree(formula, _projected, leaves)


@pytest.mark.parametrize("dtype", TYPES)
def test_scale(dtype):
    H, alpha, beta, ms = _leaves((6, 32), (3,), (1, 24), (6,), dtype=dtype)
    ms = (ms.detach().abs() + 1).requires_grad_()
    cuts = slice(0, N), slice(N, 2 * N), slice(2 * N, 2 * N + N * N)

    def exact(H, alpha, beta, ms):
        normed = H[:, :24] / torch.sqrt(ms)[:, None]
        pre, post, res = (normed[:, cut] * alpha[i] + beta[:, cut] for i, cut in enumerate(cuts))
        return torch.sigmoid(pre), 2 * torch.sigmoid(post), res

    _agree(lambda *leaves: mhc.mhc_fused_scale(*leaves, N), exact, [H, alpha, beta, ms])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("recompute", [False, True])
def test_sinkhorn(dtype, recompute):
    def exact(x):
        p = x.exp()
        for _ in range(20):
            p = p / p.sum(-1, keepdim=True)
            p = p / p.sum(-2, keepdim=True)
        return (p,)

    def formula(x):
        return (mhc.mhc_fused_sinkhorn(x, N, recompute),)

    leaves = _leaves((3, 2, N, N), dtype=dtype)
    _agree(formula, exact, leaves)
    (p,) = formula(leaves[0].detach().float())
    torch.testing.assert_close(p.sum(-2), torch.ones(3, 2, N))
    torch.testing.assert_close(p.sum(-1), torch.ones(3, 2, N), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
def test_aggregate(dtype):
    def exact(x, pre):
        return (torch.einsum("sbci,sbi->sbc", x, pre),)

    _agree(lambda x, pre: (mhc.mhc_fused_aggregate(x, pre, N),), exact, _leaves((3, 2, 10, N), (3, 2, N), dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_expand_and_combine(dtype, with_bias):
    def formula(f, post, x, res, bias=None):
        return (mhc.mhc_fused_expand_combine(f, bias, post, x, res, N),)

    def exact(f, post, x, res, bias=0):
        return (torch.einsum("sbc,sbj->sbcj", f + bias, post) + torch.einsum("sbci,sbij->sbcj", x, res),)

    shapes = [(3, 2, 10), (3, 2, N), (3, 2, 10, N), (3, 2, N, N), *[(10,)] * with_bias]
    _agree(formula, exact, _leaves(*shapes, dtype=dtype))


def _block(x, phi, alpha, beta, buffer=None):
    y, post, res = mhc.mhc_generate_mix_and_aggregate(x, phi, alpha, beta, fused_grad_x_acc_buffer=buffer)
    return mhc.mhc_fused_expand_combine(y.tanh(), None, post, x, res, N, fused_grad_x_acc_buffer=buffer)


def test_a_buffer_sums_the_gradients_of_x_in_fp32():
    """Of a whole block in BF16: rounded once, where autograd rounds three gradients and their sums."""
    leaves = _leaves((3, 2, 10, N), (24, 40), (3,), (1, 24), dtype=torch.bfloat16)
    single = [leaf.detach().float().requires_grad_() for leaf in leaves]
    buffer = torch.full((3, 2, 10, N), float("nan"))  # what it held is not read
    out = _block(*leaves, buffer)
    grad = torch.randn_like(out)
    out.backward(grad)
    assert torch.equal(leaves[0].grad, buffer.bfloat16())
    apart = torch.autograd.grad(_block(*leaves), leaves[0], grad)[0]
    exact = torch.autograd.grad(_block(*single), single[0], grad.float())[0]
    error, rounded_thrice = ((g.float() - exact).norm() / exact.norm() for g in (leaves[0].grad, apart))
    assert error < rounded_thrice < 1e-2
    single_buffer = torch.empty_like(single[0])
    summed = torch.autograd.grad(_block(*single, single_buffer), single[0], grad.float())[0]
    torch.testing.assert_close(summed, exact, rtol=1e-5, atol=1e-6)


def test_autocast_does_not_reach_into_them():
    leaves = _leaves((3, 2, 10, N), (24, 40), (3,), (1, 24))
    grad = torch.randn(3, 2, 10, N)
    plain = _block(*leaves)
    with torch.autocast("cuda", torch.bfloat16):
        cast = _block(*leaves)
        grads = torch.autograd.grad(cast, leaves, grad)
    assert torch.equal(plain, cast)
    assert all(map(torch.equal, grads, torch.autograd.grad(plain, leaves, grad)))


def test_gradients_of_what_is_frozen_are_not_computed():
    x, phi, alpha, beta = _leaves((3, 2, 10, N), (24, 40), (3,), (1, 24))
    _block(x, phi.requires_grad_(False), alpha, beta.requires_grad_(False)).sum().backward()
    assert phi.grad is beta.grad is None
    assert x.grad.any()
    assert alpha.grad.any()


def test_the_checks_are_te_s():
    x, phi = _leaves((6, 40), (20, 40))
    with pytest.raises(AssertionError, match="n=4"):
        mhc.mhc_fused_projection(x, phi)
