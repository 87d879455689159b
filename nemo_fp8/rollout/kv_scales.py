"""Scales of the FP8 KV cache, calibrated by the engine itself: ``scale = margin * percentile(|x|) / 448``.

    scales = calibrate(llm.collective_rpc, lambda: llm.generate(prompts, SamplingParams(max_tokens=1)))
    refit.push(itertools.chain(weights, named_tensors(scales)))

NeMo RL's numbers, percentile 99.9 and margin 1.05, with one difference: it takes the largest percentile of all ranks
and micro-batches, this takes the percentile of all values, so the answer does not depend on how many workers there
are. A percentile is the least value that so many per cent of all values do not exceed: one that occurred.

Scales belong to weights: keys of new weights have other magnitudes. Calibrate after a push and :func:`apply` the
scales at once, or send those of the weights before along with a push, as NeMo RL does; either way vLLM's cached
prefixes were written with other scales and must be forgotten, which a push does and :func:`apply` leaves to you.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError

PERCENTILE, MARGIN = 99.9, 1.05
E4M3_MAX = 448.0

Rpc = Callable[..., Any]
"""``llm.collective_rpc``: a method's name, ``args=``; a list with each worker's answer."""


def calibrate(
    rpc: Rpc, generate: Callable[[], Any], *, percentile: float = PERCENTILE, margin: float = MARGIN
) -> dict[str, float]:
    """The k and v scales of every attention layer, from what the engine writes to its cache while ``generate`` runs.

    ``generate`` should run prompts like those to come. The prefix cache is no hindrance to correctness, but prompts
    that are cached already are not counted, since nothing is written for them.
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
    """Scales from the counts of all workers: those of one layer are added up, whoever holds which heads."""
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
    """The least magnitude that ``percentile`` of all do not exceed, from counts by BF16 bits (which order like
    values)."""
    left = math.ceil(sum(counts.values()) * percentile / 100 - 1e-6)  # 99.9 is no binary number
    for bits in sorted(counts):
        left -= counts[bits]
        if left <= 0:
            break
    return torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).item()


def apply(rpc: Rpc, scales: Mapping[str, float]) -> None:
    """Put scales into every worker, now. Reset the prefix cache afterwards: what lies there was written with others."""
    rpc("nemo_fp8_set_kv_scales", args=(dict(scales),))


def named_tensors(scales: Mapping[str, float]) -> Iterator[tuple[str, torch.Tensor]]:
    """Scales as a refit pushes them, beside the weights."""
    for name, scale in scales.items():
        yield name, torch.tensor(scale)
