"""Calibrate the scales of an FP8 KV cache on a running engine: ``scale = margin * percentile(|x|) / 448``.

    scales = calibrate(llm.collective_rpc, lambda: llm.generate(prompts, SamplingParams(max_tokens=1)))
    refit.push(itertools.chain(weights, named_tensors(scales)))

The numbers are NeMo RL's, percentile 99.9 and margin 1.05, with one difference: NeMo RL takes the largest percentile of
all ranks and micro-batches, this module takes the percentile of all values, so the result does not depend on the number
of workers. The percentile is the smallest value in the data that so many per cent of all values do not exceed.

Scales belong to weights, since keys of new weights have other magnitudes. Either calibrate after a push and
:func:`apply` the scales at once, or send the scales of the weights before with a push, as NeMo RL does. Prefixes that
vLLM has cached were written with the old scales. A push drops them; after :func:`apply` the caller must.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("numerics")

import torch

from nemo_fp8.errors import PrecisionError

PERCENTILE, MARGIN = 99.9, 1.05
E4M3_MAX = 448.0

Rpc = Callable[..., Any]
"""A function like ``llm.collective_rpc``: takes a method's name and ``args=``, returns a list of workers' answers."""


def calibrate(
    rpc: Rpc, generate: Callable[[], Any], *, percentile: float = PERCENTILE, margin: float = MARGIN
) -> dict[str, float]:
    """Return the k and v scales of every attention layer, from what is written to the cache while ``generate`` runs.

    ``rpc`` calls a method of all workers, as ``llm.collective_rpc`` does. ``generate`` should run prompts like those to
    come. Prompts that are cached already do not count, since nothing is written for them. Magnitudes above
    ``percentile`` saturate, and ``margin`` widens the range beyond it.

    Raises PrecisionError if these make no sense, nothing was written, or the attention backend cannot be listened to.
    """
    if not 0 < percentile <= 100 or not margin > 0:
        raise PrecisionError(
            f"percentile={percentile}, margin={margin}.",
            "A percentile lies between 0 and 100, and a margin widens the range that codes can hold.",
            f"NeMo RL's are percentile={PERCENTILE} and margin={MARGIN}.",
        )
    rpc("nemo_fp8_listen_to_kv")
    try:
        generate()
    finally:
        answers = rpc("nemo_fp8_stop_listening")
    return scales_of(answers, percentile, margin)


def scales_of(
    answers: Iterable[Mapping[str, Sequence[Mapping[Any, int]]]], percentile: float, margin: float
) -> dict[str, float]:
    """Return scales from the counts of all workers, which hold different heads: the counts of a layer are added.

    Raises PrecisionError if a layer has no counts.
    """
    counts: dict[str, Counter[int]] = {}
    for answer in answers:
        for layer, both in answer.items():
            for which, found in zip("kv", both, strict=True):
                counts.setdefault(f"{layer}.{which}_scale", Counter()).update(
                    {int(bits): n for bits, n in found.items()}
                )
    empty = [name for name, found in counts.items() if not found]
    if empty or not counts:
        raise PrecisionError(
            f"Nothing was written to the KV cache of {len(empty) or 'any'} layers while it was calibrated.",
            "The engine generated nothing new: no prompts, all of them cached, or attention captured in a CUDA graph.",
            "Give prompts that were not seen before, reset the prefix cache, or calibrate with enforce_eager=True.",
        )
    return {name: margin * percentile_of(found, percentile) / E4M3_MAX or 1.0 for name, found in counts.items()}


def percentile_of(counts: Mapping[int, int], percentile: float) -> float:
    """Return the smallest magnitude that ``percentile`` per cent of all do not exceed.

    ``counts`` are by the bits of a magnitude in BF16, which have the order of the magnitudes.
    """
    left = math.ceil(sum(counts.values()) * percentile / 100 - 1e-6)  # 99.9 is rounded in binary
    for bits in sorted(counts):
        left -= counts[bits]
        if left <= 0:
            break
    return torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).item()


def apply(rpc: Rpc, scales: Mapping[str, float]) -> None:
    """Set scales in every worker. Reset the prefix cache afterwards: it was written with the old ones."""
    rpc("nemo_fp8_set_kv_scales", args=(dict(scales),))


def named_tensors(scales: Mapping[str, float]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield scales as (name, tensor), to be pushed together with weights."""
    for name, scale in scales.items():
        yield name, torch.tensor(scale)
