"""GitHub runs what `.ci/run` runs, with actions that nobody can change behind our back."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
PINNED = re.compile(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$")


@pytest.fixture(scope="module")
def job():
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    return job


def test_the_workflow_runs_the_same_two_commands(job):
    lines = (ROOT / ".ci/run").read_text().splitlines()
    commands = [line for line in lines if line.startswith("make ")]
    assert [step["run"] for step in job["steps"] if "run" in step] == commands == ["make check", "make test"]
    assert job["runs-on"] == "ubuntu-latest"


def test_every_action_is_pinned_by_its_digest():
    used = [line.strip().removeprefix("- ") for line in WORKFLOW.read_text().splitlines() if "uses:" in line]
    assert len(used) == 2
    assert [line for line in used if not PINNED.match(line)] == []
    assert not PINNED.match("uses: actions/checkout@v4")
    assert not PINNED.match("uses: actions/checkout@11bd719  # v4.2.2")


def test_what_pip_fetches_is_kept_from_run_to_run(job):
    (python,) = (step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@"))
    assert python["cache"] == "pip"
    kept = {str(path.relative_to(ROOT)) for path in ROOT.glob(python["cache-dependency-path"])}
    assert kept == {f"constraints/{name}.txt" for name in ("training", "bridge", "rollout", "site", "peers")}


def test_it_may_only_read(job):
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {"contents": "read"}
    assert "permissions" not in job


def test_no_two_test_files_of_a_half_share_a_name():
    """pytest imports the files of one run by their names alone, and says so only after all others have run."""
    tests = ROOT / "tests"
    halves = {"rollout": tests.glob("rollout/**/test_*.py"), "bridge": tests.glob("bridge/**/test_*.py")}
    every = tests.glob("**/test_*.py")
    halves["training"] = (path for path in every if path.relative_to(tests).parts[0] not in halves)
    for half, files in halves.items():
        names = [path.name for path in files]
        assert len(names) > 5, half
        assert [name for name in sorted(set(names)) if names.count(name) > 1] == [], half
