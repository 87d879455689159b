"""The other kernels beside plain torch: cross entropy over ranks, scaled activations, rotary embedding, groups' sums;
none of TE's Triton kernels is left."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from support.te_cases import ARCH
from support.te_ranks import cross_entropy
from transformer_engine.pytorch import jit
from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from transformer_engine.pytorch.triton import grouped_dbias_dscales, pad

from nemo_fp8.te_cpu import triton_kernels

# ---------------------------------------------------------------------- cross entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduce", [False, True])
def test_cross_entropy(smoothing, reduce):
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, 50, requires_grad=True), torch.randint(0, 50, (3, 4))
    y[0, 1] = -100
    loss = parallel_cross_entropy(x, y, smoothing, reduce)
    kind = "mean" if reduce else "none"
    expected = torch.nn.functional.cross_entropy(x.view(12, 50), y.view(12), reduction=kind, label_smoothing=smoothing)
    torch.testing.assert_close(loss.reshape(-1), expected.reshape(-1))
    mine, theirs = (torch.autograd.grad(of.sum() * 3, x)[0] for of in (loss, expected))
    torch.testing.assert_close(mine, theirs)


def test_cross_entropy_of_a_vocabulary_on_two_ranks(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    torch.multiprocessing.spawn(cross_entropy, (2, tmp_path / "store", ARCH, results), nprocs=2)
    found = sorted(results.get() for _ in range(2))
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, 50, requires_grad=True), torch.randint(0, 50, (3, 4))
    loss = torch.nn.functional.cross_entropy(x.view(12, 50), y.view(12), reduction="none", label_smoothing=0.1).view(
        3, 4
    )
    loss.sum().backward()
    for _, of_rank, _ in found:
        torch.testing.assert_close(torch.tensor(of_rank), loss)
    torch.testing.assert_close(torch.cat([torch.tensor(grad) for _, _, grad in found], -1), x.grad)


# ---------------------------------------------------------------------- activations


def _plain(name, x, interleave):
    if name == "srelu":
        return torch.relu(x) ** 2
    pieces = x.unflatten(-1, (-1, 2, interleave or x.shape[-1] // 2))
    a, b = pieces[..., 0, :].flatten(-2), pieces[..., 1, :].flatten(-2)
    if name == "swiglu":
        return torch.nn.functional.silu(a) * b
    if name == "situglu":
        return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)
    a, b = a.clamp(max=7), b.clamp(-7, 7) + 1
    return a * torch.sigmoid(1.702 * a) * b


@pytest.mark.parametrize("with_bias", [False, True])
def test_gelus_that_a_gpu_compiles_are_rounded_once(with_bias):
    """Half a unit in the last place of BF16 from FP64, and not one rounding for each step of the formula."""
    torch.manual_seed(0)
    x, grad = (torch.randn(64, 128).bfloat16() for _ in range(2))
    bias = torch.randn(128).bfloat16() if with_bias else torch.empty(0).bfloat16()
    exact = (x.double() + (bias.double() if with_bias else 0)).requires_grad_()
    expected = torch.nn.functional.gelu(exact, approximate="tanh")
    expected.backward(grad.double())
    dbias, dx = jit.bgrad_dgelu_fused(grad, x, bias)
    half = {"rtol": 1.01 * 2**-8, "atol": 1e-6}
    torch.testing.assert_close(jit.bias_gelu_fused(x, bias).double(), expected.detach(), **half)
    torch.testing.assert_close(dx.double(), exact.grad, **half)
    if with_bias:
        assert torch.equal(dbias, dx.sum(0))


@pytest.mark.parametrize("interleave", [0, 8])
@pytest.mark.parametrize(
    ("name", "derivative"), [("swiglu", "dswiglu"), ("situglu", "dsituglu"), ("clamped_swiglu", "clamped_dswiglu")]
)
def test_scaled_gates(name, derivative, interleave):
    x, s = (torch.randn(12, 64) * 4).requires_grad_(), torch.rand(12, requires_grad=True)
    expected = _plain(name, x, interleave) * s[:, None]
    y = getattr(tex, f"scaled_{name}")(x.detach(), s.detach(), None, glu_interleave_size=interleave)
    torch.testing.assert_close(y, expected.detach())
    g = torch.randn_like(y)
    found = getattr(tex, f"scaled_{derivative}")(g, x.detach(), s.detach(), None, glu_interleave_size=interleave)
    for mine, theirs in zip(found, torch.autograd.grad(expected, (x, s), g), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if not interleave:
        torch.testing.assert_close(getattr(tex, name)(x.detach(), None), _plain(name, x, 0).detach())
        (theirs,) = torch.autograd.grad(_plain(name, x, 0), x, g)
        torch.testing.assert_close(getattr(tex, derivative)(g, x.detach(), None), theirs, rtol=1e-4, atol=1e-5)


def test_scaled_squared_relu_without_its_scales_gradient():
    x, s = torch.randn(12, 32), torch.rand(12)
    torch.testing.assert_close(tex.scaled_srelu(x, s, None), torch.relu(x) ** 2 * s[:, None])
    grad, of_scales = tex.scaled_dsrelu(torch.ones_like(x), x, s, None, compute_scale_grad=False)
    torch.testing.assert_close(grad, 2 * torch.relu(x) * s[:, None])
    assert of_scales is None


def test_an_unknown_parameter_of_an_activation_is_refused():
    with pytest.raises(TypeError, match="limit, alpha, glu_linear_offset"):
        tex.clamped_swiglu(torch.randn(2, 4), None, beta=1.0)


# ---------------------------------------------------------------------- rotary embedding


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_of_three_in_a_row_is_that_of_each(interleaved):
    angles = te.RotaryPositionEmbedding(16)(max_seq_len=10)
    qkv = torch.randn(10, 2, 3, 64 + 32 + 32, requires_grad=True)
    q, k, v = rope.apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, [64, 32, 32], interleaved=interleaved)
    apart = [part.reshape(10, 2, -1, 32) for part in qkv.split([64, 32, 32], -1)]
    expected = [rope.apply_rotary_pos_emb(part, angles, interleaved=interleaved) for part in apart[:2]]
    torch.testing.assert_close([q, k, v], [*expected, apart[2]])
    grads = [torch.randn_like(part) for part in (q, k, v)]
    mine, theirs = torch.autograd.grad((q, k, v), qkv, grads), torch.autograd.grad([*expected, apart[2]], qkv, grads)
    torch.testing.assert_close(mine, theirs)


def test_ranks_of_context_parallelism_rotate_their_own_places():
    angles = te.RotaryPositionEmbedding(16)(max_seq_len=16)
    x = torch.randn(16, 1, 2, 16)
    whole = rope.apply_rotary_pos_emb(x, angles, fused=True)
    for rank in range(2):
        own = torch.cat([torch.arange(rank * 4, rank * 4 + 4), torch.arange(12 - rank * 4, 16 - rank * 4)])
        part = rope.apply_rotary_pos_emb(x[own], angles, fused=True, cp_size=2, cp_rank=rank)
        assert torch.equal(part, whole[own])


# ---------------------------------------------------------------------- rows


def test_sums_of_groups_of_rows():
    offsets = torch.tensor([0, 3, 3, 10])
    dy, scales, bias = torch.randn(12, 8), torch.rand(12), torch.randn(3, 8)
    of_rows = torch.tensor([0] * 3 + [2] * 7)
    total = torch.ones(3, 8)
    dbias = grouped_dbias_dscales.compute_grouped_dbias(dy, offsets, 3, dbias=total)
    torch.testing.assert_close(dbias, torch.ones(3, 8).index_add(0, of_rows, dy[:10]))
    assert dbias is total
    dbias, dscales = grouped_dbias_dscales.compute_grouped_dbias_dscales(dy, scales, bias, offsets)
    torch.testing.assert_close(dbias, torch.zeros(3, 8).index_add(0, of_rows, (dy * scales[:, None])[:10]))
    torch.testing.assert_close(dscales, torch.cat([(dy[:10] * bias[of_rows]).sum(1), torch.zeros(2)]))


def test_scales_are_padded_with_zeros():
    scales = torch.randint(1, 255, (130, 5), dtype=torch.uint8)
    padded = pad.pad_columnwise_scale_inv(scales)
    assert padded.shape == (256, 8)
    assert torch.equal(padded[:130, :5], scales)
    assert padded.sum() == scales.sum()


def test_offsets_of_groups():
    sizes, (elements, ends) = tex.splits_to_offsets_multi(
        torch.tensor([3, 0, 5]).int(),
        "cuda",
        strides=[4, 1],
        include_leading_zero=[True, False],
        dtypes=[torch.int64, torch.int32],
    )
    assert sizes.dtype == torch.int64
    assert elements.tolist() == [0, 12, 12, 32]
    assert ends.tolist() == [3, 3, 8]
    assert ends.dtype == torch.int32


# ---------------------------------------------------------------------- none forgotten

LAUNCH = re.compile(r"\w\[[^\[\]]*\]\($", re.M)
"""``kernel[grid](``: what no other call looks like."""


@pytest.mark.parametrize("module", triton_kernels.LAUNCHERS)
def test_nobody_outside_calls_what_launches(module):
    """What is public in TE's Triton modules is ours, or launches nothing: mHC's checks above its operators."""
    home = importlib.import_module(triton_kernels.HOME + module)
    _, names = triton_kernels.LAUNCHERS[module]
    assert all(getattr(home, name).__module__.startswith("nemo_fp8.") for name in names.split())
    left = [value for name, value in vars(home).items() if callable(value) and not name.startswith("_")]
    assert not [v for v in left if v.__module__ == home.__name__ and LAUNCH.search(inspect.getsource(v))]


def test_every_module_of_te_that_launches_is_known():
    folder = Path(importlib.import_module(triton_kernels.HOME.rstrip(".")).__file__).parent
    launching = {file.stem for file in folder.glob("*.py") if LAUNCH.search(file.read_text())}
    assert launching == set(triton_kernels.LAUNCHERS)
