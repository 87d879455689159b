"""The quantization method ``nemo_fp8``: it decides how each layer of vLLM's model is stored.

vLLM asks this object for every layer while it builds a model, in every worker. The contract comes through
``hf_overrides={"quantization_config": {"quant_method": "nemo_fp8", ...}}``, so vLLM's own configuration takes it to
every worker. ``quantization="nemo_fp8"`` alone means the default contract.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.selection import contract_of
from nemo_fp8.models.units import part_names
from nemo_fp8.preflight.doctor import kept_from_amx
from nemo_fp8.render.vllm import PLUGIN, from_plugin, options_of_plugin
from nemo_fp8.rollout.engine import compatibility, experts, kv
from nemo_fp8.rollout.engine.linear import NemoFp8LinearMethod
from nemo_fp8.rollout.engine.rows import RowsEmbeddingMethod, RowsLinearMethod
from nemo_fp8.rollout.engine.selection import reason_to_keep, reason_to_keep_experts
from nemo_fp8.rollout.engine.storage import storage_of
from nemo_fp8.rollout.refit.worker.checkpoint import warn_if_unpushable


class NemoFp8Config(QuantizationConfig):
    """The rollout side of a contract as a quantization config of vLLM; ``options`` are those of the plugin.

    With ``unquantized="rows"`` the contract may generate in the compute dtype: then there is no ``storage``.

    Raises PrecisionError if NVFP4 is asked for and the installed vLLM has not what it needs, or a variable keeps oneDNN
    from AMX that vLLM finds in the processor.
    """

    def __init__(self, precision: Precision | None = None, options: dict[str, str] | None = None) -> None:
        super().__init__()
        self.precision = Precision(rollout="fp8") if precision is None else precision
        self.options = options_of_plugin({}) if options is None else options
        if self.precision.rolls_out_quantized or self.options["unquantized"] == "packed":
            self.storage = storage_of(self.precision)
        wrong = compatibility.misfits(compatibility.FOUR_BITS) if self.precision.rollout == "nvfp4" else []
        if wrong:
            raise compatibility.error_of(wrong)
        has_amx = current_platform.is_cpu() and torch.cpu._is_amx_tile_supported()
        if has_amx and (kept := [*kept_from_amx(os.environ)]):
            raise PrecisionError(kept)
        self._loaded = False
        self._of_modules: dict[Precision, NemoFp8Config] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NemoFp8Config:
        """Make the object from a ``quantization_config``; raises PrecisionError for an unknown key."""
        return cls(Precision(**{"rollout": "fp8"} | from_plugin(config)), options_of_plugin(config))

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
        """Return the method that stores this layer; None for layers that vLLM stores as ever.

        Raises PrecisionError if the layer's cache cannot be in FP8 on this machine and one was asked for.
        """
        if isinstance(layer, (LinearBase, RoutedExperts)) and self.precision.modules:
            return self._by_its_own(layer, prefix)
        if isinstance(layer, (LinearBase, RoutedExperts)) and not self.precision.rolls_out_quantized:
            return self._kept(layer, "the contract generates in the compute dtype")
        if isinstance(layer, LinearBase):
            reason = reason_to_keep(self.precision, prefix, self._layers(), self.packed_modules_mapping)
            return self._linear(prefix) if reason is None else self._kept(layer, reason)
        if isinstance(layer, RoutedExperts):
            moe = layer.moe_config
            inner = moe.intermediate_size_per_partition_unpadded * moe.tp_size
            reason = reason_to_keep_experts(
                self.precision, prefix, self._layers(), moe.num_logical_experts, inner, moe.hidden_dim_unpadded
            )
            return self._experts(layer, prefix) if reason is None else self._kept(layer, reason)
        if isinstance(layer, VocabParallelEmbedding):
            return RowsEmbeddingMethod() if self._multiplies_rows() else None
        return kv.method_for(self, layer) if isinstance(layer, (Attention, MLAAttention)) else None

    def _by_its_own(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer under the contract that the rules for modules give it."""
        routed = isinstance(layer, RoutedExperts)
        count = layer.moe_config.num_logical_experts if isinstance(layer, RoutedExperts) else 0
        names = part_names(prefix, experts=count) if routed else part_names(prefix, self.packed_modules_mapping)
        own = contract_of(self.precision, names, count).replace(modules=())
        if not own.rolls_out_quantized:
            return self._kept(layer, "the contract's rules for modules give it the compute dtype")
        config = self._of_modules.setdefault(own, NemoFp8Config(own, self.options))
        config.packed_modules_mapping = self.packed_modules_mapping
        config.loaded = self.loaded  # type: ignore[method-assign]  # the model is one
        return config.get_quant_method(layer, prefix)

    def _linear(self, prefix: str) -> NemoFp8LinearMethod:
        if self.precision.rollout != "nvfp4":
            return NemoFp8LinearMethod(self, prefix)
        from nemo_fp8.rollout.engine.four_bits import Nvfp4LinearMethod

        return Nvfp4LinearMethod(self, prefix)

    def _experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase:
        if self.precision.rollout != "nvfp4":
            return experts.method_for(self, layer, prefix)
        from nemo_fp8.rollout.engine import four_bit_experts

        return four_bit_experts.method_for(self, layer, prefix)

    def loaded(self, layer: torch.nn.Module) -> None:
        """Log a warning, once, if the model takes no pushes. vLLM calls this in its last pass over a complete model."""
        if not self._loaded:
            self._loaded = True
            warn_if_unpushable(layer)

    def unquantized(self, reason: str) -> UnquantizedLinearMethod:
        """Return the method for a linear in the compute dtype, with the reason why it is not quantized."""
        method = RowsLinearMethod() if self._multiplies_rows() else UnquantizedLinearMethod()
        method.nemo_fp8_reason = reason
        return method

    def _kept(self, layer: torch.nn.Module, reason: str) -> QuantizeMethodBase:
        return experts.unquantized(layer, reason) if isinstance(layer, RoutedExperts) else self.unquantized(reason)

    def _multiplies_rows(self) -> bool:
        """Return whether weights in the compute dtype stay as they were loaded; on a GPU vLLM leaves them so anyway."""
        return self.options["unquantized"] == "rows" and current_platform.is_cpu()

    def parts(self, prefix: str, count: int) -> list[str]:
        """Return the names of the ``count`` weights that are fused into a layer, or ``part 0``, ``part 1``, ... ."""
        names = self.packed_modules_mapping.get(prefix.rsplit(".", 1)[-1], ())
        if len(names) == count:
            return [*names]
        return [""] if count == 1 else [f"part {i}" for i in range(count)]

    def _layers(self) -> int:
        return int(get_current_vllm_config().model_config.hf_text_config.num_hidden_layers)
