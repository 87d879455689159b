"""The quantization method ``nemo_fp8``: which layer of vLLM's model is stored how.

vLLM asks this object once for every layer while it builds a model, in every worker. The contract comes through
``hf_overrides={"quantization_config": {"quant_method": "nemo_fp8", ...}}``, so it travels inside vLLM's own
configuration to wherever a worker starts; ``quantization="nemo_fp8"`` alone takes the defaults.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from nemo_fp8.contract import Precision
from nemo_fp8.render.vllm import PLUGIN, from_plugin, options_of_plugin
from nemo_fp8.rollout.in_vllm.experts import NemoFp8MoEMethod
from nemo_fp8.rollout.in_vllm.linear import NemoFp8LinearMethod
from nemo_fp8.rollout.selection import reason_to_keep


class NemoFp8Config(QuantizationConfig):  # type: ignore[misc]
    """A contract's rollout side, as vLLM asks for it."""

    def __init__(self, precision: Precision | None = None, options: dict[str, str] | None = None) -> None:
        super().__init__()
        self.precision = Precision(rollout="fp8") if precision is None else precision
        self.options = options_of_plugin({}) if options is None else options

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NemoFp8Config:
        """From a ``quantization_config``; an unknown key is an error."""
        return cls(Precision(rollout="fp8", **from_plugin(config)), options_of_plugin(config))

    @classmethod
    def get_name(cls) -> str:
        return PLUGIN

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How this layer is stored; None leaves embeddings, the head and everything unknown as they are."""
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if self._keeps(prefix) else NemoFp8LinearMethod(self, prefix)
        if isinstance(layer, RoutedExperts):
            if self._keeps(prefix, expert=True):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return NemoFp8MoEMethod(self, layer)
        if isinstance(layer, Attention):
            return BaseKVCacheMethod(self)
        return None

    def _keeps(self, prefix: str, expert: bool = False) -> bool:
        layers = get_current_vllm_config().model_config.hf_text_config.num_hidden_layers
        return reason_to_keep(self.precision, prefix, layers, self.packed_modules_mapping, expert) is not None
