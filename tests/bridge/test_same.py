"""NeMo 2.7.3 on megatron-core 0.15.3 and Megatron-Bridge 0.3.1 on 0.16.1 train the same model on the same data."""

import json
import os
import subprocess
import sys

import pytest
from support import ROOT, TESTS

NEMO = ROOT / ".venv/bin/python"


def _losses(python, stack, precision):
    env = os.environ | {"PYTHONPATH": f"{TESTS}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    words = ["-m", "support.bridge.same", stack, precision, "5"]
    done = subprocess.run([python, *words], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_the_same_losses_to_the_bit_in_bf16():
    assert _losses(NEMO, "nemo", "bf16_mixed") == _losses(sys.executable, "bridge", "bf16_mixed")
