"""The plugin for vLLM: the entry point ``vllm.general_plugins`` calls :func:`register` in each of vLLM's processes.

The main process, EngineCore and every worker of every executor load plugins before they build anything, so the
quantization method ``nemo_fp8`` is known wherever a model is, and on a CPU kernels for checkpoints of ModelOpt's.
Nothing is patched: vLLM has a registry of methods, and one of kernels. One setting of torch is made, on a CPU with AVX2
or AVX-512, without which compiled code of one reaches the other (:mod:`nemo_fp8.rollout.engine.compiled`). If vLLM's
internals are not what we know, vLLM works as without us, and an engine that asks for ``nemo_fp8`` gets an error.
"""

from __future__ import annotations

from typing import Any

from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.vllm import PLUGIN


def register() -> None:
    """Register ``quantization="nemo_fp8"`` with vLLM, in this process. A second call changes nothing."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from nemo_fp8.rollout.engine import compatibility

    wrong = compatibility.misfits()
    register_quantization_config(PLUGIN)(_refusing(compatibility.error_of(wrong)) if wrong else _config())
    if not wrong:
        from nemo_fp8.rollout.engine import compiled
        from nemo_fp8.rollout.refit.worker import transfer

        compiled.register()
        transfer.register()
        if not compatibility.misfits(compatibility.FOUR_BITS):
            from nemo_fp8.rollout.engine import cpu_kernels

            cpu_kernels.register()


def _config() -> type:
    from nemo_fp8.rollout.engine.config import NemoFp8Config

    return NemoFp8Config


def _refusing(error: PrecisionError) -> type:
    """Return a quantization method that raises ``error`` when it is made."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class NemoFp8DoesNotFit(QuantizationConfig):
        def __new__(cls) -> NemoFp8DoesNotFit:
            raise error

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> NemoFp8DoesNotFit:
            raise error

    return NemoFp8DoesNotFit
