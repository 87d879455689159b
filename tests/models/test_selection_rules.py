"""Recipes by module: one rule, whoever names the module, in training and in the rollout."""

from pathlib import Path

import pytest

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.selection import KEEP, SHAPE, Kept, contract_of, why_kept
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.stored import stored
from nemo_fp8.models.units import select

DATA = Path(__file__).parent / "data"
LLAMA, MOE = (Model.read(DATA / f"{name}.json") for name in ("llama-3-8b", "qwen3-30b-a3b"))
RULES = (("*.layers.1.*", "bf16"), ("*.linear_qkv", "bf16"), ("*.up_proj", "mxfp8"), ("*.linear_fc2", "blockwise"))
RULED = preset("bf16_with_nvfp4_mixed").replace(modules=RULES)


@pytest.mark.parametrize(("name", "recipe"), [
    ("decoder.layers.1.mlp.linear_fc2", None),
    ("model.layers.1.mlp.down_proj", None),
    ("decoder.layers.0.self_attention.linear_qkv", None),
    ("model.layers.0.self_attn.k_proj", None),
    ("decoder.layers.0.mlp.linear_fc1", "mxfp8"),
    ("model.layers.0.mlp.gate_proj", "mxfp8"),  # fused with what the pattern names
    ("model.layers.0.mlp.down_proj", "blockwise"),
    ("model.layers.0.self_attn.o_proj", "nvfp4"),
])  # fmt: skip
def test_every_naming_of_a_linear_gives_it_the_same_recipe(name, recipe):
    assert contract_of(RULED, (name,)).scaling == recipe


@pytest.mark.parametrize("name", ["model.layers.3.mixer.out_proj", "model.layers.3.linear_attn.out_proj"])
def test_what_projects_out_of_a_mixer_is_no_attention(name):
    """Megatron calls it mixer.out_proj, and neither its file of recipes nor an engine knows another name."""
    rules = (("*.self_attention.*", "bf16"), ("*.linear_proj", "bf16"), ("*.out_proj", "mxfp8"))
    assert contract_of(RULED.replace(modules=rules), (name,)).scaling == "mxfp8"
    assert contract_of(RULED.replace(modules=rules), ("model.layers.3.self_attn.out_proj",)).scaling is None


@pytest.mark.parametrize("side", ["train", "rollout"])
@pytest.mark.parametrize("model", [LLAMA, MOE], ids=["llama", "moe"])
def test_both_sides_store_each_linear_as_its_rule_says(model, side):
    block = {"nvfp4": {"train": (16, 16), "rollout": (1, 16)}, "mxfp8": (1, 32), "blockwise": (128, 128)}
    for (layer, name), found in stored(model, RULED, Parallel(), side).items():
        recipe = contract_of(RULED, (f"decoder.layers.{layer}.{name}",), 1, side).scaling
        if recipe is None:
            assert isinstance(found, Kept)
            assert (found.rule, layer == 1 or name.endswith("qkv")) == (KEEP, True)
            continue
        assert isinstance(found, Operand)
        wanted = block[recipe]
        assert found.block == (wanted[side] if isinstance(wanted, dict) else wanted)


def test_a_checkpoint_is_chosen_from_as_the_model_is():
    shapes = {}
    for layer, linear in LLAMA.all_linears():
        for name, rows in zip(linear.hugging_face, linear.parts, strict=True):
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, linear.columns)
    chosen = select(shapes, RULED, layers=LLAMA.layers)
    assert {name for name in shapes if ".layers.1." in name or "self_attn.q" in name} <= chosen.kept.keys()
    assert all(".layers.1." not in name and not name.endswith("k_proj.weight") for name in chosen.quantized)


def test_the_shape_that_fits_is_that_of_the_modules_own_recipe():
    p = Precision(format="e4m3", scaling="blockwise", modules=(("*.linear_fc1", "mxfp8"),))
    fc1, fc2 = ("decoder.layers.0.mlp.linear_fc1",), ("decoder.layers.0.mlp.linear_fc2",)
    shape = [((272,), 256)]  # a multiple of 16, and not of 32
    assert why_kept(p, fc2, shape, side="train") is None
    assert why_kept(p, fc1, shape, side="train").rule == SHAPE
