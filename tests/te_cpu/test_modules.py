"""TE's modules under every recipe: forward and backward near BF16, the same bits with recompute, learning with its
optimizer."""

import pytest
import torch
import transformer_engine.pytorch as te
from support.te_cases import ARCH, CASES
from transformer_engine.common import recipe as recipes

from nemo_fp8.contract import Precision
from nemo_fp8.render.te import te_recipe

RECIPES = [name for name, case in CASES.items() if ARCH in case.archs]
# A GEMM of two E4M3 operands is off by sqrt(2) times 2.65%, one of two NVFP4 operands by about 15%; a layer has up to
# four in a row.
NEAR = {"nvfp4": 0.4}
FORMATS = {"nvfp4": "e2m1", "tensorwise": "hybrid"}
BF16 = {"params_dtype": torch.bfloat16}
MODULES = {
    "Linear": lambda: te.Linear(128, 256, **BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(128, 256, **BF16),
    "RMSNorm+Linear": lambda: te.LayerNormLinear(128, 256, normalization="RMSNorm", **BF16),
    "MLP gelu": lambda: te.LayerNormMLP(128, 256, activation="gelu", **BF16),
    "MLP swiglu": lambda: te.LayerNormMLP(128, 256, activation="swiglu", normalization="RMSNorm", **BF16),
    "layer": lambda: te.TransformerLayer(
        128, 256, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **BF16
    ),
}


def _run(module, x, dy, recipe):
    x = x.clone().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(dy if dy.shape == y.shape else dy[..., : y.shape[-1]].contiguous())
    return [y.detach(), x.grad] + [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("module", MODULES)
def test_forward_and_backward_are_near_bf16(module, name):
    torch.manual_seed(0)
    built = MODULES[module]()
    x, dy = torch.randn(64, 2, 128).bfloat16(), torch.randn(64, 2, 256).bfloat16()
    if module in ("Linear", "LayerNormLinear", "RMSNorm+Linear"):
        x, dy = x.view(128, 128), dy.view(128, 256)
    exact = _run(built, x, dy, None)
    found = _run(built, x, dy, CASES[name].build())
    for was, now in zip(exact, found, strict=True):
        assert now.isfinite().all()
        error = (now.float() - was.float()).norm() / was.float().norm().clamp_min(1e-6)
        assert error < NEAR.get(name, 0.12), f"{error:.3f} of shape {tuple(now.shape)}"
    assert not torch.equal(exact[0], found[0])  # it was quantized


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])  # for which TE refuses it
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear"])
def test_a_backward_in_high_precision_multiplies_what_was_never_quantized(module, name, products):
    """``backward="high_precision"``: the gradients are those of BF16 training to the bit, the forward is not."""
    torch.manual_seed(0)
    built = MODULES[module]()
    x, dy = torch.randn(128, 128).bfloat16(), torch.randn(128, 256).bfloat16()
    exact = _run(built, x, dy, None)
    quantized = _run(built, x, dy, CASES[name].build())
    products.clear()
    recipe = te_recipe(Precision(format=FORMATS.get(name, "e4m3"), scaling=name, backward="high_precision"), recipes)
    assert recipe.backward_override == "high_precision"
    y, *gradients = _run(built, x, dy, recipe)
    (fprop, *backward), plain = products, ("Tensor", "Tensor")
    assert "Tensor" not in fprop
    assert backward == [plain, plain]
    assert torch.equal(y, quantized[0])
    assert not torch.equal(y, exact[0])
    assert all(torch.equal(now, was) for now, was in zip(gradients, exact[1:], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(gradients[:2], quantized[1:], strict=False))


@pytest.mark.parametrize("name", RECIPES)
def test_groups_of_rows_one_of_them_empty(name):
    torch.manual_seed(0)
    module = te.GroupedLinear(3, 128, 256, **BF16)
    splits = [64, 0, 96]
    x, dy = torch.randn(160, 128).bfloat16(), torch.randn(160, 256).bfloat16()
    x.requires_grad_()
    with te.autocast(enabled=True, recipe=CASES[name].build()):
        y = module(x, splits)
    y.backward(dy)
    weights = [getattr(module, f"weight{i}") for i in range(3)]
    parts = [part.float() @ weight.float().t() for part, weight in zip(x.detach().split(splits), weights, strict=True)]
    expected = torch.cat([p + getattr(module, f"bias{i}").float() for i, p in enumerate(parts)])
    assert (y.float() - expected).norm() / expected.norm() < NEAR.get(name, 0.06)
    assert not weights[1].grad.any()


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_recompute_gives_the_same_bits(name):
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = MODULES["layer"]()
        x = torch.randn(32, 2, 128).bfloat16().requires_grad_()
        with te.autocast(enabled=True, recipe=CASES[name].build()):
            y = te.checkpoint(layer, x) if recompute else layer(x)
        y.float().pow(2).sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_learns(name, quantized):
    torch.manual_seed(0)
    recipe = CASES[name].build()
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        layer = MODULES["layer"]()
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=2e-3, master_weights=True)
    x, target = torch.randn(32, 2, 128).bfloat16(), torch.randn(32, 2, 128).bfloat16()
    losses = []
    for _ in range(6):
        with te.autocast(enabled=True, recipe=recipe):
            loss = (layer(x).float() - target.float()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("recompute", ["by TE's checkpoint", "by the layer itself"])
def test_delayed_scales_move_with_recompute(recompute, arch):
    """The second is docs/upstream/te_frozen_scales.md: drop it, and its words in docs/te_cpu.md, when TE has mended
    it."""
    by_itself = recompute == "by the layer itself"
    layer = te.LayerNormMLP(128, 256, checkpoint=by_itself, **BF16)
    for _ in range(2):
        x = torch.randn(64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with te.autocast(recipe=CASES["delayed"].build()):
            y = layer(x) if by_itself else te.checkpoint(layer, x)
        y.sum().backward()
    scales = layer.fp8_meta["scaling_fwd"].scale[[0, 1, 3, 4]]  # input and weight of either linear
    frozen = by_itself and arch == 100
    assert (scales == 1).all() if frozen else (scales != 1).all()


def test_what_ran_in_inference_mode_first_goes_on_outside_of_it():
    """A kernel writes scales and histories, whoever made them: torch would refuse those of inference mode."""
    torch.manual_seed(0)
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
    first, second = MODULES["LayerNormLinear"](), MODULES["LayerNormLinear"]()
    second.load_state_dict(first.state_dict())
    found = []
    for module, looking in ((first, torch.no_grad), (second, torch.inference_mode)):
        with te.autocast(recipe=CASES["delayed"].build()), looking():
            module(x)
        found.append(_run(module, x, dy, CASES["delayed"].build()))
        state = module.fp8_meta["scaling_fwd"]
        assert state.scale.is_inference() == (looking is torch.inference_mode)
        assert state.amax_history.count_nonzero(dim=1).tolist()[-2:] == [2, 2]
        found[-1] += [state.scale, state.amax_history]
    assert all(map(torch.equal, *found))


def test_attention_in_fp8_rounds_what_it_multiplies():
    """TE rounds in Python what cuDNN's kernel holds in FP8: q, k and v by one scale, probabilities, and the output."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 32, 4, 16).bfloat16()
    attention = te.DotProductAttention(4, 16, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="no_mask")
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
        found = attention(*inputs)
    found.sum().backward()

    def rounded(x):
        scale = 448 / x.abs().amax().float()
        return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).bfloat16()

    def expected(cast):
        a, b, c = (x.transpose(1, 2) for x in cast(torch.stack([q, k, v])))
        scores = (a.float() @ b.float().mT / 4).bfloat16()
        probabilities = scores.float().softmax(-1).bfloat16()
        out = (cast(probabilities).float() @ c.float()).bfloat16()
        return cast(out).transpose(1, 2).reshape(2, 32, 64).float()

    far = (expected(rounded) - expected(lambda x: x)).abs().mean()
    assert (found.float() - expected(rounded)).abs().mean() < far / 10
    assert all(x.grad.isfinite().all() and x.grad.any() for x in inputs)
