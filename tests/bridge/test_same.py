"""NeMo 2.7.3 on megatron-core 0.15.3 and Megatron-Bridge 0.3.1 on 0.16.1 train the same model on the same data."""

import pytest
from support.bridge.same import PRECISIONS, losses

BY_CHANCE = "nvfp4"
"""It rounds gradients by chance, from a generator of which the stacks draw other numbers."""


SHORT = "delayed"
"""The one that every change sees; it has a state of its own, which goes from step to step."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == SHORT else pytest.mark.long) for name in PRECISIONS if name != BY_CHANCE],
)
def test_the_same_losses_to_the_bit(name):
    nemo, bridge = (losses(stack, name) for stack in ("nemo", "bridge"))
    assert nemo == bridge
    assert nemo[-1] < nemo[0] - 1


@pytest.mark.long
def test_what_is_rounded_by_chance_begins_with_the_same_loss_and_stays_near():
    """A forward has no chance in it, so that the first loss says that the models are one."""
    nemo, bridge = (losses(stack, BY_CHANCE) for stack in ("nemo", "bridge"))
    assert nemo[0] == bridge[0]
    assert nemo[1:] != bridge[1:]
    assert nemo == pytest.approx(bridge, rel=0.01)
