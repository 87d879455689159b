"""autocast in small Transformers: which linears run in FP8, what they compute, recompute, delayed state, nesting."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nemo_fp8
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.autocast import autocast
from nemo_fp8.numerics.linear import linear
from nemo_fp8.numerics.selection import linear_weights

TENSORWISE = Precision(format="hybrid", scaling="tensorwise")
BLOCKWISE = Precision(format="hybrid", scaling="blockwise")
MXFP8 = Precision(format="e4m3", scaling="mxfp8")
DELAYED = Precision(format="hybrid", scaling="delayed", amax_history_len=4, amax_compute_algo="max")
ALL = {"tensorwise": TENSORWISE, "blockwise": BLOCKWISE, "mxfp8": MXFP8, "delayed": DELAYED}


class Model(torch.nn.Module):
    """Three Transformer layers and a head, with or without activation recompute."""

    def __init__(self, recompute=None):
        super().__init__()
        make = lambda: torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True)  # noqa: E731
        self.layers = torch.nn.ModuleList([make() for _ in range(3)])
        self.head = torch.nn.Linear(64, 32)
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().bfloat16()


@pytest.fixture
def x():
    return torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def train(model, fp8, x, steps=3, microbatches=1, inside=False):
    """Outputs and all gradients of some steps."""
    found = []
    for step in range(steps):
        model.zero_grad()
        leaves = [(x * (1 + step + i)).requires_grad_() for i in range(microbatches)]
        with fp8:
            losses = [model(leaf).float().square().mean() for leaf in leaves]
            if inside:
                sum(losses).backward()
        if not inside:
            sum(losses).backward()
        found += [loss.detach() for loss in losses] + [leaf.grad for leaf in leaves] + [p.grad.clone() for p in model.parameters()]
    return found


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def ran_in_fp8(model, fp8, x):
    """Which linears' outputs are those of the FP8 linear on the inputs they had; for contracts without state."""
    found = {}

    def watch(name):
        def hook(module, args, output):
            fp8_output = linear(args[0], module.weight, module.bias, precision=fp8.precision)
            plain = args[0] @ module.weight.t() + module.bias
            assert not torch.equal(fp8_output, plain)
            found[name] = torch.equal(output, fp8_output)

        return hook

    names = [(n, m) for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    handles = [m.register_forward_hook(watch(n)) for n, m in names]
    with fp8, torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return {name for name, yes in found.items() if yes}, set(found)


# ---------------------------------------------------------------------- what runs


@pytest.mark.parametrize("p", [TENSORWISE, BLOCKWISE, MXFP8], ids=["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_every_linear_runs_in_fp8(model, x, p, given):
    yes, everything = ran_in_fp8(model, autocast(p, model if given else None), x)
    assert yes == everything
    assert "layers.0.linear1" in yes


def test_attention_s_projections_too(model, x):
    """nn.MultiheadAttention calls its linears where no mode looks; both of its weights must be reached."""
    attention, x = model.layers[0].self_attn.float(), x.float()
    plain = attention(x, x, x)[0]
    with autocast(BLOCKWISE, attention):
        both = attention(x, x, x)[0]
    with autocast(BLOCKWISE.replace(keep=("out_proj",)), attention):
        only_in = attention(x, x, x)[0]
    with autocast(BLOCKWISE.replace(keep=("in_proj",)), attention):
        only_out = attention(x, x, x)[0]
    assert len({t.float().norm().item() for t in (plain, both, only_in, only_out)}) == 4
    q, k, v = linear(x, attention.in_proj_weight, attention.in_proj_bias, precision=BLOCKWISE).view(2, 24, 3, 4, 16).permute(2, 0, 3, 1, 4)
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 24, 64)
    expected = linear(heads, attention.out_proj.weight, attention.out_proj.bias, precision=BLOCKWISE)
    assert float(((both - expected).norm() / expected.norm()).detach()) < 1e-3


def test_cross_attention(x):
    attention = torch.nn.MultiheadAttention(64, 4, kdim=32, vdim=32, batch_first=True).bfloat16()
    other = x[..., :32].contiguous()
    assert set(linear_weights(attention, BLOCKWISE)) == {"q_proj", "k_proj", "v_proj", "out_proj"}
    with autocast(BLOCKWISE, attention):
        y = attention(x, other, other)[0]
    assert not torch.equal(y, attention(x, other, other)[0])
    packed = torch.nn.MultiheadAttention(64, 4, batch_first=True).bfloat16()
    with autocast(DELAYED, packed):
        y = packed(x, x * 2, x * 2)[0]  # slices of one weight
    assert not torch.equal(y, packed(x, x * 2, x * 2)[0])


def test_functional_linears_and_tied_weights():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(32, 64)
            self.inner = torch.nn.Linear(64, 64, bias=False)

        def forward(self, ids):
            return torch.nn.functional.linear(self.inner(self.embed(ids)), self.inner.weight)

    model, ids = Tied().bfloat16(), torch.arange(16)
    hidden = linear(model.embed(ids), model.inner.weight, precision=BLOCKWISE)
    for fp8 in (autocast(BLOCKWISE, model), autocast(BLOCKWISE)):
        with fp8:
            y = model(ids)
        assert torch.equal(y, linear(hidden, model.inner.weight, precision=BLOCKWISE))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"first_layers": 1}, {"layers.0."}),
        ({"last_layers": 2}, {"layers.1.", "layers.2."}),
        ({"keep": ("head",)}, {"head"}),
        ({"keep": ("*.linear2", "re:head$")}, {"layers.0.linear2", "layers.1.linear2", "layers.2.linear2", "head"}),
        ({"first_layers": 1, "last_layers": 1, "keep": ("head",)}, {"layers.0.", "layers.2.", "head"}),
    ],
)
def test_layers_and_names_stay_in_the_compute_dtype(model, x, fields, kept):
    yes, everything = ran_in_fp8(model, autocast(BLOCKWISE.replace(**fields), model), x)
    assert everything - yes == {name for name in everything if name.startswith(tuple(kept))}


def test_a_shape_that_does_not_fit(x):
    odd = torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.Linear(40, 64)).bfloat16()
    with autocast(BLOCKWISE, odd):
        assert torch.equal(odd(x), odd[1](odd[0](x)))
    with autocast(BLOCKWISE):
        y = odd(x)
    assert torch.equal(y, odd(x))
    with pytest.raises(PrecisionError, match="multiples of 16") as error:
        autocast(BLOCKWISE.replace(strict=True), odd)
    assert len(error.value.problems) == 2


def test_outside_and_switched_off_nothing_changes(model, x):
    plain = model(x)
    fp8 = autocast(BLOCKWISE, model)
    assert torch.equal(model(x), plain)
    with fp8:
        assert not torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)
    for off in (autocast(Precision(), model), autocast(BLOCKWISE, model, enabled=False), autocast(DELAYED, enabled=False)):
        with fp8, off:
            assert torch.equal(model(x), plain)
        with off:
            assert torch.equal(model(x), plain)


def test_nested_regions_of_two_contracts(model, x):
    lower, upper = model.layers[0], model.layers[1]

    def run(outer, inner):
        with outer:
            h = lower(x)
            with inner:
                h = upper(h)
            return lower(h)

    mixed = run(autocast(BLOCKWISE, model), autocast(MXFP8, upper))
    with autocast(BLOCKWISE):
        h = lower(x)
    with autocast(MXFP8):
        h = upper(h)
    with autocast(BLOCKWISE):
        assert torch.equal(mixed, lower(h))


def test_under_torch_s_own_autocast(x):
    model = torch.nn.Linear(64, 32)
    with torch.autocast("cpu", torch.bfloat16), autocast(BLOCKWISE, model):
        y = model(x.float())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, linear(x, model.weight, model.bias, precision=BLOCKWISE))


# ---------------------------------------------------------------------- training


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
    assert same(train(model, autocast(DELAYED, model), x, microbatches=2), train(again, autocast(DELAYED, again), x, microbatches=2))


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


# ---------------------------------------------------------------------- delayed scaling


def fp8_state(model):
    return {name: t for name, t in model.state_dict().items() if ".fp8." in name}


def test_when_scales_are_updated(model, x):
    fp8 = autocast(DELAYED, model)
    ones = {name: t.clone() for name, t in fp8_state(model).items()}
    with fp8, fp8:
        y = model(x)
        assert torch.equal(fp8_state(model)["head.weight.fp8.forward.scale"], torch.ones(2))  # not before the outermost ends
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
    assert all(torch.equal(fp8_state(model)[name], after_backward[name]) for name in forward)  # evaluation updates nothing


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


@pytest.mark.parametrize(
    ("p", "match"),
    [
        (DELAYED, "delayed"),
        (BLOCKWISE.replace(first_layers=1), "first_layers=1"),
        (BLOCKWISE.replace(keep=("head",)), "head"),
        (BLOCKWISE.replace(strict=True), "strict"),
    ],
)
def test_what_needs_the_model_says_so(p, match):
    with pytest.raises(PrecisionError, match=match) as error:
        autocast(p)
    assert "autocast(precision, model)" in error.value.problems[0].remedy


def test_layers_need_a_list_of_layers():
    with pytest.raises(PrecisionError, match="ModuleList"):
        autocast(BLOCKWISE.replace(first_layers=1), torch.nn.Sequential(torch.nn.Linear(32, 32)))


def test_a_parametrized_weight_is_refused():
    with pytest.raises(PrecisionError, match="computed anew"):
        autocast(BLOCKWISE, torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 32)))


def test_an_error_inside_leaves_everything_in_order(model, x):
    fp8 = autocast(DELAYED, model)
    before = fp8_state(model)
    with pytest.raises(AssertionError, match="embedding dimension"), fp8:
        model(torch.cat([x, x], -1))
    assert torch.equal(fp8_state(model)["head.weight.fp8.forward.scale"], before["head.weight.fp8.forward.scale"])
    plain = model(x)
    with fp8:
        assert not torch.equal(model(x), plain)


def test_the_public_name():
    assert nemo_fp8.autocast is autocast
