"""NVFP4, recipes by module and backwards of their own in NeMo's training: TransformerEngine runs what the contract
says, linear by linear, and the loss comes out near BF16's."""

from collections import Counter

import pytest
from support.train.harness import RunFailed, train_tiny

from nemo_fp8.contract.presets import preset
from nemo_fp8.contract.te_variables import te_environment

PROBE = "support.train.probes:recipes"
LINEARS = 16  # four in each of four layers
# At 1e-3 a step of BF16 itself may throw the loss up, and the next one brings it back: how high it goes is chance, and
# another processor's order of sums is enough to change it by a tenth.
STEADY = {"stock": False, "lr": 5e-4}


@pytest.fixture(scope="module")
def bf16():
    return train_tiny("bf16_mixed", **STEADY).losses


def test_nvfp4_runs_in_every_linear_and_stays_near_bf16(bf16):
    run = train_tiny("bf16_with_nvfp4_mixed", probe=PROBE, **STEADY)
    assert Counter(map(tuple, run.extra["recipes"].values())) == {("NVFP4BlockScaling", None): LINEARS}
    assert run.losses != bf16
    assert run.losses == pytest.approx(bf16, rel=0.01)
    assert run.losses[-1] < run.losses[0] - 0.1


def test_rules_by_module_and_a_backward_of_its_own(bf16):
    rules = [["*.layers.0.*", "blockwise"], ["*.linear_qkv", "bf16"], ["*.linear_fc1", "mxfp8"]]
    settings = {"modules": rules, "backward_scaling": "mxfp8", "weight_block": "1x16"}
    run = train_tiny("bf16_with_nvfp4_mixed", settings=settings, probe=PROBE, **STEADY)
    wanted = {
        f"decoder.layers.{layer}.{name}": "Float8BlockScaling" if layer == 0 else recipe
        for layer in range(4)
        for name, recipe in (
            ("self_attention.linear_qkv", None),
            ("self_attention.linear_proj", "CustomRecipe"),
            ("mlp.linear_fc1", "MXFP8BlockScaling"),
            ("mlp.linear_fc2", "CustomRecipe"),
        )
    }
    assert {name: said and said[0] for name, said in run.extra["recipes"].items()} == wanted
    assert run.losses == pytest.approx(bf16, rel=0.01)


def test_a_rule_takes_no_layer_out_of_those_that_stay_in_bf16():
    first = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1}
    settings = first | {"modules": [["*", "mxfp8"]]}
    run = train_tiny("bf16_with_nvfp4_mixed", stock=False, settings=settings, probe=PROBE, steps=1)
    assert {said and said[0] for name, said in run.extra["recipes"].items() if ".layers.0." in name} == {None}
    assert Counter(said[0] for said in run.extra["recipes"].values() if said) == {"MXFP8BlockScaling": 12}


DEQUANTIZED = {"backward": "dequantized", "weight_block": "1x16", "row_scaled": True}


def test_what_transformer_engine_reads_from_the_environment_must_be_there():
    with pytest.raises(RunFailed, match="NVTE_BACKWARD_OVERRIDE=dequantized is needed for backward='dequantized'"):
        train_tiny("bf16_with_nvfp4_mixed", stock=False, settings=DEQUANTIZED, steps=1)


@pytest.mark.long
def test_where_it_is_there_the_backward_takes_what_the_forward_made():
    wanted = te_environment(preset("bf16_with_nvfp4_mixed").replace(**DEQUANTIZED))
    run = train_tiny(
        "bf16_with_nvfp4_mixed", stock=False, settings=DEQUANTIZED, steps=2, env=wanted, torchrun=True, probe=PROBE
    )
    assert set(map(tuple, run.extra["recipes"].values())) == {("NVFP4BlockScaling", "dequantized")}


@pytest.mark.parametrize(
    ("plugin", "recipe"),
    [
        ("bf16_with_nvfp4_mixed", "NVFP4BlockScaling"),
        pytest.param("bf16_with_fp8_blockwise_mixed", "Float8BlockScaling", marks=pytest.mark.long),
    ],
)
def test_a_backward_in_high_precision_trains(bf16, plugin, recipe):
    """The forward alone is quantized; that the backward is BF16's to the bit is seen in TE's modules."""
    settings = {"backward": "high_precision"}
    wanted = te_environment(preset(plugin).replace(**settings))
    run = train_tiny(plugin, settings=settings, env=wanted, torchrun=True, probe=PROBE, **STEADY)
    assert set(map(tuple, run.extra["recipes"].values())) == {(recipe, "high_precision")}
    assert run.losses[0] != bf16[0]
    assert run.losses == pytest.approx(bf16, rel=0.01)
    assert run.losses[-1] < run.losses[0] - 0.1
