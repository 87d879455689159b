"""Oracles and strategies lie beside the tests that share them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_printoptions(threshold=20, edgeitems=2)  # what hypothesis prints of a failing tensor
