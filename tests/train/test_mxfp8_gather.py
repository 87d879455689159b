"""Overlapped gathers of MXFP8 weights: stock NeMo loses them in three ways, and the callback in none."""

from pathlib import Path

import pytest
from support.train.harness import train_tiny

MXFP8 = "bf16_with_mxfp8_mixed"
REUSE = {"reuse_grad_buf_for_mxfp8_param_ag": True}
PLAIN = {"ranks": 2, "steps": 5, "optim": REUSE, "ddp": REUSE | {"fp8_param_gather": True}}
OVERLAP = PLAIN | {
    "optim": REUSE | {"overlap_param_gather": True},
    "ddp": PLAIN["ddp"] | {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
MENDED = OVERLAP | {"before": "support.train.probes:gather_mxfp8"}
VALIDATE = {"trainer": {"val_check_interval": 2, "limit_val_batches": 2}}


@pytest.fixture(scope="module")
def expected():
    return train_tiny(MXFP8, **PLAIN).losses


def test_stock_nemo_destroys_the_weights(expected):
    assert train_tiny(MXFP8, **OVERLAP).losses[1] > expected[1] + 0.3


@pytest.mark.parametrize("around", [{}, VALIDATE], ids=["plain", "with-validation"])
def test_mended_it_is_the_run_without_overlap(around, expected):
    assert train_tiny(MXFP8, **MENDED, **around).losses == expected


def test_checkpoints_hold_the_weights_of_their_step_and_change_nothing(tmp_path, expected):
    saves = {"save_every": 3, "folder": str(tmp_path)}
    assert train_tiny(MXFP8, **MENDED, **saves).losses == expected
    checkpoint = str(Path(tmp_path, "tiny/run/checkpoints/step=2"))
    # The same weights as those that a run without overlap saves.
    _, plain = (
        train_tiny(MXFP8, **PLAIN, save_every=3, folder=str(tmp_path / "plain")),
        Path(tmp_path, "plain/tiny/run/checkpoints/step=2"),
    )
    losses = [train_tiny(MXFP8, **PLAIN | {"steps": 1}, restore=str(path)).losses for path in (checkpoint, plain)]
    assert losses[0] == losses[1]
