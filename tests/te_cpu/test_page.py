"""The page's snippet, as it stands there, in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/te_cpu.md"


def test_the_page_is_true():
    (snippet,) = re.findall(r"^```python te\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", f"{snippet}\nassert layer.layernorm_mlp.fc1_weight.grad.isfinite().all()"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
