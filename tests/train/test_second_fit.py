"""Delayed scales go on in a second fit of the same model by the same NeMo trainer, and the CPU is entered once."""

import pytest
import torch
from support.train.harness import train_tiny

STEPS = 4
DELAYED = "bf16_with_fp8_delayed_mixed"
SETTINGS = {"fp8_param_gather": False, "fp8_amax_history_len": 2}


def _scales(after, steps, **more):
    run = train_tiny(
        DELAYED,
        stock=False,
        settings=SETTINGS,
        steps=steps,
        before="support.train.second_fit:watch_scales",
        after=after,
        **more,
    )
    return torch.tensor(run.extra["scales"])


@pytest.fixture(scope="module")
def uninterrupted():
    return _scales("support.train.second_fit:report", 2 * STEPS)


@pytest.mark.parametrize("after", ["fit_again", "validate_and_fit_again"])
def test_scales_go_on_in_a_second_fit(uninterrupted, after):
    """NeMo keeps the module over two fits, and the plugin opens its contexts anew: linears and their states are the
    same objects."""
    more = {"trainer": {"limit_val_batches": 1}} if after.startswith("validate") else {}
    scales = _scales(f"support.train.second_fit:{after}", STEPS, **more)
    assert len(scales) >= 2 * STEPS
    assert torch.equal(scales[:STEPS], uninterrupted[:STEPS])
    moved = (scales[STEPS:].diff(dim=0) != 0).any(0)  # [linears, (input, weight, grad)]
    assert moved.all(), "every scale of every linear moves"
    # The second fit starts with another optimizer and other data, but its first forward sees the weights of the
    # uninterrupted run.
    assert torch.equal(scales[STEPS][:, 1], uninterrupted[STEPS][:, 1])


def test_the_cpu_is_entered_once_and_left():
    from nemo_fp8.train.accelerator import MegatronCPU
    from nemo_fp8.train.megatron_cpu import TABLE
    from nemo_fp8.train.patching import is_patched

    accelerator = MegatronCPU()
    for _ in range(2):
        for _ in range(2):  # Lightning calls it again for every stage
            accelerator.setup_device(torch.device("cpu"))
        assert len(accelerator._contexts._exit_callbacks) == 1
        assert is_patched(TABLE)
        accelerator.teardown()
        assert not is_patched(TABLE)


@pytest.mark.parametrize(
    ("plugin", "settings", "stock"),
    [
        ("bf16_mixed", {}, True),
        ("bf16_mixed", {}, False),
        (DELAYED, SETTINGS, False),
        ("bf16_with_fp8_current_scaling_mixed", {"fp8_param_gather": True}, False),
        ("bf16_with_mxfp8_mixed", {"fp8_param_gather": True}, False),
    ],
    ids=["NeMo", "BF16", "delayed", "FP8 parameters", "MXFP8 parameters"],
)
def test_a_second_fit_trains_where_a_module_leaves_its_gpu(plugin, settings, stock):
    """On a GPU ``module.cpu()`` takes parameters out of the buffer that the optimizer updates: with NeMo's own plugin
    the second fit trains nothing, and says nothing."""
    run = _fit_twice(plugin, settings, stock=stock)
    moves = (torch.tensor(run.extra["weights"]).diff(dim=0) != 0).any(1)
    assert len(moves) >= 2 * STEPS - 1
    assert moves[: STEPS - 1].all()
    if stock:
        assert not moves[STEPS:].any(), "NeMo trains in a second fit: drop the repair"
    else:
        assert moves[STEPS - 1 :].all()


def test_fp8_parameters_are_validated_after_a_fit():
    run = train_tiny(
        "bf16_with_fp8_current_scaling_mixed",
        stock=False,
        settings={"fp8_param_gather": True},
        steps=2,
        trainer={"limit_val_batches": 1},
        before="support.train.second_fit:watch_weights_as_on_a_gpu",
        after="support.train.second_fit:validate_again",
    )
    assert 0 < run.extra["validated"] < 20


def _fit_twice(plugin, settings, *, stock=False):
    return train_tiny(
        plugin,
        stock=stock,
        settings=settings,
        steps=STEPS,
        before="support.train.second_fit:watch_weights_as_on_a_gpu",
        after="support.train.second_fit:fit_again",
    )
