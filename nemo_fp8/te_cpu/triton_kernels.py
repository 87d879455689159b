"""TE's Triton kernels, by the Python that launches them: each launcher is replaced by torch code.

Triton has no CPU to compile for, and its interpreter would run a program a token in Python. What launches the kernels
are functions of plain tensors, and of mHC operators of autograd; everything above them (custom operators, checks) stays
TE's. They are replaced when their module has been loaded, before anybody imports them from there.
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
    "mhc": (
        "hyper_connections",
        "mHCProjectionOp mHCScaleFusedOp mHCSinkhornOp mHCAggregateOp mHCExpandCombineOp",
    ),
}
"""TE's module, ours, and what has one name in both: functions, and operators of autograd."""

MODULES = tuple(HOME + name for name in LAUNCHERS)


def replace(module: Any) -> None:
    """Give one of TE's modules, just loaded, ours in the place of what launches kernels."""
    ours, names = LAUNCHERS[module.__name__.removeprefix(HOME)]
    home = importlib.import_module(f"nemo_fp8.te_cpu.{ours}")
    vars(module).update({name: getattr(home, name) for name in names.split()})
