"""vLLM's engine arguments and Hugging Face's quantization_config, both ways."""

import fnmatch
import json
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patterns import EXPERTS, MEGATRONS, VLLMS
from support.strategies import contracts, ruled_contracts

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.selection import contract_of
from nemo_fp8.render import render, vllm, vllm_online
from nemo_fp8.render.rendering import leading_as_kept

FP32 = Precision(rollout="fp8")
MX = Precision(rollout="fp8", rollout_block="1x32", weight_scale="pow2", activation_scale="pow2")
NAMES = ["model.layers.0.mlp.gate", "model.layers.13.self_attn.qkv_proj", "lm_head", "model.embed_tokens", "a.b", "axb"]


@given(contracts())
def test_every_rollout_reads_back_but_for_what_the_notes_name(contract):
    rendering = render(contract, "vllm")
    back = vllm.from_vllm(rendering.data["engine"])
    assert set(contract.diff(back)) == set(rendering.lost)
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)
    if contract.rolls_out_quantized:
        rollout = (
            "rollout",
            "rollout_block",
            "activation_scheme",
            "weight_scale",
            "activation_scale",
            "kv_cache",
            "deep_gemm",
        )
        assert not {*rollout, "first_layers", "last_layers", "keep", "strict", "compute"} & set(rendering.lost)


@given(contracts())
def test_the_flags_say_what_the_arguments_say(contract):
    rendering = render(contract, "vllm")
    words = shlex.split(rendering.text.replace("\\\n", " "))
    flags = dict(zip(words[::2], words[1::2], strict=True))
    for name, value in rendering.data["engine"].items():
        text = flags.pop(f"--{name.replace('_', '-')}")
        assert (json.loads(text) if isinstance(value, dict) else text) == value
    assert not flags


def test_stock_vllm_where_it_suffices_and_the_plugin_where_not():
    assert vllm.to_vllm(Precision(rollout="fp8"))["quantization"] == "fp8_per_block"
    # Stock vLLM would scale activations by token or by tensor, and a contract by 128 of a token.
    assert vllm.to_vllm(Precision(rollout="fp8", rollout_block="tensor"))["quantization"] == "nemo_fp8"
    assert "quantization" not in vllm.to_vllm(Precision())
    pow2 = vllm.to_vllm(Precision(rollout="fp8", weight_scale="pow2", activation_scale="pow2", deep_gemm=True))
    assert pow2["quantization"] == "nemo_fp8"
    assert pow2["linear_backend"] == "deep_gemm"
    assert pow2["hf_overrides"]["quantization_config"]["weight_scale"] == "pow2"
    assert vllm.to_vllm(Precision(rollout="fp8", first_layers=1))["quantization"] == "nemo_fp8"


@pytest.mark.parametrize("activations", ["dynamic", "none"])
def test_nvfp4_is_the_plugins_and_reads_back(activations):
    contract = Precision(rollout="nvfp4", activation_scheme=activations, first_layers=1, keep=("*.o_proj",))
    arguments = vllm.to_vllm(contract)
    assert arguments["quantization"] == "nemo_fp8"
    config = arguments["hf_overrides"]["quantization_config"]
    assert (config["rollout"], config["rollout_block"]) == ("nvfp4", "1x16")
    assert vllm.from_vllm(arguments) == contract
    assert "rollout" not in vllm.to_plugin(Precision(rollout="fp8"))
    assert "rollout" not in vllm.from_plugin(vllm.to_plugin(Precision(rollout="fp8")))
    assert not render(contract, "vllm").lost
    fixed = [note for note in render(contract, "vllm").notes if "one scale of inputs for a layer" in note]
    assert len(fixed) == (activations == "dynamic")
    with pytest.raises(PrecisionError, match="NVFP4 as a Hugging Face FP8 checkpoint"):
        vllm.to_hugging_face(contract)


def test_unknown_words_are_refused():
    with pytest.raises(PrecisionError, match="Did you mean 'weight_scale'"):
        vllm.from_plugin({"quant_method": "nemo_fp8", "weight_scales": "pow2"})
    with pytest.raises(PrecisionError, match="fp8_per_block"):
        vllm.from_vllm({"quantization": "fp8_per_blok"})
    with pytest.raises(PrecisionError, match="kv_cache_dtype"):
        vllm.from_vllm({"kv_cache_dtype": "fp7"})


@given(
    st.lists(st.sampled_from([*"ab._13", "*", "?", "layers", "mlp"]), min_size=1, max_size=8).map("".join),
    st.sampled_from(NAMES),
)
def test_vllms_regular_expression_matches_what_the_glob_matches(pattern, name):
    regex = vllm_online.pattern_to_regex(pattern)
    assert (re.match(regex.removeprefix("re:"), name) is not None) == fnmatch.fnmatchcase(name, pattern)
    assert vllm_online.regex_to_pattern(regex) == pattern


@pytest.mark.parametrize("pattern", [r"re:layers\.(0|3)\.", "re:gate$"])
@pytest.mark.parametrize("name", NAMES)
def test_vllms_regular_expression_matches_what_the_contracts_matches(pattern, name):
    regex = vllm_online.pattern_to_regex(pattern)
    assert (re.match(regex.removeprefix("re:"), name) is not None) == Precision(keep=(pattern,)).keeps(name)
    assert vllm_online.regex_to_pattern(regex) == pattern


@given(contracts())
def test_a_quantization_config_reads_back(contract):
    try:
        config = vllm.to_hugging_face(contract)
    except PrecisionError:
        return  # each refusal has a test of its own
    back = vllm.from_hugging_face(config)
    for field in ("rollout", "rollout_block", "activation_scheme", "weight_scale", "activation_scale", "keep"):
        assert getattr(back, field) == getattr(contract, field)


def test_deepseeks_quantization_config_key_for_key():
    config = vllm.to_hugging_face(
        Precision(format="e4m3", scaling="blockwise", weight_scale="fp32", activation_scale="fp32")
    )
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    assert vllm.to_hugging_face(Precision(format="e4m3", scaling="blockwise"))["scale_fmt"] == "ue8m0"


def test_kept_modules_need_their_names():
    p = Precision(rollout="fp8", keep=("*.gate",), first_layers=1)
    with pytest.raises(PrecisionError, match="kept="):
        vllm.to_hugging_face(p)
    assert "No quantization_config" in " ".join(render(p, "vllm").notes)
    assert vllm.to_hugging_face(p, kept=["model.layers.0.mlp.gate"])["modules_to_not_convert"] == [
        "model.layers.0.mlp.gate"
    ]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"quant_method": "gptq"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "128"),
        ({"quant_method": "fp8", "weight_blocksize": [128, 128]}, "Did you mean 'weight_block_size'"),
        ({"quant_method": "fp8", "scale_fmt": "e4m3"}, "ue8m0"),
    ],
)
def test_foreign_quantization_configs_are_refused(config, word):
    with pytest.raises(PrecisionError, match=word):
        vllm.from_hugging_face(config)


@pytest.mark.parametrize(("pattern", "plugin"), [
    ("*.o_proj", False),
    ("*.self_attn.*", False),
    ("*.gate", False),
    ("model.layers.3.*", False),
    ("*.linear_qkv", True),  # Megatron's name, of which stock vLLM would quantize every part
    ("decoder.layers.3.*", True),
    ("model.layers.1?.*", False),
    ("decoder.layers.1?.*", True),
    (r"re:^decoder\.layers\.1\d\.", True),
    ("decoder.layers.*.mixer.*", True),
    ("*.q_proj", True),  # a part: vLLM refuses a fused layer whose parts differ
])  # fmt: skip
def test_stock_vllm_gets_only_names_that_it_knows(pattern, plugin):
    arguments = vllm.to_vllm(Precision(rollout="fp8", keep=(pattern,)))
    assert (arguments["quantization"] == vllm.PLUGIN) == plugin


@pytest.mark.parametrize("rule", [("*.o_proj", "mxfp8"), ("model.layers.0.mlp.down_proj", "bf16")])
def test_rules_are_no_part_of_a_quantization_config_without_a_model(rule):
    """One would say that every linear is in FP8, in the contract's own blocks."""
    p = Precision(rollout="fp8", modules=(rule,))
    with pytest.raises(PrecisionError, match=r"modules=.* in a quantization_config"):
        vllm.to_hugging_face(p)
    rendering = render(p, "vllm")
    assert "quantization_config" not in rendering.data
    assert any("No quantization_config" in note for note in rendering.notes)


# ---------------------------------------------------------------------- recipes by module, without our plugin

OWN = [
    "*.self_attn.*", "*.o_proj", "model.layers.2.*", r"re:layers\.(0|2)\.", r"re:\.(mlp|block_sparse_moe)\.",
    "*.shared_experts.*", "*", "*.gate",
]  # fmt: skip
rules = st.lists(st.tuples(st.sampled_from(OWN), st.sampled_from(["bf16", "mxfp8", "tensorwise"])), max_size=4)
stock = st.sampled_from([FP32, MX]).flatmap(
    lambda base: st.builds(
        lambda keep, modules: base.replace(keep=tuple(keep), modules=tuple(modules)),
        st.lists(st.sampled_from(OWN), max_size=2, unique=True),
        rules,
    )
)
LAYERS = [f"model.layers.{i}.{name}" for i in range(4) for name in (
    "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "mlp.experts", "mlp.gate",
    "mlp.shared_experts.down_proj")]  # fmt: skip


@given(ruled_contracts())
def test_the_engine_gives_every_linear_the_operands_that_the_contract_gives_it(contract):
    """By rules for the contract's own recipe, too, which its other fields may have given other blocks and scales."""
    arguments = vllm.to_vllm(contract)
    there = vllm.from_vllm(arguments)
    assert set(render(contract, "vllm").lost) <= set(contract.diff(there))
    for name in (f"model.layers.{layer}.{tail}" for layer in (0, 17) for tail in (*MEGATRONS, *VLLMS)):
        right, found = (
            None if p.keeps(name) else contract_of(p, (name,), EXPERTS if ".experts" in name else 0)
            for p in (contract, there)
        )
        for role in ("weight", "input"):
            assert (right and right.operand(role, "rollout")) == (found and found.operand(role, "rollout")), name


@pytest.mark.parametrize(("changes", "scheme"), [
    # FP32 blocks, and a rule for them that is not vLLM's word for a scheme of its own.
    ({"scaling": "blockwise", "weight_scale": "fp32", "activation_scale": "fp32"}, "fp8_per_block"),
    # A rule for tensorwise scaling means the contract's own 1x32 blocks, and not the 128x128 of other contracts' rules.
    ({"scaling": "tensorwise", "rollout_block": "1x32", "weight_scale": "pow2", "activation_scale": "pow2"}, "mxfp8"),
])  # fmt: skip
def test_a_rule_for_the_contracts_own_recipe_means_its_own_blocks(changes, scheme):
    base = Precision(format="e4m3", **changes)
    contract = base.replace(modules=(("*.o_proj", base.scaling), ("*.self_attn.*", "bf16")))
    arguments = vllm.to_vllm(contract)
    targets = arguments["quantization_config"]["targets"]
    assert [one for text, one in targets.items() if re.match(text[3:], "model.layers.3.self_attn.o_proj")] == [scheme]
    assert "modules" not in render(contract, "vllm").lost


def test_a_contract_whose_rules_leave_it_no_module_needs_the_plugin_for_a_format_that_vllm_has_not():
    """Its last target would be its own, and vLLM has no name for it."""
    contract = Precision(rollout="nvfp4", modules=(("*", "mxfp8"),))
    assert vllm.to_vllm(contract)["quantization"] == vllm.PLUGIN
    with pytest.raises(PrecisionError, match="rollout='nvfp4'"):
        vllm.to_vllm(contract, plugin=False)


@given(stock)
def test_rules_that_stock_vllm_can_carry_out_read_back(contract):
    arguments = vllm.to_vllm(contract, plugin=False)
    assert arguments["quantization"] in ("online", "fp8_per_block", "mxfp8")
    assert vllm.from_vllm(arguments) == leading_as_kept(contract)
    assert not {"modules", "keep"} & set(render(contract, "vllm").lost)


@given(stock)
def test_every_layer_matches_one_pattern_and_gets_what_the_rules_say(contract):
    """vLLM's matching, said once more: it refuses a layer that two patterns match, of targets or of both lists."""
    arguments = vllm.to_vllm(contract)
    config = arguments.get("quantization_config", {})
    targets = config.get("targets", {"re:.*": arguments["quantization"]})
    for name in LAYERS:
        found = [scheme for text, scheme in targets.items() if re.match(text[3:], name)]
        ignored = any(re.match(text[3:], name) for text in config.get("ignore", ()))
        router = "targets" in config and name.endswith(".gate")
        kept = contract.keeps(name) or not contract.of([name]).rolls_out_quantized or router
        right = {"128x128": "fp8_per_block", "1x32": "mxfp8"}[contract.of([name]).rollout_block]
        if "targets" in config:
            assert len(found) + ignored <= 1
        assert kept == (ignored or not found), name
        assert kept or found == [right], name
    outside = ("", "lm_head", "model.embed_tokens", "model.layers.0.self_attn.attn")  # vLLM ends where one matches
    assert "targets" not in config or not any(re.match(text[3:], name) for text in targets for name in outside)


@pytest.mark.parametrize(("changes", "word"), [
    ({"modules": (("*.mlp.*", "blockwise"),)}, "rule 'blockwise'.*weight_scale='pow2'"),
    ({"modules": (("*.mlp.*", "nvfp4"),)}, "rule 'nvfp4'"),
    ({"modules": (("*.linear_qkv", "mxfp8"),)}, "linear_qkv, in keep or modules"),
    ({"modules": (("*.k_proj", "mxfp8"),)}, "linear_qkv, in keep or modules"),
    ({"modules": (("*.experts.0.*", "mxfp8"),)}, "experts.linear_fc2, in keep or modules"),
    ({"modules": (("*.mlp.*", "mxfp8"), ("*.[qkv]_proj", "bf16"))}, "a set of characters"),
    ({"modules": ((r"re:(mlp)\.\1", "mxfp8"),)}, "a group that is named or referred to"),
    ({"keep": ("*.experts.*",)}, "experts.linear_fc2, in keep or modules"),
    ({"keep": ("*.mlp.*",)}, "experts.linear_fc2, in keep or modules"),  # as Megatron says, of Mixtral's experts too
    ({"first_layers": 1}, "counts no layers"),
    ({"rollout": "nvfp4", "rollout_block": None}, "rollout='nvfp4'"),
])  # fmt: skip
def test_what_stock_vllm_cannot_do_is_refused_and_left_to_the_plugin(changes, word):
    contract = FP32.replace(**changes)
    with pytest.raises(PrecisionError, match=word) as error:
        vllm.to_vllm(contract, plugin=False)
    assert all(problem.remedy for problem in error.value.problems)
    assert vllm.to_vllm(contract)["quantization"] == vllm.PLUGIN
    assert any("Stock vLLM does not do it" in note for note in render(contract, "vllm").notes)


def test_targets_that_others_wrote():
    """No order, since vLLM refuses a layer that two match; and what none matches stays in the compute dtype."""
    config = {"targets": {"*.self_attn.*": "fp8_per_block", "re:.*down_proj": "mxfp8"}, "ignore": ["lm_head"]}
    back = vllm.from_vllm({"quantization": "online", "quantization_config": config})
    assert back.keep == ("lm_head",)
    at = "model.layers.1."
    names = ("self_attn.qkv_proj", "mlp.down_proj", "mlp.gate_up_proj")
    found = [back.of([f"{at}{name}"]) for name in names]
    assert [(p.rollout, p.rollout_block) for p in found[:2]] == [("fp8", "128x128"), ("fp8", "1x32")]
    assert found[2].rollout == "compute"
    everywhere = {"targets": {"re:.*": "mxfp8"}}
    assert vllm.from_vllm({"quantization": "online", "quantization_config": everywhere}).modules == ()


@pytest.mark.parametrize(("arguments", "word"), [
    ({"quantization": "online", "quantization_config": {"linear": "mxfp8"}}, "linear"),
    ({"quantization": "online", "quantization_config": {"targets": {"*": "mxfp4"}}}, "mxfp4"),
    ({"quantization": "mxfp8", "quantization_config": {"targets": {"*": "mxfp8"}}}, "never both"),
    ({"quantization": "online"}, "never both"),
])  # fmt: skip
def test_online_settings_that_a_contract_cannot_describe_are_refused(arguments, word):
    with pytest.raises(PrecisionError, match=word):
        vllm.from_vllm(arguments)
