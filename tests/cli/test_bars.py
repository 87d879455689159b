"""How far long work is: plain lines in a pipe, bars in a terminal."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from support import tiny
from support.small_models import write

from nemo_fp8.mismatch import log_probs

RUNS = """
import time
from nemo_fp8.cli import progress as bars
bars.EVERY, bars.NOT_WITHIN = {every}, {within}
with bars.run_bars(2, 40) as start:
    for name in ("first", "second"):
        told = start(name)
        time.sleep({starting})
        for step in range(1, 41):
            time.sleep({pause})
            told(step, f"loss {{5 - step / 10:.3f}}")
"""
ENVIRONMENT = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}


def in_pipe(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


def in_terminal(*words, **variables):
    """What the command writes to stderr, which is a terminal."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=its, env=ENVIRONMENT | variables
    )
    os.close(its)
    said = b""
    try:
        while some := os.read(ours, 4096):
            said += some
    except OSError:  # its last writer has closed it
        pass
    os.close(ours)
    assert process.wait(60) == 0, said
    return said.decode()


def test_a_line_at_every_tenth_of_the_way():
    said = in_pipe("-c", RUNS.format(every=10, within=0, starting=0, pause=0.002))
    for name in ("first", "second"):
        assert re.search(rf"^{name}: starting(, 0:\d\d so far)?$", said, re.M)
        assert re.findall(rf"^{name}: (\d+) of 40, loss", said, re.M) == [str(4 * tenth) for tenth in range(1, 11)]
    assert re.search(r"^first: 40 of 40, loss 1\.000, 0:\d\d left$", said, re.M), "the second run is still to come"
    assert re.search(r"^second: 40 of 40, loss 1\.000, 0:\d\d in all$", said, re.M)
    assert set(re.findall(r"[\x00-\x1f]", said)) == {"\n"}


def test_tenths_of_a_moment_are_left_out_but_the_last_one():
    said = in_pipe("-c", RUNS.format(every=10, within=60, starting=0, pause=0))
    assert re.findall(r"^first: (\d+) of 40", said, re.M) == ["40"]


def test_silence_is_broken_whatever_happens():
    """Nothing is told for a second; a line comes every fifth of it. In earnest it comes every ten seconds."""
    from nemo_fp8.cli import progress as bars

    assert bars.EVERY == 10.0
    said = in_pipe("-c", RUNS.format(every=0.2, within=60, starting=1.1, pause=0))
    assert 3 <= len(re.findall(r"^first: starting", said, re.M)) <= 7
    assert re.search(r"^second: starting, 0:0\d so far$", said, re.M)


def test_time_left_is_what_the_pace_makes_of_the_whole(monkeypatch, capsys):
    from nemo_fp8.cli import progress as bars

    now = [100.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    lines = bars._Lines(lambda done, total: f"{done} of {total}")
    lines.start("run", 50, before=1, of=4)
    now[0] += 300.0
    lines.tell(25, "loss 2.000")  # three eighths of all in five minutes
    now[0] += 7200.0
    lines.tell(50)
    assert capsys.readouterr().err.splitlines() == [
        "run: starting",
        "run: 25 of 50, loss 2.000, 8:20 left",
        "run: 50 of 50, 2:05:00 left",
    ]


def test_a_terminal_has_bars():
    said = in_terminal("-c", RUNS.format(every=10, within=0, starting=0, pause=0.002))
    assert "\x1b[" in said
    assert "━" in said
    assert "40 of 40" not in said
    dumb = in_terminal("-c", RUNS.format(every=10, within=0, starting=0, pause=0), TERM="dumb")
    assert "second: 40 of 40" in dumb
    assert "\x1b" not in dumb


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("bars") / "model.safetensors"
    save_file({f"model.layers.{i}.mlp.up_proj.weight": torch.randn(256, 256).bfloat16() for i in range(12)}, path)
    return path


def test_a_command_in_a_pipe_and_in_a_terminal(checkpoint):
    words = ("-m", "nemo_fp8.cli", "inspect", str(checkpoint), "--precision", "blockwise")
    said = in_pipe(*words)
    assert re.search(r"^reading: starting$", said, re.M)
    assert re.search(r"^reading: 2 of 2 MiB, model\.layers\.\d+\.mlp\.up_proj, 0:\d\d in all$", said, re.M)
    assert "\x1b" not in said
    assert "\x1b[" in in_terminal(*words)


def _export(folder):
    words = ("export", write(folder / "in"), folder / "out", "--precision", "bf16_with_fp8_blockwise_mixed")
    counted = r"[\d,]+ of [\d,]+ MiB, \S+"
    return (*words, "--verify", "--no-vllm"), {"export": counted, "verify": counted}


def _mismatch(folder):
    config = tiny.config("qwen3")
    weights, tokens = tiny.state_dict(config), tiny.tokens(16, 8)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "fp8.yaml").write_text("rollout: fp8\n")
    save_file(weights, folder / "model.safetensors")
    said = log_probs(config, weights, tokens)
    save_file({"trainer": said, "rollout": said.clone(), "tokens": tokens}, folder / "said.safetensors")
    words = ("mismatch", folder / "said.safetensors", "--model", folder, "--precision", folder / "fp8.yaml")
    runs_of_layers = 3 * config["num_hidden_layers"]
    return words, {"emulate": f"{runs_of_layers} of {runs_of_layers}"}


@pytest.mark.parametrize("command", [_export, _mismatch], ids=["export", "mismatch"])
def test_long_work_in_a_pipe_says_where_it_begins_and_ends(command, tmp_path):
    words, ends = command(tmp_path)
    said = in_pipe("-m", "nemo_fp8.cli", *map(str, words))
    for heading, end in ends.items():
        assert re.search(rf"^{heading}: starting$", said, re.M), said
        assert re.search(rf"^{heading}: {end}, 0:\d\d in all$", said, re.M), said
    assert "\x1b" not in said
