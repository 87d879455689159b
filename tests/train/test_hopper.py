"""Training on a CPU that stands for Hopper: other copies of every tensor are kept, FP32 scales of blocks are allowed,
MXFP8 is not.

TransformerEngine asks for the architecture, and for the kind of scales, when it is imported: each run is an interpreter
of its own.
"""

import pytest
from support.train.harness import train_tiny
from support.train.megatron_alone import run_alone

from nemo_fp8.contract.presets import preset

HOPPER = {"NEMO_FP8_TE_CPU": "90"}
FP32_SCALES = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
BLOCKWISE = "bf16_with_fp8_blockwise_mixed"
JOBS = [
    {"recipe": "bf16"},
    *({"recipe": recipe} for recipe in ("delayed", "tensorwise", "blockwise")),
    {"recipe": "blockwise", "experts": True},
    {"recipe": "mxfp8"},
]


@pytest.fixture(scope="module")
def alone():
    """Megatron without NeMo."""
    found = run_alone(JOBS, HOPPER | FP32_SCALES)
    return {(job["recipe"], job.get("experts", False)): run for job, run in zip(JOBS, found["runs"], strict=True)}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_megatron_trains_on_hoppers_layouts(alone, recipe):
    run = alone[recipe, False]
    assert len(run["fp8"]) == 8
    assert run["losses"] == pytest.approx(alone["bf16", False]["losses"], rel=0.02)
    assert run["losses"] != alone["bf16", False]["losses"]
    assert run["losses"][-1] < run["losses"][0] - 0.2


def test_grouped_experts_train_with_fp32_scales(alone):
    run = alone["blockwise", True]
    assert sum("experts.linear_fc" in name for name in run["fp8"]) == 4
    assert run["losses"][-1] < run["losses"][0] - 0.2


def test_mxfp8_is_refused(alone):
    assert "compute capability 10.0" in alone["mxfp8", False]["refused"]


@pytest.mark.long
def test_nemo_trains_with_fp32_scales_of_blocks_and_weights_in_fp8():
    assert preset(BLOCKWISE).weight_scale == "pow2"
    settings = {"weight_scale": "fp32", "activation_scale": "fp32", "fp8_param_gather": True}
    run = train_tiny(
        BLOCKWISE,
        stock=False,
        settings=settings,
        steps=4,
        probe="train.test_hopper:scales",
        torchrun=True,
        timeout=300,
        env=FP32_SCALES,  # the architecture follows
    )
    blackwell = train_tiny(
        BLOCKWISE, stock=False, settings={"fp8_param_gather": True}, steps=4, probe="train.test_hopper:scales"
    )
    assert (run.extra["stands for"], blackwell.extra["stands for"]) == (90, 100)
    assert (run.extra["powers of two"], blackwell.extra["powers of two"]) == (False, True)
    assert run.losses == pytest.approx(blackwell.losses, rel=0.01)
    assert run.losses != blackwell.losses


def scales(trainer, extra):
    import torch

    from nemo_fp8.te_cpu import device

    weights = [p for p in trainer.strategy.model.parameters() if hasattr(p, "_rowwise_scale_inv")]
    mantissas = torch.cat([torch.frexp(weight._rowwise_scale_inv.flatten()).mantissa for weight in weights])
    extra["stands for"] = device.standing_for()
    extra["powers of two"] = bool(((mantissas == 0.5) | (mantissas == 0)).all())
