"""Training under autocast: recompute in every order equals no recompute to the bit, and a region leaves nothing
behind."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.small_transformer import ALL, BLOCKWISE, DELAYED, MXFP8, TENSORWISE, fp8_state, same, train
from torch.utils.checkpoint import checkpoint

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.autocast import autocast


@pytest.mark.parametrize("p", ALL.values(), ids=ALL)
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_recompute_is_equal_to_the_bit(model, x, p, recompute, inside):
    again = copy.deepcopy(model)
    again.recompute = recompute
    plain = copy.deepcopy(model)
    expected = train(model, autocast(p, model), x)
    assert same(expected, train(again, autocast(p, again), x, inside=inside))
    assert not same(expected, train(plain, nullcontext(), x))
    if p is DELAYED:
        assert same(fp8_state(model).values(), fp8_state(again).values())


@pytest.mark.parametrize("p", [TENSORWISE, BLOCKWISE], ids=["tensorwise", "blockwise"])
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recompute_without_a_model(model, x, p, recompute):
    again = copy.deepcopy(model)
    again.recompute = recompute
    assert same(train(model, autocast(p), x), train(again, autocast(p), x))


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recompute_of_a_module_under_two_contracts(model, x, recompute):
    """The inner region's contract ran, whichever region was made last."""
    layer = model.layers[0]
    inner, outer = autocast(MXFP8, layer), autocast(BLOCKWISE, model)
    found = []
    for again in (False, True):
        model.zero_grad()
        with outer, inner:
            leaf = x.clone().requires_grad_()
            y = checkpoint(layer, leaf, use_reentrant=recompute == "reentrant") if again else layer(leaf)
        y.float().square().mean().backward()
        found.append([leaf.grad, *[p.grad.clone() for p in layer.parameters()]])
    assert same(*found)


def test_recompute_with_several_microbatches_in_a_region(model, x):
    again = copy.deepcopy(model)
    again.recompute = "not reentrant"
    assert same(
        train(model, autocast(DELAYED, model), x, microbatches=2),
        train(again, autocast(DELAYED, again), x, microbatches=2),
    )


def test_a_bf16_step_after_an_fp8_step_is_bf16(model, x):
    """The hooks of an FP8 region must not turn a later plain recompute into FP8."""
    again = copy.deepcopy(model)
    again.recompute = "not reentrant"
    train(again, autocast(BLOCKWISE, again), x, steps=1)
    assert same(train(model, nullcontext(), x), train(again, nullcontext(), x))


def test_a_functional_linear_in_a_checkpoint_needs_the_model(x):
    weight = torch.randn(32, 64).bfloat16().requires_grad_()
    with autocast(BLOCKWISE), pytest.raises(PrecisionError, match="Pass the model"):
        checkpoint(torch.nn.functional.linear, x.requires_grad_(), weight, use_reentrant=False)


def test_wgrad_stays_in_bf16_when_told_to(x):
    model = torch.nn.Linear(64, 32, bias=False).bfloat16()
    with autocast(BLOCKWISE.replace(wgrad=False), model):
        y = model(x)
    y.sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(48, 32).bfloat16().t() @ x.view(48, 64))
