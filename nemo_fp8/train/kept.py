"""Keep linears of TransformerEngine in the compute dtype, or give them a recipe of their own (``own_recipe.py``).

:mod:`nemo_fp8.models.selection` decides which, by their names and by their shapes on this rank. A pattern of the
contract that names no linear of the model is refused, and under a strict contract a shape that does not fit. Where
Megatron's own ``quant_recipe`` exists (0.16), it does the same by globs alone, counts layers from zero on each pipeline
stage, and cannot see shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.models.selection import GEMM_MULTIPLE, KEEP, SHAPE, Kept, contract_of, why_kept
from nemo_fp8.models.spellings import outside_names
from nemo_fp8.train.linears import linear_names, weights_of
from nemo_fp8.train.own_recipe import recipe_for, run_under

logger = logging.getLogger("nemo_fp8")


def keep_modules(model: Any, precision: Precision) -> None:
    """Take linears out of FP8 that the contract keeps by name and, unless it is strict, those that do not fit."""
    if not precision.is_quantized:
        return
    linears = linear_names(model)  # layers are counted over all pipeline stages
    config = _config_of(model)
    experts, layers = (int(getattr(config, name, None) or 0) for name in ("num_moe_experts", "num_layers"))
    why = {
        name: why_kept(precision, (name,), _shapes(linear), side="train", experts=experts)
        for name, linear in linears.items()
    }
    kept = {name: held for name, held in why.items() if held is not None}
    _require_any(kept, linears, precision, layers)
    _require_rules(linears, precision, experts, layers)
    _require_fit(kept, precision)
    for name, held in kept.items():
        if held.rule == SHAPE:
            logger.warning("%s stays in %s and not in FP8: %s.", name, precision.compute, held.reason)
        run_under(linears[name], None)
    for name, linear in linears.items():
        own = contract_of(precision, (name,), experts)
        if name not in kept and (own is not precision or own.backward_scaling is not None):
            run_under(linear, recipe_for(own))


def _config_of(model: Any) -> Any:
    chunk = model[0] if isinstance(model, torch.nn.ModuleList | list) else model
    return next((module.config for module in chunk.modules() if hasattr(module, "config")), None)


def _shapes(linear: torch.nn.Module) -> list[tuple[tuple[int], int]]:
    return list(dict.fromkeys(((p.shape[0],), p.shape[1]) for p in weights_of(linear)))


def _require_any(
    kept: Mapping[str, Kept], linears: dict[str, torch.nn.Module], precision: Precision, layers: int
) -> None:
    """Raise PrecisionError for names to keep that name nothing in this model."""
    if not precision.keep or any(held.rule == KEEP for held in kept.values()):
        return
    if not any(map(precision.keeps, outside_names(range(layers)))) and _is_whole():
        raise PrecisionError([_names_no_linear(f"keep={list(precision.keep)}", linears)])


def _require_rules(linears: Iterable[str], precision: Precision, experts: int, layers: int) -> None:
    """Raise PrecisionError for rules by module that name nothing in this model, as for names to keep."""
    problems = []
    for pattern, _ in precision.modules:
        alone = Precision(format="hybrid", scaling="tensorwise", modules=((pattern, "mxfp8"),))
        names = [*linears, *outside_names(range(layers))]
        if not any(contract_of(alone, (name,), experts).scaling == "mxfp8" for name in names):
            problems.append(_names_no_linear(f"modules: {pattern!r}", linears))
    if problems and _is_whole():
        raise PrecisionError(problems)


def _is_whole() -> bool:
    """Return whether this rank holds every layer: else a pattern may match a linear on another pipeline stage."""
    from megatron.core import parallel_state

    return (
        not parallel_state.model_parallel_is_initialized()
        or parallel_state.get_pipeline_model_parallel_world_size() == 1
    )


def _names_no_linear(said: str, linears: Iterable[str]) -> Problem:
    return Problem(
        f"{said} names no linear of this model.",
        "A pattern that matches nothing is a typing error, or is meant for another model.",
        f"Its linears have names such as {', '.join([*linears][:3])!r}.",
    )


def _require_fit(kept: Mapping[str, Kept], precision: Precision) -> None:
    problems = []
    for name, held in kept.items():
        if precision.strict and held.rule == SHAPE:
            scaling = str(contract_of(precision, (name,), 1).scaling)
            least = GEMM_MULTIPLE[scaling]
            problems.append(
                Problem(
                    f"{name}: {held.reason}, under {scaling} scaling.",
                    f"Its GEMMs take dimensions that are multiples of {least}.",
                    f"Choose sizes that stay multiples of {least} after the tensor-parallel split, or strict=False to "
                    "keep such layers.",
                )
            )
    if problems:
        raise PrecisionError(problems)
