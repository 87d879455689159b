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


def _avx2_and_then_avx512(before, cache):
    """Run the report's script kept to AVX2, and as this CPU can, with one cache; return the second run."""
    (script,) = re.findall(r"^```python rollout\n(.*?)^```", REPORT.read_text(), re.M | re.S)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    for kept in ({"ATEN_CPU_CAPABILITY": "avx2"}, {}):
        done = subprocess.run(
            [sys.executable, "-c", before + script], env=environment | kept, capture_output=True, text=True
        )
        assert not kept or done.returncode == 0, done.stderr
    return done


@wide
@pytest.mark.long
def test_an_engine_does_not_take_code_for_narrower_vectors(tmp_path):
    done = _avx2_and_then_avx512(OURS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["AVX512", "0"]


@wide
@pytest.mark.long
def test_the_report_on_compiled_code_says_what_is_so(tmp_path):
    """Drop it, and nemo_fp8.rollout.engine.compiled, when torch has mended it."""
    assert _avx2_and_then_avx512("", tmp_path).returncode < 0


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
