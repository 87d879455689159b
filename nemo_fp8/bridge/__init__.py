"""Megatron-Bridge's front door: one setting of its ``ConfigContainer`` carries the contract through a run.

    from nemo_fp8 import bridge

    config.mixed_precision = bridge.bridge_config("bf16_with_fp8_blockwise_mixed")   # any contract
    pretrain(config, forward_step, callbacks=[bridge.BridgeMonitor(every_n_steps=50)])

or ``bridge.register_presets()``, and then any preset's name: ``mixed_precision="bf16_with_fp8_blockwise_mixed"``.

config      ``ContractPrecision``: a ``MixedPrecisionConfig`` that checks machine and configs where Bridge applies it
loading     Hugging Face weights into FP8 parameters, which Bridge 0.3.1 loses
delayed_amaxes
            amaxes of training alone, from which every rank can resume
start       what is wrong with a run's tokenizer and first weights, before it starts
masters     weights out, under Hugging Face's names, from the FP32 master weights
patches     the one name of Megatron's that has to be replaced
monitor     the measurements of ``nemo_fp8.train.watch`` as a Bridge callback

The names below are imported at their first use: Bridge takes fifteen seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "BridgeMonitor",
    "ContractPrecision",
    "bridge_config",
    "hugging_face_weights",
    "load_exactly",
    "register_presets",
    "require_start",
    "require_tokenizer",
    "start_findings",
]

if TYPE_CHECKING:
    from nemo_fp8.bridge.config import ContractPrecision, bridge_config, register_presets
    from nemo_fp8.bridge.loading import load_exactly
    from nemo_fp8.bridge.masters import hugging_face_weights
    from nemo_fp8.bridge.monitor import BridgeMonitor
    from nemo_fp8.bridge.start import require_start, require_tokenizer, start_findings
else:  # hidden from type checkers, which would accept any name otherwise
    _HOMES = {
        "BridgeMonitor": "monitor",
        "ContractPrecision": "config",
        "bridge_config": "config",
        "hugging_face_weights": "masters",
        "load_exactly": "loading",
        "register_presets": "config",
        "require_start": "start",
        "require_tokenizer": "start",
        "start_findings": "start",
    }

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
