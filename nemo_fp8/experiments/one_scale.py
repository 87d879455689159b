"""Four bits that are known to train worse than NVFP4: E2M1 with one scale for the whole tensor. A positive control.

    step     the power of two with which the tensor's largest magnitude becomes at most 6
    value    e2m1(x / step) * step

E2M1's codes span a factor of 12, from 0.5 to 6, so everything below a 24th of the largest magnitude becomes 0: of a
gradient, most of it. This is what NVFP4 has scales of 16 values against. An experiment that cannot tell this from NVFP4
tells no four-bit recipe from another.

TransformerEngine runs it: a ``CustomRecipe`` whose quantizers round inputs, weights and gradients, and hold them in
BF16, which has all of these values. Where a layer runs in NVFP4, its linears run so instead.
"""

import functools
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("train")

import nemo_run as run
import torch
from lightning.pytorch.callbacks import Callback

from nemo_fp8.experiments.tiny import tiny_llama as in_nvfp4
from nemo_fp8.numerics.nvfp4 import LARGEST, nearest
from nemo_fp8.numerics.nvfp4_tensor import magnitude_of
from nemo_fp8.recipes.precision import PrecisionLike
from nemo_fp8.train.linears import linear_names
from nemo_fp8.train.own_recipe import run_under


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest E2M1 values under one scale for all of ``x``; zeros stay zeros."""
    mantissa, exponent = torch.frexp(x.detach().abs().amax().float() / LARGEST)  # mantissa * 2**exponent, from 0.5 on
    exponent = exponent - (mantissa == 0.5).int()  # which is a power of two already
    codes = nearest(torch.ldexp(x.detach().float(), -exponent))
    magnitude = torch.ldexp(magnitude_of(codes), exponent)
    return torch.where(codes > 7, -magnitude, magnitude).to(x.dtype)


@functools.cache
def _quantizer() -> Any:
    """Return the class of the quantizer. TE can be imported only once something stands for its extension."""
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    class OneScale(IdentityQuantizer):
        """TE's quantizer that keeps what it is given, given rounded values."""

        def copy(self) -> Any:
            same = type(self)(dtype=self.dtype, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
            same.internal, same.optimize_for_gemm = self.internal, self.optimize_for_gemm
            return same

        def quantize_impl(self, tensor: torch.Tensor) -> Any:
            return super().quantize_impl(rounded(tensor))

        def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
            return super().update_quantized(rounded(src), dst, noop_flag=noop_flag)

    return OneScale


class InOneScale(Callback):
    """Puts the linears of a model that trains in NVFP4 under this recipe."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Put every linear that trains in NVFP4 under the recipe."""
        from transformer_engine.common.recipe import CustomRecipe

        recipe = CustomRecipe(qfactory=lambda role: _quantizer()())
        for linear in linear_names(trainer.model).values():
            run_under(linear, recipe)


def tiny_llama(precision: PrecisionLike = "bf16_with_nvfp4_mixed", **settings: Any) -> run.Partial[Any]:
    """Return :func:`nemo_fp8.experiments.tiny_llama` with its quantized layers in E2M1 with one scale for a tensor."""
    recipe = in_nvfp4(precision, **settings)
    recipe.trainer.callbacks += [run.Config(InOneScale)]
    return recipe
