"""What check says of two contracts for a model that is known: yes exactly if both sides store each linear alike."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patterns import tails
from support.small_models import config
from typer.testing import CliRunner

from nemo_fp8.cli import app
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.selection import contract_of, why_kept
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.units import select
from nemo_fp8.preflight.agreement import check
from nemo_fp8.render import render
from nemo_fp8.render.nemo_rl import check_nemo_rl

POW2 = {"weight_scale": "pow2", "activation_scale": "pow2"}
DEEPSEEK = {"format": "e4m3", "scaling": "blockwise", **POW2}
ALIKE = {
    "format": "e2m1", "scaling": "nvfp4", "weight_block": "1x16", "row_scaled": True, "hadamard": False,
    "stochastic_rounding": False, "backward": "dequantized",
}  # fmt: skip
DENSE = config(layers=4)
EXPERTS = config(
    layers=4, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
    decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
MLA = config(
    layers=4, model_type="deepseek_v3", q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64,
    v_head_dim=64, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=128,
    first_k_dense_replace=1,
)  # fmt: skip
MODELS = {"dense": DENSE, "experts": EXPERTS, "mla": MLA}


def _agree(train, rollout, model):
    return check(train=Precision(**train), rollout=Precision(**rollout), model=model)


SAME_LAYERS = [
    ({"first_layers": 1}, {"keep": ("*.layers.0.*",)}),
    ({"keep": ("decoder.layers.0.*",)}, {"first_layers": 1}),
    ({"last_layers": 1}, {"keep": ("*.layers.3.*",)}),
    ({"first_layers": 2, "last_layers": 1}, {"last_layers": 1, "keep": (r"re:\.layers\.[01]\.",)}),
    ({"first_layers": 1}, {"modules": (("*.layers.0.*", "bf16"),)}),
    ({"first_layers": 4}, {"keep": ("*.layers.*",)}),
]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("train", "rollout"), SAME_LAYERS)
def test_layers_by_their_number_are_those_of_that_name(train, rollout, model):
    sides = {**DEEPSEEK, **train}, {**DEEPSEEK, **rollout}
    assert _agree(*sides, model).findings == ()
    assert not check(train=Precision(**sides[0]), rollout=Precision(**sides[1])).agrees  # which knows no model


def test_the_last_layer_of_a_longer_model_has_another_number():
    sides = {**DEEPSEEK, "last_layers": 1}, {**DEEPSEEK, "keep": ("*.layers.3.*",)}
    assert _agree(*sides, DENSE).agrees
    assert not _agree(*sides, DENSE | {"num_hidden_layers": 5}).agrees


@pytest.mark.parametrize(("train", "rollout", "words"), [
    (
        {"last_layers": 1},
        {"keep": ("*.layers.2.*",)},
        ("decoder.layers.2.mlp.linear_fc1 (BF16 in the rollout: keep)",
         "decoder.layers.3.mlp.linear_fc1 (BF16 in training: first or last layers)"),
    ),
    ({"first_layers": 2}, {}, ("decoder.layers.{0-1}.mlp.linear_fc2 (BF16 in training",)),
    ({"keep": ("*.layers.[02].*",)}, {}, ("decoder.layers.{0,2}.mlp.linear_fc2 (BF16 in training",)),
])  # fmt: skip
def test_layers_that_one_side_keeps_are_named_with_the_reason(train, rollout, words):
    found = _agree({**DEEPSEEK, **train}, {**DEEPSEEK, **rollout}, DENSE)
    assert [f.code for f in found.findings] == ["sides-modules"]
    assert all(word in str(found) for word in words), found


def test_a_pattern_for_what_the_model_has_not_is_no_difference():
    sides = DEEPSEEK, {**DEEPSEEK, "keep": ("*.experts.*", "*.mixer.*", "*.layers.7.*")}
    assert not check(train=Precision(**sides[0]), rollout=Precision(**sides[1])).agrees
    assert _agree(*sides, DENSE).agrees


def test_a_rule_of_both_sides_is_named_once():
    """Its weights train in 16x16 blocks and roll out in 1x16."""
    contract = Precision(format="e4m3", scaling="mxfp8", modules=(("*.linear_fc*", "nvfp4"),))
    first = check(train=contract, rollout=contract, model=DENSE).findings[0]
    assert first.what.startswith("Weights of modules named *.linear_fc*: ")


def test_a_shape_that_only_one_side_can_hold_is_a_difference():
    """64 rows of K are no whole 128x128 block, which K and V need within what an engine fuses; training needs 16."""
    narrow = DENSE | {"num_key_value_heads": 1}
    (found,) = _agree(DEEPSEEK, DEEPSEEK, narrow).findings
    assert (found.code, found.severity) == ("sides-shapes", "warning")
    assert "decoder.layers.{0-3}.self_attention.linear_qkv (BF16 in the rollout: a part of 64 rows" in str(found)
    assert _agree(*2 * [{**DEEPSEEK, "keep": ("*.linear_qkv",)}], narrow).agrees


@pytest.mark.parametrize("changes", [
    {"modules": (("*.linear_fc1", "nvfp4"),)}, {"keep": ("*.linear_fc1",)}, {"modules": (("*.linear_fc1", "bf16"),)},
])  # fmt: skip
def test_what_an_engine_holds_as_one_is_so_in_a_model_that_has_it(changes):
    alike = {**ALIKE, "scaling": "nvfp4", **changes}
    if changes.get("modules", (("", ""),))[0][1] == "nvfp4":
        alike = {**DEEPSEEK, "weight_block": "1x16", "row_scaled": True, "backward": "dequantized", **changes}
    assert _agree(alike, alike, DENSE).agrees
    found, *notes = _agree(alike, alike, EXPERTS).findings
    assert (found.code, found.severity) == ("sides-units", "warning")
    assert "decoder.layers.{0-3}.mlp.experts.linear_fc2" in str(found)
    assert all(note.severity == "info" for note in notes)


def test_without_fp8_on_one_side_it_is_the_format_that_differs():
    assert [f.code for f in _agree(DEEPSEEK, {}, DENSE).findings] == ["sides-format"]
    assert _agree({**DEEPSEEK, "first_layers": 4}, {}, DENSE).agrees


NEMO_RL_NVFP4 = Precision(
    **ALIKE, rollout="nvfp4", first_layers=1, last_layers=2,
    modules=(("*.linear_qkv", "bf16"), ("*.linear_proj", "bf16")),
)  # fmt: skip


@pytest.mark.parametrize(("model", "words"), [
    (EXPERTS | {"num_hidden_layers": 6}, None),
    # The list names layers 4 and 5: of a longer model they are not the last ones.
    (EXPERTS | {"num_hidden_layers": 8}, "decoder.layers.{6-7}.mlp.experts.linear_fc1 (BF16 in training"),
    # NeMo RL's NVFP4 rollout holds routed experts in four bits, and nothing else.
    (DENSE | {"num_hidden_layers": 6}, "decoder.layers.{1-3}.mlp.linear_fc1 (BF16 in the rollout"),
], ids=["its own model", "a longer model", "a dense model"])  # fmt: skip
def test_nemo_rls_nvfp4_is_compared_for_a_model(tmp_path, model, words):
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "grpo.yaml").write_text(render(NEMO_RL_NVFP4, "nemo-rl", 6).text)
    (tmp_path / "te_precision.yaml").write_text(render(NEMO_RL_NVFP4, "te-precision").text)
    assert check_nemo_rl(tmp_path / "grpo.yaml").agrees  # which knows no model
    found = check_nemo_rl(tmp_path / "grpo.yaml", tmp_path)
    assert found.agrees == (words is None)
    assert (words or "") in str(found)


def _stored(p, names, shapes, experts, side, layers):
    if why_kept(p, names, shapes, layers, side=side, experts=experts) is not None:
        return None
    weight, read = (contract_of(p, names, experts, side).operand(role, side) for role in ("weight", "input"))
    return tuple(
        # Powers of two are the same values in any blocks.
        operand and (operand.format, operand.scale, operand.block if operand.scale == "e4m3" else None)
        for operand in (weight, read)
    )


def _both(model, train, rollout):
    """What each side makes of every linear: training by Megatron's names, the rollout as from a checkpoint."""
    shapes = {}
    for layer, linear in model.all_linears():
        for e in range(max(1, linear.experts)):
            for name, rows in zip(linear.hugging_face, linear.parts, strict=True):
                shapes[f"model.layers.{layer}.{name.replace('*', str(e))}.weight"] = (rows, linear.columns)
    chosen = select(shapes, rollout.replace(strict=False), layers=model.layers)
    units = {tensor: unit for unit in chosen.units for tensor in unit.tensors}
    for layer, linear in model.all_linears():
        whole = [(linear.parts, linear.columns)]
        here = _stored(train, (f"decoder.layers.{layer}.{linear.name}",), whole, linear.experts, "train", model.layers)
        unit = units.get(f"model.layers.{layer}.{linear.hugging_face[0].replace('*', '0')}.weight")
        own = unit and unit.contract(rollout)
        there = own and tuple(
            operand and (operand.format, operand.scale, operand.block if operand.scale == "e4m3" else None)
            for operand in (own.operand("weight", "rollout"), own.operand("input", "rollout"))
        )
        yield here, there


_names = st.one_of(
    tails.map(lambda tail: f"*.{tail}"),
    tails.map(lambda tail: f"*.{tail.rpartition('.')[2]}"),
    st.sampled_from(("*.layers.0.*", "*.layers.3.*", "*.layers.[12].*", "*.mlp.*", "*.experts.*", "*.linear_fc*")),
)


@st.composite
def _contracts(draw):
    base = draw(st.sampled_from((DEEPSEEK, ALIKE)))
    recipes = ("bf16", "blockwise", "nvfp4") if base is DEEPSEEK else ("bf16", "nvfp4", "blockwise")
    return Precision(
        **base,
        **({"weight_block": "1x16", "row_scaled": True, "backward": "dequantized"} if base is DEEPSEEK else POW2),
        first_layers=draw(st.integers(0, 2)),
        last_layers=draw(st.integers(0, 2)),
        keep=tuple(draw(st.lists(_names, max_size=2))),
        modules=tuple(draw(st.lists(st.tuples(_names, st.sampled_from(recipes)), max_size=2))),
    )


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*MODELS.values()]), _contracts(), _contracts(), st.booleans())
def test_it_agrees_exactly_if_every_linear_is_stored_alike(config, train, rollout, same):
    rollout = train if same else rollout
    alike = all(ours == theirs for ours, theirs in _both(Model.read(config), train, rollout))
    found = check(train=train, rollout=rollout, model=config)
    assert found.agrees == alike, found


def test_the_command_takes_a_models_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    for name, more in (("train", {"last_layers": 1}), ("rollout", {"keep": ["*.layers.3.*"]})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**DEEPSEEK, **more}))
    sides = [str(tmp_path / f"{name}.yaml") for name in ("train", "rollout")]
    for more, code in (([], 1), (["--model", str(tmp_path)], 0)):
        assert CliRunner().invoke(app, ["check", *sides, *more]).exit_code == code
    with pytest.raises(PrecisionError, match="no model config"):
        check(train=Precision(), rollout=Precision(), model=Path(tmp_path / "nowhere"))


def test_nemo_rls_file_is_compared_for_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    text = """
policy:
  precision: bfloat16
  megatron_cfg:
    enabled: true
    fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}
    first_last_layers_bf16: true
    num_layers_at_start_in_bf16: 1
    num_layers_at_end_in_bf16: 0
    env_vars: {NVTE_FP8_BLOCK_SCALING_FP32_SCALES: "1"}
  generation:
    backend: vllm
    vllm_cfg: {precision: fp8, quantization_ignored_layer_kws: ["layers.0."]}
"""
    (tmp_path / "grpo.yaml").write_text(text)
    for more, code in (([], 1), (["--model", str(tmp_path)], 0)):
        done = CliRunner().invoke(app, ["check", "--nemo-rl", str(tmp_path / "grpo.yaml"), *more])
        assert done.exit_code == code, done.output
