"""Keep what torch compiled for one CPU from another.

Inductor writes C++ for the vectors of the CPU on which it runs, and its cache does not ask for which it was written. It
takes a run that is kept to AVX2 (``ATEN_CPU_CAPABILITY=avx2``), or a home folder that two kinds of machines share: then
an engine with AVX2 compiles source for AVX-512 with vectors of half the width, leaves out every second half, and
computes other numbers without a word; and one with AVX-512 writes past the ends of tensors, and dies of it as it
starts ("free(): invalid next size"). docs/upstream/torch_compile_cache.md shows both without vLLM.

Inductor's setting ``cpp.simdlen``, the bits of a vector, is part of the cache's key. With those bits that this CPU has
torch picks what it picks by itself. The trade-off: what was compiled before this was set is not found again.
"""

from __future__ import annotations

import torch
from torch._inductor import config
from vllm.platforms import current_platform

BITS = {"AVX2": 256, "AVX512": 512}
"""The bits of a vector, by torch's name of what an x86 CPU can do. For any other nothing is named, and torch's key is
as it was: nobody has tried this with an ARM CPU's vectors of two widths."""


def register() -> None:
    """Name the width of this CPU's vectors to Inductor, unless somebody has named one."""
    if current_platform.is_cpu() and config.cpp.simdlen is None:
        config.cpp.simdlen = BITS.get(torch.backends.cpu.get_cpu_capability())
