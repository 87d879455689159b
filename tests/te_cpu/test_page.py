"""The snippets of the page and of a report, as they stand there, each in a process that starts as one of an environment
that has the package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8.te_cpu import launch

DOCS = Path(__file__).parents[2] / "docs"
PAGE, REPORT = DOCS / "te_cpu.md", DOCS / "upstream/te_calibrating.md"
SNIPPETS = re.findall(r"^```python te\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["TransformerEngine", "Accelerate", "Lightning"])
def test_the_page_is_true(snippet, tmp_path):
    assert len(snippet.splitlines()) <= 13
    _run(snippet, tmp_path)


def test_the_report_on_calibration_says_what_is_so(tmp_path):
    """Drop docs/upstream/te_calibrating.md, and its words in docs/te_cpu.md, when TE has mended it."""
    parts = re.search(r"^```python te\n(.*?)^```.*?^```text\n(.*?)^```", REPORT.read_text(), re.M | re.S)
    script, said = parts.groups()
    assert _run(script, tmp_path) == said


def _run(snippet, folder):
    environment = os.environ | launch.variables_for(None, os.environ)
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
