"""Keep the first values of FP8 weights that Megatron initializes on the CPU (``use_cpu_initialization``).

TransformerEngine quantizes a weight at its construction and keeps its values of that moment; the distributed optimizer
makes its FP32 master weights from these. Under ``use_cpu_initialization`` Megatron constructs the weight from
uninitialized memory and writes the values into it afterwards:

    weight = quantize(empty)      the kept values, and delayed scaling's amax, are those of uninitialized memory
    weight.data.copy_(value)      the codes are right, until the optimizer's first step writes master weights over them

So a run trains on whatever was in memory: NaN, or a falling loss on random weights, on a GPU as well. The replacement
lets Megatron's function fill a plain tensor, and takes the kept values, the amax and the codes from that. The
trade-off: one name of Megatron is replaced while a model is built, and only for contracts with FP8 weights.

The optimizer of a first fit uses the kept values up, and with NeMo alone that of a second fit or of a validation ends
in an error of None. They are then what the FP8 weights decode to: every forward begins as the last one ended, and what
the FP32 weights held beyond FP8 is lost, as it is with BF16 weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from nemo_fp8.train.patching import Patch, patched

logger = logging.getLogger("nemo_fp8")

_initialize = layers._initialize_affine_weight_cpu


def _initialize_affine_weight_cpu(
    weight: Any,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Any,
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
) -> torch.Tensor | None:
    kept = getattr(weight, "_high_precision_init_val", None)
    filled = weight if kept is None else torch.empty(weight.shape, dtype=kept.dtype)
    master: torch.Tensor | None = _initialize(
        filled,
        output_size,
        input_size,
        per_partition_size,
        partition_dim,
        init_method,
        stride,
        return_master_weight,
        params_dtype=params_dtype,
        rank=rank,
        world_size=world_size,
        skip_set_tensor_parallel_attributes=skip_set_tensor_parallel_attributes,
    )
    if kept is None:
        return master
    if not skip_set_tensor_parallel_attributes:
        layers.set_tensor_model_parallel_attributes(tensor=weight, is_parallel=True, dim=partition_dim, stride=stride)
    kept.copy_(filled)
    if isinstance(amax := getattr(weight._quantizer, "amax", None), torch.Tensor):
        amax.zero_()
    with torch.no_grad():
        weight.data.copy_(filled)
    return master


TABLE = (
    Patch(
        "megatron.core.extensions.transformer_engine",
        "_initialize_affine_weight_cpu",
        _initialize_affine_weight_cpu,
        "it writes into a weight whose values TransformerEngine has kept before, and master weights are made of these",
    ),
)


@contextmanager
def true_first_weights() -> Iterator[None]:
    """Build models with FP8 weights that keep their first values, until the context closes.

    Raises PrecisionError if the installed Megatron is not as the table says.
    """
    with patched(TABLE, "Building a model with FP8 weights"):
        yield


@torch.no_grad()
def give_first_weights(model: torch.nn.Module) -> None:
    """Give FP8 parameters whose first values are gone the values of their codes, before an optimizer asks for them."""
    firsts = [(parameter, getattr(parameter, "get_high_precision_init_val", None)) for parameter in model.parameters()]
    trained = [parameter for parameter, first in firsts if first is not None and first() is None]
    for parameter in trained:
        parameter._high_precision_init_val = parameter.dequantize().cpu()  # type: ignore[attr-defined]
    if trained:
        logger.warning(
            "%d parameters in FP8 were trained by a fit before, whose FP32 weights are gone: another fit begins from "
            "the FP8 weights. Go on from a checkpoint (nl.AutoResume) to keep the FP32 weights.",
            len(trained),
        )
