"""Megatron without NeMo: its own layers of TransformerEngine train on a CPU unchanged, on the version that NeMo needs
and on the newest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.train.megatron_alone import run_alone

APART = next(ROOT.glob(".venv-bridge/lib/python*/site-packages"), None)
NEWEST = "0.16.1"
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
JOBS = [
    {"recipe": "bf16"},
    *({"recipe": recipe} for recipe in RECIPES),
    *({"recipe": recipe, "experts": True} for recipe in ("bf16", "blockwise", "mxfp8")),
    {"recipe": "tensorwise", "fp8_param": True},
    {"recipe": "blockwise", "keep": "*linear_fc1"},
]
LINEARS = ["self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"]


@pytest.fixture(scope="module", params=["0.15.3", NEWEST])
def megatron(request):
    """What one process found that ran every job."""
    if request.param == NEWEST and APART is None:
        pytest.skip(f"megatron-core {NEWEST} is in .venv-bridge: make setup")
    found = run_alone(JOBS, {}, *([str(APART)] if request.param == NEWEST else []))
    assert found["version"] == request.param
    return found


def _run(megatron, **job):
    run = megatron["runs"][JOBS.index(job)]
    assert "refused" not in run, run["refused"]
    return run


def test_nemo_is_not_there(megatron):
    assert not megatron["nemo"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_in_fp8(megatron, recipe):
    bf16, fp8 = _run(megatron, recipe="bf16"), _run(megatron, recipe=recipe)
    assert bf16["fp8"] == []
    assert len(fp8["fp8"]) == 2 * len(LINEARS)
    assert fp8["losses"] == pytest.approx(bf16["losses"], rel=0.02)
    assert fp8["losses"] != bf16["losses"]
    assert fp8["losses"][-1] < fp8["losses"][0] - 0.2


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_grouped_experts_train_in_fp8(megatron, recipe):
    bf16, fp8 = _run(megatron, recipe="bf16", experts=True), _run(megatron, recipe=recipe, experts=True)
    assert sum("experts.linear_fc" in name for name in fp8["fp8"]) == 4
    assert fp8["losses"] == pytest.approx(bf16["losses"], rel=0.02)
    assert fp8["losses"] != bf16["losses"]


def test_weights_are_kept_in_fp8_by_megatrons_optimizer(megatron):
    plain, stored = _run(megatron, recipe="tensorwise"), _run(megatron, recipe="tensorwise", fp8_param=True)
    assert (plain["stored"], stored["stored"]) == (0, 2 * len(LINEARS))
    assert stored["losses"] == pytest.approx(plain["losses"], rel=0.02)


def test_a_linear_stays_in_bf16_by_a_recipe_for_single_modules(megatron):
    """``quant_recipe`` of Megatron's config. 0.15.3 takes it, and its layers of TransformerEngine do not heed it."""
    every, kept = _run(megatron, recipe="blockwise"), _run(megatron, recipe="blockwise", keep="*linear_fc1")
    left_out = [name for name in every["fp8"] if name not in kept["fp8"]]
    if megatron["version"] == NEWEST:
        assert len(left_out) == 2
        assert all("linear_fc1" in name for name in left_out)
        assert kept["losses"] != every["losses"]
    else:
        assert left_out == []
        assert kept["losses"] == every["losses"]


def test_an_overlapped_exchange_between_experts_changes_no_bit():
    """Megatron starts the exchange in streams of its own, beside other work, and marks each part for NVTX."""
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", "--standalone"]
    script = ROOT / "tests" / "support" / "train" / "overlapped.py"
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [*torchrun, script], env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    plain, overlapped = json.loads(run.stdout.splitlines()[-1])
    assert len(plain["losses"]) == 3
    assert plain["norm"] > 0
    assert overlapped == plain
