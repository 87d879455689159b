"""What each side multiplies with has one answer: the contract's. The engine, the check, the gate and the exporter give
no other."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_fp8 import check
from nemo_fp8.contract import ROLLOUT_BLOCKS, Operand, Precision
from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.errors import PrecisionError
from nemo_fp8.export import HuggingFace, export
from nemo_fp8.export.canonical import canonical
from nemo_fp8.mismatch import Run
from nemo_fp8.mismatch.weights import reference
from nemo_fp8.numerics import quantize
from nemo_fp8.preflight.agreement import _TOPICS
from nemo_fp8.rollout.engine.ops import activation_of, fake_quantize
from nemo_fp8.rollout.engine.storage import storage_of

WEIGHT = "model.layers.0.mlp.down_proj.weight"
# docs/rollout.md, "How a layer is stored", written down once more: rollout_block -> the tiles of weights and of
# activations.
TILES = {"128x128": ((128, 128), (1, 128)), "tensor": (None, (1, 128)), "1x32": ((1, 32), (1, 32))}


FP8_BLOCKS = [block for block in ROLLOUT_BLOCKS if block != "1x16"]


def _contracts():
    for name, block, scale in itertools.product(PRESETS, FP8_BLOCKS, ("fp32", "pow2")):
        try:
            p = PRESETS[name].replace(rollout="fp8", rollout_block=block, weight_scale=scale, activation_scale=scale)
        except PrecisionError:
            continue  # FP32 scales of MX blocks, or beside MX training
        yield pytest.param(p, id=f"{name}-{block}-{scale}")


CONTRACTS = [*_contracts()]


def test_every_preset_is_there_with_every_block():
    assert {(p.values[0].name, p.values[0].rollout_block) for p in CONTRACTS} == set(
        itertools.product(PRESETS, FP8_BLOCKS)
    )


@pytest.mark.parametrize("p", CONTRACTS)
def test_whoever_is_asked_gives_the_contracts_operands(p):
    storage, scale = storage_of(p), {"1x32": "e8m0"}.get(p.rollout_block, p.weight_scale)
    for role, tile, engine in zip(
        ("weight", "input"), TILES[p.rollout_block], (storage.weight, storage.activation), strict=True
    ):
        operand = p.operand(role, "rollout")
        assert operand == Operand("e4m3", tile, scale), role
        assert engine == operand, f"the engine's {role}"
        assert Run(p).operand(role) == operand, f"the gate's {role}"
        # The check speaks of a role where the sides differ, and then of the engine's operand.
        ours = p.operand(role, "train")
        said = [f.what for f in check(train=p, rollout=p).findings if f.where == _TOPICS[role]]
        apart = p.is_quantized and (ours.format, ours.block, ours.delayed) != (
            engine.format,
            engine.block,
            engine.delayed,
        )
        assert bool(said) == apart, role
        assert all(f"{engine.words()}." in what for what in said)
    assert activation_of(storage.group, storage.activation.scale) == p.operand("input", "rollout"), (
        "the engine's operators"
    )
    assert p.operand("grad", "rollout") is None


@pytest.mark.parametrize("p", CONTRACTS)
def test_the_codes_are_the_contracts_too(p):
    weight = (
        torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        * torch.linspace(0.1, 4, 256)[:, None].bfloat16()
    )
    right = quantize(weight, p.operand("weight", "rollout"))
    ((_, held),) = reference({WEIGHT: weight}, p.replace(first_layers=0, last_layers=0), layers=1)
    assert torch.equal(held.data.view(torch.uint8), right.data.view(torch.uint8))
    assert torch.equal(held.scale_inv.float(), right.scale_inv.float())
    storage = storage_of(p)
    seen = fake_quantize(weight, storage.group, storage.activation.scale, torch.float32)
    assert torch.equal(seen, quantize(weight, p.operand("input", "rollout")).dequantize())


@pytest.mark.parametrize("p", [p for p in CONTRACTS if p.values[0].name == "bf16_with_fp8_blockwise_mixed"])
def test_the_exporter_writes_the_contracts_operand_or_nothing(p, tmp_path):
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    (tmp_path / "in").mkdir()
    save_file({WEIGHT: weight}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    if p.rollout_block == "1x32":  # in ModelOpt's layout
        export(HuggingFace.open(tmp_path / "in"), tmp_path / "out", p)
        written = load_file(tmp_path / "out" / "model.safetensors")
        right = quantize(weight, storage_of(p).weight)
        assert torch.equal(written[WEIGHT].view(torch.uint8), right.data.view(torch.uint8))
        return
    if p.rollout_block != "128x128":
        with pytest.raises(PrecisionError, match="as a checkpoint"):
            export(HuggingFace.open(tmp_path / "in"), tmp_path / "out", p)
        return
    export(HuggingFace.open(tmp_path / "in"), tmp_path / "out", p)
    written, right = (
        load_file(tmp_path / "out" / "model.safetensors"),
        canonical(quantize(weight, storage_of(p).weight)),
    )
    assert torch.equal(written[WEIGHT].view(torch.uint8), right.data.view(torch.uint8))
    assert torch.equal(written[f"{WEIGHT}_scale_inv"], right.scale_inv)


def test_four_bits_are_what_transformer_engines_recipe_does_with_each_operand():
    p = PRESETS["bf16_with_nvfp4_mixed"]
    assert p.operand("weight") == Operand("e2m1", (16, 16), "e4m3")
    assert p.operand("input") == Operand("e2m1", (1, 16), "e4m3", hadamard=True)
    assert p.operand("grad") == Operand("e2m1", (1, 16), "e4m3", hadamard=True, stochastic=True)
    assert p.operand("weight", "rollout") == Operand("e2m1", (1, 16), "e4m3")
    assert p.operand("input", "rollout") == Operand("e2m1", (1, 16), "e4m3", row_scaled=True)
    assert p.replace(activation_scheme="none").operand("input", "rollout") is None
    four = p.replace(hadamard=False, four_over_six="all", four_over_six_bound_256="weights", four_over_six_error="mse")
    assert (four.operand("weight").four_over_six, four.operand("weight").largest_scale) == ("mse", 256)
    assert (four.operand("input").four_over_six, four.operand("input").largest_scale) == ("mse", 448)
    assert four.operand("grad").four_over_six is None


@pytest.mark.parametrize(("backward", "dgrad", "wgrad"), [
    ("quantized", ("grad", "weight"), ("grad", "input")),
    ("dequantized", (None, "weight"), (None, "input")),
    ("high_precision", (None, None), (None, None)),
])  # fmt: skip
@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_the_backward_multiplies_what_the_contract_says(scaling, backward, dgrad, wgrad):
    p = Precision(format="e2m1" if scaling == "nvfp4" else "e4m3", scaling=scaling, backward=backward)
    operands = {role: p.operand(role) for role in ("input", "weight", "grad")} | {None: None}
    assert p.gemms() == {
        "fprop": (operands["input"], operands["weight"]),
        "dgrad": tuple(operands[role] for role in dgrad),
        "wgrad": tuple(operands[role] for role in wgrad),
    }


def test_a_backward_may_have_a_recipe_of_its_own():
    p = PRESETS["bf16_with_nvfp4_mixed"].replace(backward_scaling="mxfp8", row_scaled=True, weight_block="1x16")
    mx = Operand("e4m3", (1, 32), "e8m0")
    assert p.gemms() == {"fprop": (p.operand("input"), p.operand("weight")), "dgrad": (mx, mx), "wgrad": (mx, mx)}
    assert p.operand("weight").block == (1, 16)


def test_a_module_has_the_recipe_of_the_first_rule_that_matches_one_of_its_names():
    rules = (("*.layers.0.*", "bf16"), ("*.linear_fc*", "mxfp8"), ("re:q_proj$", "blockwise"), ("*", "nvfp4"))
    p = PRESETS["bf16_with_nvfp4_mixed"].replace(modules=rules)
    assert Precision.from_yaml(p.to_yaml()) == p
    assert p.of(["decoder.layers.0.mlp.linear_fc1"]).operand("weight") is None
    assert p.of(["decoder.layers.0.mlp.linear_fc1"]).operand("weight", "rollout") is None
    fc1 = p.of(["decoder.layers.1.mlp.linear_fc1"])
    assert fc1.operand("weight") == fc1.operand("weight", "rollout") == Operand("e4m3", (1, 32), "e8m0")
    assert p.of("decoder.layers.1.mlp.linear_fc1") == fc1  # one name, and not its letters
    q = p.of(["x.linear_qkv", "x.q_proj"])
    assert (q.operand("weight").block, q.operand("weight", "rollout").block) == ((128, 128), (128, 128))
    assert p.of(["decoder.layers.1.self_attention.linear_proj"]) == p
    assert p.replace(rollout="compute", rollout_block=None).of(["a.linear_fc1"]).operand("weight", "rollout") is None


def test_a_module_s_contract_is_made_of_the_contract_that_was_asked():
    """Equal contracts may have other names, and other fields that were said: one was answered with the other's."""
    names = ("bf16_with_fp8_blockwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed")
    assert [PRESETS[name].replace(modules=(("*.a", "mxfp8"),)).of(["x.a"]).name for name in names] == list(names)
    for said in (True, None, True):
        p = Precision(format="e4m3", scaling="blockwise", importance_sampling=said, modules=(("*.a", "bf16"),))
        assert p.of(["x.a"]).importance_sampling is bool(said)


def test_a_rule_that_contradicts_the_contract_is_refused_when_it_is_said():
    p = Precision(format="e4m3", scaling="tensorwise", wgrad=False)
    with pytest.raises(PrecisionError, match="wgrad=False with scaling='nvfp4'"):
        p.replace(modules=(("*.linear_fc1", "nvfp4"),))


@pytest.mark.parametrize(("rules", "words"), [
    ((("*", "delayed"),), "delayed scaling"),
    ((("*", "fp4"),), "nvfp4"),
    ((("re:(", "bf16"),), "no regular expression"),
    ((("*.linear_qkv",),), "no rule"),
])  # fmt: skip
def test_rules_that_mean_nothing_are_refused(rules, words):
    with pytest.raises(PrecisionError, match=words):
        PRESETS["bf16_with_nvfp4_mixed"].replace(modules=rules)


def test_static_scales_and_the_compute_dtype():
    static = Precision(rollout="fp8", rollout_block="tensor", activation_scheme="static")
    assert static.operand("input", "rollout") == Operand("e4m3", None, "fp32", delayed=True)
    assert static.operand("weight", "rollout") == Operand("e4m3", None, "fp32")
    bf16 = PRESETS["bf16_with_fp8_blockwise_mixed"].replace(rollout="compute")
    assert bf16.operand("weight", "rollout") is None
    assert bf16.operand("weight") is not None
    with pytest.raises(PrecisionError, match="generates in the compute dtype"):
        storage_of(bf16)
    with pytest.raises(PrecisionError, match="Did you mean 'rollout'"):
        bf16.operand("weight", "rolout")
