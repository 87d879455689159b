"""The README's snippet of a rollout, as it stands there: an engine from a folder named ``model``, and a push of other
weights."""

import os
import re
from pathlib import Path

from safetensors.torch import load_file
from support.rollout import engines

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_is_true(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(checkpoint("llama"), "model")
    names = {"trainer_weights": load_file(checkpoint("llama", 1) / "model.safetensors")}
    (snippet,) = re.findall(r"^```python rollout\n(.*?)^```", README.read_text(), re.M | re.S)
    try:
        exec(compile(snippet, "README.md", "exec"), names)
        assert {t.name for t in names["receipt"].tensors} == set(names["trainer_weights"])
    finally:
        engines.stop(names["llm"])
