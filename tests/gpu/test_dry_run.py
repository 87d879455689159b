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


# (measure, way) of TransformerEngine's that need blocks with FP32 scales, which it refuses on Blackwell.
ON_HOPPER_ALONE = {
    ("casts", "weight 128x128, FP32 scales, by TE"),
    ("casts", "activation 1x128, FP32 scales, by TE"),
    ("linear", "TE blockwise fp32"),
    ("layer", "TE blockwise fp32"),
    ("8B", "TransformerEngine"),
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


def dry_run(folder: Path, path: str, choice: list[str], names: tuple[str, ...], **variables: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *choice, "--cpu", "--out", str(folder)]
    done = subprocess.run(
        [*command, "--only", ";".join(names)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path} | variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = set()
    for part in choice:
        measures = json.loads((folder / f"gpu_{part}.json").read_text())["measures"]
        assert all("result" in measure for measure in measures.values())
        found |= measures.keys()
    assert set(names) == found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", parts.PARTS)
def test_dry_run(part, folder, path):
    cases = tuple(f"{shape}: {case}" for shape, cases in CASES.items() for case in cases)
    dry_run(folder, path, [part], cases if part == "train" else parts.PARTS[part].measures)


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
    assert equal_beside_us(found) == 12
    own = found["our kernels"]
    assert min(own["compared"][what] for what in ("codes", "scales", "statistics", "values")) > 0
    assert set(own["different"].values()) == {0}
    assert own["first"] == ""


def equal_beside_us(found: dict) -> int:
    """How many operands TE and we quantized beside one another, all to the same bits; the others have a reason."""
    compared = [r for r in found["TE beside us"].values() if "left_out" not in r]
    assert all(r["compared"]["codes"] > 0 and r["compared"]["scales"] > 0 for r in compared)
    assert all(set(r["different"].values()) == {0} for r in compared)
    return len(compared)


def test_every_way_was_timed(folder):
    failed = timed(folder)
    assert failed.keys() == ON_HOPPER_ALONE
    assert all("FP32 scales of blocks on Blackwell" in why for why in failed.values())
    for name, ways in (("8B", 4), ("8B in NVFP4", 2)):
        assert_one_fingerprint(folder, name, ways)


def timed(folder: Path) -> dict[tuple[str, str], str]:
    """The ways that have an error, measure and name -> error; each other way has a time."""
    failed = {}
    for part in ("kernels", "refit"):
        for name, found in results(folder, part).items():
            failed |= {(name, way): times["error"] for way, times in found["ways"].items() if "error" in times}
            assert all(times["ms"] > 0 for times in found["ways"].values() if "error" not in times), name
            assert found.get("left_out", {}) == {}
    return failed


def assert_one_fingerprint(folder: Path, name: str, ways: int) -> None:
    prints = results(folder, "refit")[name]["fingerprints"]
    assert len(prints) == ways
    assert len(set(prints.values())) == 1


@pytest.mark.timeout(1800)
def test_what_hopper_alone_has(folder, path, tmp_path):
    names = ("TE beside us", "casts", "linear", "layer", "8B")
    dry_run(tmp_path, path, ["conformance", "kernels", "refit"], names, NEMO_FP8_TE_CPU="90")
    failed = timed(tmp_path)
    assert not failed.keys() & ON_HOPPER_ALONE
    assert {name for name, _ in failed} == {"casts", "linear", "layer"}
    assert all("mx" in way.lower() for _, way in failed)
    assert equal_beside_us(results(tmp_path, "conformance")) == 16
    assert_one_fingerprint(tmp_path, "8B", 5)


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
