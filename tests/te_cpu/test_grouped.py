"""Grouped tensors: each member is what its quantizer makes of it alone, to the bit, in buffers that the group
shares."""

import pytest
import torch
import transformer_engine_torch as tex
from support.te_cases import ARCH
from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm_for_grouped_tensor
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

E4M3 = 7
BLACKWELL = pytest.mark.skipif(ARCH < 100, reason="the format begins with Blackwell")
QUANTIZERS = {
    "current": lambda: Float8CurrentScalingQuantizer(tex.DType(E4M3), device="cuda"),
    "blockwise": lambda: Float8BlockQuantizer(tex.DType(E4M3), rowwise=True, columnwise=True, block_scaling_dim=1),
    "mxfp8": lambda: MXFP8Quantizer(tex.DType(E4M3)),
    "nvfp4": lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
}
NAMES = [pytest.param(name, marks=BLACKWELL) if name in ("mxfp8", "nvfp4") else name for name in QUANTIZERS]


def _held(tensor):
    """The buffers of a quantized tensor, by name."""
    return {name: getattr(tensor, name) for name, _ in type(tensor)._INNER_TENSORS if getattr(tensor, name) is not None}


@pytest.mark.parametrize("name", NAMES)
def test_members_are_quantized_as_they_are_alone(name):
    torch.manual_seed(0)
    rows = [128, 0, 256]
    x = torch.randn(384 + 64, 256).bfloat16()  # rows of no member at the end
    quantizer = QUANTIZERS[name]()
    group = tex.group_quantize(x, quantizer, 3, torch.tensor(rows))
    members = group.split_into_quantized_tensors()
    for part, member in zip(x[:384].split(rows), members, strict=True):
        if not part.numel():
            continue
        alone = _held(quantizer(part))
        found = _held(member)
        assert set(found) == set(alone)
        for buffer, values in alone.items():
            assert torch.equal(found[buffer].view(-1), values.view(-1)), buffer
    if name == "current":
        assert torch.equal(group.scale, torch.reciprocal(group.scale_inv))
        assert group.scale[1] == 1  # an empty member's
    back = tex.group_dequantize(group, torch.float32)
    values = [member.dequantize(dtype=torch.float32).view(-1) for member in members if member.shape[0]]
    assert torch.equal(back.rowwise_data[: 384 * 256], torch.cat(values))


@BLACKWELL
def test_members_whose_amaxes_are_known():
    torch.manual_seed(0)
    rows = [128, 0, 256]
    x, quantizer = torch.randn(384, 256).bfloat16(), QUANTIZERS["nvfp4"]()
    of_rows, of_columns = torch.tensor([8.0, 0.0, 16.0]), torch.tensor([24.0, 0.0, 12.0])
    amaxes = {"rowwise_amax": of_rows, "columnwise_amax": of_columns}
    group = tex.nvfp4_group_quantize_with_amax(x, quantizer, 3, torch.tensor(rows), **amaxes)
    assert (group.amax is of_rows, group.columnwise_amax is of_columns) == (True, True)
    for i, (part, member) in enumerate(zip(x.split(rows), group.split_into_quantized_tensors(), strict=True)):
        if not part.numel():
            continue
        alone = _held(tex.nvfp4_quantize_with_amax(part, quantizer, of_rows[i : i + 1], of_columns[i : i + 1]))
        assert set(alone) == set(_held(member))
        for buffer, values in alone.items():
            assert torch.equal(getattr(member, buffer).view(-1), values.view(-1)), buffer
    with pytest.raises(RuntimeError, match="only supports NVFP4"):
        tex.nvfp4_group_quantize_with_amax(x, QUANTIZERS["blockwise"](), 3, torch.tensor(rows), **amaxes)
    with pytest.raises(RuntimeError, match=r"as tensors \(2\)"):
        tex.nvfp4_group_quantize_with_amax(x, quantizer, 2, torch.tensor(rows[:2]), **amaxes)


def test_a_group_is_written_again_unless_told_not_to_be():
    torch.manual_seed(0)
    quantizer = QUANTIZERS["blockwise"]()
    first, second = torch.randn(256, 256).bfloat16(), torch.randn(256, 256).bfloat16()
    group = tex.group_quantize(first, quantizer, 2, None)
    before = group.rowwise_data.clone()
    assert tex.group_quantize(second, quantizer, 2, None, noop_flag=torch.ones(1), output=group) is group
    assert torch.equal(group.rowwise_data, before)
    address = group.rowwise_data.data_ptr()
    tex.group_quantize(second, quantizer, 2, None, output=group)
    assert group.rowwise_data.data_ptr() == address
    assert torch.equal(group.rowwise_data, tex.group_quantize(second, quantizer, 2, None).rowwise_data)


@pytest.mark.parametrize("name", [*NAMES, "delayed"])
def test_one_tensor_is_written_again_unless_told_not_to_be(name):
    """TE's flag in place of a branch: no buffer changes, nor delayed scaling's amax, and none moves."""
    torch.manual_seed(0)
    delayed = Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType(E4M3))
    quantizer = delayed if name == "delayed" else QUANTIZERS[name]()
    first, second = torch.randn(2, 256, 512).bfloat16() * torch.tensor([1.0, 3.0]).bfloat16()[:, None, None]
    tensor, told = quantizer(first), torch.ones(1)

    def state():
        return _held(tensor) | ({"amax": quantizer.amax} if name == "delayed" else {})

    before, places = {k: v.clone() for k, v in state().items()}, {k: v.data_ptr() for k, v in state().items()}
    tensor.quantize_(second, noop_flag=told)
    assert all(torch.equal(values, before[buffer]) for buffer, values in state().items())
    tensor.quantize_(second, noop_flag=told.zero_())
    assert {k: v.data_ptr() for k, v in state().items()} == places
    again = quantizer(second)
    for buffer, values in _held(again).items():
        assert torch.equal(state()[buffer], values), buffer
    assert any(not torch.equal(values, before[buffer]) for buffer, values in state().items())


@pytest.mark.parametrize("name", NAMES)
def test_columns_alone_are_those_of_both(name):
    """One tensor of current scaling is refused them on Hopper; a group has a kernel of its own."""
    torch.manual_seed(0)
    x, quantizer = torch.randn(384, 256).bfloat16(), QUANTIZERS[name]()
    both = tex.group_quantize(x, quantizer, 2, torch.tensor([128, 256]))
    quantizer.set_usage(rowwise=False)
    alone = tex.group_quantize(x, quantizer, 2, torch.tensor([128, 256]))
    kept = "rowwise_data" if alone.columnwise_data is None else "columnwise_data"  # Blackwell multiplies either layout
    assert (kept == "rowwise_data") == (name == "current" and ARCH >= 100)
    assert torch.equal(getattr(alone, kept), getattr(both, kept))


def test_bias_gradients_of_the_members():
    x = torch.randn(384, 128).bfloat16()
    _, sums = tex.bgrad_group_quantize(x, QUANTIZERS["blockwise"](), 3, torch.tensor([128, 0, 256]))
    assert torch.equal(sums, torch.stack([part.float().sum(0) for part in x.split([128, 0, 256])]).bfloat16())


def test_what_cannot_be_grouped_is_refused():
    delayed = Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType(E4M3))
    with pytest.raises(RuntimeError, match="only supports MXFP8, NVFP4"):
        tex.group_quantize(torch.randn(128, 128), delayed, 1, None)
    with pytest.raises(RuntimeError, match="varying last dim"):
        tex.bgrad_group_quantize(torch.randn(128, 128), QUANTIZERS["blockwise"](), 1, None, torch.tensor([128]))


# ---------------------------------------------------------------------- products

ROWS = [128, 0, 256]


def _group(parts, dtype=torch.bfloat16):
    """Plain matrices of one width as a group."""
    first = torch.tensor([len(part) for part in parts])
    arguments = {"logical_first_dim": int(first.sum()), "logical_last_dim": parts[0].shape[1]}
    group = GroupedTensor.make_grouped_tensor(
        num_tensors=len(parts),
        first_dims=first,
        last_dims=None,
        quantizer=None,
        device=torch.device("cuda"),
        dtype=dtype,
        **arguments,
    )
    for member, part in zip(group.split_into_quantized_tensors(), parts, strict=True):
        member.copy_(part)
    return group


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("name", [None, *NAMES])
def test_members_are_multiplied_as_they_are_alone(name, layout, accumulate):
    """Forward with a list of weights, dgrad with a group of them, wgrad into a list; a member of no rows among them."""
    torch.manual_seed(0)
    quantizer = QUANTIZERS[name]() if name else None
    weights = [torch.randn(256, 384).bfloat16() for _ in ROWS]
    x = [torch.randn(n, 384).bfloat16() for n in ROWS]
    dy = [torch.randn(n, 256).bfloat16() for n in ROWS]
    a, b = {"TN": (weights, x), "NN": (weights, dy), "NT": (x, dy)}[layout]
    shapes = [(256, 384)] * 3 if layout == "NT" else [(n, 256 if layout == "TN" else 384) for n in ROWS]
    out = [torch.randn(shape).bfloat16() for shape in shapes]
    expected = [part.clone() for part in out]
    for i in range(3):
        mine = [quantizer(part[i]) if quantizer is not None and part[i].numel() else part[i] for part in (a, b)]
        arguments = (None, None, None, False, None, False, None, 0, accumulate, True)
        tex.generic_gemm(
            mine[0], layout[0] == "T", mine[1], layout[1] == "T", expected[i], None, *arguments, alpha=1.0, beta=1.0
        )
    of_a = [len(part) for part in a]
    if layout == "TN" and quantizer is not None:
        left = [quantizer(part) for part in a]
    elif layout == "TN":
        left = a
    else:
        left = _group(a) if quantizer is None else tex.group_quantize(torch.cat(a), quantizer, 3, torch.tensor(of_a))
    right = (
        _group(b)
        if quantizer is None
        else tex.group_quantize(torch.cat(b), quantizer, 3, torch.tensor([len(part) for part in b]))
    )
    target = [part.clone() for part in out] if layout == "NT" else _group(out)
    general_grouped_gemm_for_grouped_tensor(left, right, target, layout=layout, accumulate=accumulate)
    found = target if layout == "NT" else target.split_into_quantized_tensors()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_bias_is_added_to_the_rounded_products(weighted):
    torch.manual_seed(0)
    weights, x = [torch.randn(256, 128).bfloat16() for _ in ROWS], [torch.randn(n, 128).bfloat16() for n in ROWS]
    biases, scales = torch.randn(3, 256).bfloat16(), torch.rand(sum(ROWS))
    target = _group([torch.zeros(n, 256) for n in ROWS])
    general_grouped_gemm_for_grouped_tensor(
        weights, _group(x), target, bias=_group([row[None] for row in biases]), bias_scale=scales if weighted else None
    )
    for part, weight, bias, scale, found in zip(
        x, weights, biases, scales.split(ROWS), target.split_into_quantized_tensors(), strict=True
    ):
        times = scale[:, None] if weighted else 1.0
        assert torch.equal(found, ((part @ weight.t()).float() + bias.float() * times).bfloat16())


def test_groups_of_unequal_numbers_are_not_multiplied():
    weights, x = [torch.randn(256, 128).bfloat16()] * 2, [torch.randn(n, 128).bfloat16() for n in ROWS]
    with pytest.raises(RuntimeError, match="same num_tensors"):
        general_grouped_gemm_for_grouped_tensor(weights, _group(x), _group([torch.zeros(n, 256) for n in ROWS]))


# ---------------------------------------------------------------------- scales in the order of the tensor cores


def _mxfp8(rows, columns, optimized):
    quantizer = MXFP8Quantizer(tex.DType(E4M3), rowwise=rows, columnwise=columns)
    quantizer.optimize_for_gemm = optimized
    return quantizer


@BLACKWELL
def test_a_group_says_how_its_scales_lie():
    torch.manual_seed(0)
    x, rows = torch.randn(384, 256).bfloat16(), torch.tensor(ROWS)
    plain, swizzled = (tex.group_quantize(x, _mxfp8(True, True, optimized), 3, rows) for optimized in (False, True))
    assert (plain._with_gemm_swizzled_scales, swizzled._with_gemm_swizzled_scales) == (False, True)
    assert not torch.equal(plain.scale_inv, swizzled.scale_inv)
    values = [tex.group_dequantize(group, torch.float32).rowwise_data for group in (plain, swizzled)]
    assert torch.equal(*values)
    before = plain.scale_inv.clone()
    copy = plain.copy()
    tex.grouped_swizzle_for_gemm(copy, True, True)
    assert torch.equal(copy.scale_inv, swizzled.scale_inv)
    assert torch.equal(copy.columnwise_scale_inv, swizzled.columnwise_scale_inv)
    assert torch.equal(plain.scale_inv, before)  # what was copied from keeps its own
    tex.grouped_swizzle_for_gemm(copy, True, True)  # again: nothing happens
    assert torch.equal(copy.scale_inv, swizzled.scale_inv)


@BLACKWELL
def test_a_group_that_came_with_rows_gets_columns_of_their_values():
    torch.manual_seed(0)
    x, rows = torch.randn(384, 256).bfloat16(), torch.tensor(ROWS)
    wire = tex.group_quantize(x, _mxfp8(True, False, False), 3, rows)
    values = tex.group_dequantize(wire, tex.DType.kBFloat16).rowwise_data.view(384, 256)
    columns = tex.group_quantize(values, _mxfp8(False, True, True), 3, rows)
    ready, swizzled = wire.copy(), wire.copy()
    tex.grouped_swizzle_for_gemm(swizzled, True, False)
    found = tex.group_requantize_inplace(
        ready, _mxfp8(True, True, True), 3, rows, tex.DType.kBFloat16, return_dequantized=True
    )
    assert torch.equal(found, values)
    assert torch.equal(ready.rowwise_data, wire.rowwise_data)
    assert torch.equal(ready.scale_inv, swizzled.scale_inv)
    assert torch.equal(ready.columnwise_data, columns.columnwise_data)
    assert torch.equal(ready.columnwise_scale_inv, columns.columnwise_scale_inv)
    assert tex.group_requantize_inplace(ready, _mxfp8(True, True, True), 3, rows, tex.DType.kBFloat16) is None
    with pytest.raises(RuntimeError, match="compact format"):
        tex.group_requantize_inplace(
            ready, _mxfp8(True, True, True), 3, rows, tex.DType.kBFloat16, return_dequantized=True
        )
    with pytest.raises(RuntimeError, match="cannot be rebuilt"):
        tex.group_requantize_inplace(swizzled, _mxfp8(True, True, True), 3, rows, tex.DType.kBFloat16)


@BLACKWELL
@pytest.mark.parametrize("layout", ["mxfp8_rowwise", "mxfp8_columnwise", "nvfp4"])
def test_addresses_of_weights_and_of_their_swizzled_scales(layout):
    torch.manual_seed(0)
    side, filled = {
        "mxfp8_rowwise": ("row", (160, 3)),
        "mxfp8_columnwise": ("column", (5, 96)),
        "nvfp4": ("row", (160, 6)),
    }[layout]
    by_rows = side == "row"
    quantizer = NVFP4Quantizer(columnwise=False) if layout == "nvfp4" else _mxfp8(by_rows, not by_rows, False)
    x = [torch.randn(160, 96).bfloat16() for _ in range(3)]
    data, scales = ([getattr(quantizer(part), f"_{side}wise_{name}") for part in x] for name in ("data", "scale_inv"))
    quantizer.optimize_for_gemm = True
    expected = torch.cat([getattr(quantizer(part), f"_{side}wise_scale_inv").view(-1) for part in x])
    for padded in scales:
        padded[filled[0] :], padded[:, filled[1] :] = 255, 255  # nobody reads what lies in the padding
    pack = tex.grouped_mlp_experimental.swizzle_scales_and_pack_ptrs_for_discrete_weights
    of_data, of_scales, buffer = pack(data, scales, layout, torch.device("cuda"))
    assert torch.equal(buffer, expected)
    assert of_data.tolist() == [part.data_ptr() for part in data]
    assert torch.equal(of_data, tex.copy_data_ptrs_to_device(data, torch.device("cuda")))
    assert of_scales.tolist() == [buffer.data_ptr() + i * scales[0].numel() for i in range(3)]
    assert [part.tolist() for part in pack([], [], layout, torch.device("cuda"))] == [[], [], []]
    with pytest.raises(RuntimeError, match="Expected one of: mxfp8_rowwise, mxfp8_columnwise, nvfp4"):
        pack(data, scales, "fp8", torch.device("cuda"))
    with pytest.raises(RuntimeError, match="matching sizes, but got 3 and 2"):
        pack(data, scales[:2], layout, torch.device("cuda"))
