"""Megatron-Bridge 0.3.1: its real dataclass, its real registry."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import contracts, ruled_contracts

from nemo_fp8 import preset
from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.selection import contract_of, why_kept_by_name
from nemo_fp8.render import bridge, nemo, render
from nemo_fp8.render.rendering import leading_as_kept


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
@given(contracts() | ruled_contracts())
def test_every_contract_reads_back_but_for_what_the_notes_name(bridge_module, contract):
    rendering = render(contract, "bridge")
    back = bridge.from_bridge(rendering.data)
    # Its first rules for the compute dtype come back as names to keep, which mean the same.
    said = leading_as_kept(contract) if "quant_recipe" in rendering.data else contract
    assert set(said.diff(back)) == set(rendering.lost)
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)
    # And from the whole real object, every field of it, and the provider's beside it.
    recipe = {"quant_recipe": rendering.data.get("quant_recipe")}
    assert bridge.from_bridge(dataclasses.asdict(_built(bridge_module, contract)) | recipe) == back


@settings(max_examples=20, deadline=None)
@given(contracts() | ruled_contracts())
def test_the_pasted_text_builds_the_real_config(bridge_module, contract):
    text = "\n".join(line for line in render(contract, "bridge").text.splitlines() if "megatron.bridge" not in line)
    namespace = {"MixedPrecisionConfig": bridge_module.MixedPrecisionConfig}
    exec(text, namespace)
    namespace["mixed_precision"].finalize()
    assert namespace["mixed_precision"] == _built(bridge_module, contract)
    assert ("quant_recipe" in namespace) == ("quant_recipe" in render(contract, "bridge").data)


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


# ---------------------------------------------------------------------- recipes by module

MEGATRONS = ["*.linear_qkv", "*.linear_proj", "*.linear_fc1", "*.mlp.*", "*.layers.0.*", "decoder.layers.2.*", "*"]
UNITS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2",
         "mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1")  # fmt: skip
bases = [preset("bf16_with_nvfp4_mixed"), preset("bf16_with_mxfp8_mixed"), preset("bf16_with_fp8_tensorwise_mixed")]
ruled = st.builds(
    lambda base, keep, rules: base.replace(fp8_param=False, keep=tuple(keep), modules=tuple(rules)),
    st.sampled_from(bases),
    st.lists(st.sampled_from(MEGATRONS), max_size=2, unique=True),
    st.lists(
        st.tuples(st.sampled_from(MEGATRONS), st.sampled_from(["bf16", "nvfp4", "mxfp8", "blockwise", "tensorwise"])),
        max_size=4,
    ),
)


@given(ruled)
def test_rules_are_rendered_as_quant_recipe_and_read_back(contract):
    rendering = render(contract, "bridge")
    assert ("quant_recipe" in rendering.data) == bool(contract.keep or contract.modules)
    assert not {"keep", "modules"} & set(rendering.lost)
    back = bridge.from_bridge(rendering.data)
    assert (back.keep, back.modules) == (leading_as_kept(contract).keep, leading_as_kept(contract).modules)


@settings(deadline=None, max_examples=50)
@given(ruled)
def test_megatrons_own_matching_gives_each_linear_what_the_rules_give_it(contract):
    from megatron.core.quantization.quant_config import RecipeConfig
    from megatron.core.quantization.utils import get_quant_config_or_none

    recipe = RecipeConfig.from_config_dict(bridge.to_quant_recipe(contract) or {"configs": {}, "matchers": {}})
    for name in (f"decoder.layers.{i}.{unit}" for i in range(3) for unit in UNITS):
        found = get_quant_config_or_none(name, recipe)
        own = contract_of(contract, (name,), int("experts." in name))
        kept = why_kept_by_name(contract, (name,), None, side="train") or not own.is_quantized
        if found is None:
            assert own.scaling == contract.scaling
            assert not kept
            continue
        chosen = found.config["training_recipe"]
        said = chosen.get("fp4_quantization_recipe") or chosen.get("fp8_quantization_recipe")
        assert said == (None if kept else own.scaling), name


@pytest.mark.parametrize(("changes", "word"), [
    ({"keep": ("*.k_proj",)}, "No quant_recipe: .*linear_qkv, by another name"),
    ({"modules": (("*.self_attn.*", "bf16"),)}, "No quant_recipe: .*by another name"),
    ({"modules": (("re:linear_fc[12]", "bf16"),)}, "No quant_recipe: .*no regular expressions"),
    ({"modules": (("*.linear_qkv", "bf16"),), "fp8_param": True}, "No quant_recipe: .*also where a rule says"),
])  # fmt: skip
def test_what_megatron_would_do_otherwise_is_not_rendered_and_said(changes, word):
    contract = preset("bf16_with_mxfp8_mixed").replace(**{"fp8_param": False} | changes)
    rendering = render(contract, "bridge")
    assert "quant_recipe" not in rendering.data
    assert set(rendering.lost) >= {"keep", "modules"} & changes.keys()
    assert any(re.search(word, note) for note in rendering.notes)
