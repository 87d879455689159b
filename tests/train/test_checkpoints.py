"""Checkpoints: a resumed run goes on to the bit, in another layout within rounding, and from BF16 to FP8 and back."""

from pathlib import Path

import pytest
from support.train.harness import train_tiny

DELAYED, TENSORWISE = "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed"
BLOCKWISE, MXFP8 = "bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed"
GATHER, PLAIN = {"fp8_param_gather": True}, {"fp8_param_gather": False}
ATTENTION = {"fp8_dot_product_attention": True}
DP2, TP2, PP2 = {"ranks": 2}, {"ranks": 2, "tp": 2, "sequence_parallel": True}, {"ranks": 2, "pp": 2}
STEPS, SAVED = 5, 3


def save(folder, recipe="bf16_mixed", **settings):
    """A whole run, and the checkpoint from the middle of it."""
    losses = train_tiny(recipe, steps=STEPS, save_every=SAVED, folder=str(folder), **settings).losses
    return losses, str(Path(folder, "tiny/run/checkpoints", f"step={SAVED - 1}"))


@pytest.mark.parametrize(
    ("recipe", "settings", "layout"),
    [
        pytest.param("bf16_mixed", {}, DP2, id="bf16-dp2"),
        pytest.param(DELAYED, PLAIN, {}, id="delayed", marks=pytest.mark.long),
        pytest.param(DELAYED, GATHER, DP2, id="delayed-fp8-weights-dp2", marks=pytest.mark.long),
        pytest.param(DELAYED, GATHER, TP2, id="delayed-fp8-weights-tp2"),
        pytest.param(TENSORWISE, GATHER, DP2, id="tensorwise-fp8-weights-dp2", marks=pytest.mark.long),
        pytest.param(TENSORWISE, PLAIN | ATTENTION, DP2, id="tensorwise-attention-dp2", marks=pytest.mark.long),
        pytest.param(BLOCKWISE, GATHER, DP2, id="blockwise-fp8-weights-dp2"),
        pytest.param(MXFP8, {}, DP2, id="mxfp8-fp8-weights-dp2"),
        pytest.param("fp16_with_fp8_mixed", {}, PP2, id="fp16-delayed-pp2"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(recipe, settings, layout, tmp_path):
    run = {"settings": settings, "stock": False, **layout}
    losses, checkpoint = save(tmp_path, recipe, **run)
    resumed = train_tiny(recipe, steps=STEPS, resume=checkpoint, **run).losses
    assert resumed == losses[SAVED:]


def test_scales_of_attention_begin_anew(tmp_path):
    """Megatron leaves them out of a checkpoint, as the plugin warns: the run goes on, not to the bit."""
    run = {"settings": PLAIN | ATTENTION, "stock": False}
    losses, checkpoint = save(tmp_path, DELAYED, **run)
    resumed = train_tiny(DELAYED, steps=STEPS, resume=checkpoint, **run)
    assert resumed.losses != losses[SAVED:], "Megatron keeps them now: drop the warning"
    assert resumed.losses == pytest.approx(losses[SAVED:], abs=5e-3)
    assert "does not resume to the bit" in resumed.log


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(DELAYED, DP2, id="delayed-dp2"),
        pytest.param(BLOCKWISE, {}, id="blockwise-single", marks=pytest.mark.long),
    ],
)
def test_a_run_resumes_in_another_layout(recipe, layout, tmp_path):
    run = {"settings": GATHER, "reshardable": True}
    losses, checkpoint = save(tmp_path, recipe, **run, **TP2)
    assert train_tiny(recipe, steps=STEPS, resume=checkpoint, **run, **layout).losses == pytest.approx(
        losses[SAVED:], abs=5e-3
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bf16_mixed", DELAYED),
        *(pytest.param(*both, marks=pytest.mark.long) for both in ((BLOCKWISE, "bf16_mixed"), (DELAYED, TENSORWISE))),
    ],
)
def test_a_run_changes_its_precision_at_a_checkpoint(before, after, tmp_path):
    losses, checkpoint = save(tmp_path, before, reshardable=True, **DP2)
    changed = train_tiny(after, steps=STEPS, resume=checkpoint, reshardable=True, **DP2).losses
    assert changed == pytest.approx(losses[SAVED:], rel=0.01)
    assert changed != losses[SAVED:]


def test_weights_alone_start_every_layout_from_the_same_loss(tmp_path):
    """What initial weights drawn apart do not show of pipeline stages: with the same weights they learn the same."""
    _, checkpoint = save(tmp_path)
    start = {"restore": checkpoint, "steps": 4}
    single = train_tiny("bf16_mixed", **start).losses
    assert train_tiny("bf16_mixed", **start, **PP2).losses == pytest.approx(single, abs=3e-3)
    assert train_tiny(DELAYED, **start, **PP2).losses == pytest.approx(single, rel=0.01)
