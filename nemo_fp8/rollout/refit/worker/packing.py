"""Pack weights anew for the kernels of a CPU, in memory that is there already.

oneDNN and vLLM's own kernels multiply with a copy of a weight in a layout of their own. So a push gathers a layer,
frees the old copy, and has vLLM make a new one. The operating system has to find and clear every page of fresh memory,
which takes longer than to write there: a quarter of a push in BF16, seen as its page faults. None of it is needed:

    gathered    where an earlier layer was gathered (``StagingMemory``)
    packed      where the old copy was (``keep_freed``)

The trade-off: a worker may keep up to eight times the bytes of its largest weight, free, for the next push or the next
forward pass. (Measured with 203 million parameters: none that it did not have before.)
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import weakref
from contextlib import suppress
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel


class StagingMemory:
    """The memory in which staged layers are gathered, one after the other.

    The operating system has to find and clear every page of fresh memory, which takes longer than the copy into it. So
    a layer is gathered where an earlier one was, once nobody refers to that one any longer; and the first one comes
    into huge pages, where Linux has them for who asks: one to be found instead of 512.
    """

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def take(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return memory of the shape, strides and type of ``like`` on a device; what lies there is anything."""
        idle = [flat for flat in self.kept if torch._C._storage_Use_Count(flat.untyped_storage()._cdata) == _NOBODY]
        fitting = [flat for flat in idle if _lies_on(flat, device) and flat.nbytes >= like.nbytes]
        if not fitting:
            self.kept = [flat for flat in self.kept if not any(flat is other for other in idle)]
            self.kept += (fitting := [_fresh(like.nbytes, device)])
        flat = min(fitting, key=lambda flat: flat.nbytes)
        return flat[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride()).data


_NOBODY = 2
"""References to a storage to which only its tensor in ``StagingMemory`` refers, and the object that asks."""


def _lies_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor lies on a device; ``cuda`` alone is any of them, since a worker has one."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _fresh(size: int, device: torch.device) -> torch.Tensor:
    """Return so many bytes of new memory; on a CPU in huge pages, if the operating system has them."""
    if device.type != "cpu" or not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device=device)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def packs_columns(layer: Any, weight: torch.Tensor, device: torch.device) -> bool:
    """Return whether a weight on a device is packed sooner if its columns lie in one piece each.

    oneDNN packs the weight of a product [inputs, outputs], and takes five times as long for one that lies [outputs,
    inputs]. It packs the same. Experts, and what an AMX kernel packs, are taken by rows only.
    """
    plain = isinstance(layer.quant_method, UnquantizedLinearMethod) and device.type == "cpu" and weight.dim() == 2
    return plain and weight.itemsize == 2 and not check_cpu_sgl_kernel(*weight.shape, weight.dtype)


def packed(layer: Any) -> Any:
    """Return which function multiplies with the copy of a weight that a CPU kernel packed; None if there is none.

    vLLM makes that function anew for every weight that it packs, and oneDNN shows what it packed to nobody. The
    reference is weak, so that no old copy is kept; that to a function which is gone equals no other.
    """
    multiplies = vars(layer).get("cpu_linear")
    return multiplies and weakref.ref(multiplies)


def pack(layer: Any) -> None:
    """Pack the copy of a weight again, from the weight as it is now."""
    release(layer)
    layer.quant_method.process_weights_after_loading(layer)


def release(layer: Any) -> None:
    """Free the copy of a weight that a CPU kernel packed, so that two copies never exist at once."""
    if "cpu_linear" in vars(layer) and isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
        layer.cpu_linear = None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_LEAST, _MOST = 32 << 20, 2**31 - 1  # DEFAULT_MMAP_THRESHOLD_MAX, and the largest number that mallopt takes
_ALIGNMENT = 1 << 20  # more than any allocator asks for beside the bytes themselves


def keep_freed(largest: int) -> None:
    """Have the C library keep the memory of a freed copy for the next one; ``largest`` has so many bytes.

    glibc does it by itself for pieces up to 32 MB: once it has freed one that it had mapped, it maps only larger ones,
    and returns what is free at the end of its heap from twice that size on. The same rule goes on here up to the
    largest weight, but for the end of the heap, where the copies of several layers are free at times, since one of
    another size does not fit where the last one was. Other C libraries are left as they are.
    """
    if largest and platform.libc_ver()[0] == "glibc":
        mallopt, threshold = ctypes.CDLL(None).mallopt, max(largest + _ALIGNMENT, _LEAST)
        mallopt(_MMAP_THRESHOLD, min(threshold, _MOST))
        mallopt(_TRIM_THRESHOLD, min(8 * threshold, _MOST))
