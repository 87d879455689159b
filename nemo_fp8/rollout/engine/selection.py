"""Decide which of vLLM's layers stay in the compute dtype, by the rule of :mod:`nemo_fp8.models.selection`.

vLLM fuses ``q_proj``, ``k_proj``, ``v_proj`` into one ``qkv_proj``, and all experts of a layer into one module. The
rule knows the names of their parts, and decides about the unit as a whole. The exporter uses the same rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.selection import SHAPE, why_kept, why_kept_by_name
from nemo_fp8.models.units import part_names

STAYS = "nemo_fp8: %s stays in the compute dtype: %s"
OTHER_BLOCKS = "nemo_fp8: %s has other blocks than the unsharded weights: %s"
"""What the log says of a linear or of the experts of a layer: their name, and why."""


def reason_to_keep(precision: Precision, name: str, layers: int, packed: Mapping[str, Sequence[str]]) -> str | None:
    """Return why the linear ``name`` stays in the compute dtype; None if no rule about names keeps it.

    ``layers`` counts the decoder layers of the model, ``packed`` maps a fused name to its parts (``qkv_proj`` to
    ``q_proj, k_proj, v_proj``).
    """
    kept = why_kept_by_name(precision, part_names(name, packed), layers)
    return None if kept is None else kept.reason


def reason_to_keep_experts(
    precision: Precision, name: str, layers: int, experts: int, inner: int, hidden: int
) -> str | None:
    """Return why all ``experts`` of a layer stay in the compute dtype, by names or shapes; None if they go to FP8.

    ``inner`` and ``hidden`` are their sizes before any split. Raises PrecisionError if the shape is the reason and the
    contract is strict.
    """
    shapes = [((inner, inner), hidden), ((hidden,), inner)]
    kept = why_kept(precision, part_names(name, experts=experts), shapes, layers, experts=experts)
    if kept is not None and kept.rule == SHAPE and precision.strict:
        raise PrecisionError(
            f"{name} cannot be in FP8.",
            f"{kept.reason[0].upper()}{kept.reason[1:]}, and the contract is strict.",
            f"Add {name!r} to keep, or set strict=False.",
        )
    return None if kept is None else kept.reason


def in_every_layer(name: str) -> str:
    """Return ``model.layers.*.mlp`` for ``model.layers.3.mlp``, so that a log has one line for all layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
