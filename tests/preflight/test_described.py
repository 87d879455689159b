"""A machine that words describe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.described import GPUS, TORCH_WHEELS
from nemo_fp8.preflight.machine import ABSENT, Machine


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


def test_a_cpu_in_words() -> None:
    assert Machine.parse("cpu").cpu is None
    assert Machine.parse("cpu,avx2").cpu == ()
    assert Machine.parse("amx,cpu").cpu == ("avx512", "amx")
    assert dict(Machine.parse("cpu,avx2").facts())["CPU"] == "neither AVX-512 nor AMX"
