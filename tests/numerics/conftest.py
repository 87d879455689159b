"""A small model, and something to put through it."""

import pytest
import torch

torch.set_printoptions(threshold=20, edgeitems=2)  # what hypothesis prints of a failing tensor


@pytest.fixture
def model():
    from support.small_transformer import Model

    torch.manual_seed(0)
    return Model().bfloat16()


@pytest.fixture
def x():
    return torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
