"""Grouped tensors: each member is what its quantizer makes of it alone, to the bit, in buffers that the group shares."""

import pytest
import torch
import transformer_engine_torch as tex
from te_cases import ARCH
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
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
