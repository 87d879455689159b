"""Factories make Configs that NeMo accepts, under the names and with the arguments of NeMo's document."""

import ast
import copy
import inspect
import pickle
import re
import runpy
from functools import partial
from pathlib import Path

import fiddle as fdl
import nemo_run as run
import pytest
import torch
from hypothesis import given
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.recipes.precision import mixed_precision
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision
from support.strategies import contracts

import nemo_fp8
from nemo_fp8 import PRESETS, PrecisionError
from nemo_fp8 import lightning as our_nl
from nemo_fp8.factories import plugin_config
from nemo_fp8.train.plugin import MixedPrecision, plugin_arguments

TRAINER_ARGS = {"devices": 1, "accelerator": "cpu", "max_steps": 1, "logger": False, "enable_checkpointing": False}
FP8_ARGS = {
    "fp8": "hybrid",
    "fp8_margin": 1,
    "fp8_amax_history_len": 32,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_params": False,
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_factory_whose_plugin_holds_its_contract(name):
    config = getattr(nemo_fp8, name)()
    assert isinstance(config, run.Config)
    plugin = fdl.build(config)
    assert isinstance(plugin, MegatronMixedPrecision)
    assert plugin.contract == PRESETS[name]


def _of_nemo():
    functions = inspect.getmembers(mixed_precision, inspect.isfunction)
    return {name: factory for name, factory in functions if factory.__module__ == mixed_precision.__name__}


# What our Configs set and NeMo's of the same name do not, with the reason. Nothing today.
EXTRA: dict[str, dict[str, str]] = {}


def test_nemos_factories_are_found():
    assert len(_of_nemo()) == 12


@pytest.mark.parametrize("name", _of_nemo())
def test_a_config_sets_what_nemos_sets_and_nothing_else(name):
    ours, theirs = getattr(nemo_fp8, name)(), _of_nemo()[name]()
    extra = {field: value for field, value in ours.__arguments__.items() if field in EXTRA.get(name, {})}
    assert ours.__arguments__ == {**theirs.__arguments__, **extra}
    assert set(extra) == set(EXTRA.get(name, {}))


@pytest.mark.parametrize("name", _of_nemo())
def test_every_argument_of_nemos_plugin_is_read_and_written_as_on_nemos_config(name):
    ours, theirs = getattr(nemo_fp8, name)(), _of_nemo()[name]()
    for argument in list(inspect.signature(MegatronMixedPrecision.__init__).parameters)[1:]:
        value = getattr(theirs, argument)
        assert getattr(ours, argument) == value, argument
        assert type(getattr(ours, argument)) is type(value), argument
        setattr(ours, argument, value)
    assert fdl.build(ours).contract == PRESETS[name]


def test_every_fp8_argument_of_the_document_is_a_keyword():
    plugin = fdl.build(nemo_fp8.bf16_with_fp8_mixed(**FP8_ARGS))
    got = plugin.dtype_config
    assert (got.fp8, got.fp8_margin, got.fp8_amax_history_len, got.fp8_amax_compute_algo) == (
        "hybrid",
        1,
        32,
        "most_recent",
    )
    assert got.fp8_param is False
    assert got.fp8_param_gather is False


@pytest.mark.parametrize("name", ["fp8_params", "fp8_param", "fp8_param_gather"])
def test_three_names_for_primary_weights_are_one_setting(name):
    assert not fdl.build(nemo_fp8.bf16_with_fp8_mixed(**{name: False})).contract.fp8_param
    assert fdl.build(nemo_fp8.bf16_with_fp8_blockwise_mixed(**{name: True})).contract.fp8_param
    with pytest.raises(PrecisionError, match="one setting"):
        nemo_fp8.bf16_with_fp8_mixed(
            fp8_params=True, **({name: False} if name != "fp8_params" else {"fp8_param": False})
        )


def test_fields_that_only_the_contract_has_arrive():
    config = nemo_fp8.bf16_with_fp8_blockwise_mixed(
        weight_scale="fp32", keep=("*.gate",), rollout_block="tensor", engine="emulated"
    )
    plugin = fdl.build(config)
    assert plugin.contract.weight_scale == "fp32"
    assert plugin.contract.keep == ("*.gate",)
    assert plugin.engine == "emulated"
    assert plugin_config(plugin.contract, "emulated") == config


def test_a_config_for_a_contract_by_its_name(tmp_path):
    assert plugin_config("bf16_with_mxfp8_mixed") == nemo_fp8.bf16_with_mxfp8_mixed()
    (tmp_path / "mine.yaml").write_text("format: hybrid\nscaling: blockwise\nlast_layers: 1\n")
    assert fdl.build(plugin_config(str(tmp_path / "mine.yaml"))).contract.last_layers == 1
    with pytest.raises(PrecisionError, match="Did you mean 'bf16_with_mxfp8_mixed'"):
        plugin_config("bf16_with_mxfp8_mixd")
    with pytest.raises(PrecisionError, match="is no contract"):
        plugin_config(None)


def test_what_was_said_to_a_factory_stays_said():
    config = nemo_fp8.bf16_with_fp8_blockwise_mixed(weight_scale="pow2", activation_scale="pow2")
    config.fp8_recipe = "tensorwise"
    assert fdl.build(config).contract.weight_scale == "pow2"
    assert fdl.build(config).replace(fp8_margin=1).replace(fp8_recipe="blockwise").contract.said == {
        "weight_scale",
        "activation_scale",
    }


@given(contracts())
def test_a_contract_passes_through_the_plugins_arguments_unchanged(p):
    plugin = MixedPrecision(**plugin_arguments(p))
    assert plugin.contract == p
    assert plugin.contract.said == p.said, "what follows from other fields still follows from them"


def test_a_config_can_be_changed_like_nemos():
    config = nemo_fp8.bf16_with_fp8_mixed()
    config.fp8_margin = 2
    config.fp8_param_gather = False
    assert fdl.build(config).contract == PRESETS["bf16_with_fp8_mixed"].replace(margin=2, fp8_param=False)
    with pytest.raises(AttributeError, match="fp8_margn"):
        config.fp8_margn = 2


def test_fp8_can_be_switched_off_and_an_unknown_argument_is_refused():
    assert fdl.build(nemo_fp8.bf16_with_fp8_mixed(fp8=None)).contract.is_fp8 is False
    with pytest.raises(PrecisionError, match="Did you mean 'fp8_margin'"):
        nemo_fp8.bf16_with_fp8_mixed(fp8_margn=1)


def test_a_loss_scale_that_is_no_number_is_refused():
    with pytest.raises(PrecisionError, match="loss_scale=nan is not a positive"):
        nemo_fp8.fp16_mixed(fp16_loss_scale=float("nan"))


def test_a_plugin_can_be_copied_pickled_and_changed():
    plugin = fdl.build(nemo_fp8.bf16_with_fp8_tensorwise_mixed(keep=["*.gate"], engine="emulated"))
    for again in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert again.contract == plugin.contract
        assert again.dtype_config == plugin.dtype_config
    changed = plugin.replace(num_layers_at_start_in_bf16=2)
    assert changed.contract == plugin.contract.replace(first_layers=2)
    assert changed.engine == "emulated"


def test_the_documents_first_sample_runs():
    from nemo_fp8 import bf16_mixed, fp16_mixed

    trainer_bf16 = run.Config(nl.Trainer, plugins=bf16_mixed(), **TRAINER_ARGS)
    trainer_fp16 = run.Config(nl.Trainer, plugins=fp16_mixed(), **TRAINER_ARGS)
    assert fdl.build(trainer_bf16).precision_plugin.dtype_config.params_dtype is torch.bfloat16
    assert fdl.build(trainer_fp16).precision_plugin.dtype_config.params_dtype is torch.float16


def test_the_documents_recipe_sample_runs():
    from nemo_fp8 import fp16_mixed

    recipe = partial(llm.llama3_8b.pretrain_recipe)()
    recipe.trainer.plugins = fp16_mixed()
    assert fdl.build(recipe.trainer.plugins).contract == PRESETS["fp16_mixed"]


def test_the_documents_fp8_sample_runs():
    from nemo_fp8 import bf16_with_fp8_mixed, fp16_with_fp8_mixed
    from nemo_fp8 import lightning as nl

    for factory in (bf16_with_fp8_mixed, fp16_with_fp8_mixed):
        trainer = fdl.build(run.Config(nl.Trainer, plugins=factory(), **TRAINER_ARGS, **FP8_ARGS))
        assert isinstance(trainer, nl.Trainer)
        assert isinstance(trainer, our_nl._nemo.Trainer)
        contract = trainer.precision_plugin.contract
        assert (contract.margin, contract.amax_history_len, contract.amax_compute_algo, contract.fp8_param) == (
            1,
            32,
            "most_recent",
            False,
        )


def test_nemos_own_trainer_rejects_the_fp8_sample():
    with pytest.raises(TypeError, match="fp8"):
        fdl.build(run.Config(nl.Trainer, plugins=nemo_fp8.bf16_with_fp8_mixed(), **TRAINER_ARGS, **FP8_ARGS))


def test_fp8_arguments_without_our_plugin_are_an_error_that_shows_the_way():
    from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed

    for plugins in (None, fdl.build(bf16_with_fp8_mixed()), [fdl.build(bf16_with_fp8_mixed())]):
        with pytest.raises(PrecisionError, match=r"plugins=bf16_with_fp8_mixed\(fp8_margin=1\)"):
            our_nl.Trainer(plugins=plugins, **TRAINER_ARGS, fp8_margin=1)
    trainer = our_nl.Trainer(plugins=[fdl.build(nemo_fp8.bf16_with_fp8_mixed())], **TRAINER_ARGS, fp8_margin=1)
    assert trainer.precision_plugin.contract.margin == 1
    assert isinstance(trainer.precision_plugin, MixedPrecision)


def test_our_lightning_is_nemos_but_for_the_trainer():
    assert our_nl.MegatronStrategy is nl.MegatronStrategy
    assert our_nl.Trainer is not nl.Trainer


def test_nemo_run_writes_and_reads_a_config():
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    config = nemo_fp8.bf16_with_fp8_blockwise_mixed(keep=("*.gate",), weight_scale="fp32")
    serializer = ZlibJSONSerializer()
    again = serializer.deserialize(serializer.serialize(config))
    assert fdl.build(again).contract == fdl.build(config).contract


def test_the_module_of_factories_names_them_all():
    assert set(nemo_fp8.factories.__all__) == {"plugin_config", *PRESETS}


def test_the_stub_has_their_arguments_and_their_words():
    stub = ast.parse(Path(nemo_fp8.__file__).with_suffix(".pyi").read_text())
    (arguments,) = (node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "_Arguments")
    names = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)}
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert functions.keys() == PRESETS.keys()
    for name, function in functions.items():
        factory = getattr(nemo_fp8, name)
        assert names == inspect.signature(factory).parameters.keys()
        assert ast.get_docstring(function).split() == factory.__doc__.split()


_NEMOS_OWN = Path(mixed_precision.__file__).parents[5] / "tests/collections/llm/recipes/test_mixed_precision.py"
_ITS_TESTS = re.findall(r"^def (test_\w+)", _NEMOS_OWN.read_text(), re.MULTILINE) if _NEMOS_OWN.exists() else []


@pytest.mark.parametrize("test", _ITS_TESTS)
def test_nemos_own_tests_pass_on_our_factories(test):
    """Each of the module, with the factories that it imported replaced by ours of the same name."""
    functions = runpy.run_path(str(_NEMOS_OWN))
    theirs = functions[test].__globals__
    replaced = {name: getattr(nemo_fp8, name) for name in theirs if name in PRESETS}
    assert len(replaced) == 10
    theirs.update(replaced)
    functions[test]()
