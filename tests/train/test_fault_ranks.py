"""Ranks that die or stop in the middle of a step: the others end with an error, and the run goes on from its last
checkpoint."""

import os
import re
import signal
import time

import pytest
from support.train import harness
from support.train.faulty import SMALL, at_step, fails, ours
from support.train.harness import train_tiny


def _signal_in_step(trainer, number):
    ours(trainer, None)
    if os.environ["RANK"] == "1":
        at_step(trainer, 5, lambda output: os.kill(os.getpid(), number))


def kill_in_step(trainer, tiny):
    _signal_in_step(trainer, signal.SIGKILL)


def stop_in_step(trainer, tiny):
    _signal_in_step(trainer, signal.SIGSTOP)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_a_killed_rank_ends_the_others(layout):
    log = fails("bf16_mixed", before="train.test_fault_ranks:kill_in_step", ranks=2, **layout)
    assert "exit code -9" in log
    assert "others were still running" not in log
    assert "Step 5: another rank ended" in log
    assert "There is no complete checkpoint to go on from." in log


def test_after_a_killed_rank_the_run_goes_on_from_its_last_checkpoint(tmp_path):
    whole = train_tiny("bf16_mixed", ranks=2, **SMALL).losses
    log = fails("bf16_mixed", folder=str(tmp_path), before="train.test_fault_ranks:kill_in_step", ranks=2)
    assert "others were still running" not in log
    assert re.search(r"The run goes on from \S+step=3-last \(after 4 steps\)", log)
    after = train_tiny("bf16_mixed", folder=str(tmp_path), before="support.train.faulty:ours", ranks=2, **SMALL).losses
    assert after == whole[4:]


def test_a_rank_that_stops_answering_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(harness, "GRACE", 0.5)  # nothing but the harness ends a rank that is stopped
    start = time.monotonic()
    log = fails("bf16_mixed", ranks=2, before="train.test_fault_ranks:stop_in_step", env={"TIMEOUT": "2"})
    assert time.monotonic() - start < 60, "torch would wait for 30 minutes"
    assert "Step 5: another rank ended, or has not answered in time" in log


# ---------------------------------------------------------------------- as part of a recipe


def test_nemo_records_the_callback_with_the_run_and_reads_it_back(tmp_path):
    import fiddle as fdl
    import nemo_run as run
    from nemo import lightning as nl
    from nemo.lightning import io

    from nemo_fp8.train.faults import Faults

    config = run.Config(
        nl.Trainer, accelerator="cpu", devices=1, logger=False, callbacks=[run.Config(Faults, timeout=600)]
    )
    fdl.build(config).io_dump(tmp_path, yaml_attrs=[])
    callback = io.load(tmp_path).callbacks[0]
    assert (type(callback), callback.timeout, callback.patience) == (Faults, 600, 10)
