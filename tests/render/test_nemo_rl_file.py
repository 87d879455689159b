"""A NeMo RL file is read with the files that it extends, as OmegaConf reads it; every bad one is one clear error."""

import json

import pytest
from typer.testing import CliRunner

from nemo_fp8.cli import app
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.nemo_rl import beside_the_contract, from_nemo_rl, ignored_by_nemo_rl, read_nemo_rl

BASE = """
loss_fn: {use_importance_sampling_correction: true}
policy:
  model_name: ???
  precision: bfloat16
  max_total_sequence_length: 512
  megatron_cfg:
    pipeline_dtype: ${policy.precision}
    train_tokens: ${mul:2, ${policy.max_total_sequence_length}}
    optimizer: {lr: "${oc.env:NOWHERE_TO_BE_FOUND}"}
    fp8_cfg: {enabled: false, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}
    env_vars: &env {NVTE_FP8_BLOCK_SCALING_FP32_SCALES: "1"}
  generation:
    vllm_cfg: {precision: "${policy.precision}", num_first_layers_in_bf16: 2}
"""


def files(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(texts))}.yaml"


def test_a_file_is_read_with_what_it_extends_from_its_own_folder(tmp_path):
    (tmp_path / "base").mkdir()
    files(
        tmp_path / "base", middle="defaults: root.yaml\npolicy: {megatron_cfg: {fp8_cfg: {enabled: true}}}", root=BASE
    )
    child = files(tmp_path, child="defaults: base/middle.yaml\npolicy: {generation: {vllm_cfg: {precision: fp8}}}")
    train, rollout = read_nemo_rl(child)
    assert (train.scaling, train.weight_scale) == ("blockwise", "fp32")
    assert (rollout.rollout, rollout.first_layers, rollout.importance_sampling) == ("fp8", 2, True)


def test_of_several_files_the_last_wins_and_a_section_can_take_the_place_of_another(tmp_path):
    files(
        tmp_path,
        root=BASE,
        fp8="policy: {megatron_cfg: {fp8_cfg: {enabled: true}}, generation: {vllm_cfg: {precision: fp8}}}",
        over="defaults: root.yaml\npolicy:\n  generation:\n    vllm_cfg: {use_deep_gemm: true}\n",
    )
    both = files(tmp_path, both="defaults: [root.yaml, fp8.yaml]\n")
    assert read_nemo_rl(both)[0].is_fp8
    turned = files(tmp_path, turned="defaults: [fp8.yaml, root.yaml]\n")
    assert not read_nemo_rl(turned)[0].is_fp8
    alone = files(
        tmp_path, alone="defaults: both.yaml\npolicy: {_override_: true, generation: {vllm_cfg: {precision: fp8}}}"
    )
    train, rollout = read_nemo_rl(alone)
    assert not train.is_fp8  # nothing of the base's policy is left
    assert (rollout.rollout, rollout.first_layers) == ("fp8", 0)


def test_yaml_s_merge_keys_are_followed():
    text = """
one: &one {enabled: true, fp8: e4m3, fp8_recipe: blockwise}
policy:
  megatron_cfg:
    fp8_cfg: {<<: *one, fp8: hybrid}
"""
    assert from_nemo_rl(text).format == "hybrid"


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        ({"a": "defaults: gone.yaml\npolicy: {}"}, "gone.yaml cannot be read"),
        ({"a": "defaults: b.yaml\npolicy: {}", "b": "defaults: [a.yaml]"}, "a.yaml -> b.yaml -> a.yaml"),
        ({"a": "defaults: b.yaml\npolicy: {}", "b": "policy: {precision: x, precision: y}"}, "duplicate key"),
        ({"a": "- policy"}, "no mapping"),
        ({"a": "quant_cfg: []"}, "has no section policy"),
        ({"a": "policy: {precision: '${policy.nowhere}'}"}, "'policy.nowhere' not found"),
        ({"a": "policy: {precision: '${oc.env:NOWHERE_TO_BE_FOUND}'}"}, "NOWHERE_TO_BE_FOUND"),
        ({"a": "policy: [1"}, "not YAML"),
        ({"a": "policy: !!int one"}, "not YAML"),
        ({"a": "policy: " + "[" * 5000}, "not YAML"),
        ({"a": "a: &a\n  b: *a\npolicy: *a"}, "not YAML"),
        ({"a": "policy: ${nope}"}, "'nope' not found"),
        ({"a": "defaults: ${x}\npolicy: {}"}, "defaults cannot be resolved"),
        ({"a": "defaults: 5\npolicy: {}"}, "a file's name or a list of them"),
        ({"a": "defaults: true\npolicy: {}"}, "a file's name or a list of them"),
        ({"a": "defaults: [[b.yaml]]\npolicy: {}", "b": "policy: {}"}, "a file's name or a list of them"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path, texts, word):
    with pytest.raises(PrecisionError) as caught:
        read_nemo_rl(files(tmp_path, **texts))
    assert word in str(caught.value)


def test_what_a_link_extends_lies_beside_the_link(tmp_path):
    """As in NeMo RL, which asks for the folder of the name that it was given."""
    for folder, precision in (("here", "bfloat16"), ("there", "float16")):
        (tmp_path / folder).mkdir()
        files(tmp_path / folder, base=f"policy: {{precision: {precision}}}")
    there = files(tmp_path / "there", grpo="defaults: base.yaml")
    link = tmp_path / "here" / "grpo.yaml"
    link.symlink_to(there)
    assert [read_nemo_rl(path)[0].compute for path in (there, link)] == ["fp16", "bf16"]
    (tmp_path / "there" / "self").symlink_to(tmp_path / "there")
    with pytest.raises(PrecisionError, match="extends itself"):
        read_nemo_rl(files(tmp_path / "there", circle="defaults: self/circle.yaml"))


def test_keys_that_are_not_followed_are_one_clear_error_wherever_they_are_asked(tmp_path):
    for ask in (read_nemo_rl, ignored_by_nemo_rl, beside_the_contract):
        with pytest.raises(PrecisionError, match="cannot be resolved"):
            ask(files(tmp_path, a="policy: {megatron_cfg: '${nope}', generation: '${nope}'}"))


def test_check_says_of_a_rollout_that_is_not_read_that_nothing_was_compared(tmp_path):
    path = files(tmp_path, a="policy: {generation: {backend: sglang}}")
    done = CliRunner().invoke(app, ["check", "--nemo-rl", str(path), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["agrees"], told["findings"]) == (0, None, [])
    assert "backend is sglang" in told["notes"][0]
    done = CliRunner().invoke(app, ["check", "--nemo-rl", str(path)])
    assert "not compared" in done.stdout
    assert "agree" not in done.stdout


def test_check_reads_the_file_with_its_base(tmp_path):
    files(tmp_path, root=BASE)
    child = files(tmp_path, child="defaults: root.yaml\npolicy: {quant_cfg: NVFP4_DEFAULT_CFG}")
    done = CliRunner().invoke(app, ["check", "--nemo-rl", str(child), "--json"])
    told = json.loads(done.stdout)
    assert told["agrees"]
    assert "ModelOpt" in told["notes"][0]
