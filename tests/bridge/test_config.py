"""The contract as Bridge's MixedPrecisionConfig: its registry, its fields, and what is refused."""

import dataclasses
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from support.strategies import contracts

from nemo_fp8 import PRESETS, PrecisionError, bridge, preset
from nemo_fp8.bridge.patches import TABLE, compile_helpers
from nemo_fp8.render.bridge import from_bridge


@pytest.fixture
def registry(monkeypatch):
    """Bridge's registry with ours in it, and as it was."""
    from megatron.bridge.training import mixed_precision

    before = dict(mixed_precision.MIXED_PRECISION_RECIPES)
    monkeypatch.setattr(mixed_precision, "MIXED_PRECISION_RECIPES", dict(before))
    assert set(bridge.register_presets()) == set(PRESETS)
    return mixed_precision, before


def test_every_preset_is_found_under_both_spellings(registry):
    module, _ = registry
    for name in PRESETS:
        for spelling in (name, name.replace("_", "-")):
            found = module.get_mixed_precision_config(spelling)
            assert isinstance(found, bridge.ContractPrecision)
            assert found.contract == PRESETS[name]


def test_names_that_bridge_has_keep_its_values(registry):
    module, before = registry
    both = [name for name in before if name in PRESETS]
    assert len(both) >= 12
    for name in both:
        theirs, ours = before[name](), module.get_mixed_precision_config(name)
        theirs.finalize()
        ours.finalize()
        for field in dataclasses.fields(theirs):
            if ours.fp8 or field.name != "fp8_recipe":  # which means nothing without FP8
                assert getattr(ours, field.name) == getattr(theirs, field.name), f"{name}.{field.name}"


@settings(max_examples=100)
@given(contracts())
def test_every_contract_goes_in_and_comes_back(contract):
    assert bridge.bridge_config(contract).contract == contract


def test_an_override_of_a_field_is_an_override_of_the_contract():
    config = bridge.bridge_config("bf16_with_fp8_delayed_scaling_mixed")
    config.fp8_margin = 2
    config.fp8_param_gather = False
    assert config.contract.diff(preset("bf16_with_fp8_delayed_scaling_mixed")) == {
        "margin": (2, 0),
        "fp8_param": (False, True),
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp8_recipe": "current"}, "Megatron calls current scaling 'tensorwise'"),
        ({"fp8_recipe": "mxfp8"}, "reuse_grad_buf_for_mxfp8_param_ag=False"),
        ({"fp16": True}, "exactly one dtype"),
        ({"num_layers_at_start_in_bf16": 1}, "first_last_layers_bf16"),
        ({"fp4": "e2m1"}, "fp4"),
    ],
)
def test_a_contradictory_override_is_refused_before_anything_is_built(changes, said):
    config = bridge.bridge_config("bf16_with_fp8_delayed_scaling_mixed")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(PrecisionError, match=said):
        config.finalize()


def test_an_unknown_name_is_one_clear_error():
    with pytest.raises(PrecisionError, match="Did you mean 'bf16_with_fp8_blockwise_mixed'"):
        bridge.bridge_config("bf16_with_fp8_blokwise_mixed")
    with pytest.raises(AttributeError, match="no attribute 'bridge_confg'"):
        bridge.bridge_confg  # noqa: B018


@pytest.mark.parametrize("name", ["fp16_mixed", "bf16_mixed"])
def test_fp16_training_multiplies_in_fp32_without_units(monkeypatch, name):
    from support.bridge.tiny import provider

    from nemo_fp8.bridge import config
    from nemo_fp8.numerics import bf16

    monkeypatch.setattr(bf16, "multiplies_fp16", lambda: False)
    with ExitStack() as held:
        monkeypatch.setattr(config, "FOR_THE_PROCESS", held)
        bridge.bridge_config(name).setup(provider())
        assert bf16._replaced.open[torch.float16] == (name == "fp16_mixed")


def test_what_a_run_would_refuse_is_refused(alone):
    assert "Available recipes: bf16-mixed" in alone["unknown"]["refused"]  # by Bridge itself
    assert "Did you mean 'mxfp8'" in alone["contradiction"]["refused"]
    assert "format=None" in alone["another-contradiction"]["refused"]
    assert "names no linear of this model" in alone["no-such-module"]["refused"]
    assert "modules: '*.linear_fc7' names no linear of this model" in alone["no-such-rule"]["refused"]
    assert "keep all 4 layers in BF16" in alone["all-kept"]["refused"]
    assert "context_parallel_size=2 on a machine without a GPU" in alone["over-ranks"]["refused"]


def test_masters_out_of_fp8_codes_are_found():
    from support.bridge.tiny import config, provider

    made = bridge.bridge_config("bf16_with_mxfp8_mixed")
    start = {"pretrained_checkpoint": "somewhere", "finetune": True}
    (found,) = bridge.start_findings(config(provider(), made, checkpoint=start))
    assert (found.code, found.severity) == ("start-masters-from-fp8", "warning")
    start |= {"load_optim": False, "load_main_params_from_ckpt": True}
    assert bridge.start_findings(config(provider(), made, checkpoint=start)) == []
    assert bridge.start_findings(config(provider(), "bf16_mixed", checkpoint=start)) == []


def test_a_folder_without_a_tokenizer_is_found(folder, tmp_path):
    """Bridge itself ends there, in an error of transformers'."""
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
    from support.bridge.tiny import config, provider, tokenizer

    run = config(provider(), "bf16_mixed")
    run.tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "qwen3"))
    (found,) = bridge.start_findings(run)
    assert (found.code, found.severity) == ("start-no-tokenizer", "error")
    with pytest.raises((OSError, ValueError, TypeError)):
        build_tokenizer(run.tokenizer)
    tokenizer(tmp_path)
    run.tokenizer.tokenizer_model = str(tmp_path)
    assert bridge.start_findings(run) == []
    assert build_tokenizer(run.tokenizer).vocab_size == 3


def test_a_folder_without_a_tokenizer_is_refused_before_it_is_imported(folder, alone):
    """Bridge itself writes all weights first, and then ends in an error of transformers'."""
    with pytest.raises(PrecisionError, match="qwen3 holds no tokenizer") as refused:
        bridge.require_tokenizer(folder / "qwen3")
    (found,) = refused.value.problems
    assert found.code == "start-import-no-tokenizer"
    assert "refused" not in alone["imported"], alone["imported"]
    assert (folder / "base/iter_0000000/tokenizer/tokenizer.json").exists()


def test_every_rule_on_a_start_is_tested_here():
    from nemo_fp8.findings import RULES

    tested = {"start-masters-from-fp8", "start-no-tokenizer", "start-import-no-tokenizer"}
    assert {code for code in RULES if code.startswith("start-")} == tested


def test_the_only_patch_fits_and_is_needed():
    """Megatron's own would run make where there is no Makefile; ours takes the same parameters."""
    from pathlib import Path

    from megatron.core.datasets import helpers_cpp, utils

    (row,) = TABLE
    assert row.misfit() is None
    assert not Path(helpers_cpp.__file__).with_name("Makefile").exists()
    with pytest.raises(SystemExit):
        utils.compile_helpers()
    assert compile_helpers() is None


def test_the_contract_is_what_the_renderer_says():
    config = bridge.bridge_config("bf16_with_fp8_blockwise_mixed")
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "beyond"}
    assert from_bridge(values) == PRESETS["bf16_with_fp8_blockwise_mixed"]
