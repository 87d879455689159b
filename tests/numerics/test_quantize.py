"""The quantizer, tile by tile against an independent one in numpy and ml_dtypes, and what it does at the edges."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.tensors import DTYPES, OPERANDS, bits, name, tensors

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import Quantized, quantize, quantize_pair, quantize_reference
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.quantize import tile_of

WEIGHT = Operand("e4m3", (128, 128), "fp32")
INPUT = Operand("e4m3", (1, 128), "pow2")
TENSOR = Operand("e4m3", None, "fp32")


def assert_equals_oracle(q: Quantized, x: torch.Tensor, operand: Operand, convention: str = "te") -> None:
    codes, scale_inv = oracles.quantize(x, q.block, operand.format, operand.scale, convention)
    assert oracles.differences(oracles.as_codes(q.data), codes) == 0
    ours = q.scale_inv.view(torch.uint8).numpy() if operand.scale == "e8m0" else q.scale_inv.numpy()
    assert oracles.differences(ours.reshape(scale_inv.shape), scale_inv) == 0


@pytest.mark.parametrize("operand", OPERANDS, ids=name)
@settings(max_examples=25, deadline=None)
@given(x=tensors(), usage=st.sampled_from(["row", "col"]))
def test_codes_and_scales_are_the_oracle_s(operand, x, usage):
    q = quantize(x, operand, usage=usage)
    assert q.shape == x.shape
    assert q.block == tile_of(operand, usage)
    assert_equals_oracle(q, x, operand)


@pytest.mark.parametrize("operand", OPERANDS, ids=name)
@settings(max_examples=10, deadline=None)
@given(x=tensors(), usage=st.sampled_from(["row", "col"]))
def test_whatever_answers_equals_the_reference(operand, x, usage):
    q = quantize(x, operand, usage=usage)
    data, scale_inv, _ = quantize_reference(x, q.block, FORMATS[operand.format], operand.scale)
    assert torch.equal(q.data.view(torch.uint8), data.view(torch.uint8))
    assert q.scale_inv.dtype == scale_inv.dtype
    assert torch.equal(bits(q.scale_inv), bits(scale_inv))
    assert oracles.differences(q.dequantize().numpy(), q.dequantize_reference().numpy()) == 0


@pytest.mark.parametrize("operand", [o for o in OPERANDS if o.scale != "e8m0"], ids=name)
@settings(max_examples=10, deadline=None)
@given(x=tensors(nonfinite=False))
def test_deepgemm_s_convention(operand, x):
    assert_equals_oracle(quantize(x, operand, convention="deepgemm"), x, operand, "deepgemm")


@settings(max_examples=30, deadline=None)
@given(x=tensors(dims=(2,)), operand=st.sampled_from([o for o in OPERANDS if o.block]), data=st.data())
def test_a_tile_knows_nothing_of_its_neighbours(x, operand, data):
    """Ragged or not: change everything outside one tile, and its scale and codes stay."""
    usage = data.draw(st.sampled_from(["row", "col"]))
    before = quantize(x, operand, usage=usage)
    rows, columns = before.block
    i, j = (data.draw(st.integers(0, n - 1)) for n in before.scale_inv.shape)
    tile = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
    other = torch.full_like(x, 3e4)
    other[tile] = x[tile]
    after = quantize(other, operand, usage=usage)
    assert torch.equal(before.data.view(torch.uint8)[tile], after.data.view(torch.uint8)[tile])
    assert torch.equal(bits(before.scale_inv)[i, j], bits(after.scale_inv)[i, j])


@settings(max_examples=20, deadline=None)
@given(x=tensors(dims=(2,)), operand=st.sampled_from([o for o in OPERANDS if o.block]))
def test_padding_is_zeros(x, operand):
    """A ragged tensor has the codes and scales of the same tensor with zeros around it."""
    q = quantize(x, operand)
    m, k = x.shape
    padded = torch.zeros(m + 130, k + 130, dtype=x.dtype)
    padded[:m, :k] = x
    p = quantize(padded, operand)
    assert torch.equal(p.data.view(torch.uint8)[:m, :k], q.data.view(torch.uint8))
    grid = q.scale_inv.shape
    assert torch.equal(bits(p.scale_inv)[: grid[0], : grid[1]], bits(q.scale_inv))


@settings(max_examples=20, deadline=None)
@given(x=tensors(dims=(2,)), operand=st.sampled_from(OPERANDS))
def test_col_is_row_of_the_transpose(x, operand):
    row, col = quantize_pair(x, operand)
    turned = quantize(x.t(), operand)  # not contiguous, too
    assert (row.usage, col.usage) == ("row", "col")
    assert torch.equal(col.data.view(torch.uint8).t(), turned.data.view(torch.uint8))
    assert torch.equal(col.scale_inv_fp32.t() if col.block else col.scale_inv, turned.scale_inv_fp32)
    assert torch.equal(row.data.view(torch.uint8), quantize(x, operand).data.view(torch.uint8))


@settings(max_examples=20, deadline=None)
@given(x=tensors(dims=(2,)), operand=st.sampled_from([o for o in OPERANDS if o.block in (None, (128, 128))]))
def test_transposes_move_and_change_nothing(x, operand):
    q = quantize(x, operand)
    assert oracles.differences(q.t().dequantize().t().contiguous().numpy(), q.dequantize().numpy()) == 0
    assert torch.equal(q.t().data.view(torch.uint8), quantize(x.t(), operand).data.view(torch.uint8))
    assert torch.equal(q.t().scale_inv, quantize(x.t(), operand).scale_inv)
    assert q.t().data.is_contiguous()


def test_one_way_tiles_refuse_to_turn():
    q = quantize(torch.randn(4, 256), INPUT)
    with pytest.raises(PrecisionError, match="usage='col'"):
        q.t()
    with pytest.raises(PrecisionError, match="1x128"):
        q.used_as("col")


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_are_rows(dtype):
    x = torch.randn(2, 3, 200).to(dtype)
    q, flat = quantize(x, INPUT), quantize(x.reshape(6, 200), INPUT)
    assert q.shape == x.shape
    assert q.scale_inv.shape == (6, 2)
    assert torch.equal(q.data.view(torch.uint8).reshape(6, 200), flat.data.view(torch.uint8))


@pytest.mark.parametrize("operand", OPERANDS, ids=name)
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0), (2, 0, 5)])
def test_nothing_becomes_nothing(operand, shape):
    q = quantize(torch.empty(shape), operand, statistics=True)
    assert q.shape == shape
    assert q.dequantize().shape == shape
    if operand.block is None:
        assert q.scale_inv.item() == 1.0


@pytest.mark.parametrize("shape", [(), (7,)])
def test_a_scale_for_the_whole_tensor_needs_no_matrix(shape):
    x = torch.randn(shape)
    q = quantize(x, TENSOR)
    assert q.shape == shape
    assert_equals_oracle(q, x, TENSOR)


@pytest.mark.parametrize(
    "view",
    [lambda x: x[::2], lambda x: x[:, ::3], lambda x: x.t(), lambda x: x.expand(2, *x.shape), lambda x: x[:, 1:]],
)
@pytest.mark.parametrize("operand", [WEIGHT, INPUT, TENSOR], ids=name)
def test_strided_views(operand, view):
    x = view(torch.randn(140, 310))
    q = quantize(x, operand)
    assert q.data.is_contiguous()
    assert_equals_oracle(q, x.contiguous(), operand)


def test_the_source_is_left_alone_and_no_graph_is_kept():
    x = torch.randn(130, 260, requires_grad=True)
    before = x.detach().clone()
    q = quantize(x, WEIGHT, statistics=True)
    assert torch.equal(x, before)
    assert not q.dequantize().requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_wrong_dtype_is_refused(dtype):
    with pytest.raises(PrecisionError, match=r"Cannot quantize a torch\.\w+ tensor"):
        quantize(torch.zeros(4, 4).to(dtype), TENSOR)


@pytest.mark.parametrize("shape", [(), (256,)])
def test_tiles_need_rows_and_columns(shape):
    with pytest.raises(PrecisionError, match="128x128 tiles"):
        quantize(torch.zeros(shape), WEIGHT)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"usage": "rows"}, "Did you mean 'row'"),
        ({"convention": "deepgem"}, "Did you mean 'deepgemm'"),
        ({"operand": Operand("e4m3", None, "fp32", delayed=True)}, "delayed"),
        ({"scale": torch.ones(2)}, "given scale"),
        ({"operand": WEIGHT, "scale": torch.ones(())}, "given scale"),
        ({"operand": Operand("e4m3", (1, 32), "e8m0"), "convention": "deepgemm"}, "E8M0"),
        ({"operand": Operand("e4m3", None, "fp64")}, "scale kind"),
        ({"operand": Operand("e3m4", None, "fp32")}, "number format"),
        ({"x": None}, "x=NoneType"),
        ({"x": [[1.0]]}, "x=list"),
        ({"x": np.ones((4, 4), np.float32)}, "x=ndarray"),
        ({"x": torch.eye(4).to_sparse()}, "x=torch.sparse_coo"),
        ({"x": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])}, "x=Tensor"),
        ({"scale": 2.0}, "scale=float"),
        ({"operand": Operand("e2m1", (1, 16), "e4m3"), "amax": 2.0}, "amax=float"),
        ({"operand": None}, "by None"),
        ({"operand": "e4m3"}, "precision.operand"),
        ({"operand": Operand("e4m3", (0, 128), "fp32")}, "rows, columns"),
        ({"operand": Operand("e4m3", (1.5, 128), "fp32")}, "rows, columns"),
        ({"operand": Operand("e4m3", (128,), "fp32")}, "rows, columns"),
        ({"operand": Operand("e4m3", 128, "fp32")}, "rows, columns"),
        ({"epsilon": -1.0}, "epsilon=-1"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"epsilon": "1e-3"}, "epsilon='1e-3'"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, match):
    with pytest.raises(PrecisionError, match=match):
        quantize(**{"x": torch.ones(4, 4), "operand": TENSOR, **arguments})


@settings(max_examples=20, deadline=None)
@given(x=tensors(), scale=st.floats(2.0**-60, 2.0**60, width=32), format=st.sampled_from(["e4m3", "e5m2"]))
def test_a_given_scale_is_used_as_it_is(x, scale, format):
    q = quantize(x, Operand(format, None, "fp32", delayed=True), scale=torch.tensor(scale))
    with np.errstate(all="ignore"):
        assert (
            oracles.differences(oracles.as_codes(q.data), oracles.cast(x.float().numpy() * np.float32(scale), format))
            == 0
        )
        assert q.scale_inv.numpy() == np.float32(1) / np.float32(scale)


def test_epsilon_is_a_floor_for_amax():
    x = torch.full((4, 4), 1e-9)
    assert quantize(x, TENSOR, epsilon=1e-3).scale_inv.item() == pytest.approx(1e-3 / 448, rel=1e-6)
    assert quantize(x, TENSOR).scale_inv.item() == pytest.approx(1e-9 / 448, rel=1e-6)


@pytest.mark.parametrize("operand", [TENSOR, WEIGHT, INPUT], ids=name)
def test_nan_moves_no_scale_and_infinity_gives_scale_one(operand):
    x = torch.randn(128, 128)
    with_nan = x.clone()
    with_nan[3, 3] = float("nan")
    q, n = quantize(x, operand), quantize(with_nan, operand)
    assert torch.equal(q.scale_inv, n.scale_inv)
    assert int((q.data.view(torch.uint8) != n.data.view(torch.uint8)).sum()) == 1
    with_inf = x.clone()
    with_inf[3, 3] = -float("inf")
    i = quantize(with_inf, operand)
    assert i.scale_inv.reshape(-1)[3 if i.scale_inv.numel() > 1 else 0].item() == 1.0
    assert i.dequantize()[3, 3].item() == -448.0
