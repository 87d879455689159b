"""``nemo-fp8 export`` as a person and as a script meet it."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from support.small_models import content, tensors, write

from nemo_fp8 import PrecisionError
from nemo_fp8.cli import main
from nemo_fp8.export.logprobs import compare, vllm_python

NAME = "bf16_with_fp8_blockwise_mixed"


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process: what it writes, and its exit code, which is asserted."""

    def command(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["nemo-fp8", "export", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            main()
        done = capsys.readouterr()
        assert (ended.value.code or 0) == code, done.out + done.err
        return done

    return command


def test_export_and_verify(tmp_path, run):
    source = write(tmp_path / "in", tensors(kv=64))
    done = run(source, tmp_path / "out", "--precision", NAME, "--verify", "--no-vllm")
    assert max(map(len, done.out.splitlines())) <= 80
    words = " ".join(done.out.split())
    assert "0 codes and 0 scales change when it is dequantized and exported again" in words
    assert "q_proj (and 2 with it)" in done.err
    found = json.loads(run(source, tmp_path / "out", "--precision", NAME, "--verify", "--no-vllm", "--json").out)
    assert found["done_before"]
    assert found["certificate"]["holds"]
    assert found["quantized"] == 12
    assert len(found["misaligned"]) == 3


def test_no_row_is_empty_where_nothing_is_kept(tmp_path, run):
    (tmp_path / "in").mkdir()
    save_file({"model.layers.0.mlp.down_proj.weight": torch.ones(128, 128)}, tmp_path / "in" / "model.safetensors")
    assert "kept nothing" in " ".join(run(tmp_path / "in", tmp_path / "out", "--precision", NAME).out.split())


def test_the_answer_no_has_exit_code_1(tmp_path, run):
    source = write(tmp_path / "in", shards=1)
    run(source, tmp_path / "out", "--precision", NAME)
    file = tmp_path / "out/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    done = run(source, tmp_path / "out", "--precision", NAME, "--verify", "--no-vllm", code=1)
    assert "Export again with --restart" in done.err
    run(source, tmp_path / "out", "--precision", NAME, "--restart", "--verify", "--no-vllm")


def test_a_wrong_question_has_exit_code_2_and_a_remedy(tmp_path, run):
    source = write(tmp_path / "in")
    assert "Did you mean" in run(source, tmp_path / "out", "--precision", "bf16_with_fp8_blockwize_mixed", code=2).err
    refused = json.loads(run(tmp_path, tmp_path / "out", "--precision", NAME, "--from-nemo", "--json", code=2).out)
    assert "no NeMo checkpoint" in refused["error"][0]["what"]
    without = ("--precision", NAME, "--verify", "--vllm-python", tmp_path / "python")
    assert "No Python with vLLM" in run(source, tmp_path / "out", *without, code=2).err
    assert not (tmp_path / "out").exists()  # asked before anything is written


def test_settings_change_the_contract(tmp_path, run):
    source = write(tmp_path / "in")
    words = ("--layout", "compressed-tensors", "--set", "activation_scale=fp32", "--set", "first_layers=1")
    run(source, tmp_path / "out", "--precision", NAME, *words)
    config = json.loads(content(tmp_path / "out")["config.json"])["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert "model.layers.0.mlp.up_proj" in config["ignore"]


def test_where_vllm_is_looked_for(tmp_path):
    with pytest.raises(PrecisionError, match="No Python with vLLM") as error:
        vllm_python(sys.executable)  # NeMo's environment has none
    assert "--no-vllm" in error.value.problems[0].remedy


def test_nothing_compared_proves_nothing():
    assert not compare([], []).equal
    assert not compare([{}], [{}]).equal


def test_comparing_two_engines():
    a = [{"1": -0.5, "2": -1.0}, {"3": -0.25}]
    assert compare(a, a).equal
    off = compare(a, [{"1": -0.5, "2": -1.5}, {"3": -0.25}])
    assert (off.equal, off.differing, off.compared, off.largest) == (False, 1, 3, 0.5)
    assert compare(a, [{"1": -0.5, "9": -1.0}, {"3": -0.25}]).largest == float("inf")
