"""What the sides of a weight must be multiples of, by scaling: one table for the lint, the emulation and the FP8 weights.

GEMM      TE's GEMMs take multiples of 16 on both sides (32 for MX), since each side is contracted by one of the three
PRIMARY   a blockwise weight that is kept in FP8 is cast share by share, so its blocks must be whole
"""

from __future__ import annotations

GEMM = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
PRIMARY = GEMM | {"blockwise": 128}
