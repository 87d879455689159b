"""FP8 rollout on vLLM: the contract carried out in every worker process.

``engine_args`` turns a contract into arguments for ``vllm.LLM``; the plugin, which vLLM loads in each of its
processes, quantizes BF16 weights into 128x128 blocks at load and at every push, with the casts of
:mod:`nemo_fp8.numerics`. Nothing here imports vLLM until it is used, and nothing imports NeMo.
"""

from __future__ import annotations

from nemo_fp8.rollout.arguments import engine_args, environment, init_fp8

__all__ = ["engine_args", "environment", "init_fp8"]
