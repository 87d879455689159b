"""FP8 rollout on vLLM: quantize weights in every worker process as the contract says.

``engine_args`` turns a contract into arguments for ``vllm.LLM``; the plugin, which vLLM loads in each of its
processes, quantizes BF16 weights into 128x128 blocks at load and at every push, with the casts of
:mod:`nemo_fp8.numerics`. Nothing here imports vLLM until it is used, and nothing imports NeMo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_fp8.rollout.arguments import engine_args, environment, init_fp8

__all__ = ["Receipt", "Refit", "engine_args", "environment", "init_fp8"]

if TYPE_CHECKING:
    from nemo_fp8.rollout.refit import Receipt, Refit
else:  # a type checker that saw this would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import what needs torch when it is first used."""
        if name in ("Receipt", "Refit"):
            from nemo_fp8.rollout import refit

            return getattr(refit, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
