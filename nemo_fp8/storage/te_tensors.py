"""Read tensors from the records of a checkpoint, TransformerEngine's FP8 weights included, without TransformerEngine.

Megatron writes an FP8 primary weight as an object of TE: its codes along rows and along columns, and their scales. It
is read as

    values = codes along rows * scales        rounded to the dtype that the weight has in the model

A record is a pickle, which may call any function. This unpickler has a table of the few that make a tensor
(:data:`_TORCH`), and its own functions in place of TE's (:data:`_TE`). Any other name becomes an empty class, and
nothing is imported. The trade-off: a new class of TE is refused until it has a row.
"""

from __future__ import annotations

import collections
import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch

from nemo_fp8.numerics.quantized import Quantized


def load_tensor(content: bytes) -> torch.Tensor:
    """Return the tensor of a record. A damaged record may raise anything."""
    found: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False, pickle_module=_PICKLE)
    if not isinstance(found, torch.Tensor):
        raise pickle.UnpicklingError(f"a {type(found).__name__} and no tensor")
    return found


# ---------------------------------------------------------------------- the functions that pickles of TE's weights call


def _codes(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.float8_e4m3fn)  # weights are E4M3 in every recipe


def _float8(
    data: Any, fp8_dtype: Any, scale_inv: torch.Tensor, dtype: torch.dtype, shape: Any, transpose: Any = None
) -> torch.Tensor:
    if data is None:
        data = transpose.view(shape[-1], -1).t().contiguous()
    return Quantized(_codes(data.view(-1, shape[-1])), scale_inv.reshape(()), None, "row").dequantize(dtype).view(shape)


def _blockwise(
    shape: Any,
    data: Any,
    scale_inv: Any,
    columns: Any,
    column_scales: Any,
    fp8_dtype: Any,
    dtype: torch.dtype,
    *rest: Any,
) -> torch.Tensor:
    if data is None:  # then there is only the copy along columns: the same blocks, transposed
        data, scale_inv = columns.view(shape[-1], -1).t().contiguous(), column_scales.t()
    return _tiled(data, scale_inv, (128, 128), shape, dtype)


def _mxfp8(
    data: Any,
    scale_inv: Any,
    columns: Any,
    column_scales: Any,
    fp8_dtype: Any,
    dtype: torch.dtype,
    shape: Any,
    *rest: Any,
) -> torch.Tensor:
    return _tiled(data, scale_inv.view(torch.float8_e8m0fnu).float(), (1, 32), shape, dtype)


def _tiled(
    data: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], shape: Any, dtype: torch.dtype
) -> torch.Tensor:
    matrix = data.view(-1, shape[-1])
    rows, columns = (-(-side // tile) for side, tile in zip(matrix.shape, block, strict=True))
    scales = scale_inv[:rows, :columns].contiguous()  # TE pads them for its kernels
    return Quantized(_codes(matrix), scales, block, "row").dequantize(dtype).view(shape)


_TENSOR = "transformer_engine.pytorch.tensor."
_TE = {
    (f"{_TENSOR}float8_tensor", "_make_float8_tensor_in_reduce_ex"): _float8,
    (f"{_TENSOR}float8_blockwise_tensor", "_make_float8_blockwise_tensor_in_reduce_ex"): _blockwise,
    (f"{_TENSOR}mxfp8_tensor", "_make_mxfp8_tensor_in_reduce_ex"): _mxfp8,
    # Before TE 2.15 the pickle asks the class for its function.
    (f"{_TENSOR}float8_tensor", "Float8Tensor"): SimpleNamespace(_make_in_reduce_ex=_float8),
    (f"{_TENSOR}float8_blockwise_tensor", "Float8BlockwiseQTensor"): SimpleNamespace(_make_in_reduce_ex=_blockwise),
    (f"{_TENSOR}mxfp8_tensor", "MXFP8Tensor"): SimpleNamespace(_make_in_reduce_ex=_mxfp8),
}

# ---------------------------------------------------------------------- the unpickler

_TORCH = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "UntypedStorage"): torch.storage.UntypedStorage,
}


class _Bag:
    """Stands in for every other class: takes any arguments and any state, and keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _getattr(owner: Any, name: str) -> Any:
    """Stand in for ``getattr``, and look only into our own objects.

    Python 3.11 pickles members of an enumeration by it, and TE before 2.15 its functions.
    """
    return vars(owner)[name] if isinstance(owner, SimpleNamespace) else _Bag()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _getattr
        known = _TE.get((module, name)) or _TORCH.get((module, name))
        if known is not None:
            return known
        of_torch = getattr(torch, name, None) if module == "torch" else None
        if isinstance(of_torch, torch.dtype) or (isinstance(of_torch, type) and name.endswith("Storage")):
            return of_torch
        return type(name, (_Bag,), {})


class _PICKLE:  # the part of the module pickle that torch.load uses
    Unpickler = _Unpickler
    UnpicklingError = pickle.UnpicklingError
    load = staticmethod(pickle.load)
