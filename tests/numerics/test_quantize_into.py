"""Quantizing into memory that is there already: where it may lie, what is refused, and that nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import same, values
from support.tensors import OPERANDS, name

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels, quantize, quantize_into

WEIGHT = Operand("e4m3", (128, 128), "fp32")
TENSOR = Operand("e4m3", None, "fp32")
FP8 = torch.float8_e4m3fn


@pytest.fixture(params=["fast", "torch"])
def engine(request, monkeypatch):
    """The kernel of the machine, and the specification where there is none; both keep the same promises."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_device", lambda x: None)


@pytest.mark.parametrize("operand", OPERANDS, ids=name)
@pytest.mark.parametrize("usage", ["row", "col"])
@pytest.mark.usefixtures("engine")
def test_the_same_bits_as_quantize(operand, usage):
    x = values((260, 390), torch.bfloat16, 1, "specials")
    expected = quantize(x, operand, usage=usage)
    codes, scale_inv = torch.empty_like(expected.data), torch.empty_like(expected.scale_inv)
    q = quantize_into(x, operand, codes, scale_inv, usage=usage, statistics=True)
    assert (q.data is codes, q.scale_inv is scale_inv, q.usage, q.block) == (True, True, usage, expected.block)
    assert int(q.statistics.total().elements) == x.numel()
    same(codes, expected.data)
    same(scale_inv, expected.scale_inv)


@pytest.mark.usefixtures("engine")
def test_the_shards_of_a_fused_weight():
    """q, k and v into one parameter: rows of codes, rows of scales, and not a byte beside them."""
    shards = [values((n, 384), torch.bfloat16, n, "gaussian") for n in (512, 128, 128)]
    codes, scales = torch.zeros(900, 384, dtype=FP8), torch.full((8, 3), 7.0)
    row = 0
    for shard in shards:
        q = quantize_into(shard, WEIGHT, codes[row : row + len(shard)], scales[row // 128 : (row + len(shard)) // 128])
        same(q.data, quantize(shard, WEIGHT).data)
        row += len(shard)
    whole = quantize(torch.cat(shards), WEIGHT)
    same(codes[:768], whole.data)
    same(scales[:6], whole.scale_inv)
    assert not codes[768:].view(torch.uint8).any()
    assert (scales[6:] == 7.0).all()


@pytest.mark.parametrize("operand", [WEIGHT, TENSOR, Operand("e4m3", (1, 32), "e8m0")], ids=name)
@pytest.mark.usefixtures("engine")
def test_a_slice_of_columns(operand):
    """A row-parallel shard: neither the codes nor the scales of a row follow on those of the row above."""
    x = values((300, 256), torch.bfloat16, 2, "gaussian")
    expected = quantize(x, operand)
    codes = torch.zeros(300, 1024, dtype=FP8)
    scales = torch.zeros((), dtype=torch.float32)
    if operand.block is not None:
        height, width = expected.scale_inv.shape
        scales = torch.zeros(height, 4 * width, dtype=expected.scale_inv.dtype)[:, width : 2 * width]
    quantize_into(x, operand, codes[:, 512:768], scales)
    same(codes[:, 512:768], expected.data)
    same(scales, expected.scale_inv)
    left = codes.view(torch.uint8).clone()
    left[:, 512:768] = 0
    assert not left.any()


@pytest.mark.usefixtures("engine")
def test_scales_that_lie_column_by_column():
    """DeepGEMM's layout."""
    x = values((200, 512), torch.bfloat16, 3, "gaussian")
    operand = Operand("e4m3", (1, 128), "fp32")
    scales = torch.zeros(4, 200).t()
    quantize_into(x, operand, torch.empty(200, 512, dtype=FP8), scales)
    same(scales, quantize(x, operand).scale_inv)


@pytest.mark.usefixtures("engine")
def test_one_scale_in_a_row_of_many():
    """vLLM keeps one scale for each shard of a fused weight."""
    x = values((64, 96), torch.bfloat16, 4, "gaussian")
    scales = torch.zeros(3)
    quantize_into(x, TENSOR, torch.empty(64, 96, dtype=FP8), scales[1:2])
    assert scales.tolist() == [0.0, float(quantize(x, TENSOR).scale_inv), 0.0]


@pytest.mark.usefixtures("engine")
def test_source_and_result_in_one_shared_buffer():
    """What a trainer and an engine share is one block of bytes, in which both sides lie."""
    buffer = torch.zeros(1 << 20, dtype=torch.uint8).share_memory_()
    x = buffer[4096 : 4096 + 2 * 256 * 512].view(torch.bfloat16).view(256, 512)
    x.copy_(values((256, 512), torch.bfloat16, 5, "gaussian"))
    codes = buffer[(1 << 19) : (1 << 19) + 256 * 512].view(FP8).view(256, 512)
    scales = buffer[-32:].view(torch.float32).view(2, 4)
    quantize_into(x, WEIGHT, codes, scales)
    expected = quantize(x.clone(), WEIGHT)
    same(codes, expected.data)
    same(scales, expected.scale_inv)


def wrong_memory() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    codes, scales = torch.empty(256, 256, dtype=FP8), torch.empty(2, 2)
    return {
        "codes= is torch.uint8": (codes.view(torch.uint8), scales),
        "codes= is .* of shape \\(256, 255\\)": (codes[:, :255], scales),
        "codes= .* has strides": (codes.t(), scales),
        "codes= has strides .* share memory": (codes[:1].expand(256, 256), scales),
        "scale_inv= is .* of shape \\(2, 1\\)": (codes, scales[:, :1]),
        "scale_inv= is torch.float64": (codes, scales.double()),
        "scale_inv= requires grad": (codes, torch.empty(2, 2, requires_grad=True)),
    }


@pytest.mark.parametrize("why", wrong_memory())
@pytest.mark.usefixtures("engine")
def test_memory_that_cannot_hold_it_is_refused(why):
    x = values((256, 256), torch.bfloat16, 6, "gaussian")
    with pytest.raises(PrecisionError, match=why):
        quantize_into(x, WEIGHT, *wrong_memory()[why])


@pytest.mark.usefixtures("engine")
def test_memory_that_would_spoil_the_source_is_refused():
    x = values((256, 256), torch.bfloat16, 7, "gaussian")
    half = x.view(torch.uint8).view(-1)[: 256 * 256].view(FP8).view(256, 256)
    with pytest.raises(PrecisionError, match="overlaps its source"):
        quantize_into(x, WEIGHT, half, torch.empty(2, 2))


def test_decode_into_memory_that_is_used_again():
    q = quantize(values((130, 300), torch.bfloat16, 8, "gaussian"), WEIGHT)
    back = torch.empty(130, 300, dtype=torch.bfloat16)
    if kernels.decode(q.data, q.scale_inv, q.block, out=back) is None:
        pytest.skip("no C compiler on this machine")
    same(back, q.dequantize_reference(torch.bfloat16))
    for wrong in (back[:, :299], back.float(), torch.empty(300, 130, dtype=torch.bfloat16).t()):
        with pytest.raises(PrecisionError, match="out="):
            kernels.decode(q.data, q.scale_inv, q.block, out=wrong)


@pytest.mark.parametrize("epsilon", [0.0, 1e-2])
def test_given_memory_has_the_same_lower_bound_for_amaxes(epsilon):
    x = torch.randn(8, 256) * torch.tensor([1e-4, 1.0]).repeat(4)[:, None]
    operand = Operand("e4m3", (1, 128), "pow2")
    codes, scales = torch.empty(8, 256, dtype=torch.float8_e4m3fn), torch.empty(8, 2)
    found, expected = quantize_into(x, operand, codes, scales, epsilon=epsilon), quantize(x, operand, epsilon=epsilon)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scale_inv)
    assert (scales[0, 0] == quantize(x, operand).scale_inv[0, 0]) == (epsilon == 0.0)
