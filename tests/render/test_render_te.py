"""TransformerEngine's real recipe classes, and megatron-core's own function that builds them."""

import ast
import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from support.strategies import contracts, ruled_contracts

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import nemo, render
from nemo_fp8.render.bridge import from_bridge
from nemo_fp8.render.te import from_te, te_environment, te_recipe
from nemo_fp8.render.te_loader import load_recipe_module
from nemo_fp8.render.te_precision import from_te_precision

TE_VERSION = "2.20.2"
OPERANDS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
DELAYED = ("margin", "amax_history_len", "amax_compute_algo")
TRAINING = ("format", "scaling", "attention", "multi_head_attention")


@pytest.fixture(scope="module")
def mcore_recipe(te_module):
    """megatron-core's ``get_fp8_recipe``, which it defines only where TE imports: lifted from its source, with this
    TE."""
    import megatron.core
    import torch
    from megatron.core.enums import Fp8Recipe
    from packaging.version import Version

    te = types.SimpleNamespace(common=types.SimpleNamespace(recipe=te_module))
    scope = {
        "HAVE_TE": True,
        "PkgVersion": Version,
        "torch": torch,
        "te": te,
        "transformer_engine": te,
        "Fp8Recipe": Fp8Recipe,
        "is_te_min_version": lambda version, **_: Version(TE_VERSION) >= Version(version),
        "get_te_version": lambda: Version(TE_VERSION),
        "ModelParallelConfig": object,
        "TransformerConfig": object,
        "warnings": warnings,
    }
    base = Path(megatron.core.__file__).parent
    wanted = {
        "extensions/transformer_engine.py": {"_get_extra_te_kwargs", "TEDelayedScaling"},
        "fp8_utils.py": {"get_fp8_recipe"},
    }
    for file, names in wanted.items():
        for node in ast.walk(ast.parse((base / file).read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
                names.remove(node.name)  # the first definition is the one for machines with TE
                exec(compile(ast.Module([node], []), file, "exec"), scope)
        assert not names
    return scope["get_fp8_recipe"]


def _settings(recipe, te_module):
    """Everything that a recipe says, operands included; megatron-core's own subclass counts as its parent."""
    name = next(c.__name__ for c in type(recipe).__mro__ if hasattr(te_module, c.__name__))
    operands = {
        n: str(getattr(recipe, n))
        for n in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
        if hasattr(recipe, n)
    }
    plain = {n: str(v) for n, v in vars(recipe).items() if not n.startswith("_") and n not in operands}
    return name, operands, plain


def test_megatron_core_builds_the_same_recipe_from_our_nemo_rendering(te_module, mcore_recipe):
    from megatron.core.transformer.transformer_config import TransformerConfig
    from nemo.lightning.pytorch.plugins.mixed_precision import (
        MegatronMixedPrecision,
        update_config_with_dtype_overrides,
    )

    compared = 0
    for p in PRESETS.values():
        if not p.is_fp8:
            continue
        plugin = MegatronMixedPrecision(**nemo.resolve_dtypes(nemo.to_nemo(p)))
        config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
        theirs = mcore_recipe(update_config_with_dtype_overrides(plugin.dtype_config, config))
        assert _settings(te_recipe(p, te_module), te_module) == _settings(theirs, te_module), p.name
        compared += 1
    assert compared > 10


@settings(deadline=None)
@given(contracts())
def test_the_real_recipe_reads_back_as_the_contract(te_module, contract):
    if not contract.is_quantized or not contract.wgrad:
        with pytest.raises(PrecisionError):
            te_recipe(contract, te_module)
        return
    recipe = te_recipe(contract, te_module)
    back = from_te(recipe)
    fields = (
        TRAINING
        if contract.scaling == "delayed"
        else [n for n in TRAINING if n not in ("margin", "amax_history_len", "amax_compute_algo")]
    )
    assert {n: getattr(back, n) for n in fields} == {n: getattr(contract, n) for n in fields}
    assert back.gemms() == contract.gemms()
    lost = render(contract, "te").lost
    assert set(contract.diff(back)) == set(lost)


@settings(max_examples=40, deadline=None)
@given(contracts())
def test_the_pasted_text_builds_the_same_recipe(te_module, contract):
    if not contract.is_quantized or not contract.wgrad:
        return
    rendering = render(contract, "te")
    scope = {name: getattr(te_module, name) for name in ("Format", "QParams", rendering.data["recipe"])}
    exec("\n".join(rendering.text.splitlines()[1:]), scope)
    assert _settings(scope["recipe"], te_module) == _settings(te_recipe(contract, te_module), te_module)
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)


def test_fp32_block_scales_reach_every_operand_where_tes_own_flag_does_not(te_module):
    """The trap that ``te_recipe`` closes: TE takes ``use_f32_scales`` and goes on using powers of two."""
    trap = te_module.Float8BlockScaling(use_f32_scales=True)
    assert trap.fp8_quant_fwd_weight.power_2_scale, "TE mended its flag: te.py may become simpler"
    ours = te_recipe(
        Precision(format="e4m3", scaling="blockwise", weight_scale="fp32", activation_scale="fp32"), te_module
    )
    operands = (ours.fp8_quant_fwd_inp, ours.fp8_quant_fwd_weight, ours.fp8_quant_bwd_grad)
    assert not any(o.power_2_scale for o in operands)
    assert te_module.Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale, "other recipes are untouched"


def test_wgrad_outside_fp8_is_refused_by_a_te_that_cannot(te_module):
    with pytest.raises(PrecisionError, match="Set wgrad=True"):
        te_recipe(Precision(format="hybrid", scaling="delayed", wgrad=False), te_module)


@pytest.mark.parametrize("scaling", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
def test_the_environment_gives_a_fresh_te_the_same_scales(te_folder, te_module, scaling, scale):
    """In a process of its own, since TE reads its variables once; against what ``te_recipe`` sets on the instance."""
    p = Precision(format="e4m3", scaling=scaling, weight_scale=scale, activation_scale=scale)
    script = (
        "import json; from nemo_fp8.render.te_loader import load_recipe_module\n"
        f"m = load_recipe_module({str(te_folder)!r}); r = m.{type(te_recipe(p, te_module)).__name__}()\n"
        "print(json.dumps([q.power_2_scale for q in (r.fp8_quant_fwd_inp, r.fp8_quant_fwd_weight, "
        "r.fp8_quant_bwd_grad)]))"
    )
    shell = {**os.environ, **te_environment(p)}
    out = subprocess.run([sys.executable, "-c", script], env=shell, capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [scale == "pow2"] * 3


def test_scales_of_one_kind_for_each_operand_are_beyond_the_environment(te_module):
    mixed = Precision(format="e4m3", scaling="blockwise", weight_scale="pow2", activation_scale="fp32")
    with pytest.raises(PrecisionError, match="together"):
        te_environment(mixed)
    rendering = render(mixed, "env")
    assert rendering.lost == ("weight_scale", "activation_scale")
    assert "te_recipe" in rendering.notes[0]
    recipe = te_recipe(mixed, te_module)
    assert (recipe.fp8_quant_fwd_weight.power_2_scale, recipe.fp8_quant_fwd_inp.power_2_scale) == (True, False)


def test_a_missing_te_is_said_with_its_remedy(tmp_path):
    with pytest.raises(PrecisionError, match=r"pip install --no-deps --target \.te"):
        load_recipe_module(tmp_path)


def test_an_installed_te_is_found_even_where_its_cuda_libraries_are_not(te_folder):
    """``import transformer_engine`` fails on a machine without CUDA; its recipes load all the same, and leave no half
    import."""
    script = (
        "import sys; from nemo_fp8.render.te_loader import load_recipe_module; m = load_recipe_module()\n"
        "print(m.DelayedScaling().amax_history_len, m.__file__, 'transformer_engine' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(te_folder), "NEMO_FP8_TE_CPU": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    length, file, imported = out.stdout.split()
    assert length == "1024"
    assert file.startswith(str(te_folder))
    assert imported == "False"


def test_the_environment_cannot_change_a_recipe_that_is_made_of_a_contract(te_folder):
    """In a process of its own, whose TE has read other defaults than its own."""
    script = (
        "import sys; from nemo_fp8 import Precision; from nemo_fp8.render.te import from_te, te_recipe;"
        "from nemo_fp8.render.te_loader import load_recipe_module as load;"
        "p = Precision(format='e2m1', scaling='nvfp4');"
        "module = load(sys.argv[1]);"
        "assert module.NVFP4BlockScaling().disable_rht, 'the environment was read';"
        "assert from_te(te_recipe(p, module)).gemms() == p.gemms();"
        "mx = Precision(format='e4m3', scaling='mxfp8');"
        "assert te_recipe(mx, module).backward_override is None"
    )
    said = {"NVTE_NVFP4_DISABLE_RHT": "1", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1"}
    shell = {**os.environ, **said, "NVTE_BACKWARD_OVERRIDE": "dequantized"}
    done = subprocess.run([sys.executable, "-c", script, str(te_folder)], env=shell, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Everything in MX blocks but one linear in NVFP4, with three settings that TransformerEngine does not have by itself.
BY_RULE = Precision(
    scaling="mxfp8",
    format="e4m3",
    weight_block="1x16",
    hadamard=False,
    backward="dequantized",
    modules=(("*.linear_fc1", "nvfp4"), ("*.linear_qkv", "blockwise")),
)
BY_RULE_SETS = {
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
    "NVTE_NVFP4_DISABLE_RHT": "1",
    "NVTE_BACKWARD_OVERRIDE": "dequantized",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0",
}


def test_the_environment_says_the_settings_of_a_recipe_that_comes_by_a_rule():
    wanted = te_environment(BY_RULE)
    assert BY_RULE_SETS.items() <= wanted.items()
    assert {name: word for name, word in wanted.items() if "4OVER6" in name} == {"NVTE_NVFP4_4OVER6": "none"}
    assert render(BY_RULE, "env").data == wanted
    assert render(BY_RULE, "skyrl").data["environment"].items() >= wanted.items()
    assert {name.rpartition(".")[2] for name in render(BY_RULE, "verl").data} >= wanted.keys()
    assert json.dumps(wanted) in render(BY_RULE, "slime").data["flags"]
    (note,) = [note for note in render(BY_RULE, "te-precision").notes if "--to env" in note]
    assert all(said in note for said in ("weight_block='1x16'", "hadamard=False", "backward='dequantized'"))
    # A rollout's rules alone are nothing that TransformerEngine carries out.
    assert te_environment(Precision(rollout="fp8", modules=BY_RULE.modules)) == {}


def test_two_recipes_that_want_other_values_of_one_variable_are_refused(monkeypatch):
    """No contract says it today, since every recipe of one takes its fields; a field by recipe would."""
    either = BY_RULE.variants()[:2]
    monkeypatch.setattr(Precision, "variants", lambda p: (either[0], either[1].replace(backward="high_precision")))
    with pytest.raises(PrecisionError, match="NVTE_BACKWARD_OVERRIDE for modules in mxfp8") as caught:
        te_environment(BY_RULE)
    assert "modules in nvfp4 with backward='high_precision'" in caught.value.problems[0].what


@settings(deadline=None)
@given(ruled_contracts())
def test_megatrons_file_says_every_rule_or_names_what_it_loses(contract):
    try:
        rendering = render(contract, "te-precision")
    except PrecisionError as error:
        assert all(p.what and p.why and p.remedy for p in error.problems)  # noqa: PT017
        return
    rules = from_te_precision(yaml.safe_load(rendering.text), contract.compute, contract.format)
    assert rules == (*((name, contract.compute) for name in contract.keep), *contract.modules)
    assert rendering.lost == (("backward_scaling",) if contract.backward_scaling else ())
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)


def _file(recipe, matcher=(), **config):
    said = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe} | config
    usual = {"config": "one", "type": "glob", "pattern": "*.linear_fc1", "enabled": True}
    return {"configs": {"one": said}, "matchers": {"first": usual | dict(matcher)}}


@pytest.mark.parametrize(("document", "words"), [
    (_file({"fp8_quantisation_recipe": "blockwise"}), "Did you mean 'fp8_quantization_recipe'"),
    (_file({"fp8_quantization_recipe": "mxfp8", "fp4_quantization_recipe": "nvfp4"}), "for FP4 and one for FP8"),
    (_file({"custom_recipe_factory": "a.b"}), "no word for it"),
    (_file({"fp8_quantization_recipe": "tensorwise", "tp_only_amax_red": True}), "no word for it"),
    (_file({"fp8_quantization_recipe": "blockwise", "fp8_format": "hybrid"}), "fp8_format: e4m3"),
    (_file(None), "Megatron stops"),
    (_file("nvfp4"), "Megatron stops"),
    (_file({}, training="bf16"), "Unknown key of the config one"),
    (_file({}, {"pattern": None}), "has the pattern None"),
    (_file({}, {"pattern": "re:fc1"}), "matches names with globs"),
    (_file({}, {"config": ["one"]}), "Unknown config of the matcher"),
    ({"configs": [1]}, r"holds \[1\]"),
    ({"configs": {"one": None}}, "holds None"),
    ({"matchers": {"first": "one"}}, "holds 'one'"),
])  # fmt: skip
def test_what_megatron_refuses_or_a_contract_has_no_word_for_is_refused(document, words):
    with pytest.raises(PrecisionError, match=words) as caught:
        from_te_precision(document)
    assert all(problem.remedy for problem in caught.value.problems)


def test_the_format_of_a_rule_is_that_of_the_model():
    """A file that does not say it is Megatron's E4M3: gradients of a hybrid model would be in another format there."""
    silent, hybrid = (_file({"fp8_quantization_recipe": "mxfp8"} | more) for more in ({}, {"fp8_format": "hybrid"}))
    rules = (("*.linear_fc1", "mxfp8"),)
    assert from_te_precision(silent) == from_te_precision(silent, element="e4m3") == rules
    assert from_te_precision(hybrid, element="hybrid") == rules
    with pytest.raises(PrecisionError, match="whose FP8 is 'hybrid'"):
        from_te_precision(silent, element="hybrid")
    with pytest.raises(PrecisionError, match="whose FP8 is 'hybrid'"):
        from_bridge({"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise", "quant_recipe": silent})


@pytest.mark.parametrize("pattern", ["model.layers.1[23].*", "model.layers.1?.*", "backbone.layers.*.mixer.*"])
def test_a_pattern_that_megatron_would_match_with_nothing_is_refused(pattern):
    for changes in ({"keep": (pattern,)}, {"modules": ((pattern, "bf16"),)}):
        contract = Precision(format="e4m3", scaling="mxfp8", **changes)
        with pytest.raises(PrecisionError, match="by another name"):
            render(contract, "te-precision")
        assert {*changes} <= {*render(contract, "bridge").lost}
    assert render(Precision(format="e4m3", scaling="mxfp8", keep=("model.embed_tokens",)), "te-precision").lost == ()
