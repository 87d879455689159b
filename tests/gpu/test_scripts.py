"""Every GPU script from end to end on the CPU, on small shapes, and the page that is made of their records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long  # each imports torch, and training Megatron too: a minute together

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "conformance": [],
    "kernels": [],
    "refit": [],
    "train": ["llama", "--only", "bf16;tensorwise;bf16 in parts;tensorwise, emulated"],
}
# What a CPU cannot do, and says so.
LEFT_OUT = {"e5m2 in tiles"}


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "gpu" / f"{script}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "2"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run(script, folder):
    done = python(script, *SCRIPTS[script], "--cpu", "--out", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((folder / ("train_llama.json" if script == "train" else f"{script}.json")).read_text())
    assert record["about"]["dry_run"] is True
    assert {name for name, part in record["parts"].items() if "result" not in part} <= LEFT_OUT
    assert "| " in done.stdout  # a table at the end


def test_golden_vectors_are_recorded_again_to_the_bit(folder):
    sys.path.insert(0, str(ROOT / "tests" / "golden"))
    from golden import FOLDER, Golden

    again, kept = (Golden.load(path / "te_python_reference.safetensors") for path in (folder, FOLDER))
    assert again.cases == kept.cases
    assert again.tensors.keys() == kept.tensors.keys()
    for name, t in kept.tensors.items():
        assert t.shape == again.tensors[name].shape
        assert torch.equal(t.reshape(-1).view(torch.uint8), again.tensors[name].reshape(-1).view(torch.uint8)), name


def test_dry_runs_are_not_published(folder):
    done = python("report", "--from", folder)
    assert done.returncode != 0
    assert "dry run" in done.stderr


def test_the_page_of_dry_runs_says_that_it_is_one(folder, tmp_path):
    done = python("report", "--from", folder, "--docs", tmp_path, "--golden", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpu.md").read_text()
    assert page.count("A DRY RUN") == len(SCRIPTS)
    assert "train_moe` | the same for two layers of Qwen3-30B-A3B | **missing**" in page
    assert (tmp_path / "gpu_train_llama.svg").read_text().startswith("<svg")


def test_the_page_is_up_to_date():
    done = python("report", "--check")
    assert done.returncode == 0, done.stderr
