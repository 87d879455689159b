"""NVFP4 against TE's Python reference, bit for bit, and stochastic rounding by its distribution."""

import pytest
import torch
from te_cases import ARCH
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

pytestmark = pytest.mark.skipif(ARCH < 100, reason="NVFP4 begins with Blackwell")
EDGES = torch.tensor([0.0, -0.0, 0.25, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 1e-30, -1e-30, 7.0, -0.2500001])


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("source", ["normal", "zeros", "edges", "outliers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_scales_and_amax_are_those_of_the_reference(source, square, dtype):
    torch.manual_seed(0)
    x = {
        "normal": lambda: torch.randn(64, 96),
        "zeros": lambda: torch.zeros(32, 32),
        "edges": lambda: EDGES.repeat(16, 2),
        "outliers": lambda: torch.randn(32, 64) * torch.logspace(-20, 20, 64),
    }[source]().to(dtype)
    found = NVFP4Quantizer(with_2d_quantization=square)(x)
    for side, matrix in (("row", x), ("column", x.t().contiguous())):
        amax = matrix.float().abs().amax()
        codes, scales = NVFP4QuantizerRef._quantize_blockwise_reference(matrix, amax, 16, 16 if square else 1, pow_2_scales=False, eps=0.0)
        assert torch.equal(getattr(found, f"_amax_{side}wise").reshape(()), amax)
        assert torch.equal(getattr(found, f"_{side}wise_data").view(codes.shape), codes.view(torch.uint8))
        held = getattr(found, f"_{side}wise_scale_inv")[: scales.shape[0], : scales.shape[1]]
        assert torch.equal(held, scales.view(torch.uint8))


def test_an_amax_for_every_row_on_both_sides():
    """Row-scaled: the columns, turned round, have an amax for each of their rows too, although TE describes one for them all."""
    torch.manual_seed(0)
    x = (torch.randn(64, 96) * torch.logspace(-3, 3, 96)).bfloat16()
    found = NVFP4Quantizer(row_scaled_nvfp4=True)(x)
    for side, matrix in (("row", x), ("column", x.t().contiguous())):
        amax = matrix.float().abs().amax(1)
        arguments = {"pow_2_scales": False, "row_scaled_nvfp4": True, "eps": 0.0}
        codes, scales = NVFP4QuantizerRef._quantize_blockwise_reference(matrix, amax, 16, 1, **arguments)
        assert torch.equal(getattr(found, f"_amax_{side}wise"), amax)
        assert torch.equal(getattr(found, f"_{side}wise_data").view(codes.shape), codes.view(torch.uint8))
        held = getattr(found, f"_{side}wise_scale_inv")[: scales.shape[0], : scales.shape[1]]
        assert torch.equal(held, scales.view(torch.uint8))


def test_stochastic_rounding_keeps_the_mean_and_takes_only_neighbours():
    torch.manual_seed(0)
    block = [*torch.linspace(-5.9, 5.9, 15).tolist(), 6.0]  # the amax, so that the scale is 1 and codes are values
    x = torch.tensor(block).bfloat16().repeat(4096, 1)
    found = NVFP4Quantizer(stochastic_rounding=True, columnwise=False)(x).dequantize(dtype=torch.float32)
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat([-grid.flip(0), grid])
    for column, value in enumerate(x[0].float().tolist()):
        above, below = grid[grid >= value].min(), grid[grid <= value].max()
        assert set(found[:, column].unique().tolist()) <= {above.item(), below.item()}
        spread = (above - below).item() / 2
        assert abs(found[:, column].mean().item() - value) <= 4 * spread / 4096**0.5 + 1e-6
