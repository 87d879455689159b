"""With Lightning's own CPU accelerator, the plugin alone puts Megatron on the CPU."""

import pytest
import torch
from support.train.harness import train_tiny

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.train.kept import _require_any
from nemo_fp8.train.linears import is_linear
from nemo_fp8.train.megatron_cpu import TABLE
from nemo_fp8.train.patching import is_patched


@pytest.mark.parametrize(
    "plugin",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("bf16_mixed", "bf16_with_fp8_blockwise_mixed")),
        "bf16_with_fp8_mixed",
    ],
)
def test_the_plugin_alone_trains_as_with_our_accelerator(plugin):
    settings = {"stock": False, "steps": 6, "ranks": 2, "tp": 2, "config": {"use_cpu_initialization": True}}
    alone = train_tiny(plugin, accelerator="cpu", **settings)
    ours = train_tiny(plugin, **settings)
    assert alone.losses == ours.losses
    assert alone.losses[-1] < alone.losses[0] - 0.5


def test_modules_kept_by_name_run_in_the_compute_dtype():
    """By Hugging Face's name of a part as by Megatron's of the whole."""

    def run(**settings):
        return train_tiny(
            "bf16_with_fp8_blockwise_mixed",
            stock=False,
            steps=2,
            settings=settings,
            probe="train.test_plugin_cpu:who_ran_in_fp8",
        )

    every = run().extra["fp8"]
    kept = run(keep=["*.gate_proj", "re:layers\\.0\\."]).extra["fp8"]
    assert len(every) == 16
    assert set(kept) == {name for name in every if "linear_fc1" not in name and ".layers.0." not in name}


@pytest.mark.parametrize("keep", ["lm_head", "*.router", "re:layers\\.3\\..*gate$"])
def test_a_pattern_may_name_what_is_kept_anyway_and_must_name_something(keep):
    linears = {"decoder.layers.0.mlp.linear_fc1": torch.nn.Linear(16, 16)}
    fp8 = Precision(format="e4m3", scaling="blockwise")
    _require_any({}, linears, fp8.replace(keep=(keep,)), layers=4)
    with pytest.raises(PrecisionError, match="names no linear of this model"):
        _require_any({}, linears, fp8.replace(keep=(f"{keep}.typo",)), layers=4)


def test_weights_kept_by_name_are_in_the_compute_dtype_and_train():
    """A kept weight was made in FP8; its master is of the value that it was initialized with."""
    settings = {"fp8_param_gather": True, "keep": ["*.linear_fc1"]}
    run = train_tiny(
        "bf16_with_fp8_blockwise_mixed",
        stock=False,
        steps=4,
        ranks=2,
        settings=settings,
        probe="support.train.probes:states",
    )
    assert len(run.extra["primary"]) == 12
    assert run.extra["primary"] == run.extra["ran"] == [name for name in run.extra["ran"] if "linear_fc1" not in name]
    every = train_tiny(
        "bf16_with_fp8_blockwise_mixed", stock=False, steps=4, ranks=2, settings={"fp8_param_gather": True}
    ).losses
    assert run.losses == pytest.approx(every, rel=0.005)
    assert run.losses != every


def who_ran_in_fp8(trainer, extra):
    model = trainer.strategy.lightning_module
    extra["fp8"] = [name for name, module in model.named_modules() if is_linear(module) and module.fp8]


def leaves_nothing(trainer, extra):
    trainer.strategy.precision_plugin.teardown()
    extra["left"] = is_patched(TABLE)


def test_the_plugin_leaves_nothing_behind():
    found = train_tiny(
        "bf16_mixed", stock=False, steps=1, accelerator="cpu", probe="train.test_plugin_cpu:leaves_nothing"
    )
    assert found.extra["left"] is False
