"""Calibrating the FP8 KV cache inside a worker: what keys and values really are, while the engine generates.

Each attention layer's cache writer is listened to for a while, and the magnitudes of what it writes are counted by
their BF16 bits: 32768 counters hold every value exactly, so percentiles are exact and the counts of workers, who hold
different heads, simply add up. The listener sits on one object of one layer and is taken off again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.preflight.support import GPU, UNSUPPORTED, VLLM_CHECK, answer

MAGNITUDES = 1 << 15  # the bits of a BF16 number without its sign


def require_cache(dtype: str) -> None:
    """Refuse an FP8 cache on a CPU for which vLLM has none, before vLLM ends its worker for it: whoever asked for it
    did not ask us."""
    if dtype.startswith("fp8") and current_platform.is_cpu():
        found = answer("kv-cache-fp8", Machine.here(sys.executable).without_gpu(), by=(GPU, VLLM_CHECK))
        if found.verdict == UNSUPPORTED:
            raise PrecisionError(f"kv_cache_dtype={dtype!r} on this machine.", found.reason, found.remedy)


class KvListener:
    """Counts the magnitudes of keys and values of every attention layer of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.counts = {name: torch.zeros(2, MAGNITUDES, dtype=torch.int64) for name, _ in attention_layers(model)}
        self.writers = []
        for name, layer in attention_layers(model):
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise PrecisionError(
                    f"{name}: {type(layer.impl).__name__} writes its cache inside the attention kernel.",
                    "Keys and values are counted where vLLM writes them to the cache, and this backend has no such "
                    "place.",
                    "Calibrate on another attention backend (FlashAttention, Triton, CPU), and push the scales.",
                )
            write = layer.impl.do_kv_cache_update
            layer.impl.do_kv_cache_update = partial(self._write, name, write)
            self.writers.append(layer.impl)

    def stop(self) -> dict[str, list[dict[int, int]]]:
        """Take the listener off: for each layer the counts of keys and of values, by BF16 bits, without the zeros."""
        for impl in self.writers:
            del impl.do_kv_cache_update  # the class's own is there again
        self.writers = []
        return {name: [_sparse(row) for row in counts] for name, counts in self.counts.items()}

    def _write(
        self, name: str, write: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> Any:
        real = slots[: len(key)] >= 0  # tokens that only fill up a batch go nowhere
        for row, tensor in zip(self.counts[name], (key, value), strict=True):
            bits = tensor[: len(real)][real].to(torch.bfloat16).view(torch.int16) & 0x7FFF
            row += torch.bincount(bits.flatten().int(), minlength=MAGNITUDES).cpu()
        return write(layer, key, value, cache, slots)


def set_scales(model: torch.nn.Module, scales: dict[str, float]) -> None:
    """Put scales in place: ``{"model.layers.0.self_attn.attn.k_scale": 0.02, ...}``. What is cached was written with
    others."""
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
    """The scales that attention layers write and read their cache with."""
    return {
        f"{name}.{which}_scale": float(getattr(layer, f"_{which}_scale"))
        for name, layer in attention_layers(model)
        for which in "kv"
    }


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[str, Attention]]:
    """The attention layers of a decoder with a cache of their own, by vLLM's name."""
    for name, layer in model.named_modules():
        if isinstance(layer, Attention) and getattr(layer, "kv_sharing_target_layer_name", None) is None:
            yield name, layer


def _sparse(counts: torch.Tensor) -> dict[int, int]:
    found = counts.nonzero().flatten().tolist()
    return dict(zip(found, counts[found].tolist(), strict=True))
