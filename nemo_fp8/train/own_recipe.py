"""Run a linear of TransformerEngine by a recipe of its own, or in the compute dtype, inside of a quantized layer.

Megatron opens TE's autocast around whole layers, and the TE layers of megatron-core 0.15.3 take no recipe of their own.
So such a linear opens another one around its own forward, through torch's hooks:

    forward_pre_hook    te.autocast(enabled=False), or with the linear's recipe, opens
    forward_hook        it closes, also after an error

Backward needs no hook: TE decides in forward how a GEMM's operands are stored. A recipe of its own is opened only where
the layer runs quantized: rules take no layer out of the first and last ones that stay in the compute dtype.

Forward and backward may have different formats:

    fprop    input by rows x weight by rows            the contract's own scaling
    dgrad    gradient x weight by columns              ``backward_scaling``
    wgrad    gradient x input by columns               ``backward_scaling``

TE carries these out by a ``CustomRecipe``, whose factory gives each operand a quantizer by rows and another by columns.
Those by columns are made of what those by rows hold (``rowwise_dequantized``), and not of the BF16 values: the backward
then differentiates the function that the forward ran, up to the rounding of a format that is finer. The price is a
second rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.render.te import te_recipe

_ROLES = {"input": "input", "weight": "weight", "grad_output": "grad"}


def run_under(linear: torch.nn.Module, recipe: Any) -> None:
    """Run a linear under a recipe, where its layer is quantized; None runs it in the compute dtype.

    A weight that was constructed in FP8 is converted back to the compute dtype, with its initial values, so call this
    before DDP and the optimizer see it.
    """
    from transformer_engine.pytorch import autocast
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    for name, weight in list(linear.named_parameters(recurse=False)):
        if hasattr(weight, "_quantizer"):
            setattr(linear, name, _in_compute_dtype(weight))
    opened: list[Any] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        quantized = recipe is not None and State.is_fp8_enabled()
        opened.append(
            autocast(enabled=True, recipe=recipe, amax_reduction_group=State.get_fp8_group())
            if quantized
            else autocast(enabled=False)
        )
        opened[-1].__enter__()

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        opened.pop().__exit__(None, None, None)

    linear.register_forward_pre_hook(enter)
    linear.register_forward_hook(leave, always_call=True)


def _in_compute_dtype(weight: Any) -> torch.nn.Parameter:
    """Return the weight unquantized, with the attributes that Megatron has set on it."""
    first = weight.get_high_precision_init_val() if hasattr(weight, "get_high_precision_init_val") else None
    plain = torch.nn.Parameter(weight.dequantize() if first is None else first.to(weight.dtype))
    own = {
        name: value for name, value in vars(weight).items() if not name.startswith("_") and "high_precision" not in name
    }
    plain.__dict__.update(own)
    return plain


def recipe_for(precision: Precision) -> Any:
    """Return TE's recipe for a contract without rules by module. TE has to be imported already.

    Raises PrecisionError if this version of TE cannot carry the contract out.
    """
    forward = te_recipe(precision.replace(backward_scaling=None, modules=()))  # raises for what TE cannot carry out
    if precision.backward_scaling is None:
        return forward
    from transformer_engine.common.recipe import CustomRecipe

    return CustomRecipe(qfactory=Factory(precision))


@dataclass(frozen=True)
class Factory:
    """Make the quantizers of a linear for a contract; TE calls it with the role of each."""

    precision: Precision

    def __call__(self, role: Any) -> Any:
        """Return TE's quantizer for a role."""
        from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

        ours = _ROLES.get(getattr(role, "tensor_type", None) or "", "input")
        backward = self.precision.in_backward.operand(ours)
        if ours == "grad":
            return _quantizer(backward)
        return HybridQuantizer(
            rowwise_quantizer=_quantizer(self.precision.operand(ours)),
            columnwise_quantizer=_quantizer(backward),
            columnwise_source="rowwise_dequantized",
        )


def _quantizer(operand: Operand | None) -> Any:
    """Return TE's quantizer for an operand in E2M1, or in FP8 by MX blocks or one scale for the tensor."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    assert operand is not None
    if operand.format == "e2m1":
        return NVFP4Quantizer(
            with_rht=operand.hadamard,
            with_post_rht_amax=operand.hadamard,
            with_2d_quantization=operand.block == (16, 16),
            stochastic_rounding=operand.stochastic,
            row_scaled_nvfp4=operand.row_scaled,
            nvfp4_use_4over6=operand.four_over_six is not None,
            nvfp4_e4m3_max=operand.largest_scale,
            nvfp4_4over6_err_mode=(operand.four_over_six or "mae").upper(),
        )
    dtype = DType.kFloat8E4M3 if operand.format == "e4m3" else DType.kFloat8E5M2
    if operand.scale == "e8m0":
        return MXFP8Quantizer(fp8_dtype=dtype)
    if operand.block is None:
        return Float8CurrentScalingQuantizer(
            fp8_dtype=dtype, device=torch.device("cuda"), force_pow_2_scales=operand.scale == "pow2"
        )
    return Float8BlockQuantizer(
        fp8_dtype=dtype,
        rowwise=True,
        columnwise=True,
        force_pow_2_scales=operand.scale == "pow2",
        block_scaling_dim=2 if operand.block == (128, 128) else 1,
    )
