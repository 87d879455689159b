"""BF16 products in FP32: the right bits from every operator and in every thread, and nothing is left behind."""

import os
import platform
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_fp8 import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import bf16, gemm, quantize
from nemo_fp8.numerics.autocast import autocast
from nemo_fp8.numerics.bf16 import bf16_products, multiplies_bf16, products_in_fp32, scales_sums
from nemo_fp8.numerics.linear import linear

BF16 = torch.bfloat16
NAMES = [name + variant for name in bf16._OPERANDS for variant in ("", *bf16._VARIANTS.get(name, ()))]


def draw(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def once(function, *args, **kwargs):
    """The expected result: BF16 operands in FP32, rounded once."""
    return function(*(a.float() if isinstance(a, torch.Tensor) and a.dtype is BF16 else a for a in args), **kwargs).to(
        BF16
    )


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def registered():
    """What the dispatcher holds for the operators that are replaced."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in NAMES]


class Products(TorchDispatchMode):
    """Which types were multiplied, seen above the kernels."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "addmv"):
            self.seen.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- the question


def ask(isa):
    code = "from nemo_fp8.numerics.bf16 import multiplies_bf16 as f; print(f())"
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"} | isa
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_this_processor_s_answer_is_what_its_flags_say():
    flags = torch.cpu.get_capabilities()
    units = ("avx512_bf16", "amx_bf16") if flags["architecture"] == "x86_64" else ("arm_bf16", "bf16")
    assert ask({}) == any(flags.get(unit) for unit in units)


@pytest.mark.parametrize("isa", ["AVX512_CORE", "AVX2"])
def test_a_processor_without_units(isa):
    """oneDNN multiplies BF16 on AVX-512 without units, too, and torch says that it is supported; it is slower than
    FP32."""
    assert not ask({"ONEDNN_MAX_CPU_ISA": isa})


def test_the_answer_is_the_same_where_subnormals_are_flushed():
    expected = multiplies_bf16.__wrapped__()
    torch.set_flush_denormal(True)
    try:
        assert multiplies_bf16.__wrapped__() == expected
        assert torch.tensor(2.0**-130) * 2.0**100 == 0, "the setting is put back"
    finally:
        torch.set_flush_denormal(False)


def test_on_x86_sums_are_scaled_before_they_are_rounded():
    assert scales_sums.__wrapped__() == (platform.machine() == "x86_64")


def test_arm_is_not_asked(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.delattr(torch, "addmm")
    assert not scales_sums.__wrapped__()


@pytest.mark.parametrize("where", ["small", "large", "turned", "without a bias", "with a bias"])
@pytest.mark.parametrize("how", ["sums are rounded", "the scale is rounded", "the bias is added last"])
def test_a_torch_that_rounds_first_is_seen(monkeypatch, how, where):
    """Wherever it does: kernels are chosen by size and layout."""
    real = torch.addmm

    def rounds_first(bias, a, b, *, beta, alpha):
        wrong = {
            "small": len(a) == 1,
            "large": len(a) > 1,
            "turned": a.stride(1) > 1 and b.stride(1) == 1,
            "without a bias": not beta,
            "with a bias": beta,
        }
        if not wrong[where]:
            return real(bias, a, b, beta=beta, alpha=alpha)
        if how == "the bias is added last":
            return real(bias, a, b, beta=0, alpha=alpha) + beta * bias
        if how == "the scale is rounded":
            return real(bias, a, b, beta=beta, alpha=float(torch.tensor(alpha, dtype=BF16)))
        return (torch.mm(a, b).float() * alpha + beta * bias).to(BF16)

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch, "addmm", rounds_first)
    assert scales_sums.__wrapped__() == (how == "the bias is added last" and where == "without a bias")


# ---------------------------------------------------------------------- the bits

sizes = st.integers(0, 40)


@settings(max_examples=60, deadline=None)
@given(
    sizes,
    sizes,
    sizes,
    st.integers(0, 3),
    st.sampled_from([0, 1, 0.5, -2]),
    st.sampled_from([0, 1, 3.0]),
    st.integers(0, 99),
)
def test_every_operator_rounds_the_fp32_product_once(m, k, n, batch, beta, alpha, seed):
    a, b = draw(m, k, seed=seed), draw(n, k, seed=seed + 1).t()
    c, row = draw(m, n, seed=seed + 2), draw(n, seed=seed + 3)
    x, y, z = a.expand(batch, m, k), b.expand(batch, k, n), draw(batch, m, n, seed=seed)
    scaled = {"beta": beta, "alpha": alpha}
    calls = [
        (torch.mm, a, b),
        (torch.matmul, a, b),
        (torch.bmm, x, y),
        (F.linear, a, b.t()),
        (F.linear, a, b.t(), row),
        (F.linear, x.contiguous(), b.t(), row),  # torch itself adds a bias to what lies apart, rounding twice
        (torch.mv, b, row),
        (partial(torch.addmm, **scaled), c, a, b),
        (partial(torch.addmm, **scaled), row, a, b),
        (partial(torch.baddbmm, **scaled), z, x, y),
        (partial(torch.baddbmm, **scaled), c, x, y),
        (partial(torch.addmv, **scaled), draw(k, seed=seed), b, row),
    ]
    expected = [once(function, *args) for function, *args in calls]
    with products_in_fp32():
        found = [function(*args) for function, *args in calls]
    for (function, *_), f, e in zip(calls, found, expected, strict=True):
        assert same(f, e), function
    # Against sums in FP64: half a place of BF16, and what FP32 sums of k products may lose.
    exact = a.double() @ b.double()
    slack = k * 2.0**-23 * (a.double().abs() @ b.double().abs())
    assert ((found[0].double() - exact).abs() <= exact.abs() * 2.0**-8 + slack + 2.0**-133).all()


def test_units_and_fp32_are_not_the_same_bits_so_that_the_tests_see_who_multiplied():
    a, b = torch.full((32, 32), 2.0**-130, dtype=BF16), torch.eye(32, dtype=BF16) * 2.0**100
    assert bool((a @ b == 0).all()) == multiplies_bf16()
    with products_in_fp32():
        assert (a @ b == 2.0**-30).all()


def test_a_first_operand_with_beta_zero_is_not_read():
    a, b, nan = draw(5, 7), draw(7, 3), torch.full((5, 3), torch.nan, dtype=BF16)
    with products_in_fp32():
        assert same(torch.addmm(nan, a, b, beta=0), once(torch.mm, a, b))
        assert same(torch.addmm(nan[0], a, b, beta=0.0, alpha=2), once(torch.mm, 2 * a, b))
        assert same(torch.baddbmm(nan, a[None], b[None], beta=0.0), once(torch.mm, a, b)[None])
        assert same(nan.clone().addmm_(a, b, beta=0), once(torch.mm, a, b))
        assert torch.addmm(nan, a, b).isnan().all()


def test_results_are_written_where_they_are_asked_for():
    a, b, c = draw(6, 8), draw(8, 4), draw(6, 4)
    with products_in_fp32():
        wide = torch.zeros(6, 9, dtype=BF16)
        out = wide[:, ::2][:, :4]
        assert torch.mm(a, b, out=out) is out
        assert same(wide[:, 0:8:2], once(torch.mm, a, b))
        assert not wide[:, 1::2].any()
        empty = torch.empty(0, dtype=BF16)
        assert torch.addmm(c, a, b, out=empty) is empty
        assert same(empty, once(torch.addmm, c, a, b))
        again = c.clone()
        assert torch.addmm(again, a, b, out=again) is again
        assert again.equal(empty)
        again, batch = c.clone(), c.clone()[None]
        assert again.addmm_(a, b, alpha=3) is again
        assert same(again, once(partial(torch.addmm, alpha=3), c, a, b))
        assert batch.baddbmm_(a[None], b[None]) is batch
        assert same(batch[0], empty)
        square = draw(5, 5)
        expected = once(torch.mm, square, square)
        assert same(torch.mm(square, square, out=square), expected)
        with pytest.warns(UserWarning, match="was resized"):
            torch.mm(a, b, out=torch.empty(3, dtype=BF16))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: a @ a.float(),
        lambda a: a @ a[:3],
        lambda a: torch.mm(a, a, out=torch.empty(5, 5)),
        lambda a: torch.addmm(a[:2], a, a),
        lambda a: torch.addmm(a.float(), a, a),
        lambda a: a[:1].clone().addmm_(a, a),
        lambda a: torch.bmm(a, a),
        lambda a: torch.baddbmm(a, a[None], a[None, :3]),
    ],
)
def test_what_torch_refuses_is_refused(wrong):
    a = draw(5, 5)
    with pytest.raises(RuntimeError):
        wrong(a)
    with products_in_fp32(), pytest.raises(RuntimeError):
        wrong(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32, torch.complex64])
def test_other_types_are_as_before(dtype):
    a = draw(33, 33, dtype=torch.float32).mul(100).to(dtype)
    calls = [
        lambda: a @ a,
        lambda: torch.baddbmm(a[None], a[None], a[None]),
        lambda: torch.mm(a, a, out=torch.empty(33, 33, dtype=dtype)),
    ]
    before = [call() for call in calls]
    with products_in_fp32():
        for call, expected in zip(calls, before, strict=True):
            assert call().equal(expected)


def test_inference_and_subclasses():
    a, b = draw(6, 8), draw(8, 4)

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            assert "float" not in func.__name__, "what an operator does inside is its own affair"
            return super().__torch_function__(func, types, args, kwargs)

    with products_in_fp32():
        with torch.inference_mode():
            out = a @ b
        assert out.is_inference()
        assert same(out, once(torch.mm, a, b))
        named = a.as_subclass(Named) @ b
        assert type(named) is Named
        assert same(named.as_subclass(torch.Tensor), once(torch.mm, a, b))
        assert same(torch.nn.Parameter(a) @ b, once(torch.mm, a, b))


# ---------------------------------------------------------------------- gradients


def gradients(function, *leaves, create_graph=False):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(function(*leaves).float().pow(2).sum(), leaves, create_graph=create_graph), leaves


def test_backward_and_double_backward():
    a, b, c = draw(9, 16), draw(16, 11), draw(9, 11)
    with products_in_fp32():
        (da, db, dc), (a1, b1, _) = gradients(lambda a, b, c: torch.addmm(c, a, b), a, b, c, create_graph=True)
        y = once(torch.addmm, c, a, b)
        dy = 2 * y
        assert same(da, once(torch.mm, dy, b.t()))
        assert same(db, once(torch.mm, a.t(), dy))
        assert same(dc, dy)
        twice = torch.autograd.grad(da.float().sum(), [a1, b1])
    reference = [t.float().requires_grad_() for t in (a, b)]
    first = torch.autograd.grad((c.float() + reference[0] @ reference[1]).pow(2).sum(), reference, create_graph=True)[0]
    for found, expected in zip(twice, torch.autograd.grad(first.sum(), reference), strict=True):
        assert (found.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("mask", [None, "causal", "boolean", "added"])
def test_the_gradients_of_fused_attention(mask):
    """Fused attention's backward is one operator: its operands in FP32, its three results rounded."""
    q, k, v = (draw(2, 3, 40, 16, seed=seed) for seed in range(3))
    given = {"boolean": torch.ones(40, 40, dtype=torch.bool).tril(), "added": draw(40, 40)}.get(mask)
    attend = partial(F.scaled_dot_product_attention, is_causal=mask == "causal")
    with products_in_fp32():
        found, _ = gradients(partial(attend, attn_mask=given), q, k, v)
    exact, _ = gradients(
        partial(attend, attn_mask=given.float() if mask == "added" else given), q.float(), k.float(), v.float()
    )
    for f, e in zip(found, exact, strict=True):
        assert f.dtype is BF16
        assert (f.float() - e).norm() < 0.01 * e.norm()


def test_attention_s_backward_multiplies_fp32():
    """Each gradient is the FP32 one, rounded."""
    q, k, v, dy = (draw(1, 2, 64, 32, seed=seed) for seed in range(4))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    with products_in_fp32():
        found = backward(dy, q, k, v, out, logsumexp, 0.0, False)
    for f, e in zip(found, backward(*(t.float() for t in (dy, q, k, v, out)), logsumexp, 0.0, False), strict=True):
        assert same(f, e.to(BF16))


@pytest.mark.parametrize(
    ("function", "x", "weight", "bias", "options"),
    [
        (F.conv1d, (2, 8, 20), (8, 1, 4), (8,), {"groups": 8, "padding": 3}),  # as in Mamba's mixers
        (F.conv2d, (2, 4, 9, 9), (6, 4, 3, 3), None, {"stride": 2}),
        (F.conv2d, (2, 4, 9, 9), (6, 4, 3, 3), (6,), {"padding": "same"}),
        (F.conv_transpose2d, (2, 4, 5, 5), (4, 6, 3, 3), (6,), {"dilation": 2}),
        (F.conv3d, (1, 3, 4, 14, 14), (5, 3, 2, 7, 7), (5,), {"stride": (2, 7, 7)}),  # as patches of a video
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,)], ids=["all gradients", "the weight's alone"])
def test_convolutions(function, x, weight, bias, options, wanted):
    given = [draw(*shape, seed=seed) if shape else None for seed, shape in enumerate((x, weight, bias))]
    wide = [None if t is None else t.float() for t in given]
    for tensors in (given, wide):
        for i in wanted:
            _ = tensors[i] is not None and tensors[i].requires_grad_()
    with products_in_fp32():
        found = function(*given, **options)
        dy = draw(*found.shape, seed=9)
        found.backward(dy)
    expected = function(*wide, **options)
    expected.backward(dy.float())
    assert same(found, expected.to(BF16))
    for i in wanted:
        assert given[i] is None or same(given[i].grad, wide[i].grad.to(BF16))


def test_a_compiled_function():
    a, b, c = draw(32, 32), draw(32, 32), draw(32, 32)
    compiled = torch.compile(lambda a, b, c: torch.addmm(c, a, b).relu() @ b, backend="aot_eager")
    compiled(a, b, c)
    with products_in_fp32():
        hidden = once(torch.addmm, c, a, b).relu()
        assert same(compiled(a, b, c), once(torch.mm, hidden, b))


# ---------------------------------------------------------------------- the context


@pytest.fixture(autouse=True)
def torchs_own_kernels():
    """Begin each test with them, also in a process that te_cpu has taken them from, as it does on a CPU without BF16
    units."""
    held = [dtype for dtype, times in bf16._replaced.open.items() for _ in range(times)]
    for dtype in held:
        bf16._replaced.leave(dtype)
    yield
    for dtype in held:
        bf16._replaced.enter(dtype)


def fail_inside(before):
    within = registered()
    assert all(a != b for a, b in zip(before, within, strict=True))
    with products_in_fp32():
        assert registered() == within
    assert registered() == within
    raise ZeroDivisionError


def test_nothing_is_left_behind():
    before, precision = registered(), torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), products_in_fp32():
        fail_inside(before)
    assert registered() == before
    assert torch.backends.mkldnn.matmul.fp32_precision == precision


def test_only_the_cpu_s_kernels_are_replaced():
    def others():
        tables = [torch._C._dispatch_dump_table(f"aten::{name}") for name in NAMES]
        return [[line for line in table.splitlines() if not line.startswith("CPU:")] for table in tables]

    before = others()
    with products_in_fp32():
        assert others() == before


def test_contexts_of_two_threads_may_overlap():
    a, b = torch.full((32, 32), 2.0**-130, dtype=BF16), torch.eye(32, dtype=BF16) * 2.0**100
    opened, close, before = threading.Event(), threading.Event(), registered()

    def other():
        with products_in_fp32():
            opened.set()
            close.wait(60)

    thread = threading.Thread(target=other)
    with products_in_fp32():
        thread.start()
        assert opened.wait(60)
    assert (a @ b != 0).all(), "the other thread's context is open"
    close.set()
    thread.join(60)
    assert registered() == before


def test_each_type_is_asked_for_by_itself():
    """FP16 in FP32 leaves BF16 as it is, and the other way round; each is rounded once, beyond its range to
    infinity."""
    for dtype, other in ((torch.float16, BF16), (BF16, torch.float16)):
        a, b, c = (draw(40, 40, seed=seed, dtype=dtype) * 30 for seed in range(3))
        mine, theirs = torch.addmm(c, a, b), a.to(other) @ b.to(other)
        with products_in_fp32(dtype):
            found = torch.addmm(c, a, b)
            assert same(found, torch.addmm(c.float(), a.float(), b.float()).to(dtype))
            assert same(a.to(other) @ b.to(other), theirs)
            assert bool((a * 30 @ (b * 30)).isinf().any()) == (dtype is torch.float16)
        assert same(torch.addmm(c, a, b), mine)


@pytest.mark.skipif(bf16.multiplies_fp16(), reason="a processor with FP16 units")
def test_fp16_is_as_fast_as_fp32():
    """Without it, some 30 times slower."""
    a, b = draw(256, 512, dtype=torch.float16), draw(512, 256, dtype=torch.float16)

    def spent(a, b):
        times = []
        for _ in range(7):
            before = time.process_time()
            a @ b
            times.append(time.process_time() - before)
        return min(times)

    with bf16.fp16_products():
        assert spent(a, b) < 5 * spent(a.float(), b.float())


def test_convolutions_are_computed_by_the_replaced_kernels():
    names = ("aten::convolution", "aten::convolution_backward")
    before = [torch._C._dispatch_dump(name) for name in names]
    with products_in_fp32():
        assert all(torch._C._dispatch_dump(name) != old for name, old in zip(names, before, strict=True))


def test_it_is_opened_only_where_there_are_no_units(monkeypatch):
    before = registered()
    for units in (True, False):
        monkeypatch.setattr(bf16, "multiplies_bf16", lambda units=units: units)
        with bf16_products():
            assert (registered() == before) == units
    assert registered() == before


def test_importing_replaces_nothing_and_asks_nothing():
    code = (
        "import torch; before = torch._C._dispatch_dump('aten::mm')\n"
        "import nemo_fp8, nemo_fp8.numerics, nemo_fp8.numerics.autocast\n"
        "from nemo_fp8.numerics.bf16 import multiplies_bf16\n"
        "assert torch._C._dispatch_dump('aten::mm') == before\n"
        "assert multiplies_bf16.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fp32_products_are_ieee_inside():
    """Whoever allowed BF16 multipliers for FP32 products meant to make them faster, and here they are slower."""
    matmul = torch.backends.mkldnn.matmul
    previous, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        with products_in_fp32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = previous


def test_a_torch_without_its_own_kernels_to_hand_out_says_so(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    before = registered()
    with pytest.raises(PrecisionError, match="hand out"), products_in_fp32():
        pass
    assert registered() == before


# ---------------------------------------------------------------------- who asks


@pytest.fixture(params=[True, False], ids=["units", "no units"])
def units(request, monkeypatch):
    for module in (bf16, gemm):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: request.param)
    return request.param


def expected_types(units):
    return {BF16 if units else torch.float32}


@pytest.mark.parametrize("bias", [False, True])
def test_one_linear(units, bias):
    leaves = [draw(3, 9, 16), draw(11, 16, seed=1), *([draw(11, seed=2)] if bias else [])]
    with Products() as products:
        found, (x, weight, *_) = gradients(bf16.linear, *leaves)
    assert set(products.seen) == expected_types(units)
    assert len(products.seen) == 3
    if not units:
        dy = (2 * once(F.linear, *leaves)).reshape(-1, 11)
        assert same(found[0].reshape(-1, 16), once(torch.mm, dy, weight.detach()))
        assert same(found[1], once(torch.mm, dy.t(), x.detach().reshape(-1, 16)))
    for f, leaf in zip(found, leaves, strict=True):
        assert (f.dtype, f.shape) == (leaf.dtype, leaf.shape)


def test_one_linear_under_torch_s_autocast(units):
    x, weight = draw(9, 16, dtype=torch.float32), draw(11, 16, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        with Products() as products:
            y = bf16.linear(x, weight)
        assert y.dtype is BF16
        assert set(products.seen) == expected_types(units)
        assert F.linear(x, weight).dtype is BF16, "torch's autocast goes on"
    if not units:
        assert same(y, once(F.linear, x.to(BF16), weight.to(BF16)))
    with pytest.raises(RuntimeError, match="dtype"):
        bf16.linear(x.to(BF16), weight)


@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize(
    "name", ["bf16_with_fp8_blockwise_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_mxfp8_mixed"]
)
def test_an_fp8_linear(units, name, wgrad):
    """Integers that are exact in FP8, with exact sums: both ways give one answer, forward and backward."""
    precision = preset(name).replace(wgrad=wgrad)
    g = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randint(-4, 5, shape, generator=g).to(BF16) for shape in ((64, 128), (96, 128), (64, 96)))
    x, w = x.requires_grad_(), w.requires_grad_()
    with Products() as products:
        y = linear(x, w, precision=precision)
        y.backward(dy)
    if not units:
        assert set(products.seen) == {torch.float32}
    elif precision.weight_scale == "pow2" or bf16.scales_sums():
        assert set(products.seen) == {BF16}
    if precision.weight_scale == "pow2":
        assert same(y.detach(), (x.double() @ w.double().t()).to(BF16).detach())
        assert same(w.grad, (dy.double().t() @ x.double()).to(BF16).detach())


@pytest.mark.parametrize("scaled", [True, False], ids=["scales sums", "rounds first"])
@pytest.mark.parametrize("bias", [None, BF16, torch.float32])
@pytest.mark.parametrize("name", ["bf16_with_fp8_current_scaling_mixed", "bf16_with_nvfp4_mixed"])
def test_a_scale_of_the_whole_tensor_is_the_bf16_products_own_where_it_can_be(units, monkeypatch, name, bias, scaled):
    """Else the products are FP32, and the scale is multiplied after them; both ways give one answer. A bias in FP32
    is added in FP32."""
    monkeypatch.setattr(gemm, "scales_sums", lambda: scaled)
    operand = preset(name).operand("weight")
    q, w = (quantize(draw(rows, 64, seed=rows), operand) for rows in (32, 48))
    added = None if bias is None else draw(48, seed=2, dtype=bias)
    with Products() as products:
        found = gemm.gemm(q, w, bias=added)
        gemm.gemm(q, w, bias=added, out_dtype=torch.float32)
    fast = units and scaled and bias is not torch.float32
    assert products.seen == [BF16 if fast else torch.float32, torch.float32]
    exact = q.dequantize().double() @ w.dequantize().double().t() + (0 if added is None else added.double())
    slack = 2.0**-20 * (q.dequantize().double().abs() @ w.dequantize().double().abs().t())
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + slack).all()


def test_a_linear_that_autocast_leaves_in_bf16(units):
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)).to(BF16)
    precision = preset("bf16_with_fp8_blockwise_mixed").replace(keep=("1",))
    with Products() as products:
        with autocast(precision, model):
            y = model(draw(32, 128))
        y.float().pow(2).mean().backward()
    assert set(products.seen) == expected_types(units)


def test_fp32_scales_are_multiplied_by_no_bf16_unit_that_is_not_there(units, monkeypatch):
    """A scale for the whole tensor lets FP32 products use BF16 multipliers: those of AMX, not oneDNN's imitation of
    them."""
    asked = []
    real = gemm.fp32_matmul
    monkeypatch.setattr(gemm, "fp32_matmul", lambda precision: asked.append(precision) or real(precision))
    operand = preset("bf16_with_fp8_current_scaling_mixed").operand("weight")
    gemm.gemm(quantize(draw(32, 64), operand), quantize(draw(16, 64), operand), out_dtype=torch.float32)
    assert asked == ["bf16" if units else "ieee"]
