"""FP8 arithmetic in torch: formats, scales, quantized tensors, the FP8 linear. The reference that every side is held
to.

Torch only: no NeMo, no vLLM, no TE. ``formats`` and ``scales`` say what the bits are, ``quantize`` makes them,
``gemm`` and ``linear`` compute with them, ``delayed`` remembers amaxes, ``autocast`` brings it all into a model.
"""

from nemo_fp8.extras import require

__needs__ = require("numerics")

from nemo_fp8.numerics.formats import FORMATS, Format, cast, decode
from nemo_fp8.numerics.quantize import quantize, quantize_into, quantize_pair, quantize_reference
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.numerics.statistics import Statistics

__all__ = [
    "FORMATS", "Format", "Quantized", "Statistics", "cast", "decode", "quantize", "quantize_into", "quantize_pair",
    "quantize_reference", ]  # fmt: skip
