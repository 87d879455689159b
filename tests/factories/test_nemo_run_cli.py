"""On nemo-run's own command line our factories resolve, with nothing imported by the user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEMO = str(Path(sys.executable).with_name("nemo"))


def _dryrun(*overrides):
    command = [NEMO, "llm", "pretrain", "--factory", "llama3_8b", "--dryrun", "--yes", *overrides]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(
            ["trainer.plugins=bf16_with_fp8_blockwise_mixed"],
            ["fp8_recipe='blockwise'", "fp8_param_gather=False"],
            marks=pytest.mark.long,
        ),
        (
            ["trainer.plugins=bf16_with_fp8_mixed(fp8_margin=1)", "trainer.plugins.fp8_amax_history_len=32"],
            ["fp8_margin=1", "fp8_amax_history_len=32", "fp8_recipe='delayed'"],
        ),
    ],
)
def test_factories_resolve(overrides, expected):
    done = _dryrun(*overrides)
    assert done.returncode == 0, done.stderr
    assert "MixedPrecision(" in done.stdout
    for words in expected:
        assert words in done.stdout


def test_a_wrong_argument_is_told_with_the_right_one():
    done = _dryrun("trainer.plugins=bf16_with_fp8_mixed(fp8_recipe=current)")
    assert done.returncode != 0
    assert "tensorwise" in done.stdout + done.stderr
