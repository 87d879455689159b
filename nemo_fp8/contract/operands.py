"""The operands of a linear layer's GEMMs, and how one of them is stored.

A linear layer runs three GEMMs, each on two of three operands:

    fprop   y  = x  @ w.T    input x weight
    dgrad   dx = dy @ w      grad  x weight
    wgrad   dw = dy.T @ x    grad  x input

An :class:`Operand` describes the storage of one: element type, block and kind of scale.
:meth:`nemo_fp8.contract.Precision.operand` returns the one that a contract chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("input", "weight", "grad")
GEMMS = {"fprop": ("input", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "input")}

# Precision.rollout_block -> (rows, columns) that share one scale: DeepSeek's block, MX's block, the whole tensor.
ROLLOUT_BLOCKS: dict[str, tuple[int, int] | None] = {"128x128": (128, 128), "1x32": (1, 32), "tensor": None}

# Kind of scale -> its name in reports.
SCALES = {"fp32": "FP32", "pow2": "power-of-2", "e8m0": "E8M0"}


@dataclass(frozen=True)
class Operand:
    """How one GEMM operand is stored: as codes of ``format``, with one scale for each ``block``.

    format    ``e4m3`` or ``e5m2``
    block     the tile that shares one scale, as (rows, contracted dimension); None for the whole tensor
    scale     ``fp32`` (any FP32 value), ``pow2`` (an FP32 power of two) or ``e8m0`` (one exponent byte)
    delayed   the scale is known before the tensor is: from earlier steps' amaxes, or from calibration
    """

    format: str
    block: tuple[int, int] | None
    scale: str
    delayed: bool = False

    def words(self) -> str:
        """Return the storage in words, as ``check`` and reports print it."""
        tile = "one for the whole tensor" if self.block is None else "one for each {}x{} block".format(*self.block)
        return (
            f"{self.format.upper()} with {SCALES[self.scale]} scales, "
            f"{tile}{', found beforehand' if self.delayed else ''}"
        )
