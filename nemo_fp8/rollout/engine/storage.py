"""How a rollout stores weights and activations: the contract's operands, and the grid of scales that kernels take.

    rollout_block  weights                         activations    grid of a kernel
    128x128        one scale a block of 128x128    1x128          128x128
    1x32           one E8M0 exponent a row of 32   1x32           1x32
    tensor         one scale a weight              1x128          128x128
    1x16           NVFP4: one E4M3 scale for 16    1x16 or none   1x16
                   values beneath one in FP32

A weight with one scale runs on the kernels for blocks, with the same value in every block: the same codes, the same
product. The contract decides the operands (``Precision.operand``), and the table repeats them; only the grid is decided
here. :mod:`nemo_fp8.models.selection` decides which shapes kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_fp8.contract import ROLLOUT_BLOCKS, Operand, Precision
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import PrecisionError


@dataclass(frozen=True)
class Storage:
    """One row of the table: the operands, and the grid of scales that a kernel sees.

    ``activation`` is None if activations stay in the compute dtype.
    """

    weight: Operand
    activation: Operand | None
    grid: tuple[int, int]

    @property
    def group(self) -> int:
        """The number of activations along the contracted dimension that share a scale."""
        assert self.activation is not None
        assert self.activation.block is not None
        return self.activation.block[1]


def storage_of(precision: Precision) -> Storage:
    """Return the storage of a contract's rollout.

    Raises PrecisionError if activation scales are static, or the rollout is not quantized.
    """
    p = precision
    if p.activation_scheme == "static":
        raise PrecisionError(
            "activation_scheme='static' in a rollout of BF16 weights.",
            "Static scales are calibrated ahead and lie in a quantized checkpoint; weights that are pushed bring none.",
            "Set activation_scheme='dynamic'.",
        )
    weight, activation = (p.operand(role, "rollout") for role in ("weight", "input"))
    if weight is None:
        raise PrecisionError(
            f"rollout={p.rollout!r} on an engine that quantizes.",
            "The contract generates in the compute dtype, which has no codes and no scales.",
            "Set rollout='fp8' or 'nvfp4', or start the engine without quantization='nemo_fp8'.",
        )
    grid = ROLLOUT_BLOCKS[p.rollout_block] or (BLOCK, BLOCK)
    return Storage(weight, activation, grid)
