"""Shares of master weights are cast along rows alone: no transposes that nobody reads, and every bit the same. Shares
that end within rows are in tests/te_cpu/test_shards.py."""

import logging
import sys
import types
from contextlib import ExitStack

import pytest
from support.train.harness import train_tiny
from support.train.megatron_alone import STEPS, run_alone

from nemo_fp8.contract import Precision
from nemo_fp8.preflight.support import PER_TENSOR
from nemo_fp8.train import row_casts

HOPPER = 90
"""It multiplies FP8 matrices in one layout alone, so weights have transposes."""
TARGET, NAME = "transformer_engine.pytorch.tensor.utils", "_update_transpose_only_float8_flat_fragment"


def contract(scaling, **changes):
    return Precision(format="hybrid", scaling=scaling, fp8_param=True).replace(**changes)


# ---------------------------------------------------------------------- bits


@pytest.fixture(scope="module")
def runs():
    """Steps of Megatron's on weights in FP8, (scaling, whether it is mended) -> what was seen."""
    jobs = [{"recipe": s, "fp8_param": True, "row_casts": on} for s in PER_TENSOR for on in (False, True)]
    found = run_alone(jobs, {"NEMO_FP8_TE_CPU": str(HOPPER)})["runs"]
    return {(job["recipe"], job["row_casts"]): run for job, run in zip(jobs, found, strict=True)}


@pytest.mark.parametrize("scaling", PER_TENSOR)
def test_no_share_is_turned_and_training_is_the_same_to_the_bit(runs, scaling):
    stock, mended = runs[scaling, False], runs[scaling, True]
    assert stock["stored"] == 8
    assert stock["turned"] == 8 * STEPS, "if this is 0, TransformerEngine has mended it: drop row_casts.py"
    assert mended["turned"] == 0
    assert mended["bits"] == stock["bits"]
    assert mended["losses"] == stock["losses"]
    assert len(set(stock["losses"])) == STEPS


# ---------------------------------------------------------------------- when


def is_replaced(trainer, extra):
    utils = sys.modules[TARGET]
    extra["during"] = getattr(utils, NAME).__module__


def is_back(extra):
    extra["after"] = getattr(sys.modules[TARGET], NAME).__module__


@pytest.mark.parametrize(
    ("preset", "settings", "mended"),
    [
        ("bf16_with_fp8_current_scaling_mixed", {"fp8_param_gather": True}, True),
        ("bf16_with_fp8_current_scaling_mixed", {"fp8_param_gather": False}, False),
        ("bf16_with_fp8_subchannel_scaling_mixed", {"fp8_param_gather": True}, False),
    ],
)
def test_the_plugin_mends_it_while_a_run_lasts(preset, settings, mended):
    hooks = {"probe": "train.test_row_casts:is_replaced", "after": "train.test_row_casts:is_back"}
    run = train_tiny(preset, stock=False, settings=settings, steps=1, **hooks)
    assert run.extra == {"during": row_casts.__name__ if mended else TARGET, "after": TARGET}


def of_other_parameters(weight, share):
    return False


@pytest.mark.parametrize("holds", [{}, {NAME: of_other_parameters}], ids=["no such function", "other parameters"])
def test_another_transformer_engine_is_left_alone_and_it_is_said(holds, monkeypatch, caplog):
    utils = types.ModuleType(TARGET)
    vars(utils).update(holds)
    monkeypatch.setitem(sys.modules, TARGET, utils)
    with ExitStack() as held, caplog.at_level(logging.INFO, "nemo_fp8"):
        row_casts.hold_row_casts(held, contract("delayed"))
        assert getattr(utils, NAME, None) is holds.get(NAME)
    assert f"as the installed TransformerEngine does it: {TARGET}" in caplog.text


@pytest.mark.parametrize("precision", [contract("blockwise", format="e4m3"), contract("delayed", fp8_param=False)])
def test_other_contracts_replace_nothing(precision, monkeypatch):
    utils = types.ModuleType(TARGET)

    def theirs(model_weight, master_weight, start_offset, quantizer):
        return False

    setattr(utils, NAME, theirs)
    monkeypatch.setitem(sys.modules, TARGET, utils)
    with ExitStack() as held:
        row_casts.hold_row_casts(held, precision)
        assert getattr(utils, NAME) is theirs
        row_casts.hold_row_casts(held, contract("delayed"))
        assert getattr(utils, NAME) is not theirs
    assert getattr(utils, NAME) is theirs
