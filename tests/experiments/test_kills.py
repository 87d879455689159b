"""Everything that can be killed is killed in one run, and the curve is that of a run that was left alone. Minutes: see
`make test-long`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from cli.test_lifetime import SIGNALS
from support import SUPPORT, TESTS, actors
from support.processes import below, left_of, wait_for

from nemo_fp8.contract.presets import preset
from nemo_fp8.experiments.rl.record import read_record
from nemo_fp8.experiments.rl.settings import GrpoSettings

SCRIPT = SUPPORT / "run_and_kill.py"


def run(settings, **kills):
    """The exit code of a driver, and what was in its processes' shared memory."""
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(
        [sys.executable, SCRIPT, json.dumps(settings.to_dict()), json.dumps(kills)], env=environment
    )
    names = set()
    while process.poll() is None:
        names |= actors.shared_memory()
        time.sleep(0.5)
    return process.returncode, names


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("one_step_off", [False, True])
def test_a_killed_run_has_the_curve_of_one_left_alone(one_step_off, tmp_path):
    alone = GrpoSettings(
        folder=str(tmp_path / "alone"),
        base=str(tmp_path / "base"),
        precision=preset("bf16_with_fp8_blockwise_mixed"),
        digits=4,
        base_steps=60,
        steps=7,
        problems=16,
        validation=64,
        validate_every=7,
        one_step_off=one_step_off,
    )
    killed = replace(alone, folder=str(tmp_path / "killed"))
    assert run(alone)[0] == 0
    # A step apart from each other: what is killed before its step is saved does that step again, and its line with it.
    code, names = run(killed, **{"1": "RolloutEngine", "3": "TrainerRank", "5": "driver"})
    assert code == -9
    code, more = run(killed)
    assert code == 0
    time.sleep(5)  # Ray ends what is left of the driver's session
    assert not (names | more) & set(os.listdir("/dev/shm"))

    rows, others = read_record(alone.record), read_record(killed.record)
    assert [r["step"] for r in rows] == [r["step"] for r in others] == list(range(8))
    assert sum(r["engine_restarts"] for r in others) == 1
    for row, other in zip(rows[:-1], others[:-1], strict=True):
        assert other["reward"] == pytest.approx(row["reward"], abs=0.15)
    assert others[-1]["validation_accuracy"] == pytest.approx(rows[-1]["validation_accuracy"], abs=0.1)


def _has_begun(command, log):
    """Ray is there, and the log says after ten seconds that the command is at work."""
    wait_for(lambda: re.search(r"^bf16-fp8, seed 1: starting, 0:\d\d so far$", log.read_text(), re.M), 120)
    assert actors.processes("raylet", command.pid)


def _is_there(command, log):
    """Ray is there, and a process that becomes an actor."""
    for word in ("raylet", "ray::"):
        wait_for(lambda: actors.processes(word, command.pid), 120)  # noqa: B023, at once


def _computes(command, log):
    """A rank and an engine are there."""
    for actor in ("RolloutEngine", "TrainerRank"):
        wait_for(lambda: actors.processes(f"ray::{actor}", command.pid), 120)  # noqa: B023, at once


@pytest.mark.parametrize(
    ("number", "is_under_way"),
    [
        pytest.param(signal.SIGTERM, _has_begun, id="SIGTERM-early"),
        pytest.param(signal.SIGKILL, _is_there, id="SIGKILL-early"),
        *(pytest.param(n, _computes, id=n.name, marks=pytest.mark.long) for n in SIGNALS),
    ],
)
def test_nothing_is_left_of_a_comparison(tmp_path, number, is_under_way):
    """Ray's own processes, a rank and an engine below it, whatever ends the command."""
    words = ["rl-compare", "--folder", str(tmp_path / "runs"), "--variants", "bf16-fp8", "--seeds", "1", "--steps", "2"]
    log = tmp_path / "log"
    with log.open("w") as file:
        command = subprocess.Popen([sys.executable, "-m", "nemo_fp8.cli", *words], stdout=file, stderr=file)
    found = []
    try:
        is_under_way(command, log)
        found = below(command)
        command.send_signal(number)
        assert command.wait(60) == SIGNALS[number], log.read_text()
        assert left_of(found, 30) == []
        assert "\x1b" not in log.read_text()
    finally:
        command.kill()
        command.wait()
        for left in left_of(found, 0):
            left.kill()
