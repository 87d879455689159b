"""The example of a rollout runs as it stands: an engine answers otherwise after a push, which is read back."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/rollout_push.py"


def test_the_example_pushes_and_the_engine_answers_otherwise(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    before, after = (re.search(rf"{when} the push: +(\[.*\])", done.stdout)[1] for when in ("before", "after"))
    assert before != after
    assert "verified      21 of 21 read back" in done.stdout
