"""NeMo RL's YAML: the documents' samples as written, recipes of its shapes, both ways, and every slip refused."""

import re
import subprocess
import sys
from fnmatch import fnmatchcase as fnmatch

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.strategies import contracts, ruled_contracts

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.families import HUGGING_FACE
from nemo_fp8.models.selection import contract_of, why_kept_by_name
from nemo_fp8.preflight.agreement import check
from nemo_fp8.render import nemo_rl, render
from nemo_fp8.render.nemo_rl import (
    beside_the_contract,
    check_nemo_rl,
    from_nemo_rl,
    ignored_by_nemo_rl,
    read_nemo_rl,
)
from nemo_fp8.render.nemo_rl_fp4 import ALIKE, missing
from nemo_fp8.render.te_precision import to_te_precision

# The two samples of NeMo RL's FP8 document, key for key.
DOCUMENT_ROLLOUT = """
loss_fn:
    use_importance_sampling_correction: true
policy:
    generation:
        vllm_cfg:
            precision: 'fp8'
            use_deep_gemm: true
            num_last_layers_in_bf16: 0
            num_first_layers_in_bf16: 0
            use_weight_pow2_scale: False
            use_activation_pow2_scale: False
"""
DOCUMENT_TRAINING = """
policy:
    megatron_cfg:
        fp8_cfg:
            fp8: "hybrid"
            fp8_recipe: "tensorwise"
            fp8_param: false
"""
# The shape of a whole file: interpolations, and sections that are none of our business.
WHOLE = """
defaults: grpo_math_1B.yaml
grpo: {num_prompts_per_step: 64}
loss_fn: {reference_policy_kl_penalty: 0.01, use_importance_sampling_correction: true, token_level_loss: true}
policy:
  model_name: some/model
  precision: bfloat16
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 4
    pipeline_dtype: ${policy.precision}
    distributed_data_parallel_config: {grad_reduce_in_fp32: false, overlap_grad_reduce: true}
    fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false, force_clear_fp8_caches: true}
    env_vars: {NVTE_FP8_BLOCK_SCALING_FP32_SCALES: "1", PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:False"}
  generation:
    backend: vllm
    vllm_kwargs: {max_num_seqs: 32}
    vllm_cfg: {precision: fp8, tensor_parallel_size: 4, gpu_memory_utilization: 0.5, async_engine: false,
      use_deep_gemm: true,
               max_model_len: "${policy.max_total_sequence_length}"}
cluster: {gpus_per_node: 8}
"""


def test_the_documents_rollout_sample_is_bf16_training_with_an_fp8_rollout():
    p = from_nemo_rl(DOCUMENT_ROLLOUT)
    assert p == Precision(rollout="fp8", deep_gemm=True)
    assert not p.is_fp8
    assert (p.weight_scale, p.activation_scale) == ("fp32", "fp32")


def test_omegaconf_has_nothing_to_warn_of():
    """Its 2.4 warns of functions that are registered as before."""
    code = "from nemo_fp8.render.nemo_rl_file import read_document; read_document('a: ${max:1,2}')"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_documents_older_keys_are_read_and_said_to_be_ignored():
    ignored = ignored_by_nemo_rl(DOCUMENT_ROLLOUT.replace("False", "True"))
    assert [
        ("pow2_weight_scaling_factors" in p.remedy, "pow2_activation_scaling_factors" in p.remedy) for p in ignored
    ] == [
        (True, False),
        (False, True),
    ]
    assert {p.code for p in ignored} == {"nemo-rl-not-read"}
    assert from_nemo_rl(DOCUMENT_ROLLOUT.replace("False", "True")).weight_scale == "pow2"
    both = "{precision: fp8, use_weight_pow2_scale: true, pow2_weight_scaling_factors: %s}"
    both = f"policy: {{generation: {{vllm_cfg: {both}}}}}"
    assert from_nemo_rl(both % "true").weight_scale == "pow2"
    with pytest.raises(PrecisionError, match="contradict"):
        from_nemo_rl(both % "false")


def test_the_documents_training_sample_is_fp8_training_and_says_what_nemo_rl_needs():
    p = from_nemo_rl(DOCUMENT_TRAINING)
    assert (p.format, p.scaling, p.fp8_param, p.rollout) == ("hybrid", "tensorwise", False, "compute")
    (ignored,) = ignored_by_nemo_rl(DOCUMENT_TRAINING)
    assert ignored.code == "nemo-rl-not-enabled"
    assert "enabled: true" in ignored.remedy


def test_a_whole_file_is_read():
    p = from_nemo_rl(WHOLE)
    expected = Precision(
        format="e4m3",
        scaling="blockwise",
        weight_scale="fp32",
        activation_scale="fp32",
        deep_gemm=True,
        grad_reduce="compute",
    )
    assert p == expected
    assert check(train=p, rollout=p).agrees
    assert ignored_by_nemo_rl(WHOLE) == []


def test_a_forgotten_variable_is_the_conflict_that_costs_most():
    """FP32 scales in the rollout (NeMo RL's default) beside powers of two in training (TransformerEngine's)."""
    text = WHOLE.replace('NVTE_FP8_BLOCK_SCALING_FP32_SCALES: "1", ', "")
    with pytest.raises(PrecisionError, match=r"3\.7% apart"):
        from_nemo_rl(text)
    train, rollout = read_nemo_rl(text)
    assert not check(train=train, rollout=rollout).agrees


def test_modules_kept_in_the_rollout_only_are_a_conflict():
    text = WHOLE.replace("use_deep_gemm: true", "use_deep_gemm: true, quantization_ignored_layer_kws: [a_proj]")
    assert read_nemo_rl(text)[1].keep == ("*a_proj*",)
    with pytest.raises(PrecisionError, match="a_proj"):
        from_nemo_rl(text)


def test_the_list_of_mx_rollouts_takes_words_and_patterns_of_whole_names():
    text = "policy: {generation: {vllm_cfg: {precision: fp8, is_mx: true, quantization_ignore_patterns: %s}}}"
    kept = read_nemo_rl(text % "[lm_head, 'model.layers.0.*', 'model.*.mlp.gate']")[1]
    assert kept.keep == ("*lm_head*", "model.layers.0.*", "model.*.mlp.gate")
    data = nemo_rl.to_nemo_rl(kept.replace(keep=(*kept.keep, "model.layers.1.mlp.up_proj", "re:.*qkv.*")))
    vllm_cfg = data["policy"]["generation"]["vllm_cfg"]
    # A name without wildcards would be taken for a word, and a regular expression for a name.
    assert vllm_cfg["quantization_ignore_patterns"] == ["lm_head", "model.layers.0.*", "model.*.mlp.gate"]
    assert "quantization_ignored_layer_kws" not in vllm_cfg
    blocks = Precision(rollout="fp8", keep=("*lm_head*", "model.layers.0.*"))
    vllm_cfg = nemo_rl.to_nemo_rl(blocks)["policy"]["generation"]["vllm_cfg"]
    assert vllm_cfg["quantization_ignored_layer_kws"] == ["lm_head"]  # the other key raises for 128x128 blocks
    assert "quantization_ignore_patterns" not in vllm_cfg


def test_keys_that_say_nothing_about_precision_are_none_of_our_business():
    text = "policy: {generation: {vllm_cfg: {precision: fp8, enable_prefix_caching: true}}}"
    assert read_nemo_rl(text)[1] == Precision(rollout="fp8", importance_sampling=False)


def test_the_layout_of_a_kv_cache_is_said_to_be_lost():
    text = "policy: {generation: {vllm_cfg: {precision: fp8, kv_cache_dtype: %s}}}"
    contract = from_nemo_rl(text % "fp8_ds_mla")
    assert contract.kv_cache == "fp8"  # vLLM's own layout of an FP8 cache for latent attention
    assert render(contract, "nemo-rl").data["policy"]["generation"]["vllm_cfg"]["kv_cache_dtype"] == "fp8"
    (lost,) = beside_the_contract(text % "fp8_ds_mla")
    assert (lost.code, lost.severity) == ("nemo-rl-kv-layout", "info")
    assert "fp8_ds_mla" in lost.what
    assert beside_the_contract(text % "fp8") == []


# ---------------------------------------------------------------------- who generates

FP8 = "fp8_cfg: {enabled: true, fp8: %s, fp8_recipe: %s, fp8_param: false}"
GENERATES = "policy: {megatron_cfg: {%s}, generation: {backend: %s, %s}}"


@pytest.mark.parametrize(
    ("training", "block"),
    [
        (FP8 % ("e4m3", "blockwise"), "128x128"),
        (FP8 % ("hybrid", "delayed"), "tensor"),
        (FP8 % ("hybrid", "tensorwise"), "tensor"),
        (FP8 % ("e4m3", "mxfp8"), "1x32"),
        ("fp4_cfg: {enabled: true}", "1x16"),
    ],
)
def test_megatron_generates_with_what_it_trains(training, block):
    # The base files have a section for vLLM, which nobody reads then.
    text = GENERATES % (training, "megatron", "vllm_cfg: {precision: bfloat16}")
    train, rollout = read_nemo_rl(text)
    assert (rollout.scaling, rollout.rolls_out_quantized, rollout.rollout_block) == (train.scaling, True, block)
    assert check_nemo_rl(text).agrees
    assert from_nemo_rl(text).rollout_block == block
    assert not check_nemo_rl(text.replace("megatron, ", "vllm, ")).agrees


def test_in_bf16_megatron_generates_in_bf16():
    text = GENERATES % ("fp8_cfg: {enabled: false}", "megatron", "vllm_cfg: {precision: fp8}")
    assert read_nemo_rl(text)[1].rollout == "compute"
    assert check_nemo_rl(text).agrees


@pytest.mark.parametrize(
    ("backend", "settings", "word"),
    [
        ("sglang", "sglang_cfg: {sglang_server_config: {}}", "backend is sglang"),
        ("dynamo", "vllm_cfg: {precision: bfloat16}", "backend is dynamo"),
        ("megatron", "mcore_generation_config: {fp8_cfg: {enabled: false}}", "another fp8_cfg"),
        (
            "megatron",
            "mcore_generation_config: {num_layers_at_start_in_bf16: 2}",
            "another num_layers_at_start_in_bf16",
        ),
    ],
)
def test_a_rollout_that_is_not_read_is_said_to_be_uncompared(backend, settings, word):
    text = GENERATES % (FP8 % ("e4m3", "blockwise"), backend, settings)
    assert read_nemo_rl(text)[0].is_fp8
    assert check_nemo_rl(text) is None
    (found,) = beside_the_contract(text)
    assert (found.code, found.severity) == ("nemo-rl-rollout-not-compared", "info")
    assert word in found.what
    with pytest.raises(PrecisionError, match="not compared"):
        from_nemo_rl(text)


def test_what_megatron_is_told_twice_alike_is_no_other_precision():
    cfg = FP8 % ("e4m3", "blockwise")
    assert check_nemo_rl(GENERATES % (cfg, "megatron", f"mcore_generation_config: {{{cfg}}}")).agrees


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy: {megatron_cfg: {zero_train_gen_mismatch: true}}", ["backend: vllm"]),
        (GENERATES % ("zero_train_gen_mismatch: true", "sglang", "sglang_cfg: {}"), ["backend: sglang"]),
        (
            GENERATES % ("zero_train_gen_mismatch: true, " + FP8 % ("e4m3", "mxfp8"), "megatron", "temperature: 1"),
            ["policy.megatron_cfg.fp8_cfg"],
        ),
        (
            GENERATES
            % ("zero_train_gen_mismatch: true", "megatron", f"mcore_generation_config: {{{FP8 % ('e4m3', 'mxfp8')}}}"),
            ["mcore_generation_config.fp8_cfg"],
        ),
        (
            "policy: {precision: float16, megatron_cfg: {zero_train_gen_mismatch: true}, generation: {backend: vllm}}",
            ["policy.precision: float16", "backend: vllm"],
        ),
    ],
)
def test_zero_mismatch_is_for_bf16_that_megatron_generates(text, words):
    with pytest.raises(PrecisionError) as caught:
        read_nemo_rl(text)
    assert len(caught.value.problems) == len(words)
    for problem, word in zip(caught.value.problems, words, strict=True):
        assert word in problem.what
        assert "NeMo RL refuses" in problem.why
    read_nemo_rl(text.replace("zero_train_gen_mismatch: true", "zero_train_gen_mismatch: false"))
    read_nemo_rl(GENERATES % ("zero_train_gen_mismatch: true", "megatron", "temperature: 1"))


def test_keys_that_change_numbers_and_are_not_compared_are_named():
    text = """
policy:
  megatron_cfg: {moe_router_dtype: fp64, fp32_lm_head: false}
  generation:
    real_quant: true
    vllm_cfg: {logprobs_mode: raw_logprobs, fp32_lm_head: true}
    mcore_generation_config: {transformer_impl: inference_optimized}
"""
    (found,) = beside_the_contract(text)
    assert (found.code, found.severity) == ("nemo-rl-changes-numbers", "info")
    named = ["megatron_cfg.moe_router_dtype=fp64", "generation.real_quant=True", "vllm_cfg.logprobs_mode=raw_logprobs"]
    assert all(word in found.what for word in [*named, "vllm_cfg.fp32_lm_head=True"])
    assert "megatron_cfg.fp32_lm_head" not in found.what  # it is off
    assert "transformer_impl" not in found.what  # vLLM generates
    (megatron,) = beside_the_contract(text.replace("real_quant", "backend: megatron\n    real_quant"))
    assert "transformer_impl=inference_optimized" in megatron.what
    assert "vllm_cfg" not in megatron.what
    assert check_nemo_rl(text).agrees


# ---------------------------------------------------------------------- what a key holds

VLLM, MEGATRON = "policy: {generation: {vllm_cfg: {precision: fp8, %s}}}", "policy: {megatron_cfg: {%s}}"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (VLLM % "quantization_ignored_layer_kws: lm_head", "quantization_ignored_layer_kws='lm_head'"),
        (VLLM % "is_mx: true, quantization_ignore_patterns: lm_head", "quantization_ignore_patterns='lm_head'"),
        (VLLM % "is_mx: true, quantization_ignore_patterns: 5", "quantization_ignore_patterns=5"),
        (VLLM % "is_mx: true, quantization_ignore_patterns: [1, 2]", "quantization_ignore_patterns=[1, 2]"),
        (VLLM % "is_mx: 1", "is_mx=1"),
        (VLLM % "is_mx: 'yes'", "is_mx='yes'"),
        (VLLM % "use_deep_gemm: 'no'", "use_deep_gemm='no'"),
        (VLLM % "pow2_weight_scaling_factors: 1", "pow2_weight_scaling_factors=1"),
        (VLLM % "num_first_layers_in_bf16: true", "num_first_layers_in_bf16=True"),
        (VLLM % "kv_cache_dtype: [a]", "kv_cache_dtype=['a']"),
        (MEGATRON % "te_precision_config_file: [a]", "te_precision_config_file=['a']"),
        (MEGATRON % "te_precision_config_file: 3", "te_precision_config_file=3"),
        (MEGATRON % "fp8_cfg: {enabled: 'no', fp8: e4m3, fp8_recipe: blockwise}", "fp8_cfg.enabled='no'"),
        (MEGATRON % "zero_train_gen_mismatch: 'no'", "zero_train_gen_mismatch='no'"),
        (
            "policy: {generation: {nvfp4_pertoken_rollout: {enabled: true, additional_ignore: 3}}}",
            "additional_ignore=3",
        ),
        (
            "policy: {generation: {nvfp4_pertoken_rollout: {enabled: true, additional_ignore: 'a'}}}",
            "additional_ignore='a'",
        ),
        ("policy: {generation: {backend: [vllm]}}", "backend=['vllm']"),
        ("loss_fn: {use_importance_sampling_correction: 'yes'}", "use_importance_sampling_correction='yes'"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_the_name_of_its_key(text, key):
    with pytest.raises(PrecisionError) as caught:
        from_nemo_rl(text)
    (problem,) = caught.value.problems
    assert f"{key} is not " in problem.what
    assert problem.why
    assert problem.remedy.startswith("Write ")


def test_null_is_as_not_written():
    text = VLLM % "is_mx: null, quantization_ignore_patterns: null, use_deep_gemm: null"
    assert read_nemo_rl(text)[1] == Precision(rollout="fp8", importance_sampling=False)


def test_where_an_mx_rollout_is_quantized_is_no_other_precision():
    text = "policy: {generation: {vllm_cfg: {precision: fp8, is_mx: true, refit_prequantize: %s}}}"
    assert read_nemo_rl(text % "true") == read_nemo_rl(text % "false")
    assert read_nemo_rl(text % "true")[1].rollout_block == "1x32"


def test_what_modelopt_quantizes_is_said_to_be_compared_by_nobody():
    text = "policy: {quant_cfg: NVFP4_DEFAULT_CFG, generation: {quant_cfg: %s}}"
    (same,) = beside_the_contract(text % "NVFP4_DEFAULT_CFG")
    (other,) = beside_the_contract(text % "null")
    assert (same.code, other.code) == ("nemo-rl-modelopt", "nemo-rl-modelopt-differs")
    assert "None in the rollout" in other.what
    assert beside_the_contract(WHOLE) == []


@settings(deadline=None)
@given(contracts())
def test_every_contract_reads_back_but_for_what_the_notes_name(contract):
    mixed_environment = (
        contract.scaling in ("blockwise", "tensorwise") and contract.weight_scale != contract.activation_scale
    )
    no_such_rollout = (contract.rollout == "fp8" and contract.rollout_block == "tensor") or contract.rollout == "nvfp4"
    lonely_cache = contract.rollout != "fp8" and contract.kv_cache == "fp8"
    if mixed_environment or no_such_rollout or lonely_cache:
        with pytest.raises(PrecisionError):
            render(contract, "nemo-rl")
        return
    rendering = render(contract, "nemo-rl")
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)
    assert yaml.safe_load(rendering.text) == rendering.data
    if contract.is_quantized and contract.keep:
        assert "keep" in rendering.lost
        return
    back = from_nemo_rl(rendering.text)
    assert set(contract.diff(back)) == set(rendering.lost)
    assert render(back, "nemo-rl").data == rendering.data


def test_every_presets_yaml_is_one_contract_again():
    for p in PRESETS.values():
        if p.rollout == "nvfp4":
            with pytest.raises(PrecisionError, match="NVFP4 attention"):
                render(p, "nemo-rl")
            p = p.replace(rollout="compute", rollout_block=None)
        assert from_nemo_rl(render(p, "nemo-rl").text).gemms() == p.gemms()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            "policy: {megatron_cfg: {fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipee: blockwise}}}",
            "Did you mean 'fp8_recipe'",
        ),
        ("policy: {megatron_cfg: {fp8_cfg: {enabled: true, fp8: e4m3}}}", "lacks fp8_recipe"),
        ("policy: {megatron_cfg: {fp8_cgf: {enabled: true}}}", "Did you mean 'fp8_cfg'"),
        ("policy: {megatron_cfg: {fp8_cfg: true}}", "no mapping"),
        ("policy: {megatron_cfg: {fp4_cfg: {enabled: true, fp4_recipe: mxfp4}}}", "nvfp4"),
        ("policy: {megatron_cfg: {fp4_cfg: {enabled: true, fp4_recipee: nvfp4}}}", "Did you mean 'fp4_recipe'"),
        (
            "policy: {megatron_cfg: {fp4_cfg: {enabled: true}, fp8_cfg: {enabled: true, fp8: e4m3, "
            "fp8_recipe: blockwise}}}",
            "both enabled",
        ),
        ("policy: {generation: {nvfp4_pertoken_rollout: {enabled: true, ignore: [a]}}}", "additional_ignore"),
        ("policy: {megatron_cfg: {te_precision_config_file: recipes.yaml}}", "there is no file recipes.yaml"),
        ("policy: {megatron_cfg: {te_precision_config_fle: recipes.yaml}}", "te_precision_config_file"),
        ("policy: {generation: {vllm_cfg: {precision: fp8, quantization_ignore_pattern: [a]}}}", "_patterns"),
        ("policy: {generation: {vllm_cfg: {precision: fp8, refit_prequantize: true}}}", "is_mx: true"),
        ("policy: {generation: {vllm_cfg: {is_mx: true, refit_prequantize: true}}}", "precision: fp8 and"),
        ("policy: {generation: {vllm_cfg: {precision: fp8, is_mx: true, refit_prequantize: 'on'}}}", "a switch"),
        ("policy: {generation: {vllm_cfg: {precision: fp8, quantization_ignore_patterns: [a]}}}", "ignored_layer_kws"),
        ("policy: {generation: {vllm_cfg: {precision: fp8, is_mx: true, refit_prequantise: true}}}", "prequantize"),
        (
            "policy: {megatron_cfg: {env_vars: {NVTE_FP8_BLOCK_SCALING_FP32_SCALE: '1'}}}",
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        ),
        (
            "policy: {generation: {vllm_cfg: {precision: fp8, pow2_weight_scaling_factor: true}}}",
            "pow2_weight_scaling_factors",
        ),
        ("policy: {generation: {vllm_cfg: {precision: fp8, use_deepgemm: true}}}", "Did you mean 'use_deep_gemm'"),
        ("policy: {generation: {vllm_cfg: {precision: fp9}}}", "fp9"),
        ("policy: {generation: {vllm_cfg: {kv_cache_dtype: fp8}}}", "refuses an FP8 KV cache"),
        ("policy: {generation: {vllm_cfg: {precision: fp8, is_mx: true, pow2_weight_scaling_factors: false}}}", "E8M0"),
        ("policy: {precision: bf16}", "bfloat16"),
        ("loss_fn: {use_importance_sampling_corection: true}", "Did you mean 'use_importance_sampling_correction'"),
        ("policy: {generation: {vllm_cfg: {precision: '${somewhere.else}'}}}", "OmegaConf"),
        ("policy: {precision: bfloat16}\npolicy: {precision: float16}", "duplicate key"),
    ],
)
def test_slips_are_refused(text, word):
    with pytest.raises(PrecisionError) as caught:
        from_nemo_rl(text)
    assert word in str(caught.value)


def test_what_nemo_rl_would_do_otherwise_is_refused_not_noted():
    with pytest.raises(PrecisionError, match="128x128"):
        nemo_rl.to_nemo_rl(Precision(rollout="fp8", rollout_block="tensor"))


# ---------------------------------------------------------------------- NVFP4: five places

MOE = preset("bf16_with_nvfp4_mixed").replace(
    **ALIKE, first_layers=2, last_layers=4, modules=(("*.linear_qkv", "bf16"), ("*.linear_proj", "bf16"))
)
"""What NeMo RL's own recipe for Qwen3-30B-A3B says: attention and six layers in BF16, the rest in NVFP4 per token."""


def _written(folder, change=lambda document: None):
    """The overlay of MOE and Megatron's file of recipes beside it, as a user saves them."""
    document = nemo_rl.to_nemo_rl(MOE, 48)
    change(document["policy"])
    (folder / "te_precision.yaml").write_text(render(MOE, "te-precision").text)
    (folder / "grpo.yaml").write_text(yaml.safe_dump(document))
    return folder / "grpo.yaml"


def test_five_places_of_nvfp4_come_out_of_one_contract_and_are_one_again(tmp_path):
    megatron, generation = (nemo_rl.to_nemo_rl(MOE, 48)["policy"][name] for name in ("megatron_cfg", "generation"))
    assert megatron["fp4_cfg"] == {"enabled": True, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": False}
    assert megatron["fp8_cfg"] == {"enabled": False}
    five = dict.fromkeys(FIVE_VARIABLES[:-1], "1") | {FIVE_VARIABLES[-1]: "dequantized"}
    assert five.items() <= megatron["env_vars"].items()
    counts = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    assert [megatron[name] for name in counts] == [True, 2, 4]
    assert generation["nvfp4_pertoken_rollout"]["additional_ignore"] == [
        f"*.layers.{n}.mlp.experts*" for n in (0, 1, 44, 45, 46, 47)
    ]
    back = from_nemo_rl(_written(tmp_path))
    assert back.diff(MOE) == {}
    assert check(train=back, rollout=back).agrees
    assert missing(*read_nemo_rl(tmp_path / "grpo.yaml")) == []


@pytest.mark.parametrize("layer", [3, 27, 104])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_single_layers_experts_are_said_in_a_list_and_read_back(tmp_path, recipe, layer):
    """All layers but one have no key of their own: they are patterns of the numbers that are not its own."""
    rules = [("*.linear_qkv", "bf16"), ("*.linear_proj", "bf16"), (f"*.layers.{layer}.mlp.experts*", recipe)]
    rules += [("*.experts*", "bf16")] if recipe == "nvfp4" else []
    contract = MOE.replace(modules=tuple(rules), first_layers=0, last_layers=0)
    rendering = render(contract, "nemo-rl")
    assert rendering.lost == ()
    ignored = rendering.data["policy"]["generation"]["nvfp4_pertoken_rollout"]["additional_ignore"]
    kept = {n for n in range(200) if any(fnmatch(f"model.layers.{n}.mlp.experts", pattern) for pattern in ignored)}
    assert kept == ({layer} if recipe == "bf16" else {*range(200)} - {layer})
    (tmp_path / "te_precision.yaml").write_text(render(contract, "te-precision").text)
    (tmp_path / "grpo.yaml").write_text(rendering.text)
    train, rollout = read_nemo_rl(tmp_path / "grpo.yaml")
    for name in (f"decoder.layers.{n}.mlp.experts.linear_fc1" for n in (layer, layer + 1)):
        for mine, side in ((train, "train"), (rollout, "rollout")):
            assert mine.of([name]).operand("weight", side) == contract.of([name]).operand("weight", side)
    at = f"layers.{'[!' if recipe == 'nvfp4' else layer}"
    other = rendering.text.replace(at, "layers.[" if recipe == "nvfp4" else "layers.7")
    (tmp_path / "grpo.yaml").write_text(other)
    assert not check(train=train, rollout=read_nemo_rl(tmp_path / "grpo.yaml")[1]).agrees


FIVE_VARIABLES = (
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    "NVTE_NVFP4_DISABLE_RHT",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "NVTE_BACKWARD_OVERRIDE",
)


@pytest.mark.parametrize("place", [
    "megatron_cfg.fp4_cfg",
    "megatron_cfg.te_precision_config_file",
    "megatron_cfg.first_last_layers_bf16",
    *(f"megatron_cfg.env_vars.{name}" for name in FIVE_VARIABLES),
    "generation.nvfp4_pertoken_rollout",
    "generation.nvfp4_pertoken_rollout.additional_ignore",
])  # fmt: skip
def test_a_place_that_is_missing_is_named(tmp_path, place):
    def leave_out(policy):
        *sections, key = place.split(".")
        for name in sections:
            policy = policy[name]
        del policy[key]

    file = _written(tmp_path, leave_out)
    train, rollout = read_nemo_rl(file)
    found = [f for f in check_nemo_rl(file).findings if f.code == "nemo-rl-nvfp4-missing"]
    assert found == missing(train, rollout)
    assert [f.where for f in found] == [f"policy.{place}"]
    harmless = ("DISABLE_RHT", "DISABLE_STOCHASTIC_ROUNDING", "BACKWARD_OVERRIDE")  # no other values in a forward
    assert check(train=train, rollout=rollout).agrees == place.endswith(harmless)


def test_the_last_layers_need_the_number_of_layers_and_attention_stays_out():
    with pytest.raises(PrecisionError, match="--layers 48"):
        render(MOE, "nemo-rl")
    with pytest.raises(PrecisionError, match="W4A16 comes from ModelOpt"):
        render(MOE.replace(activation_scheme="none"), "nemo-rl", 48)


def test_the_variables_of_a_recipe_that_comes_by_a_rule_are_written_and_read(tmp_path):
    p = Precision(
        scaling="mxfp8",
        format="e4m3",
        weight_block="1x16",
        hadamard=False,
        rollout="compute",
        rollout_block="128x128",
        modules=(("*.linear_fc1", "nvfp4"), ("*.linear_qkv", "blockwise")),
    )
    document = nemo_rl.to_nemo_rl(p)
    env_vars = document["policy"]["megatron_cfg"]["env_vars"]
    assert (env_vars["NVTE_NVFP4_DISABLE_RHT"], env_vars["NVTE_NVFP4_DISABLE_2D_QUANTIZATION"]) == ("1", "1")
    (tmp_path / "te_precision.yaml").write_text(render(p, "te-precision").text)
    file = tmp_path / "grpo.yaml"
    file.write_text(yaml.safe_dump(document))
    assert from_nemo_rl(file).diff(p) == {}
    # The rule's blockwise scales are powers of two, and the variable gives them FP32.
    env_vars["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(PrecisionError, match="blockwise scaling by a rule"):
        from_nemo_rl(file)


# ---------------------------------------------------------------------- rules by module, in the rollout

BLOCKS = preset("bf16_with_fp8_blockwise_mixed").replace(weight_scale="fp32", activation_scale="fp32")
MX = preset("bf16_with_mxfp8_mixed")


def _sides(p, layers=48):
    """Both sides of a contract's rendering, as a user saves it: the overlay, and Megatron's file of recipes."""
    recipes = to_te_precision(p) if p.modules and p.is_quantized else None
    return read_nemo_rl(render(p, "nemo-rl", layers).text, recipes)


@pytest.mark.parametrize(
    ("contract", "rules", "lines"),
    [
        (BLOCKS, (("*.linear_qkv", "bf16"),), ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        (BLOCKS, (("*.layers.0.*", "bf16"),), [".layers.0."]),
        (BLOCKS, (("*.layers.[0-3].*", "bf16"),), [f".layers.{n}." for n in range(4)]),
        (BLOCKS, (("decoder.layers.1[23].*", "bf16"),), [".layers.12.", ".layers.13."]),
        (BLOCKS, (("*.layers.1?.mlp.linear_fc2", "bf16"),), [f"layers.{n}.mlp.down_proj" for n in range(10, 20)]),
        (BLOCKS, (("*.linear_attn.*", "bf16"),), [".linear_attn."]),
        (BLOCKS, (("*.layers.17.mlp.linear_fc2", "bf16"),), ["layers.17.mlp.down_proj"]),
        (BLOCKS, (("*.mlp.experts.*", "bf16"),), ["mlp.experts", "block_sparse_moe.experts"]),
        (BLOCKS, (("*.linear_proj", "bf16"), ("*", "blockwise")), ["self_attn.o_proj"]),
        (
            MX,
            (("*.linear_qkv", "bf16"),),
            ["*.self_attn.q_proj", "*.self_attn.k_proj", "*.self_attn.v_proj", "*.self_attn.qkv_proj"],
        ),
        (MX, (("*.layers.0.*", "bf16"),), [".layers.0."]),
        (MX, (("decoder.layers.1[23].*", "bf16"),), [".layers.12.", ".layers.13."]),
        # vLLM asks for the experts of a layer by a name that ends in experts.
        (MX, (("*.experts.*", "bf16"),), ["*.mlp.experts*", "*.block_sparse_moe.experts*"]),
        (
            MOE,
            (*MOE.modules, ("*.mlp.linear_fc1", "bf16")),
            [f"*.layers.{n}.mlp.experts*" for n in (0, 1, *range(44, 48))],
        ),
    ],
)  # fmt: skip
def test_rules_for_the_compute_dtype_are_on_the_rollouts_lists(contract, rules, lines):
    p = contract.replace(modules=rules)
    rendering = render(p, "nemo-rl", 48)
    assert [line for found in nemo_rl.lines_of(rendering.data).values() for line in found] == lines
    assert "modules" not in rendering.lost
    train, rollout = _sides(p)
    assert train.modules == rules
    assert {f.code for f in check(train=train, rollout=rollout).findings} <= {
        f.code for f in check(train=p, rollout=p).findings
    }


@pytest.mark.parametrize(
    ("contract", "rules"),
    [
        (BLOCKS, (("*.linear_fc2", "mxfp8"),)),
        (BLOCKS, (("*.linear_fc1", "mxfp8"), ("*.mlp.*", "bf16"))),
        (MX, (("*.linear_fc2", "tensorwise"),)),
        (MX, (("*.linear_fc2", "nvfp4"),)),
        (MOE, (*MOE.modules, ("*.linear_fc2", "mxfp8"))),
        (BLOCKS, (("*.linear_nowhere", "bf16"),)),
    ],
)
def test_rules_that_the_rollouts_lists_cannot_say_are_lost_and_named(contract, rules):
    rendering = render(contract.replace(modules=rules), "nemo-rl", 48)
    assert "modules" in rendering.lost
    with pytest.raises(PrecisionError, match=re.escape("modules=")):
        rendering.require_whole()


def test_words_that_a_user_wrote_say_the_trainings_rule_too():
    p = BLOCKS.replace(modules=(("*.linear_qkv", "bf16"),))
    text = render(p, "nemo-rl").text.replace("self_attn.", "")  # q_proj, k_proj and v_proj
    train, rollout = read_nemo_rl(text, to_te_precision(p))
    assert (rollout.keep, rollout.modules) == ((), p.modules)
    assert check(train=train, rollout=rollout).agrees
    # One of them missing says another thing, which is named.
    _, rollout = read_nemo_rl(re.sub(" *- q_proj\n", "", text), to_te_precision(p))
    assert (rollout.keep, rollout.modules) == (("*k_proj*", "*v_proj*"), ())
    assert not check(train=train, rollout=rollout).agrees


# What a finding of ``check`` may come from that the contract does not have itself.
FROM = {
    "sides-modules": {"keep", "modules"},
    "sides-recipes": {"keep", "modules"},
    "sides-units": {"keep", "modules"},
    "sides-layers": {"first_layers", "last_layers", "keep", "modules"},
    "sides-correction": {"importance_sampling"},
    "sides-kv-cache": {"attention", "multi_head_attention"},  # without them an FP8 cache is all that attends in FP8
}


@settings(deadline=None)
@given(ruled_contracts() | ruled_contracts(of=st.just(MOE)))
@example(
    Precision(
        format="hybrid", scaling="mxfp8", weight_scale="pow2", activation_scale="pow2", multi_head_attention=True,
        rollout="fp8", kv_cache="fp8", modules=(("*.linear_qkv", "bf16"),),
    )
)  # fmt: skip
def test_what_a_rendering_with_rules_reads_back_as_has_no_finding_of_its_own(contract):
    try:
        rendering = render(contract, "nemo-rl", 48)
    except PrecisionError as error:
        assert all(p.what and p.why and p.remedy for p in error.problems)  # noqa: PT017
        return
    own = {f.code for f in check(train=contract, rollout=contract).findings}
    train, rollout = _sides(contract)
    for found in check(train=train, rollout=rollout).findings:
        if found.code not in own:
            assert FROM.get(found.code, set()) & {*rendering.lost}, found.code
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)
    # And linear by linear, whatever check compares: nothing is in another format without being named.
    if contract.modules and not {"modules", "keep"} & {*rendering.lost} and rollout.rollout == "fp8":
        # No model has both linear_qkv and linear_q_proj, whose name outside of Megatron is q_proj as well.
        for name in HUGGING_FACE.keys() - {"self_attention.linear_q_proj"}:
            for layer in (0, 2, 17, 40):
                module = f"decoder.layers.{layer}.{name}"
                ours, theirs = (_held(p, module) for p in (contract, rollout))
                assert ours == theirs, module


def _held(p, module):
    """How the rollout holds a linear, without its activation scheme and scales, which have fields of their own."""
    if why_kept_by_name(p, (module,), None, experts=1) is not None:
        return None
    weight = contract_of(p, (module,), 1).operand("weight", "rollout")
    return weight and (weight.format, weight.block)
