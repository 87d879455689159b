"""The switch refuses what cannot work, with the remedy, and leaves alone who does not ask."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8.te_cpu import switch


def _run(code, path=None):
    environment = os.environ | ({} if path is None else {"PYTHONPATH": path})
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_importing_nemo_fp8_changes_nothing():
    done = _run("import torch, nemo_fp8, nemo_fp8.numerics, nemo_fp8.te_cpu; assert not torch.empty(1).is_cuda; "
                "import sys; "
                "assert 'transformer_engine_torch' not in sys.modules")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_other_processes_do_not_inherit_tes_switch_for_builds():
    done = _run("import os; from nemo_fp8 import te_cpu; te_cpu.install(); import transformer_engine.pytorch; "
                "assert 'NVTE_PROJECT_BUILDING' not in os.environ")  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("te_cpu.install(80)", "No GPU of that architecture can be stood for"),
        (
            "import types; sys.modules['transformer_engine'] = types.ModuleType('x'); te_cpu.install()",
            "after TransformerEngine was imported",
        ),
        ("import torch; torch.cuda.is_available = lambda: True; te_cpu.install()", "on a machine with a GPU"),
    ],
)
def test_what_cannot_work_is_refused(code, words):
    done = _run(f"import sys; from nemo_fp8 import te_cpu; {code}")
    assert done.returncode == 1
    assert words in done.stderr
    assert "remedy" in done.stderr


@pytest.mark.parametrize(
    ("variables", "arch"),
    [
        ({}, 100),
        ({"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, 90),
        ({"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}, 100),
        ({"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "NEMO_FP8_TE_CPU": "100"}, 100),
    ],
)
def test_who_asks_for_fp32_scales_of_blocks_has_hopper(variables, arch):
    """Unless an architecture is named."""
    assert switch.asked_for(variables) == arch


def test_without_transformer_engine_it_says_what_to_install(tmp_path):
    elsewhere = """
import importlib.metadata as metadata
there = metadata.version
def version(name):
    if name == "transformer-engine":
        raise metadata.PackageNotFoundError(name)
    return there(name)
metadata.version = version
"""
    done = _run(f"{elsewhere}\nfrom nemo_fp8 import te_cpu; te_cpu.install()", str(tmp_path))
    assert "transformer-engine==2.20.2" in done.stderr
    assert "pip install --no-deps" in done.stderr


def test_the_versions_that_it_takes_are_those_of_the_page():
    from nemo_fp8.preflight.support import TE_ON_CPU

    page = (Path(__file__).parents[2] / "docs/te_versions.md").read_text()
    assert set(TE_ON_CPU) == set(re.findall(r"^\| ([\d.]+) \| \*\*yes\*\* \|", page, re.M))


def test_a_version_that_does_not_fit_is_refused(tmp_path):
    """Or tried, where it is named."""
    folder = tmp_path / "transformer_engine-2.18.0.dist-info"
    folder.mkdir()
    folder.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.18.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = _run("from nemo_fp8 import te_cpu; te_cpu.install()", path)
    assert "2.18.0 is installed" in done.stderr
    assert "remedy" in done.stderr
    done = _run("from nemo_fp8 import te_cpu; te_cpu.install(versions=['2.18.0']); assert te_cpu.is_installed()", path)
    assert done.returncode == 0, done.stderr


def test_compiled_functions_run_uncompiled():
    """Megatron's fusions are torch.compile's; a graph would be taken from a cache that other processors have written
    to."""
    never = "def never(graph, inputs): raise AssertionError('compiled')"
    code = f"from nemo_fp8 import te_cpu; te_cpu.install()\nimport torch\n{never}\n"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}print(torch.compile(lambda x: x.cuda() + 1, backend=never)(torch.ones(2)).tolist())",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[2.0, 2.0]\n", done.stderr


def test_a_process_ends_without_a_word():
    """Whoever still holds the switch then, as a plugin of pytest's may: threading is taken down after torch."""
    code = "import threading; from nemo_fp8.te_cpu import switch; switch.install(); threading.held = switch"
    on_avx2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # where products of BF16 are replaced
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=os.environ | on_avx2, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
