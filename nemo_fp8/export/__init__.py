"""Write FP8 checkpoints in Hugging Face's layout as a stream, and verify them.

    export(HuggingFace.open("llama-3-8b"), "llama-3-8b-fp8", preset("bf16_with_fp8_blockwise_mixed"))

Tensors are read, quantized and written one after the other, so memory holds one tensor and its codes, whatever the size
of the model. An export that was killed resumes at the shard that it was writing. ``verify`` compares the files with the
numerics, bit for bit, and ``logprobs`` compares vLLM on the export with vLLM that quantizes the source itself.
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
