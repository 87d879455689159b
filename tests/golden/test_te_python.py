"""TransformerEngine's own Python makes the same golden vectors again, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden import FOLDER, Golden


@pytest.mark.long
def test_golden_vectors_are_recorded_again_to_the_bit(tmp_path):
    command = [sys.executable, "-W", "ignore", str(FOLDER / "te_python.py"), str(tmp_path / "again.safetensors")]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | {"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    again, kept = (
        Golden.load(path) for path in (tmp_path / "again.safetensors", FOLDER / "te_python_reference.safetensors")
    )
    assert again.cases == kept.cases
    assert again.tensors.keys() == kept.tensors.keys()
    for name, t in kept.tensors.items():
        assert t.shape == again.tensors[name].shape
        assert torch.equal(t.reshape(-1).view(torch.uint8), again.tensors[name].reshape(-1).view(torch.uint8)), name
