"""Find the linears of TransformerEngine in a model that trains, by the names that a contract's rules match.

    module.module.decoder.layers.0.mlp.linear_fc1   in Megatron's wrappers, on the second of two pipeline stages
    decoder.layers.12.mlp.linear_fc1                here: no wrappers, and layers are counted over all stages

A linear under an adapter has the name that it has without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

# The prefixes that the wrappers of Megatron, NeMo and Lightning add to the names of modules.
_WRAPPERS = re.compile(r"^(?:(?:module|\d+)\.)+")
# The name that adapters of NeMo and Bridge give to the linear that they wrap.
_UNDER_AN_ADAPTER = ".to_wrap"
_LAYER = re.compile(r"^(.*?\blayers\.)(\d+)(?=\.|$)")


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether a module is a linear of TransformerEngine, which includes its grouped linears for experts."""
    return isinstance(getattr(module, "fp8_meta", None), dict) and any(
        hasattr(module, name) for name in ("weight", "weight0")
    )


def linear_names(model: Any) -> dict[str, torch.nn.Module]:
    """Return every linear that FP8 can run in by the name that ``keep`` matches; layers count over pipeline stages."""
    chunks: Iterable[Any] = model if isinstance(model, torch.nn.ModuleList | list) else [model]
    names: dict[str, torch.nn.Module] = {}
    for chunk in chunks:
        numbers: dict[str, str] = {}
        for name, module in chunk.named_modules():
            name = _WRAPPERS.sub("", name)
            here = _LAYER.match(name)
            if here and here.end() == len(name) and isinstance(number := getattr(module, "layer_number", None), int):
                numbers[name] = f"{here[1]}{number - 1}"
            if is_linear(module):
                name = name.removesuffix(_UNDER_AN_ADAPTER)
                names[name if here is None else numbers.get(here[0], here[0]) + name[here.end() :]] = module
    return names


def weights_of(linear: torch.nn.Module) -> list[Any]:
    """Return the weight of a linear, or those of all experts of a grouped one."""
    return [p for name, p in linear.named_parameters(recurse=False) if name.startswith("weight")]


def codes_of(weight: Any) -> torch.Tensor | None:
    """Return the codes of a weight that TransformerEngine holds in FP8, as bytes; None of any other tensor, and where
    only the transposed copy is left."""
    held = (getattr(weight, name, None) for name in ("_data", "_rowwise_data"))
    return next((codes for codes in held if isinstance(codes, torch.Tensor)), None)
