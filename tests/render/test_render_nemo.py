"""NeMo's keyword arguments against the installed NeMo 2.7.3, field by field, and everything it takes without a word."""

import dataclasses
import inspect

import pytest
from hypothesis import given, settings
from support.strategies import contracts, ruled_contracts

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import nemo, nemo_script, render

FACTORIES = [
    "bf16_mixed",
    "fp16_mixed",
    "bf16_with_fp8_mixed",
    "fp16_with_fp8_mixed",
    "bf16_with_mxfp8_mixed",
    "fp16_with_mxfp8_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "fp16_with_fp8_current_scaling_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "fp16_with_fp8_subchannel_scaling_mixed",
]


@pytest.fixture(scope="module")
def nemo_recipes():
    from nemo.collections.llm.recipes.precision import mixed_precision

    return mixed_precision


@pytest.fixture(scope="module")
def plugin_class():
    from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision

    return MegatronMixedPrecision


def _recipe_factories(module):
    return {n: f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}


def test_no_factory_of_nemo_is_missing(nemo_recipes):
    assert set(_recipe_factories(nemo_recipes)) <= set(PRESETS)


def test_every_preset_equals_nemos_factory_of_the_same_name(nemo_recipes, plugin_class):
    import fiddle

    for name, factory in _recipe_factories(nemo_recipes).items():
        theirs = dataclasses.asdict(fiddle.build(factory()).dtype_config)
        ours = dataclasses.asdict(plugin_class(**nemo.resolve_dtypes(nemo.to_nemo(PRESETS[name]))).dtype_config)
        assert ours == theirs, name


def test_the_table_names_every_argument_of_nemos_plugin_with_its_default(plugin_class):
    arguments = inspect.signature(plugin_class.__init__).parameters
    ours = {n: s.default for n, s in nemo.SETTINGS.items()} | nemo.IMPLIED
    assert set(nemo.NAMES) - set(arguments) == {"fp8_param"}  # NeMo's configs know that name, its plugin does not
    assert {n for n in arguments if n != "self"} <= set(nemo.NAMES)
    for name, argument in arguments.items():
        if name in ours and argument.default is not inspect.Parameter.empty:
            assert (ours[name] or None) == (argument.default or None), name


@given(contracts() | ruled_contracts())
def test_every_contract_reads_back_but_for_what_the_notes_name(contract):
    rendering = render(contract, "nemo")
    back = nemo.from_nemo(rendering.data)
    assert set(contract.diff(back)) == set(rendering.lost)
    assert set(rendering.lost) <= set(nemo_script.REASONS)
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)
    # What does come back is the whole training side, and it is a fixed point.
    assert nemo.to_nemo(back) == rendering.data


@settings(max_examples=20, deadline=None)
@given(contracts() | ruled_contracts())
def test_the_pasted_text_builds_nemos_plugin(plugin_class, contract):
    import fiddle

    namespace: dict = {}
    exec(render(contract, "nemo").text, namespace)
    built = fiddle.build(namespace["plugin"])
    assert built.dtype_config == plugin_class(**nemo.resolve_dtypes(nemo.to_nemo(contract))).dtype_config


def test_nemos_names_change_a_preset():
    base = preset("bf16_with_fp8_mixed")
    changes = nemo.changes_from_nemo(
        {"fp8_margin": 1, "fp8_amax_history_len": 32, "fp8_amax_compute_algo": "most_recent", "fp8_params": True}, base
    )
    assert changes == {"margin": 1, "amax_history_len": 32, "amax_compute_algo": "most_recent", "fp8_param": True}
    assert base.replace(**changes).margin == 1


@pytest.mark.parametrize("name", ["fp8_params", "fp8_param", "fp8_param_gather"])
def test_three_names_are_one_setting(name):
    assert nemo.changes_from_nemo({name: True}) == {"fp8_param": True}
    assert nemo.changes_from_nemo({name: None}) == {}


def test_switching_fp8_on_and_off():
    on = nemo.changes_from_nemo({"fp8": "hybrid"}, preset("bf16_mixed"))
    assert on == {"format": "hybrid", "scaling": "delayed"}, "NeMo's recipe is delayed unless it says otherwise"
    base = preset("bf16_with_fp8_mixed")
    assert not base.replace(**nemo.changes_from_nemo({"fp8": None}, base)).is_fp8
    four = nemo.changes_from_nemo({"fp4": "e2m1"}, preset("bf16_mixed"))
    assert four == {"format": "e2m1", "scaling": "nvfp4"}
    nvfp4 = preset("bf16_with_nvfp4_mixed")
    assert nemo.changes_from_nemo({"fp4": None}, nvfp4) == {"format": None, "scaling": None}
    assert nemo.changes_from_nemo({"fp8": "hybrid"}, nvfp4) == {"format": "hybrid", "scaling": "delayed"}
    current = preset("bf16_with_fp8_current_scaling_mixed")
    assert nemo.changes_from_nemo({"first_last_layers_bf16": False}, current) == {"first_layers": 0, "last_layers": 0}
    assert nemo.changes_from_nemo({"first_last_layers_bf16": True}, current) == {}


@pytest.mark.parametrize(
    ("arguments", "word", "remedy"),
    [
        ({"fp8_params": True, "fp8_param_gather": False}, "contradict", "only one"),
        ({"fp8_param": False, "fp8_param_gather": True}, "contradict", "only one"),
        ({"fp8_margin": 1, "margin": 2}, "contradict", "fp8_margin"),
        ({"first_last_layers_bf16": True}, "without counts", "num_layers_at_start_in_bf16=1"),
        ({"first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 2}, "=False", "first_last_layers_bf16=True"),
        ({"fp8": "e5m2"}, "e5m2", "hybrid"),
        ({"fp8_recipe": "current"}, "current", "tensorwise"),
        ({"fp8_recipe": "subchannel"}, "subchannel", "blockwise"),
        ({"fp8": "hybrid", "fp4": "e2m1"}, "fp4", "fp8=None"),
        ({"fp4": "e2m2"}, "e2m2", "e2m1"),
        ({"fp4": "e2m1", "fp4_recipe": "mxfp4"}, "mxfp4", "nvfp4"),
        ({"precision": "fp8"}, "fp8", "bf16-mixed"),
        ({"params_dtype": "torch.float16"}, "params_dtype", "precision"),
        ({"autocast_enabled": True}, "autocast_enabled", "Leave it out"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "reuse_grad_buf", "mxfp8"),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_params": True, "reuse_grad_buf_for_mxfp8_param_ag": False},
            "MXFP8",
            "=True",
        ),
        ({"fp8_amax_compute_algo": "most-recent"}, "most-recent", "Did you mean 'most_recent'"),
        ({"fp8_margn": 1}, "fp8_margn", "Did you mean 'fp8_margin'"),
        ({"first_last_layers_bf16": 1}, "first_last_layers_bf16", "True or False"),
    ],
)
def test_what_nemo_takes_in_silence_is_refused_with_a_remedy(arguments, word, remedy):
    with pytest.raises(PrecisionError) as caught:
        nemo.changes_from_nemo(arguments)
    assert any(word in p.what and remedy in p.remedy for p in caught.value.problems), str(caught.value)


def test_reading_takes_nemos_defaults():
    assert nemo.from_nemo({"precision": "bf16-mixed"}) == preset("bf16_mixed")
    assert nemo.from_nemo({"precision": "bf16-mixed", "fp8": "hybrid", "fp8_params": True}).scaling == "delayed"
    with pytest.raises(PrecisionError, match="precision is missing"):
        nemo.from_nemo({})
    with pytest.raises(PrecisionError, match="tensorwise"):
        nemo.from_nemo({"precision": "bf16-mixed", "fp8_recipe": "tensorwise"})  # NeMo would train in BF16
    with pytest.raises(PrecisionError, match="first_last_layers_bf16=False"):
        nemo.from_nemo(
            {"precision": "bf16-mixed", "fp8": "hybrid", "fp8_recipe": "tensorwise", "num_layers_at_start_in_bf16": 1}
        )


def test_a_whole_rendering_can_be_required():
    assert render(preset("bf16_with_fp8_mixed"), "nemo").require_whole().lost == ()
    with pytest.raises(PrecisionError, match="keep"):
        render(Precision(format="e4m3", scaling="blockwise", keep=("*.router",)), "nemo").require_whole()
    with pytest.raises(PrecisionError, match="Did you mean 'nemo'"):
        render(preset("bf16_mixed"), "nemmo")
