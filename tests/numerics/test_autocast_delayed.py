"""Delayed scaling under autocast: when scales move, and that their state is saved, resumed and copied with the
model."""

import copy
import io

import torch
from support.small_transformer import BLOCKWISE, DELAYED, Model, fp8_state, same, train

from nemo_fp8.numerics.autocast import autocast


def test_when_scales_are_updated(model, x):
    fp8 = autocast(DELAYED, model)
    ones = {name: t.clone() for name, t in fp8_state(model).items()}
    with fp8, fp8:
        y = model(x)
        assert torch.equal(
            fp8_state(model)["head.weight.fp8.forward.scale"], torch.ones(2)
        )  # not before the outermost ends
    after_forward = fp8_state(model)
    forward = [name for name in ones if name.endswith("forward.scale")]
    backward = [name for name in ones if name.endswith("backward.scale")]
    assert len(forward) == len(backward) == 13
    assert all((after_forward[name] != 1).all() for name in forward)
    assert all((after_forward[name] == 1).all() for name in backward)
    y.float().square().mean().backward()
    after_backward = fp8_state(model)
    assert all((after_backward[name] != 1).all() for name in backward)
    with torch.no_grad(), fp8:
        model(x * 100)
    assert all(
        torch.equal(fp8_state(model)[name], after_backward[name]) for name in forward
    )  # evaluation updates nothing


def test_an_inner_region_is_updated_when_the_outermost_ends(model, x):
    inner = autocast(DELAYED, model.layers[1])
    with autocast(BLOCKWISE, model):
        h = model.layers[0](x)
        for _ in range(2):
            with inner:
                y = model.layers[1](h)
            assert (fp8_state(model)["layers.1.linear1.weight.fp8.forward.scale"] == 1).all()
    assert (fp8_state(model)["layers.1.linear1.weight.fp8.forward.scale"] != 1).all()
    y.float().square().mean().backward()
    assert (fp8_state(model)["layers.1.linear1.weight.fp8.backward.scale"] != 1).all()


def test_delayed_state_resumes_to_the_bit(model, x):
    straight, halved = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(straight, autocast(DELAYED, straight), x, steps=4)
    first = train(halved, autocast(DELAYED, halved), x, steps=2)
    file = io.BytesIO()
    torch.save(halved.state_dict(), file)
    file.seek(0)
    resumed = Model().bfloat16()
    fp8 = autocast(DELAYED, resumed)
    resumed.load_state_dict(torch.load(file))
    found = []
    for step in (2, 3):
        resumed.zero_grad()
        leaf = (x * (1 + step)).requires_grad_()
        with fp8:
            loss = resumed(leaf).float().square().mean()
        loss.backward()
        found += [loss.detach(), leaf.grad] + [p.grad.clone() for p in resumed.parameters()]
    assert same(expected, first + found)


def test_the_same_contract_finds_its_state_again(model, x):
    train(model, autocast(DELAYED, model), x, steps=1)
    before = fp8_state(model)
    autocast(DELAYED, model)
    assert same(before.values(), fp8_state(model).values())
    autocast(DELAYED.replace(amax_history_len=8), model)
    assert (fp8_state(model)["head.weight.fp8.forward.scale"] == 1).all()


def test_models_are_copied_and_pickled_with_their_state(model, x):
    fp8 = autocast(DELAYED, model)
    train(model, fp8, x, steps=2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), torch.load(file, weights_only=False)
    with torch.no_grad(), fp8:
        expected = model(x)
    for copied in copies:
        # The evaluation's amaxes wait in row 0 for the next step, in the copy as in the model: TE does the same.
        with torch.no_grad(), autocast(DELAYED, copied):
            assert torch.equal(copied(x), expected)
        assert same(fp8_state(model).values(), fp8_state(copied).values())
