"""Doctor: rows for people, one clear error before the run, and what is wrong with what is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.contract.te_variables import TE_RECIPES, VARIABLES, late_variables
from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.doctor import doctor, sanity
from nemo_fp8.preflight.engine import recipes_of, require, resume_findings
from nemo_fp8.preflight.lint import first_weight_findings
from nemo_fp8.preflight.machine import ABSENT, Machine

BLOCKWISE = preset("bf16_with_fp8_blockwise_mixed")


def test_the_famous_assertion_is_met_before_the_run() -> None:
    with pytest.raises(PrecisionError) as caught:
        require(BLOCKWISE, Machine.parse("h200,cuda12.8,te2.9"))
    assert len(caught.value.problems) == 1
    problem = caught.value.problems[0]
    assert (problem.code, problem.where, problem.severity) == ("refused", "blockwise", "error")
    assert "bf16_with_fp8_blockwise_mixed" in problem.what
    assert "12.9" in problem.why
    assert "12.8" in problem.why
    assert "torch>=2.11" in problem.remedy
    assert "bf16_with_fp8_tensorwise_mixed" in problem.remedy
    require(BLOCKWISE, Machine.parse("h200,cuda12.9,te2.9"))


def test_each_side_asks_for_itself() -> None:
    old_vllm = Machine.parse("h200,cuda12.9,te2.9,vllm0.20")
    require(BLOCKWISE, old_vllm)
    with pytest.raises(PrecisionError, match="vLLM"):
        require(BLOCKWISE, old_vllm, sides=("rollout",))


def test_emulation_must_be_asked_for() -> None:
    cpu = Machine.parse("cpu,torch2.13")
    with pytest.raises(PrecisionError, match="no GPU"):
        require(BLOCKWISE, cpu)
    require(BLOCKWISE, cpu, emulate=True)
    with pytest.raises(PrecisionError, match="torch") as caught:
        require(BLOCKWISE, replace(cpu, torch=ABSENT), emulate=True)
    assert [problem.code for problem in caught.value.problems] == ["no-torch"]


def test_bf16_needs_nothing() -> None:
    require(preset("bf16_mixed"), Machine.parse("cpu"), sides=("train", "rollout"))


def test_the_unknown_is_logged_and_does_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="nemo_fp8"):
        require(BLOCKWISE, Machine.parse("h200,te2.9"))
    assert "CUDA >= 12.9" in caplog.text


def test_rows_cover_every_contract() -> None:
    rows = {row.recipe for row in doctor(Machine.parse("h200,cuda12.9,te2.9"))}
    for contract in PRESETS.values():
        assert set(recipes_of(contract)) <= rows
    contract = Precision(
        format="e4m3", scaling="blockwise", weight_scale="fp32", activation_scale="fp32", deep_gemm=True, kv_cache="fp8"
    )
    assert recipes_of(contract) == ["blockwise-fp32", "rollout-fp8", "rollout-deepgemm", "kv-cache-fp8"]
    assert recipes_of(preset("bf16_with_mxfp8_mixed")) == ["mxfp8", "rollout-mxfp8"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"nemo": "2.7.3", "mcore": "0.16.1"}, "nemo-mcore"),
        ({"nemo": "2.7.3", "mcore": "0.14.0"}, "nemo-mcore"),
        ({"bridge": "0.3.1", "mcore": "0.15.3"}, "bridge-mcore"),
        ({"nemo": "3.0.0", "mcore": "0.15.3"}, "nemo-3"),
        ({"te": "2.20.2", "te_library": False}, "te-library-missing"),
        ({"te": "2.14.0", "te_library": False, "gpu": ABSENT}, "te-not-stood-for"),
        ({"te": "2.20.2", "te_library": True, "python": "3.11.9"}, "te-dtype-pickle"),
        ({"te": "2.21.0", "te_library": True}, "te-newer"),
        ({"numpy": "2.2.0", "mcore": "0.15.3"}, "numpy-mcore"),
        ({"vllm_cpu": True, "torchvision_cuda": "13.0"}, "torchvision-vllm-cpu"),
        ({"driver": "570.86", "cuda": "13.0"}, "driver"),
        ({"driver": "515.1", "cuda": "12.8"}, "driver"),
        ({"gpu": "h200", "arch": 90, "te": ABSENT, "mcore": "0.15.3"}, "te-absent"),
    ],
)
def test_sanity(changes: dict[str, object], code: str) -> None:
    assert [f.code for f in sanity(replace(Machine(), **changes))] == [code]


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, ["ONEDNN_MAX_CPU_ISA"]),
        ({"DNNL_MAX_CPU_ISA": "avx512_core_bf16"}, ["DNNL_MAX_CPU_ISA"]),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "DNNL_MAX_CPU_ISA": "AVX2"}, []),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, []),
        ({}, []),
    ],
)
def test_a_variable_that_keeps_onednn_from_amx_ends_vllm(environment: dict[str, str], named: list[str]) -> None:
    has_amx = Machine(cpu=("avx512", "amx"), vllm_cpu=True)
    found = sanity(has_amx, environment)
    assert [(f.code, f.severity, f.where) for f in found] == [("onednn-kept-from-amx", "error", n) for n in named]
    assert not sanity(replace(has_amx, cpu=("avx512",)), environment)
    assert not sanity(replace(has_amx, vllm_cpu=False), environment)


def test_megatron_bridge_beside_nemo_is_a_choice() -> None:
    machine = Machine(nemo="2.7.3", bridge="0.3.1", mcore="0.16.1")
    assert [(f.code, f.severity) for f in sanity(machine)] == [("nemo-mcore", "info")]


def test_tes_wheel_alone_is_right_without_a_gpu() -> None:
    assert not sanity(replace(Machine(), gpu=ABSENT, te="2.20.2", te_library=False))


def test_a_delayed_run_that_could_not_be_resumed_is_told() -> None:
    delayed, blockwise = preset("bf16_with_fp8_delayed_mixed"), preset("bf16_with_fp8_blockwise_mixed")
    (found,) = resume_findings(delayed, {})
    assert "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1" in found.remedy
    assert not list(resume_findings(delayed, {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}))
    assert not list(resume_findings(blockwise, {}))
    (found,) = resume_findings(delayed.replace(attention=True), {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"})
    assert "does not resume to the bit" in found.what


def test_fp8_weights_that_megatron_initializes_on_the_cpu_are_named() -> None:
    (found,) = first_weight_findings(preset("bf16_with_mxfp8_mixed"))
    assert "use_cpu_initialization=False" in found.remedy
    assert not list(first_weight_findings(preset("bf16_with_fp8_blockwise_mixed")))


def test_what_does_not_start_without_torchvision_is_named() -> None:
    (found,) = sanity(replace(Machine(), vllm_cpu=True, torchvision_cuda="13.0"))
    for words in (
        "https://download.pytorch.org/whl/cpu",
        "Qwen2.5-VL, Qwen3-VL and Qwen3.5 (its text-only models too) do not start without",
    ):
        assert words in found.remedy


@pytest.mark.parametrize("by", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"])
def test_a_lock_that_an_import_would_wait_for_is_named(by: str, tmp_path: Path) -> None:
    """torch's own baton of a killed process; not one of a minute ago, nor one that a process holds."""
    baton = pytest.importorskip("torch.utils.file_baton").FileBaton
    folder = tmp_path / {"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": "torch_extensions/py311_cpu"}.get(
        by, ".cache/torch_extensions/py311_cpu"
    )
    environment = {by: str(tmp_path)}
    lock = folder / "managed_alloc_runtime" / "lock"
    lock.parent.mkdir(parents=True)
    held = baton(str(lock))
    assert held.try_acquire()
    assert not sanity(Machine(), environment)
    long_ago = lock.stat().st_mtime - 3600
    os.utime(lock, (long_ago, long_ago))
    assert not sanity(Machine(), environment)
    os.close(held.fd)  # as when the process is killed
    (found,) = sanity(Machine(), environment)
    assert (found.code, found.severity) == ("extension-lock", "warning")
    assert found.what.startswith(f"{lock} is 60 minutes old")
    assert found.remedy.endswith(f"rm {lock}")
    lock.unlink()
    assert not sanity(Machine(), environment)


def test_the_tested_environment_is_sane() -> None:
    assert not sanity(
        Machine(
            nemo="2.7.3",
            mcore="0.15.3",
            numpy="1.26.4",
            te="2.20.2",
            te_library=True,
            driver="580.65",
            cuda="13.0",
            arch=90,
        )
    )
    assert not [f for f in sanity(Machine.here()) if f.severity == "error"]


def te_recipes(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> ModuleType:
    """TransformerEngine's real recipe module, executed under an environment."""
    path = Path(__file__).parents[2] / ".te/transformer_engine/common/recipe/__init__.py"
    if not path.is_file():
        pytest.fail("There is no TransformerEngine wheel in .te: run make setup.")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name = f"_te_recipe_{len(environment)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_set_after_te_was_imported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = te_recipes(monkeypatch, {})
    other = [word for word in VARIABLES[name].words.values() if word != VARIABLES[name].default][-1]
    assert other is not None
    monkeypatch.setenv(name, other)
    assert [f.where for f in late_variables(os.environ, {TE_RECIPES: before})] == [name]
    assert [f.code for f in sanity(Machine(), os.environ, {TE_RECIPES: before})] == [
        "environment-late",
        "environment-set",
    ]
    after = te_recipes(monkeypatch, {name: other})
    assert not late_variables(os.environ, {TE_RECIPES: after})
    assert not late_variables(os.environ, {})  # TransformerEngine was not imported yet
