"""The script of docs/upstream/vllm_reload.md as it stands there, on vLLM alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.mark.long
def test_the_report_on_reloads_says_what_is_so(tmp_path):
    """Drop it, and its words in docs/refit.md, when vLLM has mended it."""
    page = (ROOT / "docs/upstream/vllm_reload.md").read_text()
    script, said = re.search(r"^```python rollout\n(.*?)^```.*?^```text\n(.*?)^```", page, re.M | re.S).groups()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=os.environ | ALONE
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == said
