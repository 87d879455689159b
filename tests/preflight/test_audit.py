"""The audit table: which layers run in FP8, on the shapes that are known to fail and to work."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.selection import gemm_misfit, primary_misfit
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.units import select
from nemo_fp8.preflight.lint import lint
from nemo_fp8.preflight.shapes import AuditRow, audit, packing_multiple

DATA = Path(__file__).parents[1] / "models/data"
BLOCKWISE = preset("bf16_with_fp8_blockwise_mixed")


def rows(name: str, p: Precision, parallel: str = "") -> dict[str, list[AuditRow]]:
    found: dict[str, list[AuditRow]] = {}
    for row in audit(Model.read(DATA / f"{name}.json"), p, Parallel.of(parallel)):
        found.setdefault(row.name, []).append(row)
    return found


def test_768_over_4_ranks() -> None:
    """vllm#44763: 768 / 4 = 192 rows, one and a half blocks. Refused of a checkpoint; our engine pads, and has blocks
    of its own."""
    experts = rows("qwen3-30b-a3b", BLOCKWISE, "tp4")["mlp.experts.linear_fc1"]
    assert [(r.rows, r.columns, r.train, r.rollout) for r in experts] == [(384, 2048, "FP8", "FP8")]
    assert experts[0].rollout_reason == "blocks of its own on each rank: a part has 192 rows, not a multiple of 128"
    whole = rows("qwen3-30b-a3b", BLOCKWISE, "tp4,rollout-ep")["mlp.experts.linear_fc1"]
    assert (whole[0].rollout, whole[0].rollout_reason) == ("FP8", "")


def test_kept_layers_are_rows_of_their_own() -> None:
    fc1 = rows("llama-3-8b", preset("bf16_with_fp8_tensorwise_mixed"), "tp2")["mlp.linear_fc1"]
    assert {(r.train, r.count, r.reason) for r in fc1} == {("BF16", 2, "first or last layers"), ("FP8", 30, "")}
    assert all((r.rows, r.columns) == (14336, 4096) for r in fc1)


def test_patterns_in_either_dialect() -> None:
    for pattern in ("*.mlp.linear_fc2", "*.mlp.down_proj", r"re:layers\.\d+\.mlp\.down"):
        table = rows("llama-3-8b", BLOCKWISE.replace(keep=(pattern,)))
        assert [r.train for r in table["mlp.linear_fc2"]] == ["BF16"]
        assert [r.train for r in table["mlp.linear_fc1"]] == ["FP8"]


def test_a_linear_that_is_kept_by_its_name_has_the_field_that_names_it() -> None:
    table = rows("llama-3-8b", BLOCKWISE.replace(keep=("*.linear_proj",), modules=(("*.linear_fc2", "bf16"),)))
    (proj,), (fc2,) = table["self_attention.linear_proj"], table["mlp.linear_fc2"]
    assert (proj.reason, proj.rollout_reason) == ("keep", "keep")
    assert (fc2.reason, fc2.rollout_reason) == ("modules", "modules")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b"])
def test_every_layer_is_counted_once(name: str, model: str) -> None:
    read = Model.read(DATA / f"{model}.json")
    table = audit(read, preset(name), Parallel(expert=8 if read.experts else 1))
    assert sum(r.count for r in table) == sum(max(1, linear.experts // 8) for _, linear in read.all_linears())


def test_experts_are_spread() -> None:
    table = rows("mixtral-8x7b", BLOCKWISE, "ep4,tp2,etp1")
    assert [(r.rows, r.columns, r.count) for r in table["mlp.experts.linear_fc1"]] == [(28672, 4096, 32 * 2)]
    assert table["self_attention.linear_proj"][0].columns == 2048


def test_bf16_is_bf16() -> None:
    assert {(r.train, r.rollout) for r in audit(Model.read(DATA / "llama-3-8b.json"), preset("bf16_mixed"))} == {
        ("BF16", "BF16")
    }


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(("base", "rule", "train", "rollout"), [
    # 11008 / 8 = 1376 columns on a worker: whole blocks of 16, and none of 128.
    ("bf16_with_fp8_blockwise_mixed", "nvfp4", "NVFP4", "NVFP4"),
    ("bf16_with_nvfp4_mixed", "blockwise", "FP8", "BF16"),
    ("bf16_with_nvfp4_mixed", "mxfp8", "FP8", "FP8"),
])  # fmt: skip
def test_a_worker_multiplies_the_blocks_of_the_modules_own_recipe(base, rule, train, rollout) -> None:
    p = preset(base).replace(modules=(("*.linear_fc2", rule),))
    model, parallel = Model.read(LLAMA), Parallel.of("tp8")
    table = {row.name: row for row in audit(model, p, parallel)}
    row = table["mlp.linear_fc2"]
    assert (row.train, row.rollout) == (train, rollout)
    assert bool(row.rollout_reason) == (rollout == "BF16")
    # The same module alone, in a contract that has this recipe everywhere, is the oracle.
    alone = {r.name: r for r in audit(model, p.of(["decoder.layers.0.mlp.linear_fc2"]), parallel)}["mlp.linear_fc2"]
    assert (row.train, row.rollout, row.rollout_reason) == (alone.train, alone.rollout, alone.rollout_reason)


def test_findings_about_shapes_are_those_of_the_modules_own_recipe() -> None:
    """48 rows fit FP8 GEMMs and not NVFP4's; a ragged block is 128x128's, and nothing else's."""

    def codes(p: Precision, where: str) -> set[str]:
        return {f.code for f in lint(p, model=model, parallel="tp8") if f.where == where}

    narrow = LLAMA | {"intermediate_size": 8 * 48}
    fp8, four = preset("bf16_with_fp8_tensorwise_mixed"), preset("bf16_with_nvfp4_mixed")
    model = Model.read(narrow)
    for base, rule, misfit in ((fp8, "nvfp4", True), (four, "tensorwise", False)):
        ruled = base.replace(first_layers=0, last_layers=0, modules=(("*.linear_fc2", rule),))
        assert ("shape" in codes(ruled, "mlp.linear_fc2")) == misfit
    model = Model.read(LLAMA)
    ragged = preset("bf16_with_fp8_blockwise_mixed")
    assert "block-straddles-ranks" in codes(ragged, "mlp.linear_fc2")
    assert "block-straddles-ranks" not in codes(ragged.replace(modules=(("*.linear_fc2", "nvfp4"),)), "mlp.linear_fc2")
    assert "block-straddles-ranks" in codes(four.replace(modules=(("*.linear_fc2", "blockwise"),)), "mlp.linear_fc2")


def test_a_rule_that_names_one_expert_holds_for_all_of_its_layer() -> None:
    """They are stored as one matrix: as with keep, whichever expert is named."""
    for changes in ({"keep": ("*.experts.5.*",)}, {"modules": (("*.experts.5.*", "bf16"),)}):
        table = rows("qwen3-30b-a3b", BLOCKWISE.replace(**changes))
        for name in ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2"):
            assert [(row.train, row.rollout) for row in table[name]] == [("BF16", "BF16")], changes
    table = rows("qwen3-30b-a3b", BLOCKWISE.replace(modules=(("*.experts.5.*", "nvfp4"),)))
    assert [(row.train, row.rollout) for row in table["mlp.experts.linear_fc1"]] == [("NVFP4", "NVFP4")]


def test_a_rule_for_a_part_of_the_experts_is_for_all_of_them_in_an_engine() -> None:
    """The selection of a checkpoint, which plugin and exporter use, is the oracle for the table."""
    p = preset("bf16_with_nvfp4_mixed").replace(modules=(("*.linear_fc1", "mxfp8"),))
    table = rows("qwen3-30b-a3b", p)
    shapes = {
        f"model.layers.0.mlp.experts.{e}.{word}_proj.weight": shape
        for e in range(2) for word, shape in (("gate", (768, 2048)), ("up", (768, 2048)), ("down", (2048, 768)))
    }  # fmt: skip
    (unit,) = select(shapes, p).units
    assert unit.contract(p).rollout_block == "1x32"
    sides = {name: {(r.train, r.rollout) for r in table[name]} for name in table if "experts" in name}
    assert sides == {"mlp.experts.linear_fc1": {("FP8", "FP8")}, "mlp.experts.linear_fc2": {("NVFP4", "FP8")}}


def test_packed_sequences_fit_the_recipe_of_every_module() -> None:
    mx = preset("bf16_with_mxfp8_mixed")
    ruled = mx.replace(modules=(("*.linear_fc2", "nvfp4"), ("*.linear_qkv", "bf16")))
    assert packing_multiple(mx, Parallel())[0] == 32
    assert packing_multiple(ruled, Parallel()) == (128, "128 (nvfp4)")
    assert packing_multiple(mx.replace(modules=(("*", "bf16"),)), Parallel()) == (1, "")
    found = {f.code: f for f in lint(ruled, model=Model.read(LLAMA), parallel={"packed": True, "pad_to": 64})}
    assert "128" in found["padding-too-small"].what + found["padding-too-small"].why
    everywhere = mx.replace(modules=(("*", "bf16"),))
    assert lint(everywhere, model=Model.read(LLAMA), parallel={"seq_length": 100})


def test_latent_attention() -> None:
    sizes = {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_hidden_layers": 4,
        "vocab_size": 129280,
        "intermediate_size": 18432,
    }
    ranks = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    experts = {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    }
    config = {"model_type": "deepseek_v3", **sizes, **ranks, **experts}
    p = Precision(format="e4m3", scaling="blockwise", fp8_param=True)
    table = {r.name: r for r in audit(Model.read(config), p, Parallel.of("tp8,ep8,etp1,rollout-tp8"))}
    assert table["self_attention.linear_kv_down_proj"].rows == 576  # whole on every rank
    assert "576 rows" in table["self_attention.linear_kv_down_proj"].reason  # runs in FP8, cannot be kept in FP8
    assert table["self_attention.linear_kv_down_proj"].train == "FP8"
    assert table["self_attention.linear_q_up_proj"].rows == 128 * 192 // 8
    assert all(r.rollout == "FP8" for r in table.values())  # as DeepSeek ships it
    assert table["mlp.shared_experts.linear_fc1"].rows == 2 * 2048 // 8


@pytest.mark.parametrize(
    ("scaling", "rows_", "columns", "fits"),
    [
        ("tensorwise", 16, 16, True),
        ("tensorwise", 16, 24, False),
        ("delayed", 8, 16, False),  # dgrad contracts over rows
        ("blockwise", 192, 2048, True),
        ("blockwise", 200, 2048, False),
        ("mxfp8", 32, 96, True),
        ("mxfp8", 48, 96, False),
        ("nvfp4", 32, 96, True),
        ("nvfp4", 96, 48, False),
    ],
)
def test_multiples(scaling: str, rows_: int, columns: int, fits: bool) -> None:
    assert (gemm_misfit(scaling, rows_, columns) is None) == fits


def test_primary_weights_are_stricter() -> None:
    assert primary_misfit("blockwise", 192, 2048) is not None
    assert primary_misfit("blockwise", 256, 2048) is None
    assert primary_misfit("tensorwise", 192, 2048) is None


@pytest.mark.parametrize(
    ("name", "parallel", "multiple"),
    [
        ("bf16_with_fp8_blockwise_mixed", "", 128),
        ("bf16_with_fp8_blockwise_mixed", "cp2", 512),
        ("bf16_with_fp8_blockwise_mixed", "cp2,tp4,sp", 2048),
        ("bf16_with_mxfp8_mixed", "tp4", 32),
        ("bf16_with_fp8_tensorwise_mixed", "tp4,sp", 64),
        ("bf16_mixed", "cp2", 4),
    ],
)
def test_packing(name: str, parallel: str, multiple: int) -> None:
    assert packing_multiple(preset(name), Parallel.of(parallel))[0] == multiple


@pytest.mark.parametrize(
    ("base", "scaling", "kept"),
    [
        ("bf16_with_fp8_blockwise_mixed", "mxfp8", ["mlp.linear_fc1"]),
        (
            "bf16_with_mxfp8_mixed",
            "blockwise",
            ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc2"],
        ),
        ("bf16_with_fp8_blockwise_mixed", "bf16", []),
    ],
)
def test_findings_about_shapes_say_what_the_table_says_under_rules_by_module(
    base: str, scaling: str, kept: list[str]
) -> None:
    """272 is a multiple of 16 and not of 32. The findings went by the contract's own recipe."""
    sizes = {"hidden_size": 272, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = {"model_type": "llama", "vocab_size": 1024, **sizes}
    p = preset(base).replace(modules=(("*.linear_fc1", scaling),), rollout="compute")
    findings = lint(p, model=config)
    assert [f.where for f in findings if f.code == "shape"] == kept
    table = {row.name: row for row in audit(Model.read(config), p)}
    assert [name for name, row in table.items() if "not a multiple" in row.reason] == kept
    # A weight with a recipe of its own is no primary weight.
    whole = {f.where for f in lint(p.replace(fp8_param=p.scaling != "nvfp4"), model=config) if f.code == "param-shape"}
    assert "mlp.linear_fc1" not in whole


def test_a_contract_whose_rules_leave_nothing_in_fp8_has_findings() -> None:
    p = preset("bf16_with_fp8_blockwise_mixed").replace(modules=(("*", "bf16"),))
    assert lint(p, model=DATA / "llama-3-8b.json", parallel="seq4100")
