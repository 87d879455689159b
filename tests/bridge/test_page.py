"""The snippets of docs/bridge.md run, top to bottom; so does the example; and Bridge's recipes are built."""

import re
import runpy
import subprocess
import sys

import pytest
from support import ROOT


def _python(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def test_the_pages_snippets_run(folder, monkeypatch, capsys):
    from megatron.bridge.training import mixed_precision

    monkeypatch.setattr(mixed_precision, "MIXED_PRECISION_RECIPES", dict(mixed_precision.MIXED_PRECISION_RECIPES))
    monkeypatch.chdir(folder)
    namespace = {"__name__": "__main__"}
    for snippet in _python(ROOT / "docs/bridge.md"):
        exec(compile(snippet, "bridge.md", "exec"), namespace)
    assert "[after training is done]" in capsys.readouterr().out


def test_the_example_trains_and_shows_what_it_says(tmp_path):
    words = [sys.executable, ROOT / "examples/bridge.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    shown = re.search(r"\nlosses: (.*)\nlinears in FP8: (.*)\n((?:decoder.*dB\n){3})$", done.stdout)
    losses = [float(word) for word in shown[1].split()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1
    assert int(shown[2]) == 4 * 6 - 2


def test_the_recipe_for_8b_is_built_and_checked(monkeypatch):
    from megatron.bridge.models.llama.llama_provider import Llama31ModelProvider8B
    from megatron.bridge.training.config import runtime_config_update

    from nemo_fp8 import preset

    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    make = runpy.run_path(str(ROOT / "recipes/bridge_llama31_8b.py"))["llama31_8b"]
    for name in ("bf16_with_fp8_blockwise_mixed", "bf16_with_mxfp8_mixed"):
        config = make(Llama31ModelProvider8B(vocab_size=128256), name)
        runtime_config_update(config)
        assert config.data_parallel_size == 4
        assert config.mixed_precision.contract == preset(name)
        assert config.model.fp8_recipe == preset(name).scaling
        assert config.ddp.fp8_param_gather == preset(name).fp8_param


def test_the_tiny_recipe_trains(tmp_path):
    words = [sys.executable, ROOT / "recipes/bridge_tiny.py", "bf16_with_mxfp8_mixed", "--steps", "2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert len(re.findall(r"iteration .* lm loss: \d", done.stdout + done.stderr)) == 2


def test_a_start_that_is_wrong_is_refused_and_one_that_is_poor_is_logged(tmp_path, monkeypatch):
    from support.bridge.tiny import config, provider

    from nemo_fp8 import PrecisionError, bridge
    from nemo_fp8.bridge import start

    logged = []  # what a test before this one trained may have silenced logging
    monkeypatch.setattr(start.log, "warning", lambda *words: logged.append(words))
    made = config(provider(), bridge.bridge_config("bf16_with_mxfp8_mixed"))
    bridge.require_start(made)
    assert not logged
    made.checkpoint.pretrained_checkpoint = "somewhere"
    bridge.require_start(made)
    assert "FP8" in str(logged)
    made.tokenizer.tokenizer_type, made.tokenizer.tokenizer_model = "HuggingFaceTokenizer", str(tmp_path)
    with pytest.raises(PrecisionError, match="tokenizer"):
        bridge.require_start(made)


def test_the_report_to_bridge_says_what_is_so(tmp_path):
    (script,) = _python(ROOT / "docs/upstream/bridge_fp8_load.md")
    start = "from nemo_fp8.bridge.patches import replace_for_bridge\n\nreplace_for_bridge()\n"
    for precision, share in (("bf16_with_mxfp8_mixed", "0%"), ("bf16_mixed", "100%")):
        (tmp_path / "run.py").write_text(start + script.replace("bf16_with_mxfp8_mixed", precision))
        done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert f": {share} of its master weights are the checkpoint's" in done.stdout, done.stderr[-4000:]
