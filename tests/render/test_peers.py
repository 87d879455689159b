"""verl, SkyRL and TRL themselves read what is rendered for them: every preset, by the classes that their runs begin
with."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from support import ROOT, TESTS

from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import render, skyrl, verl

PEERS = ROOT / ".peers"
NO_SUCH = "no such setting"


def ask(framework, given):
    """What the framework's own classes make of these settings, by name."""
    if not (PEERS / framework).is_dir():
        pytest.fail(f"{framework} is not in {PEERS}. Remedy: make setup")
    done = subprocess.run(
        [sys.executable, "-m", "support.peers", framework],
        input=json.dumps(given),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, ROOT))), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def words(rendering):
    """The words of a command, without the variables to export before it."""
    lines = [line for line in rendering.text.splitlines() if not line.startswith("export ")]
    return shlex.split(" ".join(lines).replace("\\ ", ""))


def renderings(framework):
    """Name -> rendering of every preset that the framework can compute in at all."""
    found = {}
    for name in PRESETS:
        try:
            found[name] = render(preset(name), framework)
        except PrecisionError:
            assert preset(name).compute == "fp16"
    return found


def section(values, prefix):
    return {key.removeprefix(f"{prefix}."): value for key, value in values.items() if key.startswith(f"{prefix}.")}


def test_verl_composes_its_configuration_and_constructs_its_classes():
    made = renderings("verl")
    given = {name: {"words": words(rendering)} for name, rendering in made.items()}
    misspelt = "++actor_rollout_ref.rollout.quantisation=fp8"
    found = ask("verl", given | {NO_SUCH: {"words": ["model_engine=megatron", misspelt]}})
    assert "quantisation" in found.pop(NO_SUCH)["refused"]
    assert len(found) == len(PRESETS)
    for name, said in found.items():
        values = made[name].data
        assert (said["class"], said["strategy"], said["unknown"]) == ("McoreActorConfig", "megatron", [])
        for core, prefix in verl.SECTIONS.items():
            ours = section(values, prefix)
            assert {key: said[core].get(key, NO_SUCH) for key in ours} == ours, (name, core)
        assert said["dtype"] == [values["actor_rollout_ref.actor.megatron.dtype"]] * 2
        assert said["quantization"] == values["actor_rollout_ref.rollout.quantization"]
        assert said["engine"] == section(values, "actor_rollout_ref.rollout.engine_kwargs.vllm")
        assert said["calculate_log_probs"] == values[verl.LOG_PROBS]
        assert said["rollout_is"] == values["algorithm.rollout_correction.rollout_is"]
        assert said["variables"].items() >= section(values, verl.ENVIRONMENT).items()


def test_verl_refuses_megatron_s_settings_without_the_word_for_megatron():
    """Why the rendering begins with it: verl's own trainer is FSDP."""
    given = [word for word in words(render(preset("bf16_with_fp8_mixed"), "verl")) if not word.startswith(verl.TRAINER)]
    (said,) = ask("verl", {"fsdp": {"words": given}}).values()
    assert "FSDPActorConfig" in said["refused"]
    assert "unexpected keyword argument 'megatron'" in said["refused"]


def test_skyrl_constructs_its_configuration():
    made = renderings("skyrl")
    given = {name: {"words": words(rendering)} for name, rendering in made.items()}
    fsdp, silent = (
        [word for word in given[name]["words"] if not word.startswith(skyrl.TRAINER)]
        for name in ("bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed")
    )
    misspelt = ["trainer.policy.megatron_config.transformer_config=1"]
    found = ask("skyrl", given | {"fsdp": {"words": fsdp}, "silent": {"words": silent}, NO_SUCH: {"words": misspelt}})
    assert "trainer.strategy='megatron'" in found.pop("fsdp")["refused"]
    passed_over = found.pop("silent")  # no weights are sent in FP8, so that nothing asks for the trainer
    assert (passed_over["strategy"], passed_over["TransformerConfig"]["fp8"]) == ("fsdp", "hybrid")
    assert "transformer_config" in found.pop(NO_SUCH)["refused"]
    assert len(found) == len([name for name in PRESETS if preset(name).compute == "bf16"])
    for name, said in found.items():
        values = made[name].data["overrides"]
        assert said["strategy"] == "megatron"
        for core in ("TransformerConfig", "OptimizerConfig"):
            ours = section(values, skyrl.SECTIONS[core])
            assert {key: said[core].get(key, NO_SUCH) for key in ours} == ours, (name, core)
        assert said["model_dtype"] == values["generator.inference_engine.model_dtype"]
        assert said["fp8_weight_sync_mode"] == values[skyrl.MODE]
        assert said["engine"].get("quantization") == values.get(skyrl.QUANTIZATION)
        assert said["engine"].get("hf_overrides", {}).get("quantization_config", {}) == section(values, skyrl.PLUGIN)
        assert said["tis_ratio_type"] == values["trainer.algorithm.off_policy_correction.tis_ratio_type"]
        assert said["logprobs"] == values[skyrl.LOG_PROBS]


def test_trl_constructs_its_classes():
    made = {name: rendering.data for name, rendering in renderings("trl").items()}
    misspelt = {"config": {"vllm_importance_sampling": True}, "server": {}}
    found = ask("trl", made | {NO_SUCH: misspelt})
    assert "vllm_importance_sampling" in found.pop(NO_SUCH)["refused"]
    assert found == made
