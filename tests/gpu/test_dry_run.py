"""Every part of ``make gpu`` from end to end without a GPU, on small shapes: TransformerEngine's own Python over
``nemo_fp8.te_cpu``."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import parts

pytestmark = pytest.mark.long  # each measure is a process that imports torch and TransformerEngine: minutes together

ROOT = Path(__file__).parents[2]
CASES = {
    "llama": ("bf16", "delayed", "blockwise fp32", "tensorwise, FP8 weights"),
    "moe": ("bf16", "blockwise pow2", "mxfp8, FP8 weights"),
}


# What a Python with TransformerEngine and Megatron need not have.
ABSENT = ("nemo", "nemo_run", "lightning", "fiddle", "vllm", "ray", "matplotlib", "typer", "rich")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    hidden = tmp_path_factory.mktemp("absent")
    for name in ABSENT:
        (hidden / f"{name}.py").write_text("raise ImportError(f'{__name__} is absent in this test')")
    return f"{ROOT}{os.pathsep}{hidden}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", parts.PARTS)
def test_dry_run(part, folder, path):
    names = (
        [f"{shape}: {case}" for shape, cases in CASES.items() for case in cases]
        if part == "train"
        else parts.PARTS[part].measures
    )
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.gpu",
        part,
        "--cpu",
        "--out",
        str(folder),
        "--only",
        ";".join(names),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    measures = json.loads((folder / f"gpu_{part}.json").read_text())["measures"]
    assert set(names) == measures.keys()
    assert all("result" in measure for measure in measures.values())


def results(folder: Path, part: str) -> dict:
    file = folder / f"gpu_{part}.json"
    if not file.exists():
        pytest.skip(f"the dry run of {part} left no record")
    return {name: measure["result"] for name, measure in json.loads(file.read_text())["measures"].items()}


def test_every_code_and_scale_is_ours(folder):
    found = results(folder, "conformance")
    for name in parts.VECTORS:
        golden = found[f"golden {name}"]
        assert golden["cases"] > 0
        assert golden["compared"]["cpu"]["codes"] > 0
        assert golden["different"] == {}
    assert all("TE's MXFP8 takes multiples of 32" in why for why in found["golden mxfp8"]["left_out"].values())
    compared = [r for r in found["TE beside us"].values() if "codes" in r]
    assert len(compared) == 18
    assert sum(r["codes_different"] + r["scales_different"] for r in compared) == 0
    own = found["our kernels"]
    assert own["codes"] > 0
    assert own["bytes_different"] == own["counts_different"] == own["values_different"] == 0


def test_every_way_was_timed(folder):
    for part in ("kernels", "refit"):
        for name, found in results(folder, part).items():
            assert all(way["ms"] > 0 for way in found["ways"].values()), name
            assert found.get("left_out", {}) == {}
    for name, ways in (("8B", 5), ("8B in NVFP4", 2)):
        prints = results(folder, "refit")[name]["fingerprints"]
        assert len(prints) == ways
        assert len(set(prints.values())) == 1


def test_every_case_begins_with_the_same_weights_and_fp8_is_no_name_only(folder):
    found = results(folder, "train")
    for shape, names in CASES.items():
        cases = [found[f"{shape}: {name}"] for name in names]
        assert [case["engine"] for case in cases] == [None, *["emulated"] * (len(cases) - 1)]
        assert [case["fp8_weights"] > 0 for case in cases] == ["FP8 weights" in name for name in names]
        for one, other in itertools.combinations(cases, 2):
            assert all(map(math.isfinite, one["losses"]))
            assert one["losses"] != other["losses"]
            assert one["losses"] == pytest.approx(other["losses"], rel=0.01)


def test_the_page_of_dry_runs_says_that_it_is_one(folder):
    page = (folder / "gpu.md").read_text()
    assert page.count("A DRY RUN") == len(parts.PARTS)
    (row,) = [line for line in page.splitlines() if line.startswith("| `tests/golden` |")]
    assert "**missing**" not in row


@pytest.mark.timeout(1800)
def test_files_in_the_folder_are_held_to_without_a_change_of_code(folder, tmp_path):
    """What a GPU will bring: the same files with the source that TE's kernels will have."""
    from golden import FOLDER, Golden

    for name in ("golden.py", "test_golden.py", "te_python_reference.safetensors"):
        shutil.copyfile(FOLDER / name, tmp_path / name)
    for name in parts.VECTORS:
        golden = Golden.load(folder / f"{name}.safetensors")
        golden.about["source"] = "TransformerEngine, its CUDA kernels on nothing: a trial"
        golden.save(tmp_path / f"{name}.safetensors")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]

    def pytest_there() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)

    done = pytest_there()
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout  # the test that asks for TE's kernels found them
    changed = Golden.load(tmp_path / "delayed.safetensors")
    key = next(name for name in changed.tensors if name.endswith(".codes"))
    changed.tensors[key][0, 0] ^= 1
    changed.save(tmp_path / "delayed.safetensors")
    done = pytest_there()
    assert done.returncode == 1
    assert f"test_numerics_equal_the_recording[delayed:{key.partition('/')[0]}]" in done.stdout
