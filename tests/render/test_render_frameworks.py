"""verl, SkyRL, slime and TRL: every preset against the keys that mean it there, both ways, and nothing lost in
silence."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from support.strategies import contracts, ruled_contracts

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight import agreement
from nemo_fp8.render import frameworks, overrides, render, skyrl, slime, trl, verl

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
FP32 = {"weight_scale": "fp32", "activation_scale": "fp32"}
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = "generator.inference_engine"

# What each recipe is to Megatron's TransformerConfig, the counts of kept layers aside.
RECIPES = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
    None: {},
}
BACK = {
    "verl": lambda data: verl.read_verl(data),
    "skyrl": lambda data: skyrl.read_skyrl(data["overrides"], data["environment"]),
    "slime": lambda data: slime.read_slime(data["flags"], data["quantization_config"]),
    "trl": lambda data: trl.read_trl(**data),
}


def _section(values, section):
    return {key.removeprefix(f"{section}."): v for key, v in values.items() if key.startswith(f"{section}.")}


def _transformer(p):
    """The overrides of TransformerConfig that mean a preset."""
    said = dict(RECIPES[p.scaling])
    if p.is_fp8:
        said["fp8_param"] = p.fp8_param
    if p.scaling == "delayed":
        said["fp8_margin"] = 0
    if p.first_layers or p.last_layers:
        said |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": p.first_layers,
            "num_layers_at_end_in_bf16": p.last_layers,
        }
    return said


@pytest.mark.parametrize("name", PRESETS)
def test_verl_s_keys_of_every_preset(name):
    p = preset(name)
    rendering = render(p, "verl")
    values = rendering.data
    assert _section(values, verl.SECTIONS["TransformerConfig"]) == _transformer(p)
    optimizer = _section(values, verl.SECTIONS["OptimizerConfig"])
    assert optimizer.get("fp8_recipe") == (p.scaling if p.is_fp8 else None)
    assert ("initial_loss_scale" in optimizer) == (p.compute == "fp16"), "verl's own is 32768"
    ddp = _section(values, verl.SECTIONS["DistributedDataParallelConfig"])
    assert ddp["grad_reduce_in_fp32"] == (p.grad_reduce == "fp32")
    assert ddp.get("fp8_param_gather") == (p.fp8_param if p.is_fp8 else None)
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[p.compute]
    assert values["actor_rollout_ref.actor.megatron.dtype"] == values[f"{ROLLOUT}.dtype"] == dtype
    # NeMo's presets have FP8 rollouts in powers of two with block scaling, and 1x32 blocks with MXFP8.
    own = p.rollout == "fp8" and p.scaling in ("delayed", "tensorwise") and not p.first_layers
    assert values[f"{ROLLOUT}.quantization"] == ("fp8" if own else None)
    assert rendering.lost == (() if own or p.rollout == "compute" else _lost_rollout(p))
    correction = values["algorithm.rollout_correction.rollout_is"]
    assert (correction, values[f"{ROLLOUT}.calculate_log_probs"]) == (
        ("token", True) if p.is_quantized else (None, False)
    )


def _lost_rollout(p):
    return ("rollout", "rollout_block") if p.rollout_block != Precision().rollout_block else ("rollout",)


@pytest.mark.parametrize("name", PRESETS)
def test_skyrl_s_keys_of_every_preset(name):
    p = preset(name)
    if p.compute == "fp16":
        with pytest.raises(PrecisionError, match="compute='fp16' in SkyRL"):
            render(p, "skyrl")
        return
    rendering = render(p, "skyrl")
    values = rendering.data["overrides"]
    said = _transformer(p)
    if p.fp8_param:
        said["fp8_param"] = False
        assert rendering.lost == ("fp8_param",), "SkyRL has it with blockwise scaling and FP32 scales only"
        assert any("fp8_param=True" in note for note in rendering.notes)
    else:
        assert rendering.lost == (("rollout", "rollout_block") if p.rollout == "nvfp4" else ())
    assert _section(values, skyrl.SECTIONS["TransformerConfig"]) == said
    assert _section(values, skyrl.SECTIONS["OptimizerConfig"]).get("fp8_recipe") == (p.scaling if p.is_fp8 else None)
    mode = {"mxfp8": "mxfp8", "delayed": "blockwise"}.get(p.scaling)
    assert values[skyrl.MODE] == mode
    assert values.get(skyrl.QUANTIZATION) == ("nemo_fp8" if p.is_fp8 and mode is None else None)
    assert values["trainer.algorithm.off_policy_correction.tis_ratio_type"] == ("token" if p.is_quantized else None)
    assert values["generator.sampling_params.logprobs"] == (0 if p.is_quantized else None)


@pytest.mark.parametrize("name", PRESETS)
def test_slime_s_flags_of_every_preset(name):
    p = preset(name)
    rendering = render(p, "slime")
    words = rendering.data["flags"]
    flags = {"--fp8-format": p.format, "--fp8-recipe": p.scaling} if p.is_fp8 else {}
    flags |= {"--fp4-format": p.format, "--fp4-recipe": p.scaling} if p.scaling == "nvfp4" else {}
    flags |= {"--sglang-dtype": {"bf16": "bfloat16", "fp16": "float16"}[p.compute], "--sglang-kv-cache-dtype": "auto"}
    if p.first_layers or p.last_layers:
        flags["--num-layers-at-start-in-bf16"] = str(p.first_layers)
    for flag, value in flags.items():
        assert words[words.index(flag) + 1] == value
    assert ("--fp8-param-gather" in words) == p.fp8_param
    assert ("--use-tis" in words) == p.importance_sampling
    assert f"--{p.compute}" in words
    if p.scaling == "blockwise":
        assert json.loads(words[words.index("--train-env-vars") + 1]) == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}
    own = p.rollout == "fp8" and p.scaling == "delayed"
    assert (rendering.data["quantization_config"] is not None) == own
    assert rendering.lost == (() if own or p.rollout == "compute" else _lost_rollout(p))


@pytest.mark.parametrize("name", PRESETS)
def test_trl_s_arguments_of_every_preset(name):
    p = preset(name)
    rendering = render(p, "trl")
    config, server = rendering.data["config"], rendering.data["server"]
    assert (config["bf16"], config["fp16"]) == (p.compute == "bf16", p.compute == "fp16")
    assert config["vllm_importance_sampling_correction"] == p.importance_sampling
    assert server == {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[p.compute], "kv_cache_dtype": "auto"}
    said = {"format", "scaling", "rollout"} if p.is_fp8 else set()
    assert said <= set(rendering.lost), "TRL trains and generates in the compute dtype"
    if p == preset("bf16_mixed"):
        assert rendering.lost == ()


@pytest.mark.parametrize("to", frameworks.SOURCES)
@given(contract=contracts() | ruled_contracts())
def test_what_reads_back_different_is_lost_and_named_and_nothing_else_is(to, contract):
    try:
        rendering = render(contract, to)
    except PrecisionError as error:
        assert all(p.what and p.why and p.remedy for p in error.problems)  # noqa: PT017
        return
    train, rollout = BACK[to](rendering.data)
    assert set(contract.diff(agreement.merge(train, rollout))) == set(rendering.lost)
    for field in rendering.lost:
        said = f" {field}={getattr(contract, field)!r}"
        lost = [note for note in rendering.notes if note.startswith("Not said here:")]
        (note,) = [note for note in lost if said in note.split(". ")[0]]
        assert "has no word for it" not in note, f"{to} loses {field} without a reason"


@pytest.mark.parametrize("to", frameworks.SOURCES)
@given(contract=contracts() | ruled_contracts())
def test_no_rendering_quantizes_the_rollout_otherwise_than_the_contract(to, contract):
    """A rollout is in the contract's FP8 or it is not in FP8: other blocks or scales are written nowhere."""
    try:
        _, rollout = BACK[to](render(contract, to).data)
    except PrecisionError:
        return
    if rollout.rollout == "fp8":
        assert contract.rollout == "fp8"
        for role in ("weight", "input"):
            assert rollout.operand(role, "rollout") == contract.operand(role, "rollout")
        named = ("keep", "modules", "first_layers", "last_layers")
        assert [getattr(rollout, name) for name in named] == [getattr(contract, name) for name in named]


def test_skyrl_s_rollout_has_rules_by_our_plugin():
    p = preset("bf16_with_fp8_blockwise_mixed").replace(**FP32, modules=(("*.linear_qkv", "bf16"),))
    data = render(p, "skyrl").data
    assert data["overrides"][skyrl.MODE] is None
    assert data["overrides"][f"{skyrl.PLUGIN}.modules"] == [["*.linear_qkv", "bf16"]]
    (note,) = (note for note in render(p, "skyrl").notes if "modules=" in note)
    assert "Its rollout obeys them where nemo_fp8's plugin quantizes it" in note
    assert render(Precision(rollout="fp8", modules=p.modules), "skyrl").require_whole().lost == ()
    assert render(p, "slime").data["quantization_config"] is None


@pytest.mark.parametrize("to", frameworks.SOURCES)
def test_a_contract_that_fits_is_whole(to):
    whole = Precision(compute="bf16") if to == "trl" else preset("bf16_with_fp8_blockwise_mixed").replace(**FP32)
    assert render(whole, to).require_whole().lost == ()


def test_the_text_says_what_the_data_says():
    p = preset("bf16_with_fp8_blockwise_mixed").replace(**FP32, kv_cache="fp8", deep_gemm=True)
    for to, data, mark in (("verl", render(p, "verl").data, "++"), ("skyrl", render(p, "skyrl").data["overrides"], "")):
        lines = [line for line in render(p, to).text.split("\n") if not line.startswith("export ")]
        words = shlex.split(" ".join(lines).replace("\\ ", ""))
        assert all(word.startswith((mark, verl.TRAINER)) for word in words)
        pairs = [word.removeprefix(mark).split("=", 1) for word in words]
        assert {name: yaml.safe_load(value) for name, value in pairs} == data
    text = render(p, "slime").text
    assert slime.read_slime(text, render(p, "slime").data["quantization_config"]) == BACK["slime"](
        render(p, "slime").data
    )
    assert "--kv_cache_dtype fp8" in render(p, "trl").text


def test_ray_gets_its_variables_as_text():
    text = render(preset("bf16_with_fp8_blockwise_mixed").replace(**FP32), "verl").text
    assert """'++ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES="1"'""" in text


def test_skyrl_s_own_way_takes_fp32_scales_from_its_variable():
    p = preset("bf16_mixed").replace(rollout="fp8", **FP32)
    assert render(p, "skyrl").data["environment"] == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    _, rollout = skyrl.read_skyrl({skyrl.MODE: "blockwise"}, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"})
    assert (rollout.weight_scale, rollout.activation_scale) == ("pow2", "fp32")


def test_slime_s_training_has_fp32_scales_unless_it_is_told():
    train, _ = slime.read_slime("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", None)
    assert (train.weight_scale, train.activation_scale) == ("fp32", "fp32")


def test_the_overrides_are_fields_of_the_installed_megatron_core():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {f"{c.__name__}.{f.name}" for c in classes for f in dataclasses.fields(c)}
    assert {name for core in overrides.FIELDS.values() for name in core} <= fields


@pytest.mark.parametrize(
    ("to", "compute", "said"),
    [("verl", "fp32", "fp32"), ("skyrl", "fp16", "fp16"), ("skyrl", "fp32", "fp32"), ("slime", "fp32", "fp32")],
)
def test_a_contract_that_a_framework_cannot_hold_at_all_is_one_clear_error(to, compute, said):
    with pytest.raises(PrecisionError) as caught:
        render(Precision(compute=compute), to)
    (problem,) = caught.value.problems
    assert said in problem.what
    assert "Set compute='bf16'" in problem.remedy


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (lambda: render(preset("bf16_mixed"), "ver"), "Did you mean 'verl'"),
        (lambda: verl.read_verl({f"{ROLLOUT}.quantisation": "fp8"}), "Did you mean"),
        (lambda: verl.read_verl({f"{ROLLOUT}.quantization": "torchao"}), "quantization"),
        (
            lambda: verl.read_verl(
                {
                    f"{verl.SECTIONS['TransformerConfig']}.fp8": "e4m3",
                    f"{verl.SECTIONS['TransformerConfig']}.fp8_recipe": "blockwise",
                    f"{verl.SECTIONS['OptimizerConfig']}.fp8_recipe": "delayed",
                }
            ),
            "contradict each other",
        ),
        (lambda: verl.read_verl({verl.TRAINER: "dp"}), "model_engine=megatron"),
        (lambda: skyrl.read_skyrl({skyrl.TRAINER: "fsdp"}, {}), "trainer.strategy=megatron"),
        (lambda: skyrl.read_skyrl({skyrl.MODE: "serialized"}, {}), "blockwise"),
        (lambda: skyrl.read_skyrl({skyrl.QUANTIZATION: "fp8"}, {}), "nemo_fp8"),
        (lambda: slime.read_slime("--bf16 --sglang-kv-cache-dtype fp8", None), "fp8_e4m3"),
        (lambda: slime.read_slime("--bf16 --fp8-receipe blockwise", None), "--fp8-recipe"),
        (lambda: slime.read_slime("--bf16 --train-env-vars {", None), "JSON"),
        (lambda: trl.read_trl({"bf16": True, "fp16": True}, {}), "exactly one dtype"),
        (lambda: trl.read_trl({"bf16": True, "vllm_quantization": "fp8"}, {}), "vllm_quantization"),
    ],
)
def test_bad_settings_are_one_clear_error(read, word):
    with pytest.raises(PrecisionError, match=re.escape(word)) as caught:
        read()
    assert all(p.what and p.why and p.remedy for p in caught.value.problems)


def test_the_page_names_every_key_and_the_source_it_was_read_from():
    page = PAGE.read_text()
    for source in frameworks.SOURCES.values():
        assert f"{source.repository} {source.commit}" in page
        assert source.date in page
        assert f"| {source.release or 'none on PyPI'}" in page
    keys = [verl.TRAINER, skyrl.TRAINER, *verl.SETTINGS, *verl.SECTIONS.values(), verl.ENVIRONMENT, verl.LOG_PROBS]
    keys += [*skyrl.SETTINGS, *skyrl.SECTIONS.values(), skyrl.MODE, skyrl.QUANTIZATION, skyrl.PLUGIN, skyrl.LOG_PROBS]
    keys += [*slime.SETTINGS, slime.CORRECTION, slime.VARIABLES, slime.CHECKPOINT, *trl.CONFIG, "--kv_cache_dtype"]
    assert [key for key in keys if f"`{key}" not in page] == []
