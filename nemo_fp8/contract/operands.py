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

BLOCK, MX_BLOCK, FOUR_BIT_BLOCK = 128, 32, 16
"""How many values share one scale: the side of blockwise scaling's blocks (DeepSeek's), MX's run, NVFP4's run."""

# Precision.rollout_block -> (rows, columns) that share one scale; None for the whole tensor.
ROLLOUT_BLOCKS: dict[str, tuple[int, int] | None] = {
    "128x128": (BLOCK, BLOCK),
    "1x32": (1, MX_BLOCK),
    "1x16": (1, FOUR_BIT_BLOCK),
    "tensor": None,
}

ROLLOUT_FIELDS = ("rollout", "rollout_block", "activation_scheme", "kv_cache", "deep_gemm", "importance_sampling")
"""The fields of a contract that speak of the rollout alone."""

# Kind of scale -> its name in reports.
SCALES = {"fp32": "FP32", "pow2": "power-of-2", "e8m0": "E8M0", "e4m3": "E4M3"}


@dataclass(frozen=True)
class Operand:
    """How one GEMM operand is stored: as codes of ``format``, with one scale for each ``block``.

    format    ``e4m3``, ``e5m2`` or ``e2m1``
    block     the tile that shares one scale, as (rows, contracted dimension); None for the whole tensor
    scale     ``fp32`` (any FP32 value), ``pow2`` (an FP32 power of two), ``e8m0`` (one exponent byte), or ``e4m3``
              (one byte for a block, beneath one FP32 scale for the tensor)
    delayed   the scale is known before the tensor is: from earlier steps' amaxes, or from calibration

    The rest is for E2M1 alone, whose four bits need help:

    hadamard         the copy for the weight gradient is quantized after a random Hadamard transform of 16 values
    stochastic       codes are rounded up or down by chance, so that the mean stays
    row_scaled       each row has an FP32 scale of its own, instead of the tensor
    four_over_six    each block takes the better of two scales, for a largest code of 6 or of 4: by the mean absolute
                     (``mae``) or squared (``mse``) error; None for 6 alone
    largest_scale    the E4M3 value that the largest block's scale becomes: 448, or 256, beneath which 4 over 6 has room
    """

    format: str
    block: tuple[int, int] | None
    scale: str
    delayed: bool = False
    hadamard: bool = False
    stochastic: bool = False
    row_scaled: bool = False
    four_over_six: str | None = None
    largest_scale: int = 448

    def words(self) -> str:
        """Return the storage in words, as ``check`` and reports print it."""
        tile = "one for the whole tensor" if self.block is None else "one for each {}x{} block".format(*self.block)
        beneath = "row" if self.row_scaled else "tensor"
        more = {
            ", found beforehand": self.delayed,
            f" beneath an FP32 scale for the {beneath}": self.scale == "e4m3",
            ", stochastic rounding": self.stochastic,
            ", Hadamard transform for the weight gradient": self.hadamard,
            f", 4 over 6 by {(self.four_over_six or '').upper()}": self.four_over_six is not None,
        }
        return (
            f"{self.format.upper()} with {SCALES[self.scale]} scales, "
            f"{tile}{''.join(words for words, holds in more.items() if holds)}"
        )
