"""The named contracts: one row each, the same names and values as NeMo 2.7.3 and Megatron-Bridge.

A preset is its name and what it sets; everything else is the contract's own default. A new recipe is a new row. Where a
name says one thing and its value another (NeMo's ``nanov2_*``), the value is kept, so that users change one import and
nothing else, and ``explain`` says so.
"""

from __future__ import annotations

from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown

_BF16: dict[str, Any] = {"compute": "bf16", "grad_reduce": "fp32"}
_FP16: dict[str, Any] = {"compute": "fp16", "grad_reduce": "compute"}
_DELAYED: dict[str, Any] = {
    "format": "hybrid",
    "scaling": "delayed",
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
    "fp8_param": True,
}
_TENSORWISE: dict[str, Any] = {
    "format": "hybrid",
    "scaling": "tensorwise",
    "first_layers": 1,
    "last_layers": 1,
    "fp8_param": True,
}
_BLOCKWISE: dict[str, Any] = {"format": "hybrid", "scaling": "blockwise"}
_MXFP8: dict[str, Any] = {"format": "e4m3", "scaling": "mxfp8", "fp8_param": True}
_NVFP4: dict[str, Any] = {"format": "e2m1", "scaling": "nvfp4"}
_FOUR_LAYERS: dict[str, Any] = {"first_layers": 2, "last_layers": 2}

# name -> the fields that it sets: NeMo's names, Megatron-Bridge's for delayed scaling, then aliases of our own.
_ROWS: dict[str, dict[str, Any]] = {
    "bf16_mixed": _BF16,
    "fp16_mixed": _FP16,
    "bf16_with_fp8_mixed": _BF16 | _DELAYED,
    "fp16_with_fp8_mixed": _FP16 | _DELAYED,
    "bf16_with_mxfp8_mixed": _BF16 | _MXFP8,
    "fp16_with_mxfp8_mixed": _FP16 | _MXFP8,
    "bf16_with_fp8_current_scaling_mixed": _BF16 | _TENSORWISE,
    "fp16_with_fp8_current_scaling_mixed": _FP16 | _TENSORWISE,
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": _BF16 | _TENSORWISE | _FOUR_LAYERS,
    "nanov2_bf16_with_fp8_current_scaling_mixed": _BF16 | _BLOCKWISE | _FOUR_LAYERS | {"fp8_param": True},
    "bf16_with_fp8_subchannel_scaling_mixed": _BF16 | _BLOCKWISE,
    "fp16_with_fp8_subchannel_scaling_mixed": _FP16 | _BLOCKWISE,
    "bf16_with_fp8_delayed_scaling_mixed": _BF16 | _DELAYED,
    "fp16_with_fp8_delayed_scaling_mixed": _FP16 | _DELAYED,
    "bf16_with_fp8_delayed_mixed": _BF16 | _DELAYED,
    "fp16_with_fp8_delayed_mixed": _FP16 | _DELAYED,
    "bf16_with_fp8_tensorwise_mixed": _BF16 | _TENSORWISE,
    "fp16_with_fp8_tensorwise_mixed": _FP16 | _TENSORWISE,
    "bf16_with_fp8_blockwise_mixed": _BF16 | _BLOCKWISE,
    "fp16_with_fp8_blockwise_mixed": _FP16 | _BLOCKWISE,
    "bf16_with_nvfp4_mixed": _BF16 | _NVFP4,
    "nemotron_3_super_bf16_with_nvfp4_mixed": _BF16 | _NVFP4 | {"last_layers": 14},
}

PRESETS: dict[str, Precision] = {name: Precision(name=name, **row) for name, row in _ROWS.items()}


def preset(name: str) -> Precision:
    """Return the contract of a preset; hyphens and underscores are the same. Raises PrecisionError if unknown."""
    found = PRESETS.get(name.replace("-", "_")) if isinstance(name, str) else None
    if found is None:
        raise PrecisionError([unknown("precision", name, PRESETS)])
    return found
