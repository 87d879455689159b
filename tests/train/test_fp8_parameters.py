"""FP8 primary weights: a weight that looks like BF16, casts that need no other rank's values, half the bytes on the wire."""

import pytest
import torch
from harness import RunFailed, train_tiny
from nemo_fp8.train.parameters import Fp8Tensor, MxFp8Tensor, _cast_shares, _take_storage, fp8_parameter

from nemo_fp8.alignment import PRIMARY
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.delayed import DelayedState
from nemo_fp8.numerics.linear import quantize_weight
from nemo_fp8.presets import preset

RECIPES = {
    "delayed": "bf16_with_fp8_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
REUSE = {"optim": {"reuse_grad_buf_for_mxfp8_param_ag": True}, "ddp": {"reuse_grad_buf_for_mxfp8_param_ag": True, "fp8_param_gather": True}}


def contract(scaling):
    return preset(RECIPES[scaling]).replace(fp8_param=True, first_layers=0, last_layers=0)


def weight(scaling, rows=256, columns=384):
    torch.manual_seed(0)
    value = (torch.randn(rows, columns) * torch.rand(rows, 1)).bfloat16()
    delayed = DelayedState(contract(scaling)) if scaling == "delayed" else None
    return value, fp8_parameter(torch.nn.Parameter(value.clone()), contract(scaling), delayed, None)


# ---------------------------------------------------------------------- the tensor


@pytest.mark.parametrize("scaling", RECIPES)
def test_reads_as_its_quantized_values_and_is_one_byte_an_element(scaling):
    value, parameter = weight(scaling)
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, Fp8Tensor)
    assert isinstance(parameter, MxFp8Tensor) is (scaling == "mxfp8")
    assert (parameter.dtype, parameter.shape) == (torch.bfloat16, value.shape)
    row, col = quantize_weight(value, contract(scaling), DelayedState(contract(scaling)) if scaling == "delayed" else None)
    assert torch.equal(parameter + 0, row.dequantize(torch.bfloat16))
    assert [q.data.element_size() for q in parameter.pair()] == [1, 1]
    assert all(torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) for a, b in zip(parameter.pair(), (row, col), strict=True))
    assert torch.equal(parameter.get_high_precision_init_val(), value)


@pytest.mark.parametrize("scaling", RECIPES)
def test_copying_quantizes_and_aliases_see_it(scaling):
    value, parameter = weight(scaling)
    alias = parameter.data
    with torch.no_grad():
        parameter.copy_(value * 0.5)
    again = alias.dequantize()
    with torch.no_grad():
        parameter.copy_(parameter.dequantize())
    assert torch.equal(alias.dequantize(), again), "what a checkpoint holds quantizes to itself"
    if scaling != "delayed":  # whose scale is not the tensor's own
        assert (again - value * 0.5).norm() < 0.04 * (value * 0.5).norm()
    with pytest.raises(PrecisionError, match="copy_"), torch.no_grad():
        parameter.mul_(2)


def test_gradients_reach_it_like_any_parameter():
    _, parameter = weight("tensorwise", 32, 48)
    x = torch.randn(4, 48).bfloat16()
    (x @ parameter.t()).sum().backward()
    assert parameter.grad.shape == parameter.shape
    assert torch.equal(parameter.grad, x.sum(0).expand(32, 48).bfloat16()) or torch.allclose(
        parameter.grad, x.sum(0).expand(32, 48), rtol=2e-2
    )
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    assert accumulator.variable is parameter


# ---------------------------------------------------------------------- casting shares


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("shape", [(256, 384), (128, 128)])
def test_the_cast_of_a_share_is_that_share_of_the_cast(scaling, shape, alone):
    _, parameter = weight(scaling, *shape)
    master = torch.randn(shape.__getitem__(0) * shape[1])
    expected = fp8_parameter(torch.nn.Parameter(master.view(shape).bfloat16()), contract(scaling), parameter._held.delayed, None)
    storage = torch.zeros(master.numel() + 64, dtype=torch.uint8)[64:].view(shape)
    _take_storage(parameter, storage)
    _cast_shares([parameter], [master], [0], None)
    assert torch.equal(parameter.dequantize(), expected.dequantize())
    assert torch.equal(storage, expected.pair()[0].data.view(torch.uint8)), "the codes lie in the buffer that is gathered"


def test_shares_of_two_ranks_make_the_whole_weight():
    """Two shares that meet inside a block, each with the amaxes of both, as the reduction gives them."""
    from nemo_fp8.train.parameters import _Share

    for scaling in ("tensorwise", "blockwise"):
        _, parameter = weight(scaling, 256, 384)
        master = torch.randn(256 * 384).bfloat16()
        cut = 130 * 384 + 77
        shares = [_Share(parameter._held, master[:cut], 0), _Share(parameter._held, master[cut:], cut)]
        amax = torch.stack([share.amax() for share in shares]).amax(0)
        for share in shares:
            share.write(amax)
        expected = fp8_parameter(torch.nn.Parameter(master.view(256, 384)), contract(scaling), None, None)
        assert torch.equal(parameter.dequantize(), expected.dequantize())


def test_mxfp8_shares_are_refused_with_the_remedy():
    _, parameter = weight("mxfp8")
    with pytest.raises(PrecisionError, match="reuse_grad_buf_for_mxfp8_param_ag=True"):
        _cast_shares([parameter], [torch.zeros(4)], [0], None)


def test_blocks_never_straddle_an_edge():
    assert all(contract(scaling).operand("weight").block in (None, (1, 32), (128, 128)) for scaling in PRIMARY)
    assert PRIMARY["blockwise"] == 128


# ---------------------------------------------------------------------- in a run


@pytest.mark.parametrize("scaling", RECIPES)
def test_two_ranks_train_as_with_bf16_weights_and_gather_half_the_bytes(scaling):
    settings = {"ranks": 2, "before": "probes:watch_gather", "probe": "probes:seen", "steps": 6}
    run = train_tiny(RECIPES[scaling], settings={"fp8_param_gather": True}, **settings, **(REUSE if scaling == "mxfp8" else {}))
    plain = train_tiny(RECIPES[scaling], settings={"fp8_param_gather": False}, **settings)
    assert run.losses == pytest.approx(plain.losses, rel=0.005)
    fp8, bf16 = run.extra["seen"], plain.extra["seen"]
    if scaling == "mxfp8":
        assert "torch.uint8" not in fp8
        return
    layers = 2 if scaling == "tensorwise" else 4
    linears = layers * 128 * (3 * 128 + 128 + 2 * 256)
    # One gather after each optimizer step.
    assert fp8["torch.uint8"] == 6 * linears
    saved = bf16["torch.bfloat16"] - fp8["torch.bfloat16"] - fp8["torch.uint8"]
    assert saved == pytest.approx(6 * linears, rel=0.01), "every byte of an FP8 weight saves one of BF16"


def test_weights_that_do_not_fit_stay_in_bf16():
    run = train_tiny(
        RECIPES["blockwise"],
        settings={"fp8_param_gather": True},
        steps=2,
        config={"hidden_size": 64, "ffn_hidden_size": 256},
        probe="probes:states",
    )
    assert run.extra["primary"] == []
    assert len(run.extra["ran"]) == 16, "their GEMMs run in FP8 all the same"


# 192 rows of the feed-forward run in FP8 GEMMs (a multiple of 16), and are no whole blocks of 128.
ODD = {"settings": {"fp8_param_gather": True}, "config": {"ffn_hidden_size": 192}, "stock": False, "steps": 1}


def test_a_primary_weight_that_does_not_fit_is_said_once_by_name():
    log = train_tiny("bf16_with_fp8_blockwise_mixed", **ODD).log
    for name, shape in (("fc1", (192, 128)), ("fc2", (128, 192))):
        said = f"{name}: a weight of shape {shape} is kept in bf16 and not in FP8: not a multiple of 128."
        assert log.count(said) == 1, "once, and not for each of the layers"
    assert "qkv: a weight" not in log


def test_a_strict_contract_refuses_a_primary_weight_that_does_not_fit():
    odd = {**ODD, "settings": {**ODD["settings"], "strict": True}}
    with pytest.raises(RunFailed, match=r"fc1: a primary weight of shape \(192, 128\) cannot be kept in FP8 under blockwise scaling"):
        train_tiny("bf16_with_fp8_blockwise_mixed", **odd)
