"""Megatron-Bridge 0.3.1: its real dataclass, its real registry."""

import dataclasses

import pytest
from hypothesis import given, settings
from support.strategies import contracts

from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import bridge, nemo, render


def _built(module, contract):
    config = module.MixedPrecisionConfig(**nemo.resolve_dtypes(bridge.to_bridge(contract)))
    config.finalize()
    return config


def test_the_table_names_every_field_of_the_real_class_with_its_default(bridge_module):
    fields = {f.name: f.default for f in dataclasses.fields(bridge_module.MixedPrecisionConfig)}
    assert set(fields) == {"bf16", "fp16", "fp32", *bridge.FIELDS}
    nemo_defaults = {n: s.default for n, s in nemo.SETTINGS.items()} | nemo.IMPLIED
    for name, default in fields.items():
        if name in bridge.FIELDS:
            assert (bridge.DEFAULTS.get(name, nemo_defaults[bridge.FIELDS[name]]) or None) == (default or None), name


def test_every_preset_equals_bridges_recipe_of_the_same_name(bridge_module):
    names = {name.replace("-", "_") for name in bridge_module.MIXED_PRECISION_RECIPES}
    compared = names & set(PRESETS)
    assert len(compared) >= 12
    # Bridge's registry has FP4 beside these, which a contract does not describe.
    assert all("fp4" in name for name in names - compared), names - compared
    for name in compared:
        theirs = bridge_module.get_mixed_precision_config(name)
        theirs.finalize()
        ours = _built(bridge_module, PRESETS[name])
        if not ours.fp8:
            theirs.fp8_recipe = ours.fp8_recipe
        assert ours == theirs, name


@settings(deadline=None)
@given(contracts())
def test_every_contract_reads_back_but_for_what_the_notes_name(bridge_module, contract):
    rendering = render(contract, "bridge")
    back = bridge.from_bridge(rendering.data)
    assert set(contract.diff(back)) == set(rendering.lost)
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)
    # And from the whole real object, every field of it.
    assert bridge.from_bridge(dataclasses.asdict(_built(bridge_module, contract))) == back


@settings(max_examples=20, deadline=None)
@given(contracts())
def test_the_pasted_text_builds_the_real_config(bridge_module, contract):
    text = "\n".join(line for line in render(contract, "bridge").text.splitlines() if "megatron.bridge" not in line)
    namespace = {"MixedPrecisionConfig": bridge_module.MixedPrecisionConfig}
    exec(text, namespace)
    namespace["mixed_precision"].finalize()
    assert namespace["mixed_precision"] == _built(bridge_module, contract)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "bf16=True"),
        ({"bf16": True, "fp16": True}, "exactly one"),
        ({"bf16": True, "fp8_recipee": "mxfp8"}, "Did you mean 'fp8_recipe'"),
        ({"bf16": True, "fp8": "hybrid", "fp8_param": True, "fp8_param_gather": False}, "contradict"),
        ({"bf16": True, "fp4_param_gather": True}, "FP4"),
        ({"bf16": True, "fp8": "hybrid", "first_last_layers_bf16": True}, "keeps no layer"),
    ],
)
def test_what_bridge_would_take_in_silence_is_refused(values, word):
    with pytest.raises(PrecisionError, match=word):
        bridge.from_bridge(values)


def test_bridges_default_recipe_is_its_own():
    assert bridge.from_bridge({"bf16": True, "fp8": "e4m3"}).scaling == "tensorwise"
