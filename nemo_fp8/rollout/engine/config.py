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
from nemo_fp8.rollout.engine import experts, kv
from nemo_fp8.rollout.engine.linear import NemoFp8LinearMethod
from nemo_fp8.rollout.engine.selection import reason_to_keep, reason_to_keep_experts
from nemo_fp8.rollout.engine.storage import storage_of
from nemo_fp8.rollout.refit.worker.checkpoint import warn_if_unpushable


class NemoFp8Config(QuantizationConfig):
    """A contract's rollout side, as vLLM asks for it."""

    def __init__(self, precision: Precision | None = None, options: dict[str, str] | None = None) -> None:
        super().__init__()
        self.precision = Precision(rollout="fp8") if precision is None else precision
        self.options = options_of_plugin({}) if options is None else options
        self.storage = storage_of(self.precision)
        self._loaded = False

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
            reason = reason_to_keep(self.precision, prefix, self._layers(), self.packed_modules_mapping)
            return NemoFp8LinearMethod(self, prefix) if reason is None else self.unquantized(reason)
        if isinstance(layer, RoutedExperts):
            moe = layer.moe_config
            inner = moe.intermediate_size_per_partition_unpadded * moe.tp_size
            reason = reason_to_keep_experts(
                self.precision, prefix, self._layers(), moe.num_logical_experts, inner, moe.hidden_dim_unpadded
            )
            if reason is None:
                return experts.method_for(self, layer, prefix)
            method = UnquantizedFusedMoEMethod(layer.moe_config)
            method.nemo_fp8_reason = reason
            return method
        if isinstance(layer, Attention):
            kv.require_cache(layer.kv_cache_dtype)
            return BaseKVCacheMethod(self)
        return None

    def loaded(self, layer: torch.nn.Module) -> None:
        """Say, once, if no push can follow. The model of this layer is whole: this is vLLM's last pass over all
        layers."""
        if not self._loaded:
            self._loaded = True
            warn_if_unpushable(layer)

    def unquantized(self, reason: str) -> UnquantizedLinearMethod:
        """vLLM's method for the compute dtype, which remembers why it was taken."""
        method = UnquantizedLinearMethod()
        method.nemo_fp8_reason = reason
        return method

    def parts(self, prefix: str, count: int) -> list[str]:
        """The names of the weights that were fused into a layer; numbers where vLLM's model does not say."""
        names = self.packed_modules_mapping.get(prefix.rsplit(".", 1)[-1], ())
        if len(names) == count:
            return [*names]
        return [""] if count == 1 else [f"part {i}" for i in range(count)]

    def _layers(self) -> int:
        return int(get_current_vllm_config().model_config.hf_text_config.num_hidden_layers)
