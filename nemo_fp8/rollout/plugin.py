"""vLLM's way in: the entry point ``vllm.general_plugins`` calls :func:`register` in each of vLLM's processes.

The main process, EngineCore and every worker of every executor load plugins before they build anything, so the
quantization method ``nemo_fp8`` is there wherever a model is. Nothing is patched: vLLM has a register for this.
"""

from __future__ import annotations

from nemo_fp8.render.vllm import PLUGIN


def register() -> None:
    """Make ``quantization="nemo_fp8"`` known to this process. Called again, it changes nothing."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from nemo_fp8.rollout.in_vllm.config import NemoFp8Config

    register_quantization_config(PLUGIN)(NemoFp8Config)
