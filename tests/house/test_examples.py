"""Every example runs as it stands, and shows what its docstring says. rollout_push.py and bridge.py run in other
environments (tests/rollout, tests/bridge)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {
    "nemo_recipe": r"fp8_recipe +blockwise\n(.*\n)*the loss after ten steps: [0-5]\.\d{3}$",
    "pytorch": r"bf16_mixed +loss 0\.0\d+\nbf16_with_fp8_mixed +loss 0\.0\d+\n(.+\n?){2}$",
    "export": r"21 weights in FP8(.*\n)*.* 0 wrong: holds is True",
    "mismatch": r"the gate is calm\n(.*\n)*the gate FIRES\n(.*\n)*.*layers\.1\.mlp\.down_proj\.weight is zeroed",
}


def shown(name, folder):
    """What an example prints, run in this folder."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_there_are_at_most_six_and_every_one_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHOWS, "rollout_push", "bridge"}


@pytest.mark.parametrize("name", SHOWS)
def test_an_example_shows_what_it_says(name, tmp_path):
    assert re.search(SHOWS[name], shown(name, tmp_path).strip())
