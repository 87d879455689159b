"""autocast in small Transformers: which linears run in FP8, what they compute, nesting, and what is refused."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from support.small_transformer import BLOCKWISE, DELAYED, MXFP8, TENSORWISE, fp8_state
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import nemo_fp8
import nemo_fp8.numerics.autocast as autocast_module
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.autocast import _open, autocast
from nemo_fp8.numerics.linear import linear
from nemo_fp8.numerics.selection import linear_weights


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


@pytest.mark.parametrize("p", [TENSORWISE, BLOCKWISE, MXFP8], ids=["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_every_linear_runs_in_fp8(model, x, p, given):
    yes, everything = ran_in_fp8(model, autocast(p, model if given else None), x)
    assert yes == everything
    assert "layers.0.linear1" in yes


def test_a_contract_is_known_by_its_name(model, x):
    by_name = autocast("bf16_with_fp8_blockwise_mixed", model)
    assert by_name.precision == nemo_fp8.preset("bf16_with_fp8_blockwise_mixed")
    assert ran_in_fp8(model, by_name, x)[0]
    with pytest.raises(PrecisionError, match="bf16_with_fp8_blokwise_mixed"):
        autocast("bf16_with_fp8_blokwise_mixed")


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
    q, k, v = (
        linear(x, attention.in_proj_weight, attention.in_proj_bias, precision=BLOCKWISE)
        .view(2, 24, 3, 4, 16)
        .permute(2, 0, 3, 1, 4)
    )
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


def test_a_shape_that_does_not_fit_a_rule_s_recipe_says_that_recipe():
    p = BLOCKWISE.replace(modules=(("*", "mxfp8"),), strict=True)
    with pytest.raises(PrecisionError, match="multiples of 32 for an FP8 GEMM with mxfp8 scaling"):
        autocast(p, nn.Sequential(nn.Linear(48, 64)))


def test_outside_and_switched_off_nothing_changes(model, x):
    plain = model(x)
    fp8 = autocast(BLOCKWISE, model)
    assert torch.equal(model(x), plain)
    with fp8:
        assert not torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)
    for off in (
        autocast(Precision(), model),
        autocast(BLOCKWISE, model, enabled=False),
        autocast(DELAYED, enabled=False),
    ):
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


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_threads_share_a_region_s_object(model, x, given):
    """It ended in "Token was created in a different Context", and a region without a model in an IndexError elsewhere.

    All four are inside at once, and a thread outside of any region runs the model as it is.
    """
    fp8, inside = autocast(BLOCKWISE, model if given else None), threading.Barrier(5, timeout=30)
    with torch.no_grad():
        plain = model(x)
        with fp8:
            expected = model(x)

    def run(region):
        with torch.no_grad():
            with region:
                inside.wait()
                found = model(x)
                inside.wait()
            return found, model(x)

    with ThreadPoolExecutor(5) as threads:
        found = list(threads.map(run, [fp8, fp8, fp8, fp8, nullcontext()]))
    assert not torch.equal(expected, plain)
    assert all(torch.equal(within, expected) and torch.equal(after, plain) for within, after in found[:4])
    assert all(torch.equal(one, plain) for one in found[4])


def test_the_public_name():
    assert nemo_fp8.autocast is autocast


# ---------------------------------------------------------------------- weights that are replaced, regions that fail


def _replaced_by_assignment(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


def _replaced_by_hand(model):
    for module in model:
        module.weight = nn.Parameter(module.weight.detach().clone())


def _moved_to_other_memory(model):
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.float().bfloat16()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _modules_replaced(model):
    for i, module in enumerate(model):
        model[i] = nn.Linear(128, 128, bias=False).bfloat16()
        model[i].weight.data.copy_(module.weight)


@pytest.mark.parametrize(
    "replace", [_replaced_by_assignment, _replaced_by_hand, _moved_to_other_memory, _modules_replaced]
)
@pytest.mark.parametrize("p", [BLOCKWISE, DELAYED], ids=["blockwise", "delayed"])
@pytest.mark.parametrize("inside", [False, True])
def test_replaced_parameters_stay_in_fp8(replace, p, inside):
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)).bfloat16()
    x, fp8, old = torch.randn(16, 128).bfloat16(), autocast(p, model), [module.weight for module in model]
    with torch.no_grad():  # without gradients no scale moves
        plain = model(x)
        with fp8:
            before = model(x)
            if inside:
                replace(model)
                after = model(x)
        if not inside:
            replace(model)
            with fp8:
                after = model(x)
    assert all(module.weight is not weight for module, weight in zip(model, old, strict=True))
    assert not torch.equal(before, plain)
    assert torch.equal(after, before)


def test_a_module_that_is_kept_stays_so_when_it_is_replaced_and_the_model_is_searched_once(monkeypatch):
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)).bfloat16()
    x, searches, adopt = torch.randn(16, 128).bfloat16(), [], autocast_module._adopt
    with autocast(BLOCKWISE.replace(keep=("1",)), model):
        model[1] = nn.Linear(128, 128, bias=False).bfloat16()
        monkeypatch.setattr(autocast_module, "_adopt", lambda *given: searches.append(given) or adopt(*given))
        for _ in range(3):
            assert torch.equal(model[1](x), x @ model[1].weight.T)
    assert len(searches) == 1


def test_a_replaced_module_is_recomputed_in_fp8():
    """Its hooks came while it ran for the first time."""
    model, x = (
        nn.Sequential(nn.Linear(128, 128, bias=False)).bfloat16(),
        torch.randn(16, 128).bfloat16().requires_grad_(),
    )
    outputs = []
    with set_checkpoint_early_stop(False), autocast(BLOCKWISE, model):
        _modules_replaced(model)
        model[0].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
        y = checkpoint(model, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], x @ model[0].weight.T)


def test_without_a_model_nothing_is_remembered_of_modules_that_are_gone():
    fp8, x = autocast(BLOCKWISE), torch.randn(16, 128).bfloat16()
    with fp8:
        for _ in range(5):
            nn.Linear(128, 128, bias=False).bfloat16()(x)
        gc.collect()
        assert len(fp8._owners) == 0


def test_a_region_that_cannot_be_opened_leaves_none_open(monkeypatch):
    class Fails:
        def __enter__(self):
            raise RuntimeError("TE cannot")

        def __exit__(self, *_):
            raise AssertionError("it was never entered")

    p = BLOCKWISE
    fp8, x, linear = autocast(p), torch.randn(16, 128).bfloat16(), nn.Linear(128, 128, bias=False).bfloat16()
    plain = linear(x)
    monkeypatch.setattr(autocast, "_te", lambda self: Fails())
    with pytest.raises(RuntimeError, match="TE cannot"), fp8:
        pass
    monkeypatch.undo()
    assert _open.get() == ()
    assert torch.equal(linear(x), plain), "FP8 is off again"
    with fp8:
        assert not torch.equal(linear(x), plain)


@pytest.mark.parametrize(("fields", "words"), [
    ({"modules": (("*.linear2", "mxfp8"), ("*.linaer1", "bf16"))}, r"modules: '\*\.linaer1' names no linear"),
    ({"keep": ("*.linaer1", "*.linaer2")}, r"keep=.*linaer2.* names no linear"),
])  # fmt: skip
def test_a_pattern_that_names_nothing_is_refused(fields, words):
    """As in training: a typing error would train in other formats than the contract's."""
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    with pytest.raises(PrecisionError, match=words):
        autocast(BLOCKWISE.replace(**fields), layer)
    autocast(BLOCKWISE.replace(keep=("*.router", "linear1")), layer)
    autocast(BLOCKWISE.replace(keep=("lm_head", "*.gate")), layer)  # stays in the compute dtype anyway


def test_rules_by_module_give_each_linear_its_own_recipe():
    rules = (("first", "bf16"), ("second", "blockwise"), ("*", "nvfp4"))
    p = Precision(format="e4m3", scaling="mxfp8", modules=rules)
    names = ("first", "second", "third")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for name in names})
    x = torch.randn(32, 64).bfloat16()
    with autocast(p, model), torch.no_grad():
        found = {name: module(x) for name, module in model.items()}
    for name, own in (("second", Precision(format="e4m3", scaling="blockwise")), ("third", p.of(["third"]))):
        assert torch.equal(found[name], linear(x, model[name].weight, precision=own))
    assert torch.equal(found["first"], model["first"](x))
    with pytest.raises(PrecisionError, match="autocast without a model"):
        autocast(p)


@pytest.mark.parametrize("wrong", ["model", [], {}])
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(PrecisionError, match="A model that is a"):
        nemo_fp8.autocast("bf16_with_fp8_blockwise_mixed", wrong)
