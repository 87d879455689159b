"""How a rollout stores weights and activations: the contract's block and scales as operands of :mod:`nemo_fp8.numerics`.

    rollout_block  weights                         activations           rows, columns of a weight
    128x128        one scale a block of 128x128    1x128                 multiples of 32, 128
    1x32           one E8M0 exponent a row of 32   1x32                  any, multiples of 32
    tensor         one scale a weight              1x128                 multiples of 32, 128

A whole-tensor scale runs on the kernels for blocks, with one value in every block: the same codes, the same product.
The alignment is what vLLM's kernels take on any device, so that a CPU keeps the layers that a GPU would keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError


@dataclass(frozen=True)
class Storage:
    """One row of the table: the operands, the grid that a kernel sees, and what a weight's sides are multiples of."""

    weight: Operand
    activation: Operand
    grid: tuple[int, int]
    alignment: tuple[int, int]

    @property
    def group(self) -> int:
        """How many activations along the contracted dimension share a scale."""
        assert self.activation.block is not None
        return self.activation.block[1]

    def fits(self, rows: int, columns: int) -> bool:
        """Whether kernels take a weight of this shape."""
        return rows % self.alignment[0] == 0 and columns % self.alignment[1] == 0


def storage_of(precision: Precision) -> Storage:
    """The storage that a contract's rollout asks for."""
    p = precision
    if p.activation_scheme == "static":
        raise PrecisionError(
            "activation_scheme='static' in a rollout of BF16 weights.",
            "Static scales are calibrated ahead and lie in a quantized checkpoint; weights that are pushed bring none.",
            "Set activation_scheme='dynamic'.",
        )
    if p.rollout_block == "1x32":
        mx = Operand("e4m3", (1, 32), "e8m0")
        return Storage(mx, mx, (1, 32), (1, 32))
    block = (128, 128) if p.rollout_block == "128x128" else None
    return Storage(Operand("e4m3", block, p.weight_scale), Operand("e4m3", (1, 128), p.activation_scale), (128, 128), (32, 128))
