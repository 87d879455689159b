"""What torch.compile leaves on disk, kept apart by the instruction set that it was generated for.

    key of a compiled graph  =  torch's own key  +  capability (AVX2, AVX512, ...)  +  every instruction set of the processor

Megatron's fusions are compiled by TorchInductor, whose cache (``/tmp/torchinductor_USER``) holds C++ generated for vectors
of one width. torch's key does not say which, so a process that runs with AVX2 takes a graph generated for AVX-512, compiles
it for AVX2, and writes past its vectors: ``free(): invalid pointer``, or a segmentation fault. That happens with
``ATEN_CPU_CAPABILITY``, and with one home folder on two kinds of machines. torch has a setting that enters every key
(``torch.compiler.config.cache_key_tag``); a tag that the user has set is kept in front. The trade-off: two processors that
inductor would generate the same code for compile once each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.compiler import config


@contextmanager
def compiled_for_this_cpu() -> Iterator[None]:
    """Only graphs that were generated for this instruction set are taken from the cache, in this thread, until the context closes."""
    tag = config.cache_key_tag
    config.cache_key_tag = f"{tag} {instruction_set()}".strip()
    try:
        yield
    finally:
        config.cache_key_tag = tag


def instruction_set() -> str:
    """What torch computes with in this process, and all that the processor has beside."""
    has = sorted(name for name, there in torch.cpu.get_capabilities().items() if there is True)
    return " ".join((torch.backends.cpu.get_cpu_capability(), *has))
