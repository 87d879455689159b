"""NeMo 2.7.3 on megatron-core 0.15.3 and Megatron-Bridge 0.3.1 on 0.16.1 train the same model on the same data."""

import pytest
from support.bridge.same import PRECISIONS, losses

SHORT = "delayed"
"""The one that every change sees; it has a state of its own, which goes from step to step."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SHORT else pytest.mark.long) for name in PRECISIONS]
)
def test_the_same_losses_to_the_bit(name):
    nemo, bridge = (losses(stack, name) for stack in ("nemo", "bridge"))
    assert nemo == bridge
    assert nemo[-1] < nemo[0] - 1
