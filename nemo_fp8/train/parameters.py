"""FP8 primary weights: the weights lie in FP8 with their scales, and Megatron's distributed optimizer gathers the bytes.

The optimizer keeps FP32 master weights, spread over the data-parallel ranks. After a step each rank casts its share
of every weight into the gather's buffer, one byte an element, and the all-gather carries half of BF16's bytes:

    scale = f(MAX over ranks of the amaxes of their shares)       delayed scaling: the scale of earlier steps
    codes = cast(bf16(master) * scale)

Megatron does all of that, and asks ``fp8_utils`` five things that only TransformerEngine answers: is this an FP8 weight,
is it MXFP8, give me its values, take this storage, cast these shares. :data:`TABLE` answers them. :class:`Fp8Tensor` is the
weight: to autograd and to whoever does not know better it looks like BF16.

MXFP8 needs two casts of one weight, along rows and along columns, and neither follows from the other. So Megatron gathers
BF16 and casts on every rank: no bytes are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import scales
from nemo_fp8.numerics.delayed import DelayedScaling, DelayedState
from nemo_fp8.numerics.formats import FP32_MAX, cast
from nemo_fp8.numerics.linear import Pair, quantize_weight
from nemo_fp8.numerics.quantize import find_scales
from nemo_fp8.numerics.quantized import Quantized, per_tile
from nemo_fp8.train.patching import Patch


@dataclass
class _Held:
    """What all aliases of one weight share: codes and scales by rows and by columns, and how they are found."""

    row: Quantized
    col: Quantized | None
    """None where the rows' codes serve for columns too."""
    precision: Precision
    delayed: DelayedState | None
    group: Any
    """The ranks that agree on a delayed scale."""
    initial: torch.Tensor | None
    """The value that the weight was initialized with, until the optimizer has made its master weight of it."""

    @property
    def operand(self) -> Operand:
        operand = self.precision.operand("weight")
        assert operand is not None
        return operand

    @property
    def scaling(self) -> DelayedScaling | None:
        return None if self.delayed is None else self.delayed.forward

    def write(self, value: torch.Tensor) -> None:
        """Quantize a whole weight into the codes and scales that lie here."""
        for mine, new in zip((self.row, self.col), quantize_weight(value, self.precision, self.delayed), strict=True):
            if mine is not None:
                _bytes(mine.data).copy_(_bytes(new.data))
                mine.scale_inv.copy_(new.scale_inv)


class Fp8Tensor(torch.Tensor):
    """A weight in FP8. Reading it gives values in its nominal dtype; ``copy_`` quantizes."""

    _held: _Held
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: _Held, dtype: torch.dtype) -> Fp8Tensor:
        self: Fp8Tensor = torch.Tensor._make_wrapper_subclass(cls, held.row.shape, dtype=dtype, device=held.row.device)
        self._held = held
        return self

    def __init__(self, held: _Held, dtype: torch.dtype) -> None:
        super().__init__()

    def pair(self) -> Pair:
        """The operands of fprop and dgrad."""
        held = self._held
        return held.row, held.row.used_as("col") if held.col is None else held.col

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as an ordinary tensor."""
        return self._held.row.dequantize(dtype or self.dtype)

    def detach(self) -> Fp8Tensor:
        """An alias: it shares codes and scales, also those that replace the present ones."""
        return type(self)(self._held, self.dtype)

    def float(self, memory_format: object = None) -> torch.Tensor:
        return self.dequantize(torch.float32)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """Megatron expands a parameter as itself to find its gradient accumulator; nothing has to be expanded for that."""
        return _Identity.apply(self) if other is self else super().expand_as(other)  # type: ignore[no-untyped-call]

    def get_high_precision_init_val(self) -> torch.Tensor:
        """What the optimizer makes the master weight of, under TE's name."""
        return self.dequantize() if self._held.initial is None else self._held.initial

    def clear_high_precision_init_val(self) -> None:
        """The master weight is made."""
        self._held.initial = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            target, source = args[:2]
            target._held.write(source.dequantize() if isinstance(source, cls) else source.to(target.dtype))
            return target
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise PrecisionError(
                f"{func} on an FP8 weight.",
                "Its codes have scales that such a change would not know of.",
                "Write a whole new value with copy_().",
            )
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


class MxFp8Tensor(Fp8Tensor):
    """An MXFP8 weight, which Megatron gathers in BF16."""


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, Fp8Tensor) else value


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def fp8_parameter(parameter: torch.nn.Parameter, precision: Precision, delayed: DelayedState | None, group: Any) -> torch.nn.Parameter:
    """The parameter held in FP8, with everything that Megatron has written on it."""
    value = parameter.detach()
    row, col = quantize_weight(value, precision, delayed)
    mx = precision.scaling == "mxfp8"
    # Its own storage: the scale of a delayed state must not change under the codes.
    row = replace(row, data=row.data.contiguous(), scale_inv=row.scale_inv.clone())
    held = _Held(row, col if mx else None, precision, delayed, group, value.clone())
    new = torch.nn.Parameter((MxFp8Tensor if mx else Fp8Tensor)(held, value.dtype))
    new.__dict__.update(parameter.__dict__)
    return new


# ---------------------------------------------------------------------- the answers that Megatron's fp8_utils wants


def _take_storage(fp8_tensor: Fp8Tensor, new_raw_data: torch.Tensor) -> None:
    """Move the codes into a buffer of Megatron's, from where they will be gathered."""
    held = fp8_tensor._held
    new_raw_data.detach().copy_(_bytes(held.row.data))
    held.row = replace(held.row, data=new_raw_data.detach().view(held.row.data.dtype))


@torch.no_grad()
def _cast_shares(
    model_params: Sequence[Fp8Tensor],
    main_params: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: Any,
    fsdp_shard_model_params: Sequence[torch.Tensor] | None = None,
) -> None:
    """Cast this rank's share of every weight, with scales that all ranks agree on. A share may be empty (None)."""
    if not model_params:
        return
    if any(isinstance(p, MxFp8Tensor) for p in model_params):
        raise PrecisionError(
            "MXFP8 primary weights without reuse_grad_buf_for_mxfp8_param_ag.",
            "They are gathered in BF16 through the gradient buffer; shares of them cannot be cast.",
            "Set reuse_grad_buf_for_mxfp8_param_ag=True on DDP and optimizer configs (nemo_fp8's plugin does), or fp8_param_gather=False.",
        )
    shares = [
        _Share(p._held, None if m is None else m.to(p.dtype), o or 0)
        for p, m, o in zip(model_params, main_params, start_offsets, strict=True)
    ]
    amaxes = [share.amax() for share in shares]
    flat = torch.cat([a.flatten() for a in amaxes])
    # Delayed scales are those of all tensor-parallel ranks as well: agree now, so that any rank's checkpoint is everybody's.
    delayed = model_params[0]._held.delayed is not None
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, model_params[0]._held.group if delayed else data_parallel_group)
    for share, amax in zip(shares, torch.split(flat, [a.numel() for a in amaxes]), strict=True):
        share.write(amax)


class _Share:
    """The stretch of one weight whose master weights lie on this rank, in whole rows of tiles padded with zeros."""

    def __init__(self, held: _Held, values: torch.Tensor | None, start: int) -> None:
        self.held, self.values, self.start = held, values, start
        self.tile = held.row.block
        if values is None or self.tile is None:
            return
        columns = held.row.shape[1]
        band = self.tile[0] * columns
        self.first, last = start // band, -(-(start + values.numel()) // band)
        padded = values.new_zeros((last - self.first) * band)
        self.before = start - self.first * band
        padded[self.before : self.before + values.numel()] = values
        self.rows = slice(self.first, last)
        self.matrix = padded.view(-1, columns)

    def amax(self) -> torch.Tensor:
        """The amaxes of this share, in the shape of the weight's scales; 0 where it has nothing."""
        amax = torch.zeros_like(self.held.row.scale_inv)
        if self.values is None:
            return amax
        if self.tile is None:
            return scales.amax_of(self.values)
        rows, columns = self.tile
        tiles = self.matrix.view(-1, rows, self.matrix.shape[1] // columns, columns)
        amax[self.rows] = scales.amax_of(tiles, (1, 3))
        return amax

    def write(self, amax: torch.Tensor) -> None:
        """Cast the share with the scales of the amaxes that all ranks agree on."""
        held = self.held
        format = held.row.format
        amax = amax.view(held.row.scale_inv.shape)
        if held.scaling is not None:
            slot = held.scaling.roles.index("weight")
            scale = held.scaling.scale[slot]
            scale_inv = scale.reciprocal()
            held.scaling.history[0, slot] = torch.fmax(held.scaling.history[0, slot], amax)
        else:
            largest = FP32_MAX if self.tile is None else torch.finfo(torch.bfloat16).max
            scale, scale_inv = find_scales(amax, format, held.operand.scale, value_for_inf=largest)
        held.row.scale_inv.copy_(scale_inv)
        if self.values is None:
            return
        if self.tile is None:
            codes = cast(self.values.float() * scale, format)
        else:
            scaled = per_tile(self.matrix.float(), scale[self.rows], self.tile)
            codes = cast(scaled, format).flatten()[self.before : self.before + self.values.numel()]
        _bytes(held.row.data).view(-1)[self.start : self.start + self.values.numel()] = _bytes(codes)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """As if TransformerEngine were here, and new enough."""
    return True


_UTILS = "megatron.core.fp8_utils"
TABLE = (
    Patch(_UTILS, "HAVE_TE_FP8_TENSOR_CLASS", True, "otherwise nothing is an FP8 weight"),
    Patch(_UTILS, "FP8_TENSOR_CLASS", Fp8Tensor, "what an FP8 weight is"),
    Patch(_UTILS, "HAVE_TE_MXFP8TENSOR", True, "otherwise nothing is an MXFP8 weight"),
    Patch(_UTILS, "MXFP8Tensor", MxFp8Tensor, "what an MXFP8 weight is", optional=True),
    Patch(_UTILS, "is_te_min_version", is_te_min_version, "it decides by TE's version how an FP8 weight is dequantized"),
    Patch(_UTILS, "_modify_underlying_storage_impl", _take_storage, "DDP moves weights into its buffers"),
    Patch(_UTILS, "_quantize_param_shard_impl", _cast_shares, "the distributed optimizer casts its master weights"),
)
