"""vLLM's engine arguments and Hugging Face's quantization_config, both ways."""

import fnmatch
import json
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import contracts

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import render, vllm

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
    regex = vllm.pattern_to_regex(pattern)
    assert (re.match(regex.removeprefix("re:"), name) is not None) == fnmatch.fnmatchcase(name, pattern)
    assert vllm.regex_to_pattern(regex) == pattern


@pytest.mark.parametrize("pattern", [r"re:layers\.(0|3)\.", "re:gate$"])
@pytest.mark.parametrize("name", NAMES)
def test_vllms_regular_expression_matches_what_the_contracts_matches(pattern, name):
    regex = vllm.pattern_to_regex(pattern)
    assert (re.match(regex.removeprefix("re:"), name) is not None) == Precision(keep=(pattern,)).keeps(name)
    assert vllm.regex_to_pattern(regex) == pattern


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
    ("*.q_proj", True),  # a part: vLLM refuses a fused layer whose parts differ
])  # fmt: skip
def test_stock_vllm_gets_only_names_that_it_knows(pattern, plugin):
    arguments = vllm.to_vllm(Precision(rollout="fp8", keep=(pattern,)))
    assert (arguments["quantization"] == vllm.PLUGIN) == plugin
