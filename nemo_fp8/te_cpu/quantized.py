"""TE's quantized tensors: made, kept in shape and written as the extension does, whichever kind they are.

    create(quantizer, shape, dtype)       an empty tensor with the buffers that the quantizer asks for
    conform(quantizer, tensor)            the same of a tensor that is there: missing buffers made, unwanted ones
                                          dropped
    quantize(x, quantizer, output, noop)  codes, scales and amaxes of ``x``
    finish(y, quantizer, dtype, output)   the FP32 result of a fused kernel, rounded or quantized as that kernel does

TE's Python says itself which buffers a quantizer keeps (``inner_tensor_specs``): a transposed copy on Hopper and none
on Blackwell, scales padded for a GEMM, rows and columns or one of both. So nothing of the layouts is said here a second
time. How values become codes and where they lie is the kind's own affair (``float8``, ``blockwise``, ``mxfp8``,
``nvfp4``), one row of :func:`kinds` each.

Where TE asks for scales in the order that a GPU's tensor cores read, they are brought into it last (``swizzle``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nemo_fp8.moved import renamed
from nemo_fp8.te_cpu import swizzle
from nemo_fp8.te_cpu.enumerations import torch_dtype
from nemo_fp8.te_cpu.tensors import amax_of, as_matrix_shape

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"reduced": "nemo_fp8.te_cpu.tensors.reduced"})

Write = Callable[[Any, torch.Tensor, Any, torch.Tensor | None], None]
"""``write(quantizer, x, tensor, amax)``: fill the tensor's buffers from ``x``; ``amax`` where a fused kernel has found
it already."""


@dataclass(frozen=True)
class Kind:
    """What one class of quantizers does."""

    write: Write
    casts_wide: bool = False
    """A fused kernel casts its FP32 result at once, since the scale is known before it starts (delayed scaling)."""
    amax_of_wide: Callable[[Any], bool] = lambda quantizer: False
    """A fused activation takes the amax of its FP32 result, and casts the result rounded to the tensor's dtype."""
    swizzles: Callable[[Any, int, int], bool] = lambda quantizer, rows, columns: True
    """The kernel that casts a tensor of this shape writes swizzled scales; otherwise they are swizzled after it."""


@functools.cache
def kinds() -> dict[type, Kind]:
    """Return the kinds by TE's quantizer class. TE imports this extension before it has any, so they are asked for
    late."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    from nemo_fp8.te_cpu import blockwise, float8, mxfp8, nvfp4

    return {
        Float8Quantizer: Kind(float8.write_delayed, casts_wide=True),
        Float8CurrentScalingQuantizer: Kind(float8.write_current, amax_of_wide=lambda q: True),
        Float8BlockQuantizer: Kind(blockwise.write),
        MXFP8Quantizer: Kind(mxfp8.write),
        NVFP4Quantizer: Kind(
            nvfp4.write, amax_of_wide=lambda q: not q.row_scaled_nvfp4 and not q.with_rht, swizzles=nvfp4.swizzles
        ),
    }


def kind_of(quantizer: Any) -> Kind:
    """Return the kind of a quantizer, subclasses included; raises NotImplementedError if a CPU has no cast for it."""
    for base in type(quantizer).__mro__:
        if base in kinds():
            return kinds()[base]
    raise NotImplementedError(
        f"{type(quantizer).__name__} has no cast on a CPU. A quantizer of your own has to write its tensors in "
        "Python, as those of "
        "CustomRecipe do."
    )


def is_quantized(tensor: Any) -> bool:
    """Return whether it is one of TE's. (A plain torch.Tensor has a ``dequantize`` too.)"""
    return hasattr(tensor, "_quantizer")


# ---------------------------------------------------------------------- buffers

Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _specs(quantizer: Any, shape: tuple[int, ...]) -> Specs:
    """Return the buffers that this quantizer writes, by name: shape and type, as TE's Python says."""
    specs: Specs = _describer(quantizer).inner_tensor_specs(quantizer, shape or (1,))
    if type(quantizer).__name__ == "NVFP4Quantizer" and "_columnwise_data" in specs:
        rows, columns = as_matrix_shape(
            shape
        )  # two codes a byte along all rows, where TE's Python halves the last of their dimensions
        specs = specs | {"_columnwise_data": ((columns, rows // 2), torch.uint8)}
    if shape:
        return specs
    return {name: (() if _holds_codes(name) else size, dtype) for name, (size, dtype) in specs.items()}  # a scalar


def _holds_codes(buffer: str) -> bool:
    return "scale" not in buffer and "amax" not in buffer


@functools.cache
def _float8() -> Any:
    from transformer_engine.pytorch.tensor import float8_tensor

    return float8_tensor


def _describer(quantizer: Any) -> Any:
    """Return the class that describes the quantizer's tensors: delayed scaling's are those of current scaling, and TE
    describes them once."""
    if isinstance(quantizer, _float8().Float8Quantizer):
        return _float8().Float8CurrentScalingQuantizer
    return type(quantizer)


def create(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = None, pin_memory: bool = False
) -> Any:
    """Return an empty tensor as ``quantizer`` makes them, or a plain one where there is none. Scales begin as zeros:
    padding is compared."""
    shape = tuple(int(n) for n in shape)
    if quantizer is None:
        return torch.empty(shape, dtype=dtype)
    _check_shape(quantizer, shape)
    described = _describer(quantizer).storage_metadata(quantizer, dtype)
    names = dict(described["cls"]._INNER_TENSORS)
    buffers: dict[str, torch.Tensor | None] = dict.fromkeys(names.values())
    for name, (size, kind) in _specs(quantizer, shape).items():
        buffers[names[name]] = (torch.empty if _holds_codes(name) else torch.zeros)(size, dtype=kind)
    if "fp8_scale_inv" in buffers and hasattr(quantizer, "scale"):
        buffers["fp8_scale_inv"] = torch.reciprocal(quantizer.scale)
    arguments = described["nontensor_kwargs"] | buffers
    if arguments.get("with_gemm_swizzled_scales"):
        arguments["with_gemm_swizzled_scales"] = kind_of(quantizer).swizzles(quantizer, *as_matrix_shape(shape))
    if quantizer.internal:
        return described["cls"](**arguments)
    arguments.setdefault("dtype", arguments.pop("fake_dtype"))
    stride = torch.empty(shape, device="meta").stride()
    return described["cls"](shape=shape, stride=stride, device=device or torch.device("cpu"), **arguments)


def conform(quantizer: Any, tensor: Any) -> Any:
    """Give ``tensor`` exactly the buffers that ``quantizer`` writes; those that are there stay, with their memory."""
    if quantizer is None:
        return tensor
    wanted = _specs(quantizer, tuple(tensor.size()))
    for name, _ in type(tensor)._INNER_TENSORS:
        if name not in wanted:
            setattr(tensor, name, None)
        elif getattr(tensor, name) is None:
            shape, dtype = wanted[name]
            setattr(tensor, name, torch.zeros(shape, dtype=dtype))
    if hasattr(tensor, "_transpose"):
        tensor._transpose_invalid = tensor._transpose is None
        tensor._fp8_dtype = type(tensor._fp8_dtype).cast(quantizer.dtype)
    return tensor


_TILES = {"MXFP8Quantizer": ("MXFP8", 32), "NVFP4Quantizer": ("NVFP4", 16)}


def _check_shape(quantizer: Any, shape: tuple[int, ...]) -> None:
    """Refuse what the extension refuses, in its words."""
    name, side = _TILES.get(type(quantizer).__name__, ("", 1))
    rows, columns = as_matrix_shape(shape)
    if rows % side or columns % side:
        raise ValueError(f"{name} requires tensor dims that are divisible by {side} (got shape={shape})")


# ---------------------------------------------------------------------- casts


@torch.no_grad()
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Quantize ``tensor`` into a new quantized tensor, or into ``output``; write nothing where ``noop`` holds a 1."""
    x = tensor.detach().contiguous()
    if quantizer is None:
        return x
    out = create(quantizer, x.shape, x.dtype) if output is None else conform(quantizer, output)
    if noop is None or noop.item() != 1:
        fill(quantizer, x, out)
    return out


@torch.no_grad()
def fill(
    quantizer: Any, x: torch.Tensor, out: Any, amax: torch.Tensor | None = None, *, write: Write | None = None
) -> None:
    """Write ``x`` into the buffers of ``out``, as they are, with ``write`` instead of the kind's own where it is
    given."""
    if x.numel():
        swizzle.clear(out)
        (write or kind_of(quantizer).write)(quantizer, x, out, amax)
    if quantizer.optimize_for_gemm:
        swizzle.swizzle(out)
    for see in _watchers if x.numel() else ():
        see(quantizer, x, out)


See = Callable[[Any, torch.Tensor, Any], None]
_watchers: list[See] = []


@contextmanager
def watching_casts(see: See) -> Iterator[None]:
    """Call ``see(quantizer, x, quantized)`` after each cast of a tensor in this process, until the context closes."""
    _watchers.append(see)
    try:
        yield
    finally:
        _watchers.remove(see)


@torch.no_grad()
def finish(
    y: torch.Tensor, quantizer: Any, dtype: torch.dtype, out: Any = None, *, amax_of_rounded: bool = False
) -> Any:
    """Return what a kernel leaves of its FP32 result ``y``: rounded to ``dtype``, or quantized.

    A cast with a scale that is known reads the FP32 result itself. Where the scale is still to be found the result is
    rounded first; its amax is that of the FP32 values after an activation, and that of the rounded ones after a norm
    (``amax_of_rounded``).
    """
    if quantizer is None:
        return y.to(dtype) if out is None else out.copy_(y)
    out = create(quantizer, y.shape, dtype) if out is None else conform(quantizer, out)
    kind = kind_of(quantizer)
    if kind.casts_wide:
        fill(quantizer, y, out)
    elif kind.amax_of_wide(quantizer) and not amax_of_rounded:
        fill(quantizer, y.to(dtype), out, amax_of(y))
    else:
        fill(quantizer, y.to(dtype), out)
    return out


# ---------------------------------------------------------------------- back


@functools.cache
def _readers() -> dict[type, Any]:
    """Return the module of each kind, by the class that holds its buffers: ``operand(t, by_rows)`` and
    ``values(t, dtype)``."""
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    from nemo_fp8.te_cpu import blockwise, float8, mxfp8, nvfp4

    return {
        Float8TensorStorage: float8,
        Float8BlockwiseQTensorStorage: blockwise,
        MXFP8TensorStorage: mxfp8,
        NVFP4TensorStorage: nvfp4,
    }


def reader_of(tensor: Any) -> Any:
    """Return the module that reads tensors of this class; raises NotImplementedError if there is none."""
    for base in type(tensor).__mro__:
        if base in _readers():
            return _readers()[base]
    raise NotImplementedError(f"{type(tensor).__name__} cannot be read on a CPU.")


@torch.no_grad()
def dequantize(tensor: Any, otype: int | torch.dtype) -> torch.Tensor:
    """Return ``code * scale_inv`` in FP32, rounded once to ``otype``."""
    return reader_of(tensor).values(tensor, torch_dtype(otype))  # type: ignore[no-any-return]
