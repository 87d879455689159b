"""NVFP4 in vLLM: what lies in a layer, what it multiplies, and what a whole engine answers."""

import pytest
import torch
from support.rollout import engines
from support.rollout.in_process import build, call
from support.rollout.models import weights_of

from nemo_fp8 import Precision, PrecisionError
from nemo_fp8.rollout import engine_args

NVFP4 = Precision(rollout="nvfp4")
WAYS = {
    "one scale for all": {},
    "one scale for each token": {"activations": "emulated"},
    "weights only": {"activation_scheme": "none"},
}
KERNELS = {
    "one scale for all": "EmulationNvFp4LinearKernel",
    "one scale for each token": "PerTokenNvFp4Kernel",
    "weights only": "WeightOnlyNvFp4Kernel",
}
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_e2m1(x):
    """The nearest value of E2M1; between two, the one whose code is even. No code of ours or of vLLM's."""
    distance = (x.double().abs()[..., None] - MAGNITUDES).abs()
    odd = torch.arange(8) % 2 * 1e-9  # far below a step of FP32
    return MAGNITUDES[(distance + odd).argmin(-1)].copysign(x)


def plain(x, amax, of_activations=False):
    """Values of ``x`` in NVFP4 beneath the scale that this amax gives, in FP32.

    Ties of E4M3 are frequent among BF16 values, so the order of the products is that of TE for weights, and of vLLM for
    activations.
    """
    encode, sixth = torch.div(torch.tensor(2688.0), amax), torch.tensor(6.0).reciprocal()
    blocks = x.float().view(*x.shape[:-1], -1, 16)
    most = blocks.abs().amax(-1, keepdim=True)
    scale = encode * (most * sixth) if of_activations else most * (encode * sixth)
    scale = scale.clamp_max(448).to(torch.float8_e4m3fn).float()
    steps = torch.where(scale == 0, 0, blocks * (scale * encode.reciprocal()).reciprocal())
    return (to_e2m1(steps.clamp(-6, 6)) * scale / encode).view(x.shape)


def activations(x, way):
    if way == "weights only":
        return x.float()
    amax = torch.tensor(2688.0) if way == "one scale for all" else x.float().abs().amax(-1).view(-1, 1, 1)
    return plain(x, amax, of_activations=True).bfloat16().float()


def product(x, weights, way):
    """``x @ w.T`` of fused weights: one amax for all of them."""
    fused = torch.cat(weights)
    return activations(x, way) @ plain(fused, fused.float().abs().max()).bfloat16().float().t()


def in_bf16(x, weights, way):
    fused = torch.cat(weights)
    return activations(x, way).bfloat16() @ plain(fused, fused.float().abs().max()).bfloat16().t()


def close(found, wanted):
    """As near as the order of a sum and one rounding to BF16 allow."""
    spread = wanted.abs().amax()
    return torch.allclose(found.float(), wanted, rtol=2**-7, atol=float(spread) * 2**-8)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_multiplies_what_a_plain_computation_does(checkpoint, way):
    model = build(checkpoint("llama"), rollout="nvfp4", **WAYS[way])
    weights = weights_of(checkpoint("llama"))
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    block = "model.layers.1.self_attn."
    parts = [weights[f"{block}{part}_proj.weight"] for part in "qkv"]
    found = call(model, block + "qkv_proj", x)
    assert close(found, product(x, parts, way))
    assert not close(found, torch.nn.functional.linear(x, torch.cat(parts)).float())  # four bits are far from BF16
    others = [other for other in WAYS if other != way]
    assert not any(close(found, product(x, parts, other)) for other in others)


def test_memory_holds_modelopts_layout_with_one_scale_for_fused_parts(checkpoint):
    from nemo_fp8.rollout.engine.report import plain_report

    model, weights = build(checkpoint("qwen3"), rollout="nvfp4"), weights_of(checkpoint("qwen3"))
    layer = model.get_submodule("model.layers.0.mlp.gate_up_proj")
    assert (layer.weight.dtype, tuple(layer.weight.shape)) == (torch.uint8, (1024, 128))
    assert (layer.weight_scale.dtype, tuple(layer.weight_scale.shape)) == (torch.float8_e4m3fn, (1024, 16))
    parts = [weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    amaxes = [part.float().abs().max() for part in parts]
    assert amaxes[0] != amaxes[1]
    assert layer.weight_global_scale == max(amaxes) / 2688
    low, high = layer.weight & 15, layer.weight >> 4
    codes = torch.stack([low, high], -1).view(1024, 256)
    values = MAGNITUDES[(codes & 7).long()] * torch.where(codes > 7, -1, 1)
    scales = layer.weight_scale.float().repeat_interleave(16, 1) * layer.weight_global_scale
    right = plain(torch.cat(parts), max(amaxes))
    assert (values * scales - right).abs().max() < 1e-6
    report = plain_report(model)
    assert {row["stored"] for row in report.values()} == {"nvfp4"}
    assert {row["block"] for row in report.values()} == {(1, 16)}


@pytest.mark.parametrize("way", WAYS)
def test_experts_multiply_what_a_plain_computation_does(checkpoint, way):
    from nemo_fp8.rollout.engine import four_bit_experts
    from nemo_fp8.rollout.engine.report import plain_report

    model, weights = build(checkpoint("qwen3_moe"), rollout="nvfp4", **WAYS[way]), weights_of(checkpoint("qwen3_moe"))
    name = "model.layers.0.mlp.experts"
    report = plain_report(model)
    assert {row["kernel"] for row in report.values() if row["stored"] == "nvfp4"} == {"Nvfp4MoEMethod", KERNELS[way]}
    layer = next(m for n, m in model.named_modules() if n.startswith(name) and hasattr(m, "w13_weight"))
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    draws = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(8, generator=draws)[:2] for _ in range(37)])
    shares = torch.rand(37, 2, generator=draws)
    found = layer.quant_method.apply(layer, x, shares, ids, None, None)
    wanted = torch.zeros(37, 256)
    for expert in range(8):
        gate, up, down = (weights[f"{name}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        token, place = (ids == expert).nonzero(as_tuple=True)
        # In BF16 and for the same tokens at once: an inner value that is rounded otherwise would move a code.
        hidden = in_bf16(x[token], [gate, up], way).float()
        inner = (torch.nn.functional.silu(hidden[:, :128]) * hidden[:, 128:]).bfloat16()
        wanted[token] += shares[token, place, None] * in_bf16(inner, [down], way).float()
    assert (found.float() - wanted).norm() / wanted.norm() < 0.004
    other = four_bit_experts.four_bit_experts(
        x, layer.w13_weight, layer.w13_weight_scale, layer.w13_weight_scale_2 * 1.05, layer.w2_weight,
        layer.w2_weight_scale, layer.w2_weight_scale_2, shares, ids, None, layer.quant_method.scales,
    )  # fmt: skip
    assert (other.float() - wanted).norm() / wanted.norm() > 0.03


def test_what_there_is_not_is_refused(checkpoint):
    with pytest.raises(PrecisionError, match="kernel='decode' with rollout='nvfp4'"):
        build(checkpoint("llama"), rollout="nvfp4", kernel="decode")
    with pytest.raises(PrecisionError, match="kernel='codes' with rollout='nvfp4'"):
        build(checkpoint("qwen3_moe"), rollout="nvfp4", keep=("*attn*",), kernel="codes")


def test_odd_shapes_stay_in_bf16_with_the_reason(checkpoint):
    """Any number of rows will do; columns are whole blocks of 16."""
    from nemo_fp8.rollout.engine.report import plain_report

    report = plain_report(build(checkpoint("qwen3", intermediate=328), rollout="nvfp4"))
    kept = {name: row["why"] for name, row in report.items() if row["stored"] != "nvfp4"}
    assert kept == {f"model.layers.{i}.mlp.down_proj": "328 columns are not a multiple of 16" for i in range(4)}


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_an_engine_generates(engine, checkpoint, kind):
    llm = engine(checkpoint(kind), **engine_args(NVFP4))
    found = engines.log_probs(llm, 2)
    assert found.isfinite().all()
    assert torch.allclose(found.exp().sum(-1), torch.ones(found.shape[:2]), atol=1e-3)
    (report,) = llm.collective_rpc("nemo_fp8_report")
    assert {name for name, row in report.items() if row["stored"] != "nvfp4"} == {
        name for name in report if name.endswith("mlp.gate")
    }


def test_each_layer_is_stored_as_the_rule_for_its_module_says(checkpoint):
    from nemo_fp8.rollout.engine.report import plain_report

    rules = (("*.layers.0.*", "bf16"), ("*.linear_qkv", "blockwise"), ("*.up_proj", "mxfp8"))
    model, weights = build(checkpoint("llama"), rollout="nvfp4", modules=rules), weights_of(checkpoint("llama"))
    blocks = {(128, 128): "qkv_proj", (1, 32): "gate_up_proj", (1, 16): "o_proj", None: "layers.0"}
    report = {name: row for name, row in plain_report(model).items() if ".layers." in name and "_proj" in name}
    for name, row in report.items():
        if ".layers.0." in name:
            assert (row["stored"], "rules for modules" in row["why"]) == ("bfloat16", True), name
        elif word := next((word for block, word in blocks.items() if name.endswith(word) and block), None):
            assert blocks[row["block"]] == word, name
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = call(model, "model.layers.1.self_attn.o_proj", x)
    assert close(found, product(x, [weights["model.layers.1.self_attn.o_proj.weight"]], "one scale for all"))
    kept = call(model, "model.layers.0.self_attn.o_proj", x)
    assert close(kept, torch.nn.functional.linear(x, weights["model.layers.0.self_attn.o_proj.weight"]).float())
