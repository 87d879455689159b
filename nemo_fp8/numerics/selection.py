"""Find the linears of a plain PyTorch model, and apply the rule of :mod:`nemo_fp8.models.selection` to them.

The decoder layers are the entries of the model's largest ``nn.ModuleList`` of equal modules, which holds for every
common Transformer in PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.models.selection import GEMM_MULTIPLE, SHAPE, contract_of, gemm_misfit, why_kept
from nemo_fp8.models.spellings import names_what_is_kept_anyway

log = logging.getLogger(__name__)


def linear_weights(model: torch.nn.Module, precision: Precision) -> dict[str, torch.Tensor]:
    """Return the weights whose GEMMs run in FP8 under the contract, by the name of their linear.

    A linear whose shape does not fit is logged and left out; under a strict contract raises PrecisionError for all of
    them. Raises it, too, for names to keep and rules by module that match none, as training does.
    """
    layers = _layers_of(model, precision)
    chosen, problems = {}, []
    found = dict(_candidates(model))
    _require_matches(precision, [*found])
    for name, weight in found.items():
        rows, columns = weight.shape
        kept = why_kept(
            precision, (name,), [((rows,), columns)], layers[1], side="train", layer=_layer_of(name, layers[0])
        )
        if kept is None:
            chosen[name] = weight
        elif kept.rule == SHAPE:
            problems.append(_misfit(name, weight, precision))
    if problems and precision.strict:
        raise PrecisionError(problems)
    for problem in problems:
        log.info("%s %s", problem.what, problem.why)
    return chosen


def _require_matches(precision: Precision, linears: list[str]) -> None:
    """Raise PrecisionError for names to keep of which none, and for each rule of which no name, is in this model."""

    def named(pattern: str) -> bool:
        alone = Precision(format="hybrid", scaling="tensorwise", modules=((pattern, "mxfp8"),))
        return names_what_is_kept_anyway(pattern) or any(contract_of(alone, (one,)) is not alone for one in linears)

    missing = [f"modules: {pattern!r}" for pattern, _ in precision.modules if not named(pattern)]
    if precision.keep and not any(map(named, precision.keep)):
        missing.append(f"keep={list(precision.keep)}")
    if missing:
        raise PrecisionError(
            Problem(
                f"{said} names no linear of this model.",
                "A pattern that matches nothing is a typing error, or is meant for another model.",
                f"Its linears have names such as {', '.join(linears[:3])!r}.",
            )
            for said in missing
        )


def require_module(model: object) -> None:
    """Raise PrecisionError for what is no model of torch."""
    if not isinstance(model, torch.nn.Module):
        raise PrecisionError(
            f"A model that is a {type(model).__name__}.",
            "Its linears are looked for among the modules of a torch.nn.Module.",
            "Give the model itself; of several, torch.nn.ModuleList([...]).",
        )


def fits(weight: torch.Tensor, precision: Precision) -> bool:
    """Return whether FP8 GEMMs can multiply a weight of this shape."""
    rows, columns = weight.shape
    return gemm_misfit(precision.scaling, rows, columns) is None


def _candidates(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight that a linear multiplies with: of nn.Linear, and the projections of nn.MultiheadAttention."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not is_te(module):
            if not isinstance(module._parameters.get("weight"), torch.nn.Parameter):
                raise PrecisionError(
                    f"{path}: its weight is computed anew in every forward.",
                    "A parametrized weight (weight norm, a merged adapter) is no parameter that a record could be "
                    "kept for.",
                    "Remove the parametrization, or run this module outside of autocast.",
                )
            yield path, module.weight
        elif isinstance(module, torch.nn.MultiheadAttention):
            for part in ("in_proj", "q_proj", "k_proj", "v_proj"):
                weight = getattr(module, f"{part}_weight")
                if weight is not None:
                    yield f"{path}.{part}".lstrip("."), weight


def is_te(module: torch.nn.Module) -> bool:
    """Return whether a module is TransformerEngine's, which runs its own FP8."""
    return type(module).__module__.split(".")[0] == "transformer_engine"


def _layers_of(model: torch.nn.Module, precision: Precision) -> tuple[str, int | None]:
    """Return the path of the list of decoder layers, and its length."""
    if not (precision.first_layers or precision.last_layers):
        return "", None
    lists = [
        (len(module), path)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1 and len({type(m) for m in module}) == 1
    ]
    if not lists:
        raise PrecisionError(
            f"first_layers={precision.first_layers}, last_layers={precision.last_layers} on a model without a list of "
            "layers.",
            "Decoder layers are found as the entries of an nn.ModuleList, and this model holds none.",
            "Name the modules in keep= instead, and set first_layers=0 and last_layers=0.",
        )
    # The longest list; of two equally long ones the outer, which has the shorter path.
    count, path = max(lists, key=lambda found: (found[0], -len(found[1])))
    return f"{path}." if path else "", count


def _layer_of(name: str, prefix: str) -> int | None:
    if not name.startswith(prefix):
        return None
    index = name.removeprefix(prefix).split(".")[0]
    return int(index) if index.isdigit() else None


def _misfit(name: str, weight: torch.Tensor, precision: Precision) -> Problem:
    scaling = str(contract_of(precision, (name,)).scaling)
    return Problem(
        f"{name}: a weight of {'x'.join(map(str, weight.shape))} stays in the compute dtype.",
        f"Both sides must be multiples of {GEMM_MULTIPLE[scaling]} for an FP8 GEMM with {scaling} scaling.",
        f"Pad the layer, add {name!r} to keep=, or set strict=False.",
    )
