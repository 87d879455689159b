"""Each bug of NeMo 2.7.3 that bites in training: NeMo's own plugin fails, ours does not, on the same run."""

from harness import train_tiny


def _end(result, steps=4):
    return sum(result.losses[-steps:]) / steps


def test_fp16_trains_because_its_loss_is_scaled():
    settings = {"steps": 32, "seed": 7}
    nemo = train_tiny("fp16_mixed", stock=True, **settings)
    ours = train_tiny("fp16_mixed", stock=False, **settings)
    assert nemo.losses[0] - _end(nemo) < 0.1, "NeMo has repaired FP16: drop the repair"
    assert set(nemo.loss_scales) == {2.0**32}, "the loss was never scaled, so nothing ever overflowed"
    assert ours.losses[0] - _end(ours) > 1.0
    # The scaler works: it came down from 2**32 by skipping overflows, and then held.
    assert ours.loss_scales[-1] < 2.0**24
    assert ours.loss_scales[-1] == ours.loss_scales[-4]


def test_fp16_survives_an_overflow_where_nemos_recipes_check_for_nan():
    """NeMo's llama3_8b sets ``check_for_nan_in_grad``, which ends an FP16 run at its first overflow."""
    ours = train_tiny("fp16_mixed", stock=False, steps=3, ddp={"check_for_nan_in_grad": True})
    assert len(ours.losses) == 3
    assert ours.loss_scales[-1] < 2.0**32
