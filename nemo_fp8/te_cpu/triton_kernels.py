"""TE's Triton kernels, by the Python functions that launch them: each is replaced by torch code, or refuses under its
own name.

Triton has no CPU to compile for, and its interpreter would run a program a token in Python. The functions that launch
the kernels are plain ones of plain tensors, and everything above them (autograd, custom operators, checks) stays TE's.
They are replaced when their module has been loaded, before anybody imports them from there.
"""

from __future__ import annotations

import importlib
from typing import Any

HOME = "transformer_engine.pytorch.triton."
"""Where TE keeps them."""

LAUNCHERS: dict[str, tuple[str, str]] = {
    "permutation": (
        "permutation",
        "make_row_id_map permute_with_mask_map unpermute_with_mask_map unpermute_with_mask_map_bwd_with_merging_probs "
        "make_chunk_sort_map sort_chunks_by_map",
    ),
    "cross_entropy": ("cross_entropy", "cross_entropy_forward cross_entropy_backward"),
    "pad": ("rows", "pad_columnwise_scale_inv"),
    "grouped_dbias_dscales": ("rows", "compute_grouped_dbias compute_grouped_dbias_dscales"),
}
"""TE's module, ours, and the functions that have one name in both."""

MISSING: dict[str, str] = {
    "mhc": "mhc_generate_mix_and_aggregate mhc_fused_sinkhorn mhc_fused_scale mhc_fused_aggregate "
    "mhc_fused_expand_combine "
    "mhc_fused_projection",
}
"""Functions that have no CPU implementation, by TE's module: the hyper-connections."""

MODULES = tuple(HOME + name for name in (*LAUNCHERS, *MISSING))


def replace(module: Any) -> None:
    """Give one of TE's modules, just loaded, our functions in the place of those that launch kernels."""
    from nemo_fp8.te_cpu.extension import missing

    name = module.__name__.removeprefix(HOME)
    if name in LAUNCHERS:
        ours, functions = LAUNCHERS[name]
        home = importlib.import_module(f"nemo_fp8.te_cpu.{ours}")
        vars(module).update({function: getattr(home, function) for function in functions.split()})
    for function in MISSING.get(name, "").split():
        setattr(module, function, missing(function, module.__name__))
