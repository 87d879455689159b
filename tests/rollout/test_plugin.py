"""The quantization method in vLLM's own models: what each layer holds, and what it multiplies with."""

import pytest
import torch
from support.rollout.engines import MX
from support.rollout.in_process import call, reference, same_bits
from support.rollout.models import weights_of

from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize_reference

QKV = ("q_proj", "k_proj", "v_proj")
POW2 = {"weight_scale": "pow2", "activation_scale": "pow2"}
LAYER = "model.layers.1"


def packed(codes):
    """As AMX reads them, by vLLM's own packer."""
    return torch.ops._C.convert_weight_packed(codes)


# ---------------------------------------------------------------------- codes and scales


@pytest.mark.parametrize(
    ("kind", "contract", "block", "scale"),
    [
        ("qwen3", {}, (128, 128), "fp32"),
        ("qwen3", POW2, (128, 128), "pow2"),
        ("qwen3", {"kernel": "decode"}, (128, 128), "fp32"),
        ("qwen3", {"rollout_block": "tensor"}, None, "fp32"),
        ("qwen3", MX, (1, 32), "e8m0"),
    ],
)
def test_a_linear_holds_the_codes_and_scales_of_the_reference(model, checkpoint, here, kind, contract, block, scale):
    weights, layer = weights_of(checkpoint(kind)), model(kind, **contract).get_submodule(f"{LAYER}.self_attn.qkv_proj")
    codes, scale_inv = reference(torch.cat([weights[f"{LAYER}.self_attn.{part}.weight"] for part in QKV]), block, scale)
    decodes = "kernel" in contract or contract.get("rollout_block") == "1x32"
    assert type(layer.quant_method.fp8_linear).__name__ == ("DecodeKernel" if decodes else here.linear)
    assert same_bits(layer.weight.data, codes if decodes or not here.amx else packed(codes))
    assert same_bits(layer.weight_scale_inv.data, scale_inv)


@pytest.mark.parametrize("contract", [{}, POW2, {"kernel": "decode"}, {"rollout_block": "tensor"}])
def test_experts_hold_the_codes_and_scales_of_the_reference(model, checkpoint, here, contract):
    weights, layer = weights_of(checkpoint("qwen3_moe")), experts(model("qwen3_moe", **contract))
    block, scale = (None if contract.get("rollout_block") else (128, 128)), contract.get("weight_scale", "fp32")
    assert type(layer.quant_method).__name__ == ("DecodedMoEMethod" if "kernel" in contract else here.experts)
    for expert in range(8):
        name = f"{LAYER}.mlp.experts.{expert}."
        gated = torch.cat([weights[name + "gate_proj.weight"], weights[name + "up_proj.weight"]])
        for held, source in (("w13", gated), ("w2", weights[name + "down_proj.weight"])):
            codes, scale_inv = reference(source, block, scale)
            assert same_bits(
                getattr(layer, f"{held}_weight").data[expert],
                codes if "kernel" in contract or not here.amx else packed(codes),
            )
            assert same_bits(getattr(layer, f"{held}_weight_scale_inv").data[expert], scale_inv)


def experts(model, layer=LAYER):
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return next(m for m in model.get_submodule(layer).modules() if isinstance(m, RoutedExperts))


def test_nothing_of_the_bf16_weights_stays(model):
    layer = model("qwen3").get_submodule(f"{LAYER}.mlp.down_proj")
    held = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    assert held == 256 * 512 + 4 * 2 * 4  # a byte a weight, and FP32 scales of 2 x 4 blocks


# ---------------------------------------------------------------------- products


def test_decoded_weights_multiply_to_what_the_kernel_multiplies_to(model, checkpoint):
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    name = f"{LAYER}.self_attn.qkv_proj"
    weight = torch.cat([weights_of(checkpoint("qwen3"))[f"{LAYER}.self_attn.{part}.weight"] for part in QKV])
    codes, scale_inv = reference(weight)
    exact = x.float() @ (codes.float() * scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)).t()
    decoded, on_amx = call(model("qwen3", kernel="decode"), name, x), call(model("qwen3"), name, x)
    assert torch.equal(decoded, exact.bfloat16())
    assert (on_amx.float() - exact).norm() < 4e-3 * exact.norm()  # BF16 out
    assert not torch.equal(decoded.float(), x.float() @ weight.float().t())


def fake_quantized(x, scale="fp32", block=(1, 128)):
    codes, scale_inv, _ = quantize_reference(x, block, format_of("e4m3"), scale)
    inverse = (
        scale_inv.float() if scale_inv.dtype == torch.float32 else torch.exp2(scale_inv.view(torch.uint8).float() - 127)
    )
    return codes.float() * inverse.repeat_interleave(block[1], 1)


@pytest.mark.parametrize("contract", [{}, POW2])
def test_emulated_activations_are_what_an_fp8_gemm_would_see(model, here, contract):
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    name, scale = f"{LAYER}.mlp.down_proj", contract.get("activation_scale", "fp32")
    emulated = call(model("qwen3", activations="emulated", **contract), name, x)
    seen = fake_quantized(x, scale)
    # AMX's kernel takes BF16; decoded weights are multiplied in FP32, where nothing of what was seen is rounded away.
    assert torch.equal(emulated, call(model("qwen3", **contract), name, seen.bfloat16() if here.amx else seen))
    assert not torch.equal(emulated, call(model("qwen3", **contract), name, x))


def test_emulated_mx_activations(model):
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    name = f"{LAYER}.mlp.down_proj"
    seen = fake_quantized(x, "e8m0", (1, 32))
    assert torch.equal(
        call(model("qwen3", activations="emulated", **MX), name, x), call(model("qwen3", **MX), name, seen.bfloat16())
    )


@pytest.mark.parametrize("emulated", [False, True])
def test_experts_on_decoded_weights(model, checkpoint, emulated):
    """Against each token's experts one by one; and against vLLM's fused kernel, which rounds to BF16 between the
    GEMMs."""
    draws = torch.Generator().manual_seed(3)
    x, ids = torch.randn(6, 256, generator=draws).bfloat16(), torch.randint(0, 8, (6, 2), generator=draws).int()
    ids[:, 1] = (ids[:, 0] + 1) % 8
    share = torch.rand(6, 2, generator=draws)
    weights = weights_of(checkpoint("qwen3_moe"))
    see = fake_quantized if emulated else torch.Tensor.float

    def decoded(name):
        codes, scale_inv = reference(weights[name])
        return (
            codes.float()
            * scale_inv.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
        )

    def answer(token, expert):
        gate, up, down = (
            decoded(f"{LAYER}.mlp.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        seen = see(x[token, None])
        inner = (torch.nn.functional.silu(seen @ gate.t()) * (seen @ up.t())).bfloat16()
        return (see(inner) @ down.t())[0]

    wanted = torch.stack([sum(share[t, k] * answer(t, int(ids[t, k])) for k in range(2)) for t in range(6)])
    method = {"activations": "emulated"} if emulated else {"kernel": "decode"}
    layer = experts(model("qwen3_moe", **method))
    got = layer.quant_method.apply(layer, x, share, ids, None, None)
    assert (got.float() - wanted).norm() < 3e-3 * wanted.norm()
    if not emulated:
        fused = experts(model("qwen3_moe"))
        assert (
            fused.quant_method.apply(fused, x, share, ids, None, None).float() - wanted
        ).norm() < 1e-2 * wanted.norm()


def test_the_operators_live_in_compiled_graphs():
    from nemo_fp8.rollout.engine import ops

    x = torch.randn(4, 256).bfloat16()
    codes, scale_inv = reference(torch.randn(128, 256).bfloat16())

    def step(x):
        seen = ops.fake_quantize(x * 2, 128, "fp32", torch.float32)
        return ops.decoded_linear(seen, codes, scale_inv, None, [128, 128], torch.bfloat16) + 1

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))
