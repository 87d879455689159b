"""What holds the GPU scripts together: a part that fails takes nothing with it, dry runs are never published, three
calls fit a lease."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import common  # noqa: E402 - lies beside the scripts
import records  # noqa: E402
import supervise  # noqa: E402


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--cpu", "--out", str(tmp_path), "--limit", "60"])
    return common.Run("kernels", "A description.\n\nMore of it.")


def parts(run) -> dict:
    return json.loads(run.file.read_text())["parts"]


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(run):
    assert run.part("bad", lambda: 1 / 0) is None
    assert run.part("good", lambda: {"value": float("nan")}) is not None
    assert parts(run)["bad"]["error"].startswith("ZeroDivisionError")
    assert parts(run)["good"]["result"] == {"value": "nan"}
    with pytest.raises(SystemExit) as ended:
        run.finish(lambda record: "a table")
    assert ended.value.code == 1


def test_a_part_that_does_not_apply_is_no_failure(run):
    def absent():
        raise common.Skipped("there is none")

    run.part("absent", absent)
    assert parts(run)["absent"]["skipped"] == "there is none"
    with pytest.raises(SystemExit) as ended:
        run.finish(lambda record: "a table")
    assert ended.value.code == 0


def test_nothing_begins_after_the_limit(run):
    run.options.limit = -1.0
    assert run.part("late", lambda: pytest.fail("it began")) is None
    assert "not begun" in parts(run)["late"]["skipped"]


def test_what_has_an_outcome_is_left_out_when_a_script_goes_on(run, monkeypatch):
    run.part("done", lambda: {"value": 1})
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    again = common.Run("kernels", "A description.")
    assert again.part("done", lambda: pytest.fail("it ran again")) is None
    assert again.part("next", lambda: {"value": 2}) == {"value": 2}
    assert {name: part["result"]["value"] for name, part in parts(again).items()} == {"done": 1, "next": 2}


# A script of four parts in the supervisor's terms: one good, one that dies, one that hangs, one after all that.
SCRIPT = """
import os, pathlib, sys, time
sys.path.insert(0, {folder!r})
import records
file = pathlib.Path({file!r})
def part(name, budget, do):
    record = records.read(file)
    if name in record["parts"]:
        return
    record["parts"][name] = {{records.RUNNING: {{"since": time.time(), "budget": budget}}}}
    records.write(file, record)
    record["parts"][name] = {{"result": do()}}
    records.write(file, record)
part("good", 30, lambda: 1)
part("dies", 30, lambda: os._exit(139))
part("hangs", 0.1, lambda: time.sleep(60))
if "broken" not in records.read(file)["parts"]:
    part("broken", 30, lambda: 2)
    sys.exit(records.AGAIN)
part("after", 30, lambda: 3)
"""


def test_a_part_that_dies_or_hangs_takes_nothing_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "GRACE", 0.0)
    monkeypatch.setattr(supervise, "LOOK", 0.05)
    script, file = tmp_path / "script.py", tmp_path / "script.json"
    script.write_text(SCRIPT.format(folder=str(ROOT / "scripts/gpu"), file=str(file)))
    assert supervise.supervise(script, [], file, 200) == 0
    found = records.read(file)["parts"]
    assert [found[name].get("result") for name in ("good", "broken", "after")] == [1, 2, 3]
    assert found["dies"]["error"] == "the process ended with 139"
    assert found["hangs"]["error"] == "ended after the 0.1 s that it may take"


def test_when_the_time_is_over_all_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "LOOK", 0.05)
    script, file = tmp_path / "script.py", tmp_path / "script.json"
    script.write_text(
        SCRIPT.format(folder=str(ROOT / "scripts/gpu"), file=str(file))
        .replace("0.1", "99")
        .replace("os._exit(139)", "0")
    )
    ended = "ended: the time for this script was over"
    assert supervise.supervise(script, [], file, 3) == 1
    found = records.read(file)["parts"]
    assert "after" not in found
    assert all(part.get("error", ended) == ended and records.RUNNING not in part for part in found.values())


def test_the_record_says_where_its_numbers_come_from(run):
    run.part("good", dict)
    about = json.loads(run.file.read_text())["about"]
    assert about["dry_run"] is True
    assert about["versions"]["nemo-fp8"]
    assert "--cpu" in about["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", about["date"])


def test_a_way_that_fails_leaves_the_race(run):
    def bad():
        raise RuntimeError("no such kernel")

    found = run.race({"good": lambda: None, "bad": bad}, 1.0)
    assert found["bad"] == {"error": "RuntimeError: no such kernel"}
    assert found["good"]["ms"] >= 0


def test_tables():
    text = common.table(["way", "ms"], [["a\nb", "1,234.5"], ["c", None]])
    assert text.splitlines() == ["| way | ms |", "|---|---:|", "| a b | 1,234.5 |", "| c |  |"]
    assert [common.number(x) for x in (1234.5, 0.01234, 0, None)] == ["1,234", "0.0123", "0", ""]


def test_every_call_fits_the_lease():
    """What a call may take at the very most, of its 590 seconds, with a minute to install and a half to copy."""
    calls = re.findall(r"^  (bits|llama|moe)\) setup;(.*);;", (ROOT / "scripts/gpu/run.sh").read_text(), re.M)
    assert [name for name, _ in calls] == ["bits", "llama", "moe"]
    for _, commands in calls:
        most = [(int(most), int(limit)) for most, limit in re.findall(r"(?:supervised|train) (\d+) (\d+) ", commands)]
        assert most
        assert sum(seconds for seconds, _ in most) <= 540
        assert all(limit < seconds for seconds, limit in most)


def test_the_page_tells_the_calls_and_what_is_missing():
    page = (ROOT / "docs/benchmarks/gpu.md").read_text()
    for name in ("conformance", "kernels", "refit", "train_llama", "train_moe"):
        here = (ROOT / f"docs/benchmarks/gpu_{name}.json").exists()
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert ("**missing**" in row) != here
    for command in re.findall(r"command: (.*?)\s+carry", page):
        assert len(command) < 2000
