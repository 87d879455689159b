"""Oracles and strategies lie beside the tests that share them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_printoptions(threshold=20, edgeitems=2)  # what hypothesis prints of a failing tensor


@pytest.fixture
def model():
    from small_transformer import Model

    torch.manual_seed(0)
    return Model().bfloat16()


@pytest.fixture
def x():
    return torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
