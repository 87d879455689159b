"""What the sides of a weight must be multiples of, by scaling: one table for the lint, ``autocast``, and the linears that training keeps.

TE's GEMMs take multiples of 16 on both sides (32 for MX), since each side is contracted by one of the three.
"""

from __future__ import annotations

GEMM = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
