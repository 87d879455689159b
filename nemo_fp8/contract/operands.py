"""The operands of a linear layer, and the words in which a contract says how each is stored.

Three GEMMs make a linear layer, and each has two of three operands:

    fprop   y  = x  @ w.T    input  x weight
    dgrad   dx = dy @ w      grad   x weight
    wgrad   dw = dy.T @ x    grad   x input

Which operand a contract stores how is :meth:`nemo_fp8.contract.Precision.operand`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("input", "weight", "grad")
GEMMS = {"fprop": ("input", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "input")}

# Weight blocks that share one scale in an FP8 rollout: DeepSeek's, MX's, and the whole tensor.
ROLLOUT_BLOCKS: dict[str, tuple[int, int] | None] = {"128x128": (128, 128), "1x32": (1, 32), "tensor": None}

# Kind of scale -> its name.
SCALES = {"fp32": "FP32", "pow2": "power-of-2", "e8m0": "E8M0"}


@dataclass(frozen=True)
class Operand:
    """How one GEMM operand is stored: the element type, and the scale that goes with it.

    ``block`` is the tile that shares one scale, along (rows, contracted dimension); None is the whole tensor. ``scale``
    is ``fp32`` (any value), ``pow2`` (FP32 holding a power of two) or ``e8m0`` (one exponent byte). ``delayed`` says
    that the scale was found beforehand, from earlier steps' amaxes or by calibration, and not from the tensor itself.
    """

    format: str
    block: tuple[int, int] | None
    scale: str
    delayed: bool = False

    def words(self) -> str:
        """It all in words, as reports and ``check`` say it."""
        tile = "one for the whole tensor" if self.block is None else "one for each {}x{} block".format(*self.block)
        return (
            f"{self.format.upper()} with {SCALES[self.scale]} scales, "
            f"{tile}{', found beforehand' if self.delayed else ''}"
        )
