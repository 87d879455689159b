"""Megatron on the CPU: TransformerEngine stands on te_cpu, what is replaced besides is checked, and none of that is
left behind."""

import subprocess
import sys
import types
from contextlib import ExitStack

import pytest
import torch
from support.train.harness import train_tiny
from support.train.probes import names_as_they_are

from nemo_fp8 import te_cpu
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import bf16
from nemo_fp8.train import megatron_cpu
from nemo_fp8.train.accelerator import MegatronCPU
from nemo_fp8.train.megatron_cpu import hold_cpu, megatron_on_cpu
from nemo_fp8.train.patching import Patch, patched


def test_megatron_and_nemo_take_transformer_engines_layers():
    from megatron.core.extensions import transformer_engine
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
    from nemo.collections.llm.gpt.model import base

    assert te_cpu.is_installed()
    assert transformer_engine.HAVE_TE
    assert base.HAVE_TE
    assert not USING_PYTORCH_OPTIMIZER


def test_a_process_that_imported_megatron_without_te_is_refused():
    code = """
import sys
sys.modules["transformer_engine"] = None       # as where it is not installed
from nemo_fp8.train.megatron_cpu import megatron_on_cpu
with megatron_on_cpu(): pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "imported without TransformerEngine" in done.stderr
    assert "pip install 'nemo-fp8[train]'" in done.stderr


def test_nothing_is_left_behind():
    from nemo.lightning import io  # noqa: F401  (so that nothing is first imported inside)

    before = names_as_they_are()
    accelerator = MegatronCPU()
    accelerator.setup_device(torch.device("cpu"))
    accelerator.setup_device(torch.device("cpu"))
    assert names_as_they_are() != before
    accelerator.teardown()
    after = names_as_they_are()
    assert {k for k in before | after if before.get(k) is not after.get(k)} == set()


def test_nothing_is_left_behind_by_a_run():
    run = train_tiny(
        "bf16_with_fp8_mixed",
        stock=False,
        steps=2,
        before="support.train.probes:remember_names",
        after="support.train.probes:names_left_behind",
    )
    assert run.extra["left"] == []


def test_nothing_is_left_behind_by_an_error():
    before = names_as_they_are()
    with pytest.raises(ZeroDivisionError), megatron_on_cpu(), megatron_on_cpu():
        raise ZeroDivisionError
    assert all(names_as_they_are()[k] is v for k, v in before.items())


def test_every_row_fits_the_installed_version_and_says_why():
    for patch in megatron_cpu.TABLE:
        assert patch.misfit() is None
        assert patch.why


def test_a_version_that_does_not_fit_is_one_clear_error():
    target = types.ModuleType("some_library")

    def theirs(a, b): ...

    target.theirs, target.kept = theirs, 1
    sys.modules["some_library"] = target
    try:
        rows = [
            Patch("some_library", "kept", 2, "it is needed"),
            Patch("some_library", "gone", 2, "it is needed"),
            Patch("some_library", "theirs", lambda a: None, "it is needed"),
            Patch("some_library:Class", "x", 2, "it is needed"),
        ]
        with pytest.raises(PrecisionError) as error, patched(rows, "A test"):
            pass
        assert len(error.value.problems) == 3
        for word in ("gone", "takes (a, b)", "Class", "constraints/training.txt", "it is needed"):
            assert word in str(error.value)
        assert target.kept == 1, "nothing may be touched when something does not fit"
        with patched(rows[:1], "A test"):
            assert target.kept == 2
        assert target.kept == 1
    finally:
        del sys.modules["some_library"]


@pytest.mark.parametrize("name", ["fp16_mixed", "bf16_mixed"])
def test_fp16_training_multiplies_in_fp32_without_units(monkeypatch, name):
    monkeypatch.setattr(bf16, "multiplies_fp16", lambda: False)
    with ExitStack() as contexts:
        hold_cpu(contexts, preset(name))
        assert bf16._replaced.open[torch.float16] == (name == "fp16_mixed")
    assert not bf16._replaced.open[torch.float16]


@pytest.mark.parametrize(
    "plugin", [pytest.param("bf16_mixed", marks=pytest.mark.long), "bf16_with_fp8_blockwise_mixed"]
)
def test_every_bf16_product_of_a_step_runs_in_fp32_without_units(plugin):
    """Attention, linears, and the output layer, forward and backward, on a processor that oneDNN takes for one with
    AVX2."""
    settings = {"stock": False, "steps": 3, "model": "llama"}
    units = train_tiny(plugin, **settings)
    without = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = train_tiny(
        plugin,
        **settings,
        env=without,
        torchrun=True,
        timeout=300,
        before="support.train.probes:watch_products",
        probe="support.train.probes:seen",
    )
    seen = run.extra["seen"]
    assert seen.pop("in FP32") == seen["mm"] > 0
    seen.pop("weights quantized")
    assert set(seen) <= set(bf16._OPERANDS)
    assert {"mm", "bmm", "baddbmm"} <= set(seen)
    assert run.losses == pytest.approx(units.losses, rel=2e-3)
