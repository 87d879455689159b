"""FP8 checkpoints in Hugging Face's layout, written as a stream and verified.

    export(HuggingFace.open("llama-3-8b"), "llama-3-8b-fp8", preset("bf16_with_fp8_blockwise_mixed"))

One tensor is read, quantized and written after the other, so memory holds one of them and its codes, whatever the size
of the model. A killed export goes on at the shard that it had come to. ``verify`` compares what was written with the
numerics, to the bit, and ``logprobs`` with what vLLM makes of the source when it quantizes it on the fly.
"""

from __future__ import annotations

from nemo_fp8.extras import require

__needs__ = require("numerics")

from nemo_fp8.export.folder import Destination
from nemo_fp8.export.layouts import LAYOUTS
from nemo_fp8.export.plan import Plan
from nemo_fp8.export.run import Exported, export
from nemo_fp8.export.source import HuggingFace, Source
from nemo_fp8.export.verify import Certificate, verify

__all__ = ["LAYOUTS", "Certificate", "Destination", "Exported", "HuggingFace", "Plan", "Source", "export", "verify"]
