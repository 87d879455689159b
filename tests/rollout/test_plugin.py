"""The quantization method in vLLM's own models: what each layer holds, what it multiplies with, and what it refuses."""

import logging

import pytest
import torch
from rollout.in_process import build, call, weights_of

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize_reference
from nemo_fp8.rollout.grid import Span, fused_rows, other_blocks
from nemo_fp8.rollout.in_vllm import compatibility
from nemo_fp8.rollout.in_vllm.report import grid_report
from nemo_fp8.rollout.selection import reason_to_keep, reason_to_keep_experts
from nemo_fp8.rollout_layers import decoder_layer

QKV = ("q_proj", "k_proj", "v_proj")
POW2 = {"weight_scale": "pow2", "activation_scale": "pow2"}
MX = {"rollout_block": "1x32", **POW2}
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def model(checkpoint):
    """``model(kind, **contract)``, each built once."""
    built = {}

    def give(kind, **contract):
        key = repr((kind, sorted(contract.items())))
        if key not in built:
            built[key] = build(checkpoint(kind), **contract)
        return built[key]

    return give


@pytest.fixture
def said():
    """What nemo_fp8 writes to vLLM's log from here on, even if it was said before."""
    import vllm.logger

    vllm.logger._print_info_once.cache_clear()
    vllm.logger._print_warning_once.cache_clear()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.nemo_fp8")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def reference(weight, block=(128, 128), kind="fp32"):
    """Codes and scales on the kernel's grid, by the specification; a whole-tensor scale stands in every block."""
    codes, scale_inv, _ = quantize_reference(weight, block, format_of("e4m3"), kind)
    if block is None:
        scale_inv = scale_inv.expand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    return codes, scale_inv


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


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
def test_a_linear_holds_the_codes_and_scales_of_the_reference(model, checkpoint, kind, contract, block, scale):
    weights, layer = weights_of(checkpoint(kind)), model(kind, **contract).get_submodule(f"{LAYER}.self_attn.qkv_proj")
    codes, scale_inv = reference(torch.cat([weights[f"{LAYER}.self_attn.{part}.weight"] for part in QKV]), block, scale)
    on_amx = type(layer.quant_method.fp8_linear).__name__ == "CPUFp8BlockScaledMMKernel"
    assert on_amx == ("kernel" not in contract and contract.get("rollout_block") != "1x32")
    assert same_bits(layer.weight.data, packed(codes) if on_amx else codes)
    assert same_bits(layer.weight_scale_inv.data, scale_inv)


@pytest.mark.parametrize("contract", [{}, POW2, {"kernel": "decode"}, {"rollout_block": "tensor"}])
def test_experts_hold_the_codes_and_scales_of_the_reference(model, checkpoint, contract):
    weights, layer = weights_of(checkpoint("qwen3_moe")), experts(model("qwen3_moe", **contract))
    block, scale = (None if contract.get("rollout_block") else (128, 128)), contract.get("weight_scale", "fp32")
    for expert in range(8):
        name = f"{LAYER}.mlp.experts.{expert}."
        gated = torch.cat([weights[name + "gate_proj.weight"], weights[name + "up_proj.weight"]])
        for held, source in (("w13", gated), ("w2", weights[name + "down_proj.weight"])):
            codes, scale_inv = reference(source, block, scale)
            assert same_bits(getattr(layer, f"{held}_weight").data[expert], codes if "kernel" in contract else packed(codes))
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
    inverse = scale_inv.float() if scale_inv.dtype == torch.float32 else torch.exp2(scale_inv.view(torch.uint8).float() - 127)
    return codes.float() * inverse.repeat_interleave(block[1], 1)


@pytest.mark.parametrize("contract", [{}, POW2])
def test_emulated_activations_are_what_an_fp8_gemm_would_see(model, contract):
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    name, scale = f"{LAYER}.mlp.down_proj", contract.get("activation_scale", "fp32")
    emulated = call(model("qwen3", activations="emulated", **contract), name, x)
    seen = fake_quantized(x, scale)
    assert torch.equal(emulated, call(model("qwen3", **contract), name, seen.bfloat16()))
    assert not torch.equal(emulated, call(model("qwen3", **contract), name, x))


def test_emulated_mx_activations(model):
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    name = f"{LAYER}.mlp.down_proj"
    seen = fake_quantized(x, "e8m0", (1, 32))
    assert torch.equal(call(model("qwen3", activations="emulated", **MX), name, x), call(model("qwen3", **MX), name, seen.bfloat16()))


@pytest.mark.parametrize("emulated", [False, True])
def test_experts_on_decoded_weights(model, checkpoint, emulated):
    """Against each token's experts one by one; and against vLLM's fused kernel, which rounds to BF16 between the GEMMs."""
    draws = torch.Generator().manual_seed(3)
    x, ids = torch.randn(6, 256, generator=draws).bfloat16(), torch.randint(0, 8, (6, 2), generator=draws).int()
    ids[:, 1] = (ids[:, 0] + 1) % 8
    share = torch.rand(6, 2, generator=draws)
    weights = weights_of(checkpoint("qwen3_moe"))
    see = fake_quantized if emulated else torch.Tensor.float

    def decoded(name):
        codes, scale_inv = reference(weights[name])
        return codes.float() * scale_inv.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]

    def answer(token, expert):
        gate, up, down = (decoded(f"{LAYER}.mlp.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down"))
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
        assert (fused.quant_method.apply(fused, x, share, ids, None, None).float() - wanted).norm() < 1e-2 * wanted.norm()


def test_the_operators_live_in_compiled_graphs():
    from nemo_fp8.rollout.in_vllm import ops

    x = torch.randn(4, 256).bfloat16()
    codes, scale_inv = reference(torch.randn(128, 256).bfloat16())

    def step(x):
        seen = ops.fake_quantize(x * 2, 128, "fp32", torch.float32)
        return ops.decoded_linear(seen, codes, scale_inv, None, [128, 128], torch.bfloat16) + 1

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))


# ---------------------------------------------------------------------- what stays in BF16


def test_first_and_last_layers_routers_and_names(model):
    report = grid_report(model("qwen3_moe", first_layers=1, last_layers=1, keep=("*layers.1*o_proj", r"re:layers\.2\..*experts")))
    stored = {name.removeprefix("model.layers."): (row.stored, row.why) for name, row in report.items()}
    ends = "and the contract keeps the first 1 and the last 1"
    assert stored["0.self_attn.qkv_proj"] == ("bfloat16", f"decoder layer 0 of 4, {ends}")
    assert stored["3.mlp.experts.routed_experts"][1] == f"decoder layer 3 of 4, {ends}"
    assert stored["1.mlp.gate"] == ("bfloat16", "routers stay in the compute dtype")
    for name in ("1.self_attn.o_proj", "2.mlp.experts.routed_experts"):
        assert stored[name][0] == "bfloat16"
        assert stored[name][1].startswith("the contract's keep patterns match model.layers.")
    assert stored["1.mlp.experts.routed_experts"] == stored["2.self_attn.o_proj"] == ("fp8", None)


def test_embeddings_and_head_stay(model):
    built = model("qwen3")
    assert built.model.embed_tokens.weight.dtype == built.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.down_proj", 3),
        ("language_model.model.layers.3.mlp.down_proj", 3),
        ("transformer.h.3.attn", 3),
        ("visual.blocks.0.attn.qkv", None),
        ("vision_tower.encoder.layers.0.mlp.fc1", None),
        ("model.vision_model.layers.0.mlp.fc1", None),
        ("model.embed_tokens", None),
        ("lm_head", None),
    ],
)
def test_only_decoder_layers_count(name, layer):
    assert decoder_layer(name) == layer
    first = Precision(rollout="fp8", first_layers=1)
    reason = reason_to_keep(first, name.replace(".3.", ".0."), 4, {})
    assert reason is not None
    assert reason.startswith("decoder layer 0 of 4") == (layer is not None)


def test_a_list_of_layers_under_an_unknown_name_is_refused_where_layers_are_counted():
    with pytest.raises(PrecisionError, match=r"keep=\('perceiver"):
        reason_to_keep(Precision(rollout="fp8", last_layers=1), "perceiver.layers.0.mlp", 4, {})
    assert reason_to_keep(Precision(rollout="fp8"), "perceiver.layers.0.mlp", 4, {}) is None


def test_a_pattern_that_names_a_part_keeps_the_whole():
    """What vLLM fuses is in FP8 as a whole or not at all; in a checkpoint, too, and in training."""
    packed, at = {"qkv_proj": [*QKV], "gate_up_proj": ["gate_proj", "up_proj"]}, "model.layers.2"
    for pattern in ("*.q_proj", "*qkv_proj", "re:[qkv]_proj", "*.linear_qkv"):
        keep = Precision(rollout="fp8", keep=(pattern,))
        assert "keep patterns match" in reason_to_keep(keep, f"{at}.self_attn.qkv_proj", 4, packed)
        assert reason_to_keep(keep, f"{at}.self_attn.o_proj", 4, packed) is None
    for pattern in ("*experts.7.down_proj", "*mlp.experts", "*.experts.linear_fc2"):
        keep = Precision(rollout="fp8", keep=(pattern,))
        assert reason_to_keep_experts(keep, f"{at}.mlp.experts", 4, 8, 128, 256)
    assert reason_to_keep_experts(Precision(rollout="fp8"), f"{at}.mlp.experts", 4, 8, 128, 256) is None


def test_experts_of_a_shape_that_blocks_do_not_fit():
    name, plain = "model.layers.2.mlp.experts", Precision(rollout="fp8")
    assert "192 rows" in reason_to_keep_experts(plain, name, 4, 8, 192, 256)
    with pytest.raises(PrecisionError, match="experts cannot be in FP8"):
        reason_to_keep_experts(plain.replace(strict=True), name, 4, 8, 192, 256)


def test_a_shape_that_kernels_do_not_take_stays_with_a_line_that_names_it(model, checkpoint, said):
    report = grid_report(build(checkpoint("qwen3_odd")))
    assert report[f"{LAYER}.mlp.down_proj"].stored == "bfloat16"
    assert report[f"{LAYER}.mlp.gate_up_proj"].stored == report[f"{LAYER}.self_attn.qkv_proj"].stored == "bfloat16"
    assert report[f"{LAYER}.self_attn.o_proj"].stored == "fp8"
    assert [line for line in said if "model.layers.*.mlp.down_proj stays in the compute dtype: 320 columns" in line]
    assert [line for line in said if "model.layers.*.self_attn.qkv_proj stays in the compute dtype: a part of 64 rows" in line]


def test_a_strict_contract_refuses_it(checkpoint):
    with pytest.raises(PrecisionError, match=r"model\.layers\.0\.self_attn\.qkv_proj: a weight of 384x256 on this worker cannot be in FP8"):
        build(checkpoint("qwen3_odd"), strict=True)
    build(checkpoint("qwen3"), strict=True)


# ---------------------------------------------------------------------- blocks


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_odd", "qwen3_moe"])
def test_on_one_worker_every_layer_has_the_blocks_of_the_unsharded_weights(checkpoint, kind):
    """What would not stays in BF16; several workers may cut through blocks, which their reports say."""
    report = grid_report(build(checkpoint(kind)))
    assert {row.stored for row in report.values()} == {"fp8", "bfloat16"} if kind != "qwen3" else {"fp8"}
    assert all(row.other_blocks is None for row in report.values())


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [(1024, 256, 256), (512, 128, 128), (256, 64, 64), (320, 192)])
def test_blocks_agree_exactly_where_codes_agree(ranks, sizes):
    """Against the casts themselves: a shard's codes and scales are cut-outs of the unsharded weight's, or the rule says they are not."""
    if any(size % ranks for size in sizes):
        return
    draws = torch.Generator().manual_seed(ranks)
    whole = [torch.randn(size, 128, generator=draws) * (torch.arange(size) + 1)[:, None] for size in sizes]
    for rank in range(ranks):
        mine = [size // ranks for size in sizes]
        shards = [weight[rank * n : rank * n + n] for weight, n in zip(whole, mine, strict=True)]
        codes, _ = reference(torch.cat(shards).bfloat16())
        cut = [reference(w.bfloat16())[0][rank * n : rank * n + n] for w, n in zip(whole, mine, strict=True)]
        spans = fused_rows("abc"[: len(sizes)], mine, [rank * n for n in mine], sizes)
        assert (other_blocks(spans, Span("", 0, 128, 128), (128, 128)) is None) == same_bits(codes, torch.cat(cut))


def test_columns_have_blocks_too():
    none = [Span("", 0, 128, 128)]
    assert other_blocks(none, Span("", 0, 192, 384), (128, 128)) == "the shard ends at column 192, inside a block of 128"
    assert other_blocks(none, Span("", 192, 384, 384), (128, 128)) == "the shard begins at column 192, inside a block of 128"
    assert other_blocks(none, Span("", 128, 256, 256), (128, 128)) is None
    assert other_blocks(none, Span("", 0, 192, 384), None) is None


# ---------------------------------------------------------------------- kernels, and what is refused


def test_a_cpu_without_the_kernel_decodes_and_says_so_once(checkpoint, said, monkeypatch):
    """vLLM's own switch takes the AMX kernel away, as a CPU without AMX does."""
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CPUFp8BlockScaledMMKernel")
    report = grid_report(build(checkpoint("qwen3")))
    assert {row.kernel for row in report.values()} == {"DecodeKernel"}
    assert len([line for line in said if "decoded before each GEMM on this CPU" in line]) == 1


def test_experts_without_amx_decode(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    report = grid_report(build(checkpoint("qwen3_moe")))
    assert {row.kernel for row in report.values() if row.stored == "fp8"} == {"DecodeKernel", "DecodedMoEMethod"}


def test_codes_are_no_weights(checkpoint, tmp_path):
    """A checkpoint in FP8 under nemo_fp8 would be loaded as values without their scales."""
    import shutil

    from safetensors.torch import save_file

    folder = tmp_path / "codes"
    shutil.copytree(checkpoint("qwen3"), folder)
    tensors = weights_of(folder)
    name = f"{LAYER}.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PrecisionError, match=r"o_proj: the checkpoint is in FP8 already"):
        build(folder)


def test_static_activations_are_refused(checkpoint):
    with pytest.raises(Exception, match="activation_scheme='static' in a rollout of BF16 weights"):
        build(checkpoint("qwen3"), rollout_block="tensor", activation_scheme="static")


def test_scales_that_deep_gemm_would_quantize_again_are_refused():
    from nemo_fp8.rollout.in_vllm.kernels import refuse_second_quantization

    with pytest.raises(PrecisionError, match="VLLM_USE_DEEP_GEMM_E8M0"):
        refuse_second_quantization("DeepGemmFp8BlockScaledMMKernel", Operand("e4m3", (128, 128), "fp32"), e8m0=True)
    refuse_second_quantization("DeepGemmFp8BlockScaledMMKernel", Operand("e4m3", (128, 128), "pow2"), e8m0=True)
    refuse_second_quantization("DeepGemmFp8BlockScaledMMKernel", Operand("e4m3", (128, 128), "fp32"), e8m0=False)
    refuse_second_quantization("TritonFp8BlockScaledMMKernel", Operand("e4m3", (128, 128), "fp32"), e8m0=True)


# ---------------------------------------------------------------------- vLLM's internals


def test_a_vllm_that_does_not_fit_is_refused_with_one_error_and_only_where_it_is_asked_for(checkpoint, monkeypatch):
    from nemo_fp8.rollout.plugin import register

    gone = compatibility.Internal("vllm.config", "no_such_thing")
    other = compatibility.Internal("vllm.model_executor.utils", "replace_parameter", ("layer", "no_such_argument"))
    moved = compatibility.Internal("vllm.no_such_module", "anything")
    monkeypatch.setattr(compatibility, "INTERNALS", (*compatibility.INTERNALS, gone, other, moved))
    register()
    try:
        with pytest.raises(Exception, match="does not fit nemo_fp8") as caught:
            build(checkpoint("qwen3"))
        for part in ("no_such_thing", "replace_parameter does not take no_such_argument", "vllm.no_such_module"):
            assert part in str(caught.value)
    finally:
        monkeypatch.undo()
        register()
    build(checkpoint("qwen3"))


def test_every_import_from_vllm_is_in_the_table():
    import ast
    from pathlib import Path

    rows = (*compatibility.INTERNALS, *compatibility.GPU_TRANSFER)
    folder, listed = Path(compatibility.__file__).parent, {(row.module, row.name.split(".")[0]) for row in rows}
    taken = {
        (node.module, alias.name)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }
    assert taken - listed == set()
