"""The command line: what it says, its exit codes, its JSON, its width and its speed."""

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nemo_fp8.cli.options import require_report
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import render
from nemo_fp8.render.nemo_rl import to_nemo_rl
from nemo_fp8.render.nemo_rl_fp4 import ALIKE
from nemo_fp8.render.nemo_rl_keys import EXPERTS_ALONE, TE_PRECISION_FILE

NEMO_FP8 = str(Path(sys.executable).with_name("nemo-fp8"))
CONFIG = str(Path(__file__).parents[1] / "models/data/qwen3-30b-a3b.json")
BLOCK = "bf16_with_fp8_blockwise_mixed"

# (command, exit code, words of its output)
COMMANDS = [
    (["list"], 0, ["nanov2_bf16_with_fp8_current_scaling_mixed", "blockwise"]),
    (["explain", BLOCK], 0, ["128x128", "E5M2"]),
    (["explain", BLOCK.replace("_", "-"), "--set", "format=e4m3"], 0, ["output gradient in E4M3"]),
    (["diff", BLOCK, "bf16_with_fp8_subchannel_scaling_mixed"], 0, ["same"]),
    (["diff", BLOCK, "bf16_mixed"], 1, ["scaling"]),
    (["doctor"], 0, ["GPU", "blockwise"]),
    (["doctor", "--for", "h200,cuda12.9,te2.9"], 0, ["native"]),
    (["doctor", BLOCK, "--for", "h200,cuda12.8,te2.9"], 1, ["CUDA >= 12.9", "remedy"]),
    (["doctor", BLOCK, "--for", "cpu,avx2,torch2.13,vllm0.31"], 0, ["decoded", "3 times for eight"]),
    (["doctor", "--vllm-python", "/nowhere/bin/python"], 0, ["none; looked in /nowhere"]),
    (["lint", BLOCK], 0, ["E5M2"]),
    (["lint", "bf16_with_fp8_mixed", "--set", "first_layers=1"], 1, ["delayed"]),
    (["lint", BLOCK, "--model", CONFIG, "--parallel", "tp4"], 0, ["warning", "768/TP4 = 192", "linear_qkv"]),
    (["lint", BLOCK, "--model", CONFIG, "--parallel", "tp3"], 1, ["error", "not divisible"]),
    (["memory", BLOCK, "--model", CONFIG, "--parallel", "tp4,ep8,dp8"], 0, ["master parameters", "total"]),
    (["check", BLOCK], 0, ["agree"]),
    (["check", "bf16_mixed", BLOCK], 1, ["differs"]),
    *((["render", BLOCK, "--to", to], 0, [word]) for to, word in {
        "nemo": "MegatronMixedPrecision", "bridge": "MixedPrecisionConfig", "megatron": "--fp8-format",
        "te": "Float8BlockScaling", "nemo-rl": "vllm_cfg", "vllm": "--quantization", "env": "NVTE",
    }.items()),
    (["render", "bf16_with_nvfp4_mixed", "--to", "modelopt", "--model", CONFIG], 0, ["config_groups"]),
    (["explain", "bf16_mixd"], 2, ["Did you mean 'bf16_mixed'"]),
    (["explain", BLOCK, "--set", "margn=1"], 2, ["Did you mean 'margin'"]),
    (["explain", BLOCK, "--set", "margin"], 2, ["has no value"]),
    (["explain", BLOCK, "--set", "keep=[*.linear_proj]"], 2, ["cannot be read", "keep=['*.linear_proj']"]),
    (["explain", BLOCK, "--set", "keep=('*.linear_proj',"], 2, ["cannot be read"]),
    (["explain", BLOCK, "--set", "modules=(('*.linear_qkv', 'bf16'),)"], 0, ["*.linear_qkv in BF16"]),
    (["explain", "missing.yaml"], 2, ["no file"]),
    (["render", BLOCK, "--to", "nemorl"], 2, ["nemo-rl"]),
    (["doctor", "--for", "h20000"], 2, ["remedy"]),
    (["doctor", "--for", ""], 2, ["described by no word"]),  # a variable of the shell that is not set
    (["doctor", BLOCK, "--for", "h200,cuda12.9,te2.9,mcore0.12"], 1, ["Before 0.13, megatron-core does not know"]),
    (["lint", BLOCK, "--for", ""], 2, ["described by no word"]),
    (["lint", "bf16_with_fp8_mixed", "--for", "h100"], 0, ["Delayed scaling on h100: whether it runs is not known"]),
    (["compare", "--recipe", "tiny_lama"], 2, ["Did you mean 'tiny_llama'"]),
    (["doctor", "bf16_with_fp8_mixed", "--for", "h200,cuda12.9,te2.9,bridge0.3.1"], 0, ["bridge-loads-into-fp8"]),
    (["doctor", "bf16_mixed", "--for", "cpu"], 0, ["bf16_mixed", "native", "compute in BF16"]),
    (["doctor", "fp16_mixed", "--for", "h200"], 0, ["fp16_mixed", "native", "compute in FP16"]),
]  # fmt: skip


def _run(*arguments, **settings):
    env = os.environ | {"COLUMNS": "80"}
    return subprocess.run([NEMO_FP8, *arguments], capture_output=True, text=True, env=env, timeout=60, **settings)


@pytest.mark.parametrize(
    ("command", "code", "words"), COMMANDS, ids=lambda v: " ".join(v) if isinstance(v, list) else None
)
def test_commands_answer(command, code, words):
    done = _run(*command)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, said
    for word in words:
        assert word in said
    if command[0] != "render" and code != 2:  # what is pasted elsewhere is not wrapped
        assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "code", "words"), COMMANDS, ids=lambda v: " ".join(v) if isinstance(v, list) else None
)
def test_every_command_speaks_json(command, code, words):
    done = _run(*command, "--json")
    assert done.returncode == code
    value = json.loads(done.stdout)
    assert ("error" in value) == (code == 2)


# An application that does nothing takes an eighth of a second on a machine of today; torch alone takes eight times as
# long.
BARE = [sys.executable, "-c", "import typer, rich.console, rich.table, yaml; typer.run(lambda: None)"]
MOST = 2.5


def _times_a_bare_application(command):
    """In seconds of the processor; the median of pairs that run one after the other, of more of them where it is a near
    thing."""

    def spent(run):
        def now():
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            return used.ru_utime + used.ru_stime

        before = now()
        subprocess.run(run, capture_output=True, timeout=60)
        return now() - before

    ratios = []
    while len(ratios) < 3 or (len(ratios) < 15 and 0.8 < statistics.median(ratios) / MOST < 1.25):
        ratios += [spent(command) / spent(BARE) for _ in range(3)]
    return statistics.median(ratios)


@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["explain", BLOCK],
        ["diff", BLOCK, BLOCK],
        ["doctor"],
        ["lint", BLOCK, "--model", CONFIG],
        ["check", BLOCK],
    ],
)
def test_every_command_that_needs_no_torch_answers_in_half_a_second(command):
    assert _times_a_bare_application([NEMO_FP8, *command]) < MOST


def test_a_command_that_imports_torch_does_not():
    command = [sys.executable, "-c", "import torch; from nemo_fp8.cli import main; main()", "list"]
    assert _times_a_bare_application(command) > MOST


def test_json_of_a_preset_is_the_contract():
    listed = json.loads(_run("list", "--json").stdout)
    assert listed == {name: p.to_dict() for name, p in PRESETS.items()}


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "contract.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "pair.jsonl").write_bytes(b"\xff\xfe")
    for words in (["explain", "contract.yaml"], ["check", BLOCK, "contract.yaml"], ["mismatch", "pair.jsonl"]):
        done = _run(*words, cwd=tmp_path)
        assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: {words[-1]} cannot be read."), done.stderr


@pytest.mark.parametrize(
    "words", [["compare", "--steps", "1"], ["rl-compare", "--steps", "2"], ["inspect", "there"], ["mismatch", "there"]]
)
def test_a_report_that_could_not_be_written_is_refused_before_the_work(tmp_path, words):
    done = _run(*words, "--html", "nowhere/page.html", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Cannot write nowhere/page.html."), done.stderr  # nothing said to start


@pytest.mark.parametrize("there_is_one", [False, True])
def test_a_report_where_one_may_not_write_is_refused_before_the_work(tmp_path, monkeypatch, there_is_one):
    page = tmp_path / "page.html"
    if there_is_one:
        page.touch()
    require_report(page)
    locked = page if there_is_one else tmp_path  # who runs the tests may write everywhere, where it is root
    monkeypatch.setattr("os.access", lambda path, mode: path != locked)
    with pytest.raises(PrecisionError, match="You may not write there"):
        require_report(page)


def test_what_no_run_could_train_is_refused_before_one_is_said_to_start():
    assert _run("compare", "--recipe", "tiny_lama").stderr.startswith("error: Unknown recipe")


def test_a_yaml_file_stands_in_for_a_preset(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(preset(BLOCK).replace(weight_scale="fp32").to_yaml())
    done = _run("diff", BLOCK, str(path), "--json")
    assert json.loads(done.stdout) == {"weight_scale": {"a": "pow2", "b": "fp32"}}


def test_check_reads_both_sides_from_a_nemo_rl_config(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "policy:\n  generation:\n    vllm_cfg:\n      precision: fp8\n      use_deep_gemm: true\n      "
        "use_weight_pow2_scale: false\n"
    )
    done = _run("check", str(path), "--nemo-rl")
    assert done.returncode == 1
    assert "BF16" in done.stdout
    assert "pow2_weight_scaling_factors" in done.stderr


def test_check_names_the_place_of_nvfp4_that_a_nemo_rl_config_lacks(tmp_path):
    whole = preset("bf16_with_nvfp4_mixed").replace(**ALIKE, modules=EXPERTS_ALONE)
    (tmp_path / TE_PRECISION_FILE).write_text(render(whole, "te-precision").text)
    file = tmp_path / "grpo.yaml"
    document = to_nemo_rl(whole)
    file.write_text(yaml.safe_dump(document))
    assert _run("check", str(file), "--nemo-rl").returncode == 0
    del document["policy"]["megatron_cfg"]["env_vars"]["NVTE_NVFP4_DISABLE_RHT"]  # no other values in a forward
    file.write_text(yaml.safe_dump(document))
    done = _run("check", str(file), "--nemo-rl")
    assert done.returncode == 1
    assert "policy.megatron_cfg.env_vars.NVTE_NVFP4_DISABLE_RHT is missing" in done.stdout


def test_help_names_every_command():
    said = _run("--help").stdout
    for command in ("list", "explain", "diff", "doctor", "lint", "memory", "check", "render"):
        assert command in said
