"""Which layers of vLLM's models stay in BF16, and whose blocks the others have."""

import pytest
import torch
from support.rollout.in_process import build, reference, same_bits

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.selection import Kept, decoder_layer
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.stored import stored
from nemo_fp8.rollout.engine import compatibility
from nemo_fp8.rollout.engine.grid import Span, fused_rows, other_blocks
from nemo_fp8.rollout.engine.report import grid_report
from nemo_fp8.rollout.engine.selection import reason_to_keep, reason_to_keep_experts

QKV = ("q_proj", "k_proj", "v_proj")
LAYER = "model.layers.1"


# ---------------------------------------------------------------------- what stays in BF16


def test_first_and_last_layers_routers_and_names(model):
    report = grid_report(
        model("qwen3_moe", first_layers=1, last_layers=1, keep=("*layers.1*o_proj", r"re:layers\.2\..*experts"))
    )
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
    assert [
        line
        for line in said
        if "model.layers.*.self_attn.qkv_proj stays in the compute dtype: a part of 64 rows" in line
    ]


def test_a_strict_contract_refuses_it(checkpoint):
    with pytest.raises(
        PrecisionError,
        match=r"model\.layers\.0\.self_attn\.qkv_proj: a weight of 384x256 on this worker cannot be quantized",
    ):
        build(checkpoint("qwen3_odd"), strict=True)
    build(checkpoint("qwen3"), strict=True)


@pytest.mark.parametrize(
    "contract", [{}, {"rollout_block": "tensor"}, {"first_layers": 1, "keep": ["*.q_proj", "*.experts.3.*"]}]
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_odd", "qwen3_moe"])
def test_lint_says_of_every_layer_what_the_engine_does(model, checkpoint, kind, contract):
    """The table that a person reads before a run, from the checkpoint's config.json, against the layers of the engine
    itself."""
    llm = build(checkpoint(kind), **contract)
    p = Precision(rollout="fp8", **contract)
    of = {
        "qkv_proj": "self_attention.linear_qkv",
        "o_proj": "self_attention.linear_proj",
        "routed_experts": "mlp.experts.linear_fc1",
    }
    of |= {"gate_up_proj": "mlp.linear_fc1", "down_proj": "mlp.linear_fc2"}
    shapes = Model.read(checkpoint(kind))
    fates = stored(shapes, p, Parallel(), "rollout")
    held = {}
    for name, row in grid_report(llm).items():
        layer, word = int(name.split(".")[2]), name.rpartition(".")[2]
        if word in of:  # a router is no linear that a contract speaks of
            held[layer, of[word]] = row.stored
    assert len(held) == shapes.layers * (3 if kind == "qwen3_moe" else 4)
    assert {at: "bfloat16" if isinstance(fates[at], Kept) else "fp8" for at in held} == held


# ---------------------------------------------------------------------- blocks


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_odd", "qwen3_moe"])
def test_on_one_worker_every_layer_has_the_blocks_of_the_unsharded_weights(model, kind):
    """What would not stays in BF16; several workers may cut through blocks, which their reports say."""
    report = grid_report(model(kind))
    assert {row.stored for row in report.values()} == {"fp8", "bfloat16"} if kind != "qwen3" else {"fp8"}
    assert all(row.other_blocks is None for row in report.values())


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [(1024, 256, 256), (512, 128, 128), (256, 64, 64), (320, 192)])
def test_blocks_agree_exactly_where_codes_agree(ranks, sizes):
    """Against the casts themselves: a shard's codes and scales are cut-outs of the unsharded weight's, or the rule says
    they are not."""
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
    assert (
        other_blocks(none, Span("", 0, 192, 384), (128, 128)) == "the shard ends at column 192, inside a block of 128"
    )
    assert (
        other_blocks(none, Span("", 192, 384, 384), (128, 128))
        == "the shard begins at column 192, inside a block of 128"
    )
    assert other_blocks(none, Span("", 128, 256, 256), (128, 128)) is None
    assert other_blocks(none, Span("", 0, 192, 384), None) is None


def test_a_vllm_whose_routers_run_on_gpus_alone_leaves_experts_in_bf16_by_name(checkpoint, monkeypatch, said):
    """vLLM 0.28 and 0.29 have no router for CPUs but in their fused kernels, and ended at the first token."""
    since, _ = compatibility.FEATURES["CPU router"]
    gone = compatibility.Internal("vllm.model_executor.layers.fused_moe.router", "no_such_router")
    monkeypatch.setitem(compatibility.FEATURES, "CPU router", (since, gone))
    for contract in ({"kernel": "decode"}, {"rollout": "nvfp4"}):
        experts = build(checkpoint("qwen3_moe"), **contract).get_submodule("model.layers.1.mlp.experts.routed_experts")
        assert "vLLM before 0.30" in experts.quant_method.nemo_fp8_reason
        assert experts.w13_weight.dtype == torch.bfloat16
    assert [line for line in said if "mlp.experts" in line and "vLLM before 0.30" in line]
    with pytest.raises(PrecisionError, match=r"vLLM before 0\.30"):
        build(checkpoint("qwen3_moe"), kernel="decode", strict=True)
