"""Each bug of NeMo 2.7.3 that bites in training: NeMo's own plugin fails, ours does not, on the same run."""

import pytest
import torch
from support.train.harness import train_tiny

OVERLAP = {
    "ranks": 2,
    "ddp": {"overlap_param_gather": True, "overlap_grad_reduce": True},
    "optim": {"overlap_param_gather": True},
}


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


def test_mxfp8_weights_survive_an_overlapped_gather():
    """NeMo's llama3_8b with bf16_with_mxfp8_mixed is exactly this case."""
    nemo = train_tiny("bf16_with_mxfp8_mixed", stock=True, steps=8, **OVERLAP)
    ours = train_tiny("bf16_with_mxfp8_mixed", stock=False, steps=8, **OVERLAP)
    plain = train_tiny("bf16_with_mxfp8_mixed", stock=False, steps=8, ranks=2)
    assert max(nemo.losses) - min(nemo.losses) < 0.01, "all weights are zero, so every token is as likely as any other"
    assert ours.losses == plain.losses, "the same run, with the gather overlapped or not"
    assert ours.losses[0] - ours.losses[-1] > 1.0


def scale_the_loss(trainer, tiny):
    """NeMo's plugin with its first FP16 bug mended by hand, so that the next one shows."""
    plugin = trainer.precision_plugin
    original = plugin.connect

    def connect(model, optimizers, lr_schedulers):
        from megatron.core.utils import get_model_config

        for chunk in model:
            get_model_config(chunk.module).grad_scale_func = optimizers[0].mcore_optimizer.scale_loss
        return original(model, optimizers, lr_schedulers)

    plugin.connect = connect


def count_infinite_amaxes(trainer, extra):
    from nemo_fp8.train.repairs import amax_histories

    histories = list(amax_histories(trainer.strategy.model))
    extra["histories"] = len(histories)
    extra["infinite"] = sum(int((~torch.isfinite(history)).any()) for history in histories)


@pytest.mark.long
def test_fp16_with_delayed_scaling_does_not_freeze():
    settings = {
        "steps": 40,
        "settings": {"fp8_param_gather": False},
        "probe": "train.test_repairs:count_infinite_amaxes",
    }
    nemo = train_tiny("fp16_with_fp8_mixed", stock=True, before="train.test_repairs:scale_the_loss", **settings)
    ours = train_tiny("fp16_with_fp8_mixed", stock=False, **settings)
    assert nemo.extra["infinite"] > 0, "NeMo's loss scale does not overflow any more: drop the repair"
    assert ours.extra["histories"] == nemo.extra["histories"] > 0
    assert ours.extra["infinite"] == 0
    assert _end(ours) < _end(nemo) - 0.3
