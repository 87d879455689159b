"""FP8 and NVFP4 arithmetic in torch: the reference that training, rollout and export are compared with.

Needs torch only: no NeMo, no vLLM, no TE. ``formats`` and ``scales`` define the bits, ``quantize`` makes them,
``nvfp4`` those of four bits, ``gemm`` and ``linear`` compute with them, ``delayed`` keeps amaxes, and ``autocast``
applies it all to a model.
"""

from nemo_fp8.extras import require

__needs__ = require("numerics")

from nemo_fp8.numerics.formats import FORMATS, Format, cast, decode
from nemo_fp8.numerics.nvfp4_tensor import QuantizedNVFP4
from nemo_fp8.numerics.quantize import quantize, quantize_into, quantize_pair, quantize_reference
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.numerics.statistics import Statistics

__all__ = [
    "FORMATS", "Format", "Quantized", "QuantizedNVFP4", "Statistics", "cast", "decode", "quantize", "quantize_into",
    "quantize_pair", "quantize_reference", ]  # fmt: skip
