"""Megatron on the CPU: what is replaced, that it is checked, and that nothing is left behind."""

import types
from contextlib import ExitStack

import pytest
import torch
from harness import train_tiny
from torch.overrides import _get_current_function_mode_stack

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import bf16
from nemo_fp8.presets import preset
from nemo_fp8.train import emulated, megatron_cpu
from nemo_fp8.train.accelerator import MegatronCPU
from nemo_fp8.train.emulated import emulated_fp8
from nemo_fp8.train.engine import hold_engine
from nemo_fp8.train.megatron_cpu import megatron_on_cpu
from nemo_fp8.train.patching import Patch, patched

TABLES = {"cpu": megatron_cpu._TABLE, "fp8": emulated._table(lambda config, layer_no=-1, is_init=False: None)}


def names_as_they_are():
    """Everything that the tables' owners hold, under every name."""
    return {
        (p.target, name): value
        for table in TABLES.values()
        for p in table
        for name, value in vars(p.owner()).items()
        if not name.startswith("__")
    }


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
    assert _get_current_function_mode_stack() == []


def test_nothing_is_left_behind_by_a_run():
    run = train_tiny("bf16_with_fp8_mixed", stock=False, steps=2, before="probes:remember_names", after="probes:names_left_behind")
    assert run.extra["left"] == []
    assert run.extra["modes"] == 0


def test_nothing_is_left_behind_by_an_error():
    before = names_as_they_are()
    with pytest.raises(ZeroDivisionError), megatron_on_cpu(), emulated_fp8():
        raise ZeroDivisionError
    assert all(names_as_they_are()[k] is v for k, v in before.items())
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("table", TABLES)
def test_every_row_fits_the_installed_version_and_says_why(table):
    for patch in TABLES[table]:
        assert patch.misfit() is None
        assert patch.why


def test_a_version_that_does_not_fit_is_one_clear_error():
    target = types.ModuleType("some_library")

    def theirs(a, b): ...

    target.theirs, target.kept = theirs, 1
    import sys

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


def test_cuda_is_the_cpu_inside_and_only_inside():
    with megatron_on_cpu():
        x = torch.zeros(2, device="cuda").cuda().to("cuda:0", torch.bfloat16)
        assert x.device.type == "cpu"
        assert x.type() == "torch.cuda.BFloat16Tensor"
        assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
        assert x.type(torch.float32).dtype is torch.float32
    assert x.type() == "torch.BFloat16Tensor"
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(2, device="cuda")


@pytest.mark.parametrize("units", [True, False])
def test_bf16_products_run_in_fp32_where_there_are_no_units_for_them(monkeypatch, units):
    def kernel():
        return torch._C._dispatch_dump("aten::mm")

    monkeypatch.setattr(bf16, "multiplies_bf16", lambda: units)
    before = kernel()
    with megatron_on_cpu(), megatron_on_cpu():
        assert (kernel() == before) == units
    assert kernel() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")
@pytest.mark.parametrize("name", ["fp16_mixed", "bf16_mixed"])
def test_fp16_training_multiplies_in_fp32_without_units(monkeypatch, name):
    monkeypatch.setattr(bf16, "multiplies_fp16", lambda: False)
    with ExitStack() as contexts:
        hold_engine(contexts, preset(name), None)
        assert bf16._replaced.open[torch.float16] == (name == "fp16_mixed")
    assert not bf16._replaced.open[torch.float16]


@pytest.mark.parametrize("plugin", ["bf16_mixed", "bf16_with_fp8_blockwise_mixed"])
def test_every_bf16_product_of_a_step_runs_in_fp32_without_units(plugin):
    """Attention, linears, and the output layer, forward and backward, on a processor that oneDNN takes for one with AVX2."""
    settings = {"stock": False, "steps": 3, "model": "llama"}
    units = train_tiny(plugin, **settings)
    run = train_tiny(plugin, **settings, env={"ONEDNN_MAX_CPU_ISA": "AVX2"}, before="probes:watch_products", probe="probes:seen")
    seen = run.extra["seen"]
    assert seen.pop("in FP32") == seen["mm"] > 0
    assert set(seen) <= set(bf16._OPERANDS)
    assert {"mm", "bmm", "baddbmm"} <= set(seen)
    assert run.losses == pytest.approx(units.losses, rel=2e-3)


def test_random_streams_are_independent_and_repeatable():
    from megatron.core.tensor_parallel import random

    with megatron_on_cpu():
        tracker = random.get_cuda_rng_tracker()
        outside = torch.get_rng_state()
        tracker.add("a", 1)
        tracker.add("b", 2)
        assert torch.equal(torch.get_rng_state(), outside)
        draws = []
        for name in "aab":
            with tracker.fork(name):
                draws.append(torch.rand(3))
        assert torch.equal(torch.get_rng_state(), outside)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(6), torch.cat(draws[:2]))
        assert not torch.equal(draws[0], draws[2])
        with pytest.raises(ValueError, match="no random stream"), tracker.fork("c"):
            pass
