"""Code that torch compiled for one CPU is kept from another."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config

from nemo_fp8.rollout import plugin
from nemo_fp8.rollout.engine import compiled

REPORT = Path(__file__).parents[2] / "docs/upstream/torch_compile_cache.md"
OURS = "from nemo_fp8.rollout.plugin import register\nregister()\n"
wide = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="This process has no wider vectors than AVX2's."
)


AVX2, AVX512 = {"ATEN_CPU_CAPABILITY": "avx2"}, {}
ORDERS = pytest.mark.parametrize("order", [(AVX2, AVX512), (AVX512, AVX2)], ids=["wider", "narrower"])


def _second(before, order, cache):
    """Run the report's script twice with one cache, kept to AVX2 or as this CPU can; return the second run."""
    (script,) = re.findall(r"^```python rollout\n(.*?)^```", REPORT.read_text(), re.M | re.S)
    runs = []
    for kept in order:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | kept
        runs.append(
            subprocess.run([sys.executable, "-c", before + script], env=environment, capture_output=True, text=True)
        )
    assert runs[0].stdout.endswith(" 0 right\n"), runs[0].stderr
    return runs[1]


@wide
@pytest.mark.long
@ORDERS
def test_a_process_does_not_take_code_for_vectors_of_another_width(tmp_path, order):
    done = _second(OURS, order, tmp_path)
    assert done.stdout.endswith(" 0 right\n"), done.stderr


@wide
@pytest.mark.long
@ORDERS
def test_the_report_on_compiled_code_says_what_is_so(tmp_path, order):
    """Drop it, and nemo_fp8.rollout.engine.compiled, when torch has mended it."""
    done = _second("", order, tmp_path)
    assert done.stdout == "AVX2 1 WRONG\n" if order[1] is AVX2 else done.returncode < 0


@pytest.mark.parametrize(("capability", "bits"), [("AVX2", 256), ("AVX512", 512), ("DEFAULT", None)])
def test_the_width_that_is_named_is_that_of_the_cpu(monkeypatch, capability, bits):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with config.patch({"cpp.simdlen": None}):
        compiled.register()
        assert config.cpp.simdlen == bits
    with config.patch({"cpp.simdlen": 128}):  # somebody's choice stays
        compiled.register()
        assert config.cpp.simdlen == 128


def test_the_plugin_names_it():
    with config.patch({"cpp.simdlen": None}):
        plugin.register()
        assert config.cpp.simdlen == compiled.BITS.get(torch.backends.cpu.get_cpu_capability())


def test_torch_picks_what_it_picks_by_itself():
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with config.patch({"cpp.simdlen": None}):
        by_itself = str(pick_vec_isa())
        compiled.register()
        assert str(pick_vec_isa()) == by_itself
