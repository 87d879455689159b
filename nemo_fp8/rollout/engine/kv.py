"""Calibrate the FP8 KV cache inside a worker: count the magnitudes of keys and values while the engine generates.

A listener wraps the method of every attention layer that writes to the cache, and counts the magnitudes by their BF16
bits. There are only 32768 magnitudes, so percentiles are exact, and the counts of workers, which hold different heads,
can be added. The wrappers sit on objects, not on vLLM's classes (``COVERED``), and are removed at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.platforms import current_platform

from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.answers import answer
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.preflight.support import GPU, KV_CACHE_ON_CPU, ROUNDED, VLLM_CHECK

LARGEST = 448.0  # of E4M3
MAGNITUDES = 1 << 15  # the bits of a BF16 number without its sign
COVERED = {
    "do_kv_cache_update": "a layer writes keys and values to its cache there, and vLLM asks nobody else: they are "
    "rounded to FP8 before, or counted"
}
"""The method that is wrapped on the attention of a layer, and not on its class: the reason."""


class RoundedCache(BaseKVCacheMethod):
    """The method of an attention layer whose keys and values are rounded to FP8 and kept in a cache of BF16.

        kept = bf16(e4m3(x / scale) * scale)

    A CPU for which vLLM has no FP8 cache then attends to the numbers of one, and no memory is saved. With a scale that
    is a power of two the product is exact; with others it is rounded to BF16 once more.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Take scales as vLLM does for an FP8 cache, and round what the layer writes from now on."""
        kept, layer.kv_cache_dtype = layer.kv_cache_dtype, "fp8"
        try:
            super().process_weights_after_loading(layer)
        finally:
            layer.kv_cache_dtype = kept
        if "do_kv_cache_update" not in vars(layer.impl):
            layer.impl.do_kv_cache_update = partial(_write_rounded, layer.impl.do_kv_cache_update)


def _write_rounded(write: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, *where: Any) -> Any:
    return write(layer, rounded(key, layer._k_scale_float), rounded(value, layer._v_scale_float), *where)


def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the values that an FP8 cache with this scale gives back, in the dtype in which they came."""
    codes = (values.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(values.dtype)


def method_for(config: Any, layer: Attention | MLAAttention) -> BaseKVCacheMethod | None:
    """Return the method of an attention layer's cache.

    Raises PrecisionError for an FP8 cache that vLLM has not on this CPU, or one to be rounded that is MLA's.
    """
    if isinstance(layer, Attention):
        require_cache(layer.kv_cache_dtype)
        return (RoundedCache if config.options["cache"] == "rounded" else BaseKVCacheMethod)(config)
    if config.options["cache"] == "rounded":
        raise PrecisionError(
            "An FP8 KV cache of latent attention (MLA), on a CPU without AVX-512.",
            "vLLM has none there, and only keys and values are rounded to FP8 instead, no latents.",
            "Set kv_cache='auto'.",
        )
    return None


def is_fp8(layer: Any) -> bool:
    """Return whether an attention layer's cache has scales: it is in FP8, or rounded to it."""
    return isinstance(layer.quant_method, RoundedCache) or str(getattr(layer, "kv_cache_dtype", "")).startswith("fp8")


def require_cache(dtype: str) -> None:
    """Raise PrecisionError for an FP8 cache on a CPU for which vLLM has none.

    vLLM would end its worker. The cache comes from vLLM's own arguments then, since ``engine_args`` rounds instead.
    """
    if dtype.startswith("fp8") and current_platform.is_cpu():
        found = answer("kv-cache-fp8", Machine.here(sys.executable).without_gpu(), by=(GPU, VLLM_CHECK))
        if found.way == ROUNDED:
            raise PrecisionError(
                f"kv_cache_dtype={dtype!r} on this machine.",
                KV_CACHE_ON_CPU,
                "Set kv_cache='auto'; or start the engine with nemo_fp8.rollout.engine_args and kv_cache='fp8', which "
                "rounds keys and values to FP8 in a cache of BF16.",
            )


class KvListener:
    """Counts the magnitudes of keys and values of every attention layer of a model, until ``stop``.

    Raises PrecisionError if an attention backend writes its cache inside of its kernel.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.counts = {name: torch.zeros(2, MAGNITUDES, dtype=torch.int64) for name, _ in attention_layers(model)}
        self.writers: list[tuple[Any, Any]] = []
        """What writes to each cache, and what the object itself said of that before."""
        for name, layer in attention_layers(model):
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise PrecisionError(
                    f"{name}: {type(layer.impl).__name__} writes its cache inside the attention kernel.",
                    "Keys and values are counted where vLLM writes them to the cache, and this backend has no such "
                    "place.",
                    "Calibrate on another attention backend (FlashAttention, Triton, CPU), and push the scales.",
                )
            write = layer.impl.do_kv_cache_update
            self.writers.append((layer.impl, vars(layer.impl).get("do_kv_cache_update")))
            layer.impl.do_kv_cache_update = partial(self._write, name, write)

    def stop(self) -> dict[str, list[dict[int, int]]]:
        """Stop counting; return for each layer the counts of keys and of values, by BF16 bits, without the zeros."""
        for impl, own in self.writers:
            del impl.do_kv_cache_update  # uncovers the method of the class
            if own is not None:
                impl.do_kv_cache_update = own
        self.writers = []
        return {name: [_sparse(row) for row in counts] for name, counts in self.counts.items()}

    def _write(
        self, name: str, write: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> Any:
        real = slots[: len(key)] >= 0  # tokens that pad a batch are not written
        for row, tensor in zip(self.counts[name], (key, value), strict=True):
            bits = tensor[: len(real)][real].to(torch.bfloat16).view(torch.int16) & 0x7FFF
            row += torch.bincount(bits.flatten().int(), minlength=MAGNITUDES).cpu()
        return write(layer, key, value, cache, slots)


def set_scales(model: torch.nn.Module, scales: dict[str, float]) -> None:
    """Set scales, such as ``{"model.layers.0.self_attn.attn.k_scale": 0.02, ...}``. The cache is left as it is."""
    layers = dict(attention_layers(model))
    for name, scale in scales.items():
        path, _, kind = name.rpartition(".")
        layer, which = layers[path], kind.removesuffix("_scale")
        getattr(layer, f"_{which}_scale").fill_(scale)
        setattr(layer, f"_{which}_scale_float", scale)
        on_host = getattr(layer, f"_{which}_scale_cpu", None)
        if on_host is not None:
            on_host.fill_(scale)


def scales_of(model: torch.nn.Module) -> dict[str, float]:
    """Return the scales with which attention layers write and read their cache."""
    return {
        f"{name}.{which}_scale": float(getattr(layer, f"_{which}_scale"))
        for name, layer in attention_layers(model)
        for which in "kv"
    }


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[str, Attention]]:
    """Yield vLLM's name and the attention layer, for all layers that do not share another one's cache."""
    for name, layer in model.named_modules():
        if isinstance(layer, Attention) and getattr(layer, "kv_sharing_target_layer_name", None) is None:
            yield name, layer


def _sparse(counts: torch.Tensor) -> dict[int, int]:
    found = counts.nonzero().flatten().tolist()
    return dict(zip(found, counts[found].tolist(), strict=True))
