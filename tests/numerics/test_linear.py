"""The FP8 linear: its GEMMs against float64 on the dequantized operands, and which operands each of them uses."""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import quantize, quantize_pair
from nemo_fp8.numerics.delayed import DelayedState
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.gemm import gemm, is_exact_in_bf16
from nemo_fp8.numerics.linear import linear, operands, quantize_weight
from nemo_fp8.numerics.quantized import Quantized

RECIPES = {
    f"{scaling}-{format}-{scale or 'default'}": Precision(
        format=format, scaling=scaling, weight_scale=scale, activation_scale=scale
    )
    for scaling, scales in {
        "delayed": (None,),
        "tensorwise": ("fp32", "pow2"),
        "blockwise": ("fp32", "pow2"),
        "mxfp8": (None,),
    }.items()
    for format in ("hybrid", "e4m3")
    for scale in scales
}
each_recipe = pytest.mark.parametrize("p", RECIPES.values(), ids=RECIPES)
COMPUTE = (torch.bfloat16, torch.float16, torch.float32)


def oracle(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact product ``a @ b.T`` in float64, and how far FP32 sums may lie from it.

    AMX takes subnormal products for zero, so each of them may be lost.
    """
    a, b = a.double(), b.double()
    exact = a @ b.t()
    slack = (a.abs() @ b.abs().t()) * 2.0**-20 + a.shape[1] * 2.0**-126
    return (exact if bias is None else exact + bias.double()), slack


def assert_rounded_once(out: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> None:
    """``out`` lies within FP32 sums and one rounding of the exact product, element by element."""
    half_step = torch.finfo(out.dtype).eps / 2
    bound = exact.abs() * half_step * 1.001 + slack + torch.finfo(out.dtype).smallest_normal
    wrong = (out.double() - exact).abs() > bound
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()}, worst {float(((out.double() - exact).abs() / bound).max()):.3g} "
        "bounds off"
    )


def data(m=72, k=160, n=96, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, b, dy = (torch.randn(s, generator=g) for s in ((m, k), (n, k), (n,), (m, n)))
    return x.to(dtype).requires_grad_(), (w / 8).to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), dy.to(dtype)


@each_recipe
@pytest.mark.parametrize("dtype", COMPUTE)
def test_three_gemms_on_the_operands_of_the_contract(p, dtype):
    x, w, b, dy = data(dtype=dtype)
    delayed = DelayedState(p) if p.scaling == "delayed" else None
    y = linear(x, w, b, precision=p, delayed=delayed)
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (dtype, dtype, dtype)
    scale = torch.ones(()) if delayed else None
    (x_row, x_col), (w_row, w_col), (g_row, g_col) = (
        quantize_pair(t.detach(), operands(p)[role], scale=scale)
        for t, role in ((x, "input"), (w, "weight"), (dy, "grad"))
    )
    value = lambda q: q.dequantize_reference().double()  # noqa: E731
    assert_rounded_once(y.detach(), *oracle(value(x_row), value(w_row), b.detach()))
    assert_rounded_once(x.grad, *oracle(value(g_row), value(w_col).t()))
    assert_rounded_once(w.grad, *oracle(value(g_col).t(), value(x_col).t()))
    assert_rounded_once(b.grad, dy.double().sum(0), dy.double().abs().sum(0) * 2.0**-20)


@each_recipe
def test_wgrad_in_the_compute_dtype(p):
    x, w, _, dy = data()
    p = p.replace(wgrad=False)
    linear(x, w, precision=p, delayed=DelayedState(p) if p.scaling == "delayed" else None).backward(dy)
    assert torch.equal(w.grad, dy.t() @ x.detach())


@pytest.mark.parametrize("kind", ["fp32", "pow2", "e8m0"])
@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 200)] * 3),
    exponents=st.tuples(*[st.integers(-70, 50)] * 2),
    formats=st.sampled_from([("e4m3", "e4m3"), ("e5m2", "e4m3")]),
    usages=st.tuples(*[st.sampled_from(["row", "col"])] * 2),
    out_dtype=st.sampled_from(COMPUTE),
    data=st.data(),
)
def test_gemm_of_any_operands(kind, shape, exponents, formats, usages, out_dtype, data):
    m, n, k = shape
    blocks = {"fp32": (None, (1, 128), (128, 128)), "pow2": (None, (1, 128), (128, 128)), "e8m0": ((1, 32),)}[kind]
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    quantized = []
    for rows, exponent, format, usage in zip((m, n), exponents, formats, usages, strict=True):
        x = torch.ldexp(torch.randn(rows, k, generator=g), torch.tensor(exponent))
        x[torch.rand(rows, k, generator=g) < 0.2] = 0
        x[:, : k // 2] *= data.draw(st.sampled_from([0.0, 1.0, 2.0**-60]))
        source = x if usage == "row" else x.t().contiguous()
        quantized.append(quantize(source, Operand(format, data.draw(st.sampled_from(blocks)), kind), usage=usage))
    values = [q.dequantize_reference() for q in quantized]
    a, b = (v if usage == "row" else v.t() for v, usage in zip(values, usages, strict=True))
    exact, slack = oracle(a, b)
    out = gemm(*quantized, out_dtype=out_dtype)
    inside = exact.abs() + slack < torch.finfo(out_dtype).max / 2  # large products may cancel: FP32's rest may be large
    assert_rounded_once(torch.where(inside, out, 0), torch.where(inside, exact, 0), slack)


def test_bf16_results_are_rounded_once_to_the_bit():
    """Integers small enough for every sum to be exact: then there is one right answer."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-8, 9, s, generator=g).bfloat16() for s in ((64, 1024), (48, 1024)))
    bias = torch.randn(48, generator=g).bfloat16()
    exact = x.double() @ w.double().t()
    for p in RECIPES.values():
        if p.scaling == "delayed":
            continue
        scale_is_exact = p.weight_scale == "pow2"
        y = linear(x, w, precision=p)
        z = linear(x, w, bias, precision=p)
        if scale_is_exact:
            assert torch.equal(y, exact.bfloat16())
            assert torch.equal(z, (exact + bias.double()).bfloat16())


def whole(codes: torch.Tensor, scale_inv: float, usage: str, format=torch.float8_e4m3fn) -> Quantized:
    """[outer, contracted] numbers that FP8 holds as an operand with one scale."""
    data = codes if usage == "row" else codes.t().contiguous()
    return Quantized(data.to(format), torch.tensor(scale_inv), None, usage)


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("usages", itertools.product(("row", "col"), repeat=2))
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 5), (1, 300, 17), (64, 16, 15), (33, 130, 257), (160, 1, 96)])
def test_the_scale_of_a_tensor_is_multiplied_before_the_one_rounding(shape, usages, formats):
    """Integers whose sums are exact in any order: nothing but the scale and one rounding lies between them and the
    result."""
    m, k, n = shape
    g = torch.Generator().manual_seed(m + k + n)
    a, b = (torch.randint(-4, 5, (rows, k), generator=g).float() for rows in (m, n))
    bias = torch.randn(n, generator=g).bfloat16()
    left, right = (
        whole(codes, scale_inv, usage, format_of(format).dtype)
        for codes, scale_inv, usage, format in zip((a, b), (0.0123, 7.77), usages, formats, strict=True)
    )
    exact = a.double() @ b.double().t() * float(left.scale_inv * right.scale_inv)
    for threads in (1, 2):
        with limited(threads):
            assert_rounded_once(gemm(left, right), exact, exact.abs() * 2.0**-22)
            found = gemm(left, right, bias=bias)
        assert_rounded_once(found, exact + bias.double(), (exact.abs() + bias.double().abs()) * 2.0**-22)


def test_a_scale_after_the_rounding_would_be_seen():
    exact = torch.arange(1.0, 4000.0).double()
    twice = exact.bfloat16() * 0.0957
    with pytest.raises(AssertionError, match="bounds off"):
        assert_rounded_once(twice, exact * 0.0957, exact * 2.0**-22)


@contextmanager
def limited(threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scales", [(2.0**-70, 2.0**-60), (1e-30, 1e-30), (3e38, 3.0), (0.0, 1.5), (math.nan, 1.0)])
def test_scales_that_no_bf16_gemm_can_apply_are_multiplied_in_fp32(scales):
    """Results below BF16's normal numbers, zero times infinity: as FP32 has them."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (rows, 64), generator=g).float() for rows in (32, 48))
    sums = a @ b.t()
    assert same(gemm(*(whole(t, s, "row") for t, s in zip((a, b), scales, strict=True))), factored(sums, *scales))
    a[3, 5] = math.nan
    sums = a @ b.t()
    assert sums[3].isnan().all()
    assert same(gemm(*(whole(t, s, "row") for t, s in zip((a, b), scales, strict=True))), factored(sums, *scales))


def factored(sums, *scales):
    return (sums * torch.tensor(scales).prod()).bfloat16()


def same(found, expected):
    return ((found == expected) | (found.isnan() & expected.isnan())).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("k", [33, 48, 64, 88, 144])
def test_codes_that_are_no_numbers_reach_their_row_and_no_other(k, bad):
    a, b = torch.ones(20, k), torch.ones(40, k)
    a[3, 5] = bad
    found = gemm(whole(a, 0.3, "row", torch.float8_e5m2), whole(b, 0.7, "row"))
    expected = torch.full((20, 40), k * 0.3 * 0.7).bfloat16()
    expected[3] = bad
    assert same(found, expected)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 8), (8, 16, 0), (4, 0, 8)])
def test_products_of_nothing(m, k, n):
    for dtype in COMPUTE:
        found = gemm(whole(torch.ones(m, k), 0.3, "row"), whole(torch.ones(n, k), 0.7, "row"), out_dtype=dtype)
        assert found.shape == (m, n)
        assert found.dtype == dtype
        assert not found.any()


def test_the_matmul_setting_is_put_back():
    matmul = torch.backends.mkldnn.matmul
    x, w, _, dy = data(dtype=torch.float32)
    for before in ("none", "ieee"):
        previous, matmul.fp32_precision = matmul.fp32_precision, before
        try:
            linear(x, w, precision=RECIPES["tensorwise-hybrid-fp32"]).backward(dy)
            with pytest.raises(PrecisionError):
                gemm(quantize(x, Operand("e4m3", None, "fp32")), quantize(w.t(), Operand("e4m3", None, "fp32")))
            assert matmul.fp32_precision == before
        finally:
            matmul.fp32_precision = previous


def test_fp32_scales_of_tiles_are_multiplied_in_fp32():
    """BF16 multipliers would lose bits of code * scale; the error would be a hundred times this bound."""
    p = RECIPES["blockwise-hybrid-fp32"]
    x, w, _, _ = data(dtype=torch.float32, k=1024)
    y = linear(x, w, precision=p).detach()
    a, b = quantize(x, operands(p)["input"]).dequantize(), quantize(w, operands(p)["weight"]).dequantize()
    exact, slack = oracle(a, b)
    assert float(((y.double() - exact).abs() / slack).max()) < 1
    through_bf16 = (a.bfloat16().double() @ b.bfloat16().double().t() - exact).abs() / slack
    assert float(through_bf16.max()) > 10


@each_recipe
def test_a_weight_quantized_once(p):
    x, w, b, dy = data()
    make = lambda: DelayedState(p) if p.scaling == "delayed" else None  # noqa: E731
    results = []
    for reuse in (False, True):
        delayed = make()
        x.grad = w.grad = None
        kept = quantize_weight(w, p, delayed) if reuse else None
        y = linear(x, w, b, precision=p, delayed=delayed, weight_quantized=kept)
        y.backward(dy)
        results.append((y.detach(), x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_weight_quantized_once_is_not_looked_at_again():
    x, w, _, _ = data()
    p = RECIPES["blockwise-hybrid-pow2"]
    kept = quantize_weight(w, p)
    y = linear(x, torch.full_like(w, float("nan")), precision=p, weight_quantized=kept)
    assert torch.equal(y, linear(x, w, precision=p))


def test_leading_dimensions_and_frozen_parts():
    p = RECIPES["blockwise-hybrid-pow2"]
    x, w, b, dy = data()
    flat = linear(x, w, b, precision=p)
    assert torch.equal(linear(x.view(2, 36, 160), w, b, precision=p).view(72, 96), flat)
    assert torch.equal(linear(x[0], w, b, precision=p), flat[0])
    frozen = w.detach()
    y = linear(x, frozen, precision=p)
    y.backward(dy)
    assert x.grad is not None
    x.grad = None
    linear(x.detach(), w, precision=p).backward(dy)
    assert x.grad is None
    assert w.grad is not None
    with torch.no_grad():
        assert torch.equal(linear(x, w, b, precision=p), flat)
    assert linear(x[:0], w, b, precision=p).shape == (0, 96)


def test_what_backward_keeps_is_one_byte_an_element():
    """The point of saving codes: activations at half the size of BF16."""
    p = RECIPES["blockwise-hybrid-pow2"]
    x, w, _, _ = data(m=256, k=512, n=256)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, w, precision=p)
    assert {t.dtype for t in saved if t.numel() >= x.numel()} == {torch.float8_e4m3fn}
    assert sum(t.nbytes for t in saved) < 1.1 * (x.numel() + w.numel())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"precision": Precision()}, "without FP8"),
        ({"precision": RECIPES["delayed-hybrid-default"]}, "without its state"),
        ({"weight": torch.ones(16, 48)}, "in_features"),
        ({"weight": torch.ones(32)}, "in_features"),
    ],
)
def test_misuse_is_refused(arguments, match):
    with pytest.raises(PrecisionError, match=match):
        linear(
            **{
                "x": torch.ones(4, 32),
                "weight": torch.ones(16, 32),
                "precision": RECIPES["blockwise-hybrid-pow2"],
                **arguments,
            }
        )


def test_operands_that_do_not_fit_are_refused():
    row = Operand("e4m3", None, "fp32")
    with pytest.raises(PrecisionError, match="do not fit"):
        gemm(quantize(torch.ones(4, 32), row), quantize(torch.ones(4, 16), row))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.ones(4, 32)}, "A GEMM of Tensor"),
        ({"b": None}, "A GEMM of NoneType"),
        ({"bias": torch.ones(3)}, r"shape \(3,\) for 16 columns"),
        ({"bias": torch.ones(4, 16)}, r"shape \(4, 16\) for 16 columns"),
        ({"bias": torch.ones(1)}, "one number to each column"),
        ({"bias": 1.0}, "float for 16 columns"),
    ],
)
def test_what_is_no_operand_and_no_bias_is_refused(change, words):
    row = Operand("e4m3", None, "fp32")
    with pytest.raises(PrecisionError, match=words):
        gemm(**{"a": quantize(torch.ones(4, 32), row), "b": quantize(torch.ones(16, 32), row), **change})


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_a_bias_in_fp32_is_not_rounded_before_it_is_added(scale):
    """Sums that cancel with the bias leave what BF16 would have rounded off it."""
    a = torch.ones(1, 128)
    bias = torch.full((3,), -128.0) + torch.tensor([0.25, 0.0, 2.0**-10])
    operand = Operand("e4m3", (1, 128), scale)
    out = gemm(quantize(a, operand), quantize(a.expand(3, 128), operand), bias=bias)
    assert out.tolist() == [[0.25, 0.0, 2.0**-10]]


@each_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_s_own_autocast_changes_no_product(p, dtype):
    """It casts what torch's operators multiply, and would round scaled values a second time."""
    x, w, bias, dy = data(dtype=dtype)
    found = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            y = linear(x, w, bias, precision=p, delayed=DelayedState(p) if p.scaling == "delayed" else None)
            found.append([y, *torch.autograd.grad(y, (x, w), dy)])
    assert all(map(torch.equal, *found))


# ---------------------------------------------------------------------- four bits, and what the backward multiplies

NVFP4 = Precision(format="e2m1", scaling="nvfp4", stochastic_rounding=False)
BACKWARDS = {
    **{name: Precision(format="e4m3", scaling=name) for name in ("tensorwise", "blockwise", "mxfp8")},
    "nvfp4": NVFP4,
}


def grads(p, dtype=torch.bfloat16):
    """Output, both gradients, and what they were computed from."""
    x, w, _, dy = data(m=64, k=160, n=96, dtype=dtype)
    y = linear(x, w, precision=p)
    y.backward(dy)
    return y.detach(), x.grad, w.grad, (x.detach(), w.detach(), dy)


@pytest.mark.parametrize("p", [NVFP4, NVFP4.replace(row_scaled=True), NVFP4.replace(weight_block="1x16")])
def test_gemms_of_four_bits_multiply_the_values_of_the_codes(p):
    y, dx, dw, (x, w, dy) = grads(p)
    x_row, x_col, w_row, w_col, dy_row, dy_col = (
        quantize(t, p.operand(role), usage=usage).dequantize()
        for t, role in ((x, "input"), (w, "weight"), (dy, "grad"))
        for usage in ("row", "col")
    )
    assert_rounded_once(y, *near(*oracle(x_row, w_row)))
    assert_rounded_once(dx, *near(*oracle(dy_row, w_col.t())))
    assert_rounded_once(dw, *near(*oracle(dy_col.t(), x_col.t())))
    assert torch.equal(w_row, w_col) == (p.weight_block == "16x16")


def near(exact, slack):
    """The amax of a row and of a column is multiplied last, and the transform back is rounded: some more ulps."""
    return exact, slack * 64


@pytest.mark.parametrize("p", BACKWARDS.values(), ids=BACKWARDS)
@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_a_backward_in_the_compute_dtype_reads_the_forwards_codes_or_what_they_were_made_of(p, backward):
    y, dx, dw, (x, w, dy) = grads(p.replace(backward=backward))
    assert torch.equal(y, grads(p)[0])
    if backward == "dequantized":
        x, w = (quantize(t, p.operand(role)).dequantize(t.dtype) for t, role in ((x, "input"), (w, "weight")))
    assert_rounded_once(dx, *oracle(dy, w.t()))
    assert_rounded_once(dw, *oracle(dy.t(), x.t()))
    assert not torch.equal(dx, grads(p)[1])


def test_a_backward_with_a_recipe_of_its_own_quantizes_what_the_forward_decoded():
    p = NVFP4.replace(weight_block="1x16", backward_scaling="mxfp8")
    y, dx, dw, (x, w, dy) = grads(p)
    assert torch.equal(y, grads(p.replace(backward_scaling=None))[0])
    mx = Operand("e4m3", (1, 32), "e8m0")
    x, w = (quantize(t, p.operand(role)).dequantize(t.dtype) for t, role in ((x, "input"), (w, "weight")))
    assert torch.equal(dx, gemm(quantize(dy, mx), quantize(w, mx, usage="col")))
    assert torch.equal(dw, gemm(quantize(dy, mx, usage="col"), quantize(x, mx, usage="col")))


def test_gradients_of_four_bits_are_rounded_by_chance_so_that_their_mean_stays():
    p = NVFP4.replace(stochastic_rounding=True, hadamard=False)
    torch.manual_seed(0)
    several = torch.stack([grads(p)[1].double() for _ in range(64)])
    _, nearest, _, (_, w, dy) = grads(NVFP4.replace(hadamard=False))
    exact = dy.double() @ quantize(w, p.operand("weight"), usage="col").dequantize().double()
    of_the_mean = (several.mean(0) - exact).norm() / exact.norm()
    assert of_the_mean < 0.35 * (several[0] - exact).norm() / exact.norm()
    assert of_the_mean < 0.5 * (nearest.double() - exact).norm() / exact.norm(), "rounding to the nearest is a bias"


def test_a_transformed_operand_meets_a_transformed_one_only():
    x, dy = torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16()
    plain, turned = (Operand("e2m1", (1, 16), "e4m3", hadamard=on) for on in (False, True))
    gemm(quantize(dy, turned, usage="col"), quantize(x, turned, usage="col"))
    with pytest.raises(PrecisionError, match="Hadamard"):
        gemm(quantize(dy, turned, usage="col"), quantize(x, plain, usage="col"))


def test_four_bits_times_eight_are_not_rounded_before_they_are_multiplied():
    a, _, _, _ = data(m=64, k=160, n=96)
    b = torch.randn(96, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    four = quantize(a.detach() * 1.1, Operand("e2m1", (1, 16), "e4m3"))
    eight = quantize(b, Operand("e4m3", (128, 128), "pow2"))
    assert not is_exact_in_bf16(four)  # a processor with BF16 units would round its values
    assert_rounded_once(gemm(four, eight, out_dtype=torch.float32), *oracle(four.dequantize(), eight.dequantize()))
