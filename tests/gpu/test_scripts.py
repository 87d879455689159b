"""Every GPU script from end to end on the CPU, on small shapes, and the page that is made of their records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long  # each imports torch, and training Megatron too: a minute together

ROOT = Path(__file__).parents[2]
# record -> the script and its arguments
CASES = ["--only", "bf16;tensorwise;bf16 in parts;tensorwise, emulated"]
SCRIPTS = {
    "conformance": ["conformance"],
    "kernels": ["kernels"],
    "refit": ["refit"],
    "train_llama": ["train", "llama", *CASES],
    "train_moe": ["train", "moe", *CASES],
}
# What a CPU cannot do, and says so.
LEFT_OUT = {"e5m2 in tiles"}


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "gpu" / f"{script}.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "2"}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize("name", SCRIPTS)
def test_dry_run(name, folder):
    done = python(*SCRIPTS[name], "--cpu", "--out", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((folder / f"{name}.json").read_text())
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


def test_files_in_the_folder_are_held_to_without_a_change_of_code(folder, tmp_path):
    """What a GPU will bring: the same file under the names and with the source that TE's kernels will have."""
    sys.path.insert(0, str(ROOT / "tests" / "golden"))
    from golden import FOLDER, Golden

    for script in ("golden.py", "test_golden.py", "te_python_reference.safetensors"):
        shutil.copyfile(FOLDER / script, tmp_path / script)
    for name in ("tensorwise", "blockwise_fp32", "blockwise_pow2", "delayed"):
        golden = Golden.load(folder / "te_python_reference.safetensors")
        golden.about["source"] = "TransformerEngine, its CUDA kernels on nothing: a trial"
        golden.save(tmp_path / f"{name}.safetensors")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]

    def pytest_there() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)

    done = pytest_there()
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout  # the test that asks for TE's kernels found them
    changed = Golden.load(tmp_path / "delayed.safetensors")
    case = next(case for case in changed.cases if case["kind"] == "quantize")
    changed.tensors[f"{case['name']}/codes"].view(torch.uint8)[0, 0] ^= 1
    changed.save(tmp_path / "delayed.safetensors")
    done = pytest_there()
    assert done.returncode == 1
    assert f"test_numerics_equal_the_recording[delayed:{case['name']}]" in done.stdout


def test_dry_runs_are_not_published(folder):
    done = python("report", "--from", folder)
    assert done.returncode != 0
    assert "dry run" in done.stderr


def test_the_page_of_dry_runs_says_that_it_is_one(folder, tmp_path):
    done = python("report", "--from", folder, "--docs", tmp_path, "--golden", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpu.md").read_text()
    assert page.count("A DRY RUN") == len(SCRIPTS)
    missing = [line for line in page.splitlines() if "**missing**" in line]
    assert [line.split(" | ")[0] for line in missing] == ["| golden vectors of TE's CUDA kernels"]
    for name in ("kernels", "train_llama", "train_moe"):
        assert (tmp_path / f"gpu_{name}.svg").read_text().startswith("<svg")


def test_the_page_is_up_to_date():
    done = python("report", "--check")
    assert done.returncode == 0, done.stderr
