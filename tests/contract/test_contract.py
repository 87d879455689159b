"""The contract checks itself, follows its own rules, and goes through every text form unchanged."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from support.strategies import contracts

from nemo_fp8.contract import Precision, naming
from nemo_fp8.contract.naming import load
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.findings import RULES
from nemo_fp8.preflight.agreement import check
from nemo_fp8.preflight.lint import lint
from nemo_fp8.render import render


def _contradiction(**settings):
    with pytest.raises(PrecisionError) as caught:
        Precision(**settings)
    assert all(p.what and p.why and p.remedy for p in caught.value.problems)
    return caught.value


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"format": "hybrid"}, "scaling"),
        ({"scaling": "blockwise"}, "format"),
        ({"fp8_param": True}, "fp8_param"),
        ({"attention": True}, "attention"),
        ({"format": "hybrid", "scaling": "blockwise", "attention": True}, "attention"),
        ({"format": "hybrid", "scaling": "delayed", "first_layers": 1}, "delayed"),
        ({"format": "e4m3", "scaling": "mxfp8", "weight_scale": "fp32"}, "E8M0"),
        ({"format": "hybrid", "scaling": "delayed", "rollout": "compute", "weight_scale": "pow2"}, "delayed"),
        ({"rollout": "fp8", "activation_scheme": "static"}, "static"),
        ({"deep_gemm": True}, "DeepGEMM"),
        ({"rollout": "fp8", "rollout_block": "1x32", "weight_scale": "fp32"}, "1x32"),
        ({"compute": "fp32", "format": "hybrid", "scaling": "tensorwise", "fp8_param": True}, "fp32"),
        ({"initial_loss_scale": 0.5}, "min_loss_scale"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(settings, word):
    assert word in str(_contradiction(**settings))


DELAYED, TENSORWISE = ({"format": "hybrid", "scaling": scaling} for scaling in ("delayed", "tensorwise"))
NVFP4 = {"format": "e2m1", "scaling": "nvfp4"}
RULES_BY_MODULE = {"modules": (("*.linear_qkv", "bf16"),)}
CONTRADICTIONS = {
    "format-without-scaling": {"format": "hybrid"},
    "e2m1": {"format": "e2m1", "scaling": "blockwise"},
    "nvfp4-compute": NVFP4 | {"compute": "fp16"},
    "nvfp4-param": NVFP4 | {"fp8_param": True},
    "nvfp4-wgrad": NVFP4 | {"wgrad": False},
    "four-over-six": NVFP4 | {"four_over_six": "all"},
    "backward-delayed": DELAYED | {"backward": "dequantized"},
    "backward-unquantized": {"backward_scaling": "mxfp8"},
    "backward-twice": TENSORWISE | {"backward": "dequantized", "backward_scaling": "mxfp8"},
    "modules-unquantized": RULES_BY_MODULE,
    "modules-delayed": DELAYED | RULES_BY_MODULE,
    "rollout-block": {"rollout": "nvfp4", "rollout_block": "128x128"},
    "static-nvfp4": {"rollout": "nvfp4", "activation_scheme": "static"},
    "activations-none": {"rollout": "fp8", "activation_scheme": "none"},
    "param-without-fp8": {"fp8_param": True},
    "param-fp32": TENSORWISE | {"compute": "fp32", "fp8_param": True},
    "attention-without-fp8": {"multi_head_attention": True},
    "attention-blockwise": {"format": "hybrid", "scaling": "blockwise", "attention": True},
    "layers-delayed": DELAYED | {"last_layers": 1},
    "mxfp8-scales": {"format": "e4m3", "scaling": "mxfp8", "weight_scale": "fp32"},
    "delayed-scales": DELAYED | {"rollout": "compute", "weight_scale": "pow2"},
    "mx-rollout-scales": {"rollout": "fp8", "rollout_block": "1x32", "activation_scale": "fp32"},
    "static-blocks": {"rollout": "fp8", "activation_scheme": "static"},
    "deep-gemm": {"deep_gemm": True},
    "loss-scale": {"initial_loss_scale": 0.5},
}


@pytest.mark.parametrize(("code", "settings"), CONTRADICTIONS.items())
def test_each_contradiction_is_a_finding_of_its_own(code, settings):
    problems = _contradiction(**settings).problems
    (problem,) = (p for p in problems if p.code == f"contract-{code}")
    assert problem.severity == "error"
    assert "{" not in str(problem)
    assert lint(settings) == [*problems]


def test_each_contradiction_has_a_case():
    assert {f"contract-{code}" for code in CONTRADICTIONS} == {code for code in RULES if code.startswith("contract-")}


@pytest.mark.parametrize(
    ("settings", "suggestion"),
    [
        ({"compute": "bf61"}, "bf16"),
        ({"format": "hybird", "scaling": "blockwise"}, "hybrid"),
        ({"format": "hybrid", "scaling": "blockwize"}, "blockwise"),
        ({"amax_compute_algo": "most-recent"}, "most_recent"),
    ],
)
def test_unknown_values_suggest_the_nearest(settings, suggestion):
    assert f"Did you mean '{suggestion}'" in str(_contradiction(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"margin": 1.5},
        {"margin": True},
        {"amax_history_len": 0},
        {"first_layers": -1},
        {"fp8_param": 1},
        {"loss_scale": 0.0},
        {"initial_loss_scale": float("inf")},
        {"initial_loss_scale": float("nan")},
        {"keep": "router"},
        {"keep": ("re:(",)},
        {"hysteresis": 0},
        {"format": ["hybrid"]},
        {"compute": np.array(["bf16", "fp16"])},
        {"min_loss_scale": "1e-3"},
        {"margin": np.array([1, 2])},
    ],
)
def test_values_of_the_wrong_kind_are_refused(settings):
    _contradiction(**settings)


def test_numbers_of_numpy_are_numbers():
    """From a sweep over np.arange: some were refused as no whole number, others passed and could not be written."""
    p = Precision(
        format=np.str_("e4m3"), scaling="delayed", margin=np.int64(1), wgrad=np.bool_(True), loss_scale=np.float32(2)
    )
    assert p == Precision(format="e4m3", scaling="delayed", margin=1, loss_scale=2.0)
    assert Precision.from_yaml(p.to_yaml()) == p.replace(initial_loss_scale=np.float64(p.initial_loss_scale)) == p


def test_every_contradiction_is_reported_at_once():
    error = _contradiction(fp8_param=True, deep_gemm=True, attention=True)
    assert len(error.problems) == 3


def test_weights_kept_in_four_bits_are_one_contradiction():
    with pytest.raises(PrecisionError) as error:
        Precision(format="e2m1", scaling="nvfp4", fp8_param=True)
    assert [problem.code for problem in error.value.problems] == ["contract-nvfp4-param"]


def test_unknown_fields_are_refused_by_name():
    for make in (Precision.from_dict, lambda values: Precision().replace(**values)):
        with pytest.raises(PrecisionError, match="Did you mean 'amax_history_len'"):
            make({"amax_histroy_len": 3})


@pytest.mark.parametrize("nothing", [None, "", [], "bf16_mixed"])
def test_what_is_no_mapping_is_no_contract(nothing):
    """An empty file of YAML is None."""
    with pytest.raises(PrecisionError, match="is no contract"):
        Precision.from_dict(nothing)


def test_a_field_that_follows_keeps_following_when_others_change():
    followed = preset("bf16_mixed").replace(format="hybrid", scaling="blockwise")
    assert followed == Precision(format="hybrid", scaling="blockwise")
    assert followed.weight_scale == "pow2"
    assert followed.rollout == "fp8"
    stated = Precision(format="hybrid", scaling="blockwise", weight_scale="fp32", rollout="compute").replace(margin=1)
    assert stated.weight_scale == "fp32"
    assert stated.rollout == "compute"


SAID = {
    "weight_scale": "pow2",
    "activation_scale": "pow2",
    "rollout": "fp8",
    "rollout_block": "128x128",
    "importance_sampling": True,
}


@pytest.mark.parametrize("name", SAID)
def test_what_was_said_is_kept_even_where_it_is_what_would_follow(name):
    """``weight_scale="pow2"`` is what blockwise scaling comes to anyway; said, it must not become FP32 with another
    scaling."""
    said = Precision(format="hybrid", scaling="blockwise", **{name: SAID[name]})
    assert said == Precision(format="hybrid", scaling="blockwise")
    changed = (
        {"format": None, "scaling": None} if name in ("rollout", "importance_sampling") else {"scaling": "tensorwise"}
    )
    for p in (said, copy.deepcopy(said), pickle.loads(pickle.dumps(said)), said.replace(margin=1)):
        assert p.said == {name}
        assert getattr(p.replace(**changed), name) == SAID[name]
    assert said.replace(**{name: None}).said == set()


@given(contracts())
def test_its_definition_makes_it_again_and_holds_nothing_that_follows(p):
    again = Precision(**p.definition())
    assert (again, again.said) == (p, p.said)
    assert all(getattr(Precision(), name) != value or name in p.said for name, value in p.definition().items())


def test_a_file_that_holds_every_field_says_every_field(tmp_path):
    """What a YAML file says stays said under --set: kept, or refused where the change contradicts it."""
    path = tmp_path / "blockwise.yaml"
    path.write_text(preset("bf16_with_fp8_blockwise_mixed").to_yaml())
    p = load(str(path), ["scaling=tensorwise"])
    assert (p.scaling, p.weight_scale, p.activation_scale) == ("tensorwise", "pow2", "pow2")
    assert load(str(path), ["scaling=tensorwise", "weight_scale=null"]).weight_scale == "fp32"
    with pytest.raises(PrecisionError, match="FP32 scales with mxfp8"):
        load(str(path), ["weight_scale=fp32", "scaling=mxfp8"])
    # A preset says none of them.
    assert load("bf16_with_fp8_blockwise_mixed", ["scaling=tensorwise"]).weight_scale == "fp32"


def test_identity_is_in_the_settings_and_not_in_the_name():
    a, b = preset("bf16_with_fp8_mixed"), preset("bf16_with_fp8_delayed_mixed")
    assert a == b
    assert hash(a) == hash(b)
    assert a.name != b.name
    assert a.diff(b) == {}
    assert a.diff(a.replace(margin=2)) == {"margin": (0, 2)}
    for name in ("bf16_mixed", a.to_dict(), None):
        with pytest.raises(PrecisionError, match=r"is no contract(.|\n)*Give nemo_fp8.preset"):
            a.diff(name)
    with pytest.raises(AttributeError):
        a.margin = 3


@pytest.mark.parametrize("name", PRESETS)
def test_dict_yaml_and_pickle_are_lossless(name):
    p = preset(name).replace(keep=["*.router", "re:lm_head$"])
    for again in (Precision.from_dict(p.to_dict()), Precision.from_yaml(p.to_yaml()), pickle.loads(pickle.dumps(p))):
        assert again == p
        assert again.name == p.name


def test_yaml_refuses_what_it_would_swallow():
    with pytest.raises(PrecisionError, match="stands twice"):
        Precision.from_yaml("margin: 1\nmargin: 2\n")
    with pytest.raises(PrecisionError, match="not a mapping"):
        Precision.from_yaml("- margin\n")
    with pytest.raises(PrecisionError, match="not YAML"):
        Precision.from_yaml("margin: [1\n")


@pytest.mark.parametrize("value", ["2001-13-45", "!!int one", "!!timestamp x", "[" * 5000, "({[1]: 2},)"])
def test_what_yaml_cannot_read_is_one_error(value):
    """Not all of it is a YAMLError of PyYAML's."""
    with pytest.raises(PrecisionError, match="cannot be read"):
        load("bf16_mixed", [f"keep={value}"])
    if not value.startswith("("):
        with pytest.raises(PrecisionError, match="not YAML"):
            Precision.from_yaml(f"keep: {value}")


def test_whoever_takes_a_contract_takes_its_name_and_nothing_else(tmp_path):
    """check, render and lint ended in an AttributeError at a name, lint read it letter by letter."""
    name = "bf16_with_fp8_blockwise_mixed"
    (tmp_path / "contract.yaml").write_text(preset(name).to_yaml())
    for said in (name, str(tmp_path / "contract.yaml"), preset(name)):
        assert naming.given(said) == preset(name)
        assert check(train=said, rollout=said).agrees
        assert render(said, "vllm") == render(preset(name), "vllm")
        assert lint(said) == lint(preset(name))
    for wrong in (None, 5, {"format": "hybrid"}):
        for taker in (naming.given, lambda p: check(train=p, rollout=p), lambda p: render(p, "vllm")):
            with pytest.raises(PrecisionError, match="is no contract"):
                taker(wrong)
        with pytest.raises(PrecisionError, match="Unknown precision"):
            preset(wrong)
    assert [f.code for f in lint(None)] == ["contract"]


def test_an_error_crosses_a_process_whole():
    error = _contradiction(fp8_param=True, deep_gemm=True)
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems
    assert str(again) == str(error)


def test_operands_follow_the_recipe():
    block = Precision(format="hybrid", scaling="blockwise")
    (grad, weight), (wgrad_a, wgrad_b) = block.gemms()["dgrad"], block.gemms()["wgrad"]
    assert (grad.format, grad.block, grad.scale) == ("e5m2", (1, 128), "pow2")
    assert (weight.format, weight.block) == ("e4m3", (128, 128))
    assert (wgrad_a.format, wgrad_b.format) == ("e5m2", "e4m3")
    assert block.replace(wgrad=False).gemms()["wgrad"] == (None, None)
    assert block.replace(format="e4m3").operand("grad").format == "e4m3"
    assert preset("bf16_with_mxfp8_mixed").operand("input").block == (1, 32)
    assert preset("bf16_with_fp8_mixed").operand("weight").delayed
    assert preset("bf16_mixed").operand("weight") is None
    with pytest.raises(PrecisionError):
        block.operand("bias")


def test_layers_are_kept_by_place_and_by_name():
    p = Precision(format="hybrid", scaling="tensorwise", first_layers=1, last_layers=2, keep=("*.router", "re:proj$"))
    assert [p.keeps("x", layer, 5) for layer in range(5)] == [True, False, False, True, True]
    assert p.keeps("model.layers.3.router")
    assert p.keeps("a.o_proj")
    assert not p.keeps("a.proj.b")
