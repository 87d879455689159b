"""Numbers that are not finite, in the data and in an amax: each ends with an error that says what to do, or is
recovered from."""

import re

import pytest
import torch
from support.train.faulty import DELAYED, SMALL, at_step, checkpoints, fails, ours
from support.train.harness import train_tiny


def data_with_nan(tiny):
    """One sample of step 5 carries a NaN."""
    from nemo_fp8.experiments.corpus import Stories
    from nemo_fp8.experiments.stories import StoryData

    class Broken(Stories):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            if index == 5 * tiny.global_batch + 1:
                sample["loss_mask"][3] = torch.nan
            return sample

    class BrokenData(StoryData):
        def setup(self, stage=""):
            super().setup(stage)
            self._stories["train"] = Broken("train", self.samples["train"], self.seq_length, self.seed)

    return BrokenData(
        tiny.seq_length, tiny.micro_batch, tiny.global_batch, num_train_samples=100_000, num_val_samples=64
    )


def put_nan(output):
    output.data.view(-1)[0] = torch.nan


def nan_in_forward(trainer, tiny):
    ours(trainer, tiny)
    at_step(trainer, 5, put_nan)


def histories(trainer, extra):
    from nemo_fp8.train.repairs import amax_histories

    found = list(amax_histories(trainer.strategy.model))
    extra["finite"] = [bool(torch.isfinite(history).all()) for history in found]


@pytest.mark.parametrize("check", [True, False], ids=["megatron checks gradients", "nobody checks gradients"])
def test_nan_in_the_data_ends_a_bf16_run_at_its_step_and_before_a_checkpoint(check, tmp_path):
    log = fails(
        "bf16_mixed",
        folder=str(tmp_path),
        data="train.test_fault_numbers:data_with_nan",
        before="support.train.faulty:ours",
        ddp={"check_for_nan_in_grad": check},
    )
    assert re.search(r"Step 5: the gradients are not finite" if check else r"Step 5: .*grad_norm is nan", log)
    assert re.search(r"The run goes on from \S+step=3-last \(after 4 steps\)", log)
    assert {path.name for path in checkpoints(tmp_path).iterdir()} == {"step=3", "step=3-last"}


def test_nan_in_an_fp8_layer_is_not_hidden_by_the_cast():
    assert "Step 5: the gradients are not finite" in fails(
        "bf16_with_fp8_mixed", before="train.test_fault_numbers:nan_in_forward", **DELAYED
    )


@pytest.mark.parametrize("before", ["train.test_fault_numbers:nan_in_forward", "support.train.faulty:ours"])
def test_the_loss_scaler_skips_a_step_with_nan_and_no_amax_history_remembers_it(before):
    data = "train.test_fault_numbers:data_with_nan" if before == "support.train.faulty:ours" else None
    settings = DELAYED["settings"] | {"fp16_hysteresis": 1, "fp16_initial_loss_scale": 1024.0}
    found = train_tiny(
        "fp16_with_fp8_mixed",
        stock=False,
        settings=settings,
        data=data,
        before=before,
        probe="train.test_fault_numbers:histories",
        **SMALL,
    )
    assert found.loss_scales == [1024.0] * 5 + [512.0] * 3
    assert "Step 5 was skipped" in found.log
    assert found.losses[-1] < found.losses[4]
    assert found.extra["finite"]
    assert all(found.extra["finite"])


def always_nan(trainer, tiny):
    from nemo_fp8.train.faults import Faults

    trainer.callbacks.append(Faults(patience=3))
    for step in range(2, 8):
        at_step(trainer, step, put_nan)


def test_a_loss_that_no_scale_mends_ends_an_fp16_run():
    log = fails(
        "fp16_mixed",
        stock=False,
        settings={"fp16_initial_loss_scale": 1024.0},
        before="train.test_fault_numbers:always_nan",
    )
    assert "Step 4: the loss was not finite in 3 steps in a row" in log


# ---------------------------------------------------------------------- amaxes that are not finite

SCALES = []


def overflow(trainer, tiny):
    """At step 2 an input and a gradient of one linear hold infinity; from step 4 on its inputs are 16 times as
    large."""
    from lightning.pytorch.callbacks import Callback

    def overflowed(x):
        return x.clone().index_fill(0, torch.tensor([0]), torch.inf)

    def before_linear(module, args):
        step = trainer.global_step
        return (overflowed(args[0]) if step == 2 else args[0] * 16 if step >= 4 else args[0], *args[1:])

    def after_linear(module, args, output):
        if trainer.global_step == 2:
            output[0].register_hook(overflowed)

    class Hook(Callback):
        def on_train_start(self, trainer, *_):
            self.linear = next(
                m for name, m in trainer.strategy.model.named_modules() if name.endswith("layers.1.mlp.linear_fc2")
            )
            self.linear.register_forward_pre_hook(before_linear)
            self.linear.register_forward_hook(after_linear)

        def on_train_batch_end(self, *_):
            state = self.linear.fp8_meta["scaling_fwd"]
            SCALES.append([float(state.scale[0]), bool(torch.isfinite(state.amax_history).all())])

    trainer.callbacks.append(Hook())


def scales(trainer, extra):
    extra["scales"] = SCALES


@pytest.mark.parametrize("history", [16, 1024])
def test_after_an_amax_overflow_the_scales_come_back(history):
    settings = DELAYED["settings"] | {"fp8_amax_history_len": history}
    found = train_tiny(
        "bf16_with_fp8_mixed",
        stock=False,
        settings=settings,
        steps=9,
        before="train.test_fault_numbers:overflow",
        probe="train.test_fault_numbers:scales",
        **SMALL,
    )
    scale, finite = zip(*found.extra["scales"], strict=True)
    assert all(loss == loss and loss < 6 for loss in found.losses), "the cast saturates"
    assert finite[-1]
    assert scale[-1] < scale[1] / 8, "the scale follows what the linear sees"
