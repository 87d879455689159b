"""What a vLLM worker can be asked from outside: ``llm.collective_rpc("nemo_fp8_...")``.

vLLM mixes this class into its worker (``worker_extension_cls``), whatever the executor; ``engine_args`` names it. All
methods begin with ``nemo_fp8_``, so that none hides one of vLLM's, and return plain values, which every executor can send.
"""

from __future__ import annotations

from typing import Any

from nemo_fp8.rollout.in_vllm.reload import NemoFp8Refit
from nemo_fp8.rollout.in_vllm.report import plain_report


class NemoFp8Worker(NemoFp8Refit):
    """The methods that this package adds to a worker; those of a push are in ``reload``."""

    def nemo_fp8_report(self) -> dict[str, dict[str, Any]]:
        """How every layer is stored, and why: see :class:`nemo_fp8.rollout.in_vllm.report.LayerReport`."""
        return plain_report(self.model_runner.model)
