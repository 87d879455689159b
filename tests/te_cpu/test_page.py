"""The page's snippets, as they stand there, each in a process that starts as one of an environment that has the
package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8.te_cpu import launch

PAGE = Path(__file__).parents[2] / "docs/te_cpu.md"
SNIPPETS = re.findall(r"^```python te\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["TransformerEngine", "Accelerate", "Lightning"])
def test_the_page_is_true(snippet, tmp_path):
    assert len(snippet.splitlines()) <= 13
    environment = os.environ | launch.variables_for(None, os.environ)
    done = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
