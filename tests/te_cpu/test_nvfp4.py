"""NVFP4 against TE's Python reference, bit for bit, and stochastic rounding by its distribution."""

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from support.te_cases import ARCH
from transformer_engine.common.recipe import CustomRecipe, NVFP4BlockScaling
from transformer_engine.pytorch.custom_recipes import reference_nvfp4
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, cast_from_fp4x2
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from nemo_fp8.numerics.kernels import build
from nemo_fp8.te_cpu import swizzle

pytestmark = pytest.mark.skipif(ARCH < 100, reason="NVFP4 begins with Blackwell")
EDGES = torch.tensor(
    [0.0, -0.0, 0.25, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 1e-30, -1e-30, 7.0, -0.2500001]
)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("source", ["normal", "zeros", "edges", "outliers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_scales_and_amax_are_those_of_the_reference(source, square, dtype):
    torch.manual_seed(0)
    x = {
        "normal": lambda: torch.randn(64, 96),
        "zeros": lambda: torch.zeros(32, 32),
        "edges": lambda: EDGES.repeat(16, 2),
        "outliers": lambda: torch.randn(32, 64) * torch.logspace(-20, 20, 64),
    }[source]().to(dtype)
    found = NVFP4Quantizer(with_2d_quantization=square)(x)
    for side, matrix in (("row", x), ("column", x.t().contiguous())):
        amax = matrix.float().abs().amax()
        codes, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
            matrix, amax, 16, 16 if square else 1, pow_2_scales=False, eps=0.0
        )
        assert torch.equal(getattr(found, f"_amax_{side}wise").reshape(()), amax)
        assert torch.equal(getattr(found, f"_{side}wise_data").view(codes.shape), codes.view(torch.uint8))
        held = getattr(found, f"_{side}wise_scale_inv")[: scales.shape[0], : scales.shape[1]]
        assert torch.equal(held, scales.view(torch.uint8))


@pytest.mark.parametrize("shape", [(32, 1, 32), (4, 8, 32)])
def test_columns_run_along_all_leading_dimensions(shape):
    x = torch.randn(shape).bfloat16()
    found, flat = NVFP4Quantizer()(x), NVFP4Quantizer()(x.view(32, 32))
    assert torch.equal(found._columnwise_data.view(-1), flat._columnwise_data.view(-1))
    assert torch.equal(found._columnwise_scale_inv, flat._columnwise_scale_inv)


def test_an_amax_for_every_row_on_both_sides():
    """Row-scaled: the columns, turned round, have an amax for each of their rows too, although TE describes one for
    them all."""
    torch.manual_seed(0)
    x = (torch.randn(64, 96) * torch.logspace(-3, 3, 96)).bfloat16()
    found = NVFP4Quantizer(row_scaled_nvfp4=True)(x)
    for side, matrix in (("row", x), ("column", x.t().contiguous())):
        amax = matrix.float().abs().amax(1)
        arguments = {"pow_2_scales": False, "row_scaled_nvfp4": True, "eps": 0.0}
        codes, scales = NVFP4QuantizerRef._quantize_blockwise_reference(matrix, amax, 16, 1, **arguments)
        assert torch.equal(getattr(found, f"_amax_{side}wise"), amax)
        assert torch.equal(getattr(found, f"_{side}wise_data").view(codes.shape), codes.view(torch.uint8))
        held = getattr(found, f"_{side}wise_scale_inv")[: scales.shape[0], : scales.shape[1]]
        assert torch.equal(held, scales.view(torch.uint8))


@pytest.mark.parametrize("hadamard", [False, True])
def test_amaxes_that_are_known_are_taken(hadamard):
    """What found them has seen more than this tensor, here twice its largest value; they stay the caller's own
    memory."""
    torch.manual_seed(0)
    x = torch.randn(64, 128).bfloat16()
    quantizer = NVFP4Quantizer(with_rht=hadamard, with_post_rht_amax=hadamard)
    plain = quantizer(x)
    same = tex.nvfp4_quantize_with_amax(x, quantizer, plain._amax_rowwise, plain._amax_columnwise)
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
        assert torch.equal(getattr(same, f"_{name}"), getattr(plain, f"_{name}")), name
    rows, columns = 2 * plain._amax_rowwise, 4 * plain._amax_columnwise
    found = tex.nvfp4_quantize_with_amax(x, quantizer, rows, columns)
    assert found._amax_rowwise is rows
    assert found._amax_columnwise is columns
    turned = x.t().contiguous()
    turned = (
        (turned.view(-1, 16).float() @ quantizer.rht_matrix.float()).bfloat16().view(turned.shape)
        if hadamard
        else turned
    )
    for side, matrix, amax in (("row", x, rows), ("column", turned, columns)):
        codes, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
            matrix, amax, 16, 1, pow_2_scales=False, eps=0.0
        )
        assert torch.equal(getattr(found, f"_{side}wise_data").view(codes.shape), codes.view(torch.uint8))
        held = getattr(found, f"_{side}wise_scale_inv")[: scales.shape[0], : scales.shape[1]]
        assert torch.equal(held, scales.view(torch.uint8))
    quantizer.optimize_for_gemm = True
    swizzled = tex.nvfp4_quantize_with_amax(x, quantizer, rows, columns)
    assert swizzled._with_gemm_swizzled_scales
    assert torch.equal(swizzle.scales_of(swizzled, "column"), found._columnwise_scale_inv)


@pytest.mark.parametrize("signs", [False, True])
def test_the_transform_is_the_quantizers_own_matrix(signs):
    """Random signs or none; sums of values of like size are exact in any order."""
    torch.manual_seed(0)
    x = torch.randn(64, 128).bfloat16()
    quantizer = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=signs)
    turned = x.t().contiguous()
    turned = (turned.view(-1, 16).float() @ quantizer.rht_matrix.float()).bfloat16().view(turned.shape)
    found, expected = quantizer(x), NVFP4Quantizer()(turned)
    assert torch.equal(found._columnwise_data, expected._rowwise_data)
    assert torch.equal(found._amax_columnwise, expected._amax_rowwise)
    with pytest.raises(ValueError, match="only supported for bfloat16"):
        quantizer(x.float())


@pytest.mark.parametrize(
    ("arguments", "amax", "words"),
    [
        ({"row_scaled_nvfp4": True}, torch.ones(1), "not supported for row-scaled"),
        ({}, torch.ones(2), r"as many rowwise and columnwise amaxes as tensors \(1\)"),
        ({}, torch.ones(1).bfloat16(), "must be float32"),
    ],
)
def test_amaxes_that_do_not_fit_are_refused(arguments, amax, words):
    with pytest.raises(RuntimeError, match=words):
        tex.nvfp4_quantize_with_amax(torch.randn(32, 32).bfloat16(), NVFP4Quantizer(**arguments), amax, amax)


def test_a_product_is_that_of_the_reference_to_the_bit():
    """Sums of 16 at a time, of code times scale, which are exact; both amaxes last, and one rounding."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 256).bfloat16() * 3, torch.randn(96, 256).bfloat16() / 7
    a, b = NVFP4Quantizer()(w), NVFP4Quantizer()(x)
    codes, scales = ([_plain(side)[i] for side in (b, a)] for i in (0, 1))
    out = torch.zeros(64, 96)
    for k in range(16):
        block = slice(16 * k, 16 * k + 16)
        out += torch.outer(scales[0][:, k], scales[1][:, k]) * (codes[0][:, block] @ codes[1][:, block].t())
    out *= b._amax_rowwise * a._amax_rowwise * torch.reciprocal(torch.tensor(36 * 448 * 448.0))
    assert torch.equal(_multiplied(a, b, tex.DType.kFloat32), out)
    assert torch.equal(_multiplied(a, b, tex.DType.kBFloat16), out.bfloat16())


def test_a_layer_on_tes_reference_computes_the_same_bits():
    """The reference divides both amaxes by a number, as a GPU does: by its reciprocal. torch's own division stays."""

    def by_reference(role):
        tile = (16, 16) if role is not None and role.tensor_type == "weight" else (1, 16)
        return NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile, pow_2_scales=False)

    def computed(layer, x, recipe):
        x = x.clone().requires_grad_()
        layer.weight.grad = None
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.square().sum().backward()
        return y, x.grad, layer.weight.grad

    for seed in range(8):  # of eight draws some have an amax that the two ways of dividing take apart
        torch.manual_seed(seed)
        layer, x = te.Linear(128, 64, bias=False), torch.randn(32, 128)
        native = computed(layer, x, NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True))
        assert all(map(torch.equal, native, computed(layer, x, CustomRecipe(qfactory=by_reference))))
    x, number = torch.rand(1000), torch.tensor(36 * 448 * 448.0)
    assert torch.equal(torch.div(x, number.item()), x / number)
    assert not torch.equal(reference_nvfp4.torch.div(x, number.item()), x / number)


def test_values_are_those_of_the_kernel_to_the_bit():
    """The scale is multiplied with the amax, then with a reciprocal: three roundings, in that order."""
    torch.manual_seed(0)
    found = NVFP4Quantizer()(torch.randn(64, 256) * 3)
    codes, scales = _plain(found)
    decode = scales * found._amax_rowwise * torch.reciprocal(torch.tensor(6 * 448.0))
    assert torch.equal(found.dequantize(dtype=torch.float32), codes * decode.repeat_interleave(16, 1))


def _plain(tensor):
    """The codes of the rows as numbers, and their scales."""
    codes = cast_from_fp4x2(tensor._rowwise_data, torch.float32)
    return codes, swizzle.scales_of(tensor, "row")[: codes.shape[0], : codes.shape[1] // 16].view(
        torch.float8_e4m3fn
    ).float()


def _multiplied(a, b, dtype):
    return tex.generic_gemm(
        a, True, b, False, None, None, dtype, None, dtype, False, None, False, None, 0, False, False
    )[0]


def test_stochastic_rounding_keeps_the_mean_and_takes_only_neighbours():
    torch.manual_seed(0)
    block = [*torch.linspace(-5.9, 5.9, 15).tolist(), 6.0]  # the amax, so that the scale is 1 and codes are values
    x = torch.tensor(block).bfloat16().repeat(4096, 1)
    found = NVFP4Quantizer(stochastic_rounding=True, columnwise=False)(x).dequantize(dtype=torch.float32)
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat([-grid.flip(0), grid])
    for column, value in enumerate(x[0].float().tolist()):
        above, below = grid[grid >= value].min(), grid[grid <= value].max()
        assert set(found[:, column].unique().tolist()) <= {above.item(), below.item()}
        spread = (above - below).item() / 2
        assert abs(found[:, column].mean().item() - value) <= 4 * spread / 4096**0.5 + 1e-6


@pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize(
    "arguments",
    [
        {"with_2d_quantization": True},
        {"with_rht": True, "with_post_rht_amax": True},
        {"with_rht": True, "with_post_rht_amax": True, "stochastic_rounding": True},
        {"row_scaled_nvfp4": True},
        {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"},
    ],
    ids=["weight", "input", "gradient", "row-scaled", "4 over 6"],
)
def test_a_machine_without_a_compiler_writes_the_same_bytes(monkeypatch, arguments):
    """Compiled kernels or torch: one seed gives both sides of a tensor the same codes, scales and amaxes."""
    torch.manual_seed(0)
    x = (torch.randn(96, 160) * torch.logspace(-2, 2, 160)).bfloat16()

    def written():
        torch.manual_seed(1)
        found = NVFP4Quantizer(**arguments)(x)
        return {name: getattr(found, name) for name, _ in type(found)._INNER_TENSORS}

    fast = written()
    monkeypatch.setattr(build, "library", lambda: None)
    slow = written()
    assert fast.keys() == slow.keys()
    for name, found in fast.items():
        assert torch.equal(found, slow[name]), name
