"""What NeMo takes without a word and does not do: NeMo's plugin goes through, ours refuses and says what to do.

NeMo's side runs for real: its plugin, its override of the configs, Megatron's own config classes.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import fiddle as fdl
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo.collections import llm
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision, update_config_with_dtype_overrides

import nemo_fp8
from nemo_fp8 import PrecisionError
from nemo_fp8.findings import RULES
from nemo_fp8.preflight.engine import choose_engine
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.render.te_loader import load_recipe_module
from nemo_fp8.train.checks import Run, require_agreement
from nemo_fp8.train.plugin import MixedPrecision
from nemo_fp8.train.repairs import before_ddp


def _configs(layers=2, **model):
    model = {"num_layers": layers, "hidden_size": 128, "num_attention_heads": 4} | model
    return (
        llm.GPTConfig(**model),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        OptimizerConfig(use_distributed_optimizer=True),
    )


def _after_overrides(plugin, configs):
    """What NeMo's strategy does in ``connect``: every config written over by the plugin."""
    model, ddp, optimizer = (update_config_with_dtype_overrides(plugin.dtype_config, config) for config in configs)
    return Run(model, ddp, optimizer)


_BF16 = {"precision": "bf16-mixed", "params_dtype": torch.bfloat16}

# (arguments of the plugin, what the error must say, what NeMo's model config silently ends as)
_SILENT = [
    (
        {
            "fp8": "hybrid",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 1,
        },
        "delayed",
        {"fp8_recipe": "delayed", "first_last_layers_bf16": True},
    ),
    ({"fp8_param_gather": True}, "fp8_param", {"fp8": None, "fp8_param": True}),
    ({"fp8": "hybrid", "fp4": "e2m1"}, "fp4", {"fp8": "hybrid", "fp4": "e2m1"}),
    ({"fp8": "hybrid", "fp8_recipe": "current"}, "tensorwise", {"fp8_recipe": "current"}),
    ({"fp8": "e5m2"}, "E5M2", {"fp8": "e5m2"}),
    (
        {"fp8": "e4m3", "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
        "reuse_grad_buf",
        {"fp8_param": False},
    ),
    (
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
        "counts",
        {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0},
    ),
    ({"precision": "fp8"}, "precision", {"bf16": False, "fp16": False}),
]


@pytest.mark.parametrize(("arguments", "words", "ends_as"), _SILENT, ids=lambda v: v if isinstance(v, str) else None)
def test_a_contradiction_is_refused_at_construction(arguments, words, ends_as):
    nemo = _after_overrides(MegatronMixedPrecision(**_BF16 | arguments), _configs())
    assert {name: getattr(nemo.model, name) for name in ends_as} == ends_as, "NeMo has changed: drop the case"
    with pytest.raises(PrecisionError, match=words) as caught:
        MixedPrecision(**_BF16 | arguments)
    assert all(problem.remedy for problem in caught.value.problems)


# (factory, its arguments, changes of the configs, what the error must say)
_AFTER = [
    (
        "bf16_with_fp8_current_scaling_mixed",
        {"num_layers_at_start_in_bf16": 7},
        {},
        "nothing runs in FP8",
    ),
    ("bf16_with_fp8_current_scaling_mixed", {}, {}, "first_layers=1 and last_layers=1 keep all 2 layers in BF16"),
    ("bf16_mixed", {}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "asks for FP8"),
]


@pytest.mark.parametrize(("factory", "arguments", "model", "words"), _AFTER)
def test_what_only_the_run_can_show_is_refused_after_the_overrides(factory, arguments, model, words):
    from nemo.collections.llm.recipes.precision import mixed_precision as nemos

    config = getattr(nemos, factory)()
    for name, value in arguments.items():
        setattr(config, name, value)
    _after_overrides(fdl.build(config), _configs(**model))  # NeMo has no objection
    plugin = fdl.build(getattr(nemo_fp8, factory)(**arguments))
    with pytest.raises(PrecisionError, match=words):
        require_agreement(plugin.contract, _after_overrides(plugin, _configs(**model)))


class _Refused:
    def __post_init__(self):
        raise ValueError("no")


_ATTENTION = nemo_fp8.preset("bf16_with_fp8_mixed").replace(attention=True)
_RUNS = {
    "run-setting-dropped": ("bf16_with_fp8_blockwise_mixed", {}),
    "run-model-asks-for-fp8": ("bf16_mixed", {"model": {"fp8": "hybrid"}}),
    "run-model-asks-for-fp4": ("bf16_mixed", {"model": {"fp4": "nvfp4"}}),
    "layers-all-kept": ("bf16_with_fp8_current_scaling_mixed", {"model": {"num_layers": 2}}),
    "fp8-param-needs-distributed-optimizer": ("bf16_with_mxfp8_mixed", {"ddp": {"use_distributed_optimizer": False}}),
    "run-offloaded-optimizer": ("bf16_with_mxfp8_mixed", {"optimizer": {"optimizer_cpu_offload": True}}),
    "run-context-parallel-on-cpu": ("bf16_mixed", {"model": {"context_parallel_size": 2}}),
    "run-recomputes-bias": (
        "bf16_mixed",
        {"model": {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": True}},
    ),
    "run-recomputes-attention": (
        _ATTENTION,
        {"model": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}},
    ),
    "run-gathers-no-fp8": ("bf16_mixed", {"ddp": {"fp8_param_gather": True}}),
    "run-refused-by-megatron": ("bf16_mixed", {"optimizer": _Refused()}),
}


@pytest.mark.parametrize("code", _RUNS)
def test_every_rule_on_a_run_has_its_code(code):
    """The smallest configs that break each rule: those of ``run-`` and two that lint has too."""
    contract, configs = _RUNS[code]
    plain = {"num_layers": 8, "fp8": None, "fp4": None}
    made = {name: SimpleNamespace(**fields) if isinstance(fields, dict) else fields for name, fields in configs.items()}
    run = Run(**{"model": SimpleNamespace(**plain)} | made)
    vars(run.model).update(plain | vars(run.model))
    with pytest.raises(PrecisionError) as caught:
        require_agreement(nemo_fp8.preset(contract) if isinstance(contract, str) else contract, run)
    assert code in [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"weight_block": "1x16"}, True),
        ({"weight_block": "1x16", "backward_scaling": "mxfp8"}, False),
        ({"weight_block": "1x16", "modules": (("*", "mxfp8"),)}, False),
        ({}, False),
    ],
)
def test_a_run_whose_backward_is_biased_is_warned(caplog, monkeypatch, changes, warned):
    monkeypatch.setattr("nemo_fp8.preflight.engine._require_te_obeys", lambda precision: None)  # TE is imported here
    choose_engine(nemo_fp8.preset("bf16_with_nvfp4_mixed").replace(**changes), machine=Machine.parse("cpu,torch2.13"))
    assert ("GRPO with it did not learn" in caplog.text) == warned


def test_no_rule_on_a_run_is_left_out():
    assert {code for code in RULES if code.startswith("run-")} <= set(_RUNS)


def test_nemos_plugin_erases_the_models_fp8_and_ours_does_not():
    from nemo.collections.llm.recipes.precision.mixed_precision import bf16_mixed

    nemo = _after_overrides(fdl.build(bf16_mixed()), _configs(fp8="hybrid"))
    assert nemo.model.fp8 is None
    ours = _after_overrides(fdl.build(nemo_fp8.bf16_mixed()), _configs(fp8="hybrid"))
    assert ours.model.fp8 == "hybrid"


def test_primary_weights_need_the_distributed_optimizer():
    plugin = fdl.build(nemo_fp8.bf16_with_fp8_mixed())
    model, _, _ = _configs()
    run = _after_overrides(
        plugin, (model, DistributedDataParallelConfig(use_distributed_optimizer=False), OptimizerConfig())
    )
    with pytest.raises(PrecisionError, match="distributed optimizer"):
        require_agreement(plugin.contract, run)


def test_a_field_that_a_config_lacks_is_an_error_and_not_dropped():
    plugin = fdl.build(nemo_fp8.bf16_with_fp8_blockwise_mixed())

    class WithoutFp8:
        num_layers = 4

    run = Run(update_config_with_dtype_overrides(plugin.dtype_config, WithoutFp8()))
    with pytest.raises(PrecisionError, match="has no such field"):
        require_agreement(plugin.contract, run)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("bf16_with_fp8_blockwise_mixed", "fp8_recipe", "tensorwise"),
        ("bf16_with_fp8_current_scaling_mixed", "num_layers_at_end_in_bf16", 0),
        ("bf16_with_fp8_current_scaling_mixed", "first_last_layers_bf16", False),
        ("bf16_with_nvfp4_mixed", "fp4", None),
    ],
)
def test_a_field_written_over_later_is_found(name, field, value):
    plugin = fdl.build(getattr(nemo_fp8, name)())
    run = _after_overrides(plugin, _configs(layers=4))
    require_agreement(plugin.contract, run)
    setattr(run.model, field, value)
    with pytest.raises(PrecisionError, match=f"{field}=.* did not reach the model"):
        require_agreement(plugin.contract, run)


def test_megatrons_own_checks_run_again_on_the_result():
    plugin = fdl.build(nemo_fp8.bf16_with_fp8_blockwise_mixed())
    run = _after_overrides(plugin, _configs(layers=4))
    run.model.fp4 = "nvfp4"
    with pytest.raises(PrecisionError, match="fp4 and fp8 cannot be used simultaneously"):
        require_agreement(plugin.contract, run)


def test_the_plugin_s_own_hook_checks_what_nemo_has_written():
    plugin = fdl.build(nemo_fp8.bf16_with_fp8_blockwise_mixed())
    run = _after_overrides(plugin, _configs(layers=4))
    run.model.fp8_recipe = "tensorwise"
    trainer = SimpleNamespace(strategy=SimpleNamespace(ddp_config=run.ddp))
    module = SimpleNamespace(config=run.model, trainer=trainer, optim=SimpleNamespace(config=run.optimizer))
    with pytest.raises(PrecisionError, match="fp8_recipe='blockwise' did not reach the model"):
        plugin.convert_module(module)


@pytest.mark.parametrize("name", nemo_fp8.PRESETS)
def test_every_preset_agrees_with_a_healthy_run(name):
    plugin = fdl.build(getattr(nemo_fp8, name)())
    run = _after_overrides(plugin, _configs(layers=16))
    before_ddp(plugin.contract, run)
    require_agreement(plugin.contract, run)


def test_flags_that_the_optimizer_derives_are_derived_again():
    """Megatron's OptimizerConfig derives them from fp8_recipe when it is made, before NeMo's plugin sets it."""
    plugin = fdl.build(nemo_fp8.bf16_with_fp8_blockwise_mixed())
    model, ddp, _ = _configs(layers=4)
    optimizer = OptimizerConfig(use_distributed_optimizer=True)
    # Where TE's FusedAdam is missing the config cannot be made with the flag on; what it derives is what matters here.
    optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    run = _after_overrides(plugin, (model, ddp, optimizer))
    assert run.optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    before_ddp(plugin.contract, run)
    assert not run.optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def test_fp16_with_delayed_scaling_starts_where_nothing_overflows():
    plugin = fdl.build(nemo_fp8.fp16_with_fp8_mixed())
    assert plugin.dtype_config.initial_loss_scale == 2**32, "the same value as NeMo's"
    run = _after_overrides(plugin, _configs(layers=4))
    before_ddp(plugin.contract, run)
    assert run.optimizer.initial_loss_scale == 2**16
    assert run.ddp.check_for_nan_in_grad is False


# ---------------------------------------------------------------------- the engine


@pytest.mark.parametrize(
    ("machine", "precision", "engine"),
    [
        ("h200,cuda12.9,te2.9", "bf16_with_fp8_blockwise_mixed", "te"),
        ("cpu,torch2.13", "bf16_with_mxfp8_mixed", "emulated"),
        ("h200,cuda12.8,te2.9", "bf16_mixed", None),
    ],
)
def test_auto_takes_te_where_there_is_a_gpu_and_emulates_where_there_is_none(machine, precision, engine):
    assert choose_engine(nemo_fp8.preset(precision), "auto", Machine.parse(machine)) == engine


@pytest.mark.parametrize("engine", ["auto", "te"])
def test_a_gpu_whose_software_is_too_old_is_met_by_one_clear_message(engine):
    """NeMo RL's users meet this as an assertion from inside the first step."""
    p, machine = nemo_fp8.preset("bf16_with_fp8_blockwise_mixed"), Machine.parse("h200,cuda12.8,te2.9,torch2.10")
    with pytest.raises(PrecisionError, match=r"CUDA >= 12\.9") as caught:
        choose_engine(p, engine, machine)
    assert "torch" in caught.value.problems[0].remedy


def test_each_engine_is_refused_on_the_other_kind_of_machine():
    p = nemo_fp8.preset("bf16_with_fp8_blockwise_mixed")
    with pytest.raises(PrecisionError, match="which engine='auto' takes"):
        choose_engine(p, "te", Machine.parse("cpu,torch2.13"))
    with pytest.raises(PrecisionError, match="which has a GPU"):
        choose_engine(p, "emulated", Machine.parse("h200,cuda12.9,te2.9,torch2.13"))
    with pytest.raises(PrecisionError, match="sm89"):
        choose_engine(p, "auto", Machine.parse("a100,cuda12.8,te2.9,torch2.10"))
    with pytest.raises(PrecisionError, match="Did you mean 'emulated'"):
        choose_engine(p, "emulate")


@pytest.mark.parametrize("machine", ["h200,cuda12.9,te2.9", "cpu,torch2.13"])
def test_what_te_would_ignore_is_refused(machine):
    p = nemo_fp8.preset("bf16_with_fp8_blockwise_mixed").replace(wgrad=False)
    with pytest.raises(PrecisionError, match="wgrad"):
        choose_engine(p, "auto", Machine.parse(machine))


def test_scales_that_te_was_not_imported_with_are_refused(monkeypatch):
    """The real recipe module of TE, imported with its default: power-of-2 block scales."""
    recipes = load_recipe_module(Path(__file__).parents[2] / ".te")
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    machine = Machine.parse("h200,cuda12.9,te2.9")
    p = nemo_fp8.preset("bf16_with_fp8_blockwise_mixed")
    assert choose_engine(p, "te", machine) == "te"
    with pytest.raises(PrecisionError, match="NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1"):
        choose_engine(p.replace(weight_scale="fp32", activation_scale="fp32"), "te", machine)


def test_the_plugin_asks_before_the_model_is_built():
    plugin = MixedPrecision("bf16-mixed", fp8="hybrid", fp8_recipe="blockwise", engine="te")
    if Machine.here().has_gpu:
        pytest.skip("this machine has a GPU")
    with pytest.raises(PrecisionError, match="blockwise"), plugin.module_init_context():
        pytest.fail("the model would be built here")


def test_attention_in_fp8_is_said_and_what_megatron_would_ignore_refused(caplog, monkeypatch):
    cpu = Machine.parse("cpu,torch2.13")
    with caplog.at_level("INFO", logger="nemo_fp8"):
        assert choose_engine(_ATTENTION, machine=cpu) == "emulated"
    assert "FP8 attention: emulated" in caplog.text
    assert "does not resume to the bit" in caplog.text
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "0")
    with pytest.raises(PrecisionError, match="NVTE_UnfusedDPA_Emulate_FP8=0"):
        choose_engine(_ATTENTION, machine=cpu)
    for machine in (cpu, Machine.parse("b200,cuda12.9,te2.9")):
        with pytest.raises(PrecisionError, match="attention=True does nothing with mxfp8 scaling"):
            choose_engine(nemo_fp8.preset("bf16_with_mxfp8_mixed").replace(attention=True), machine=machine)
    both = nemo_fp8.preset("bf16_with_fp8_current_scaling_mixed").replace(attention=True, multi_head_attention=True)
    with pytest.raises(PrecisionError, match=r"^multi_head_attention=True does nothing"):
        choose_engine(both, machine=cpu)


def test_the_choice_is_said_with_its_reason(caplog):
    with caplog.at_level("INFO", logger="nemo_fp8"):
        choose_engine(nemo_fp8.preset("bf16_with_fp8_blockwise_mixed"), "auto", Machine.parse("cpu,torch2.13"))
    assert len(caplog.records) == 1
    assert "emulated" in caplog.text
    assert "no GPU" in caplog.text
