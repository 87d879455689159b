"""Megatron's CUDA-only paths, run on the CPU for as long as a context lasts.

megatron-core asks for CUDA by name: it allocates on ``cuda``, compares type strings, keeps CUDA generators,
opens streams. Under :func:`megatron_on_cpu` the same code runs on the CPU, over gloo, with its own distributed
optimizer. Five things make it so:

- :class:`CudaIsCpu`, a torch function mode: whoever asks for ``cuda`` gets the CPU;
- a table of replaced names (see ``patching``), each with the reason, checked against the installed version;
- an optimizer and a norm with what TransformerEngine's have and torch's lack;
- BF16 products in FP32 where the processor has no units for them (``numerics/bf16.py``);
- compiled fusions taken from torch's cache only where they were generated for this processor (``compiled.py``).

Nothing is left behind when the context closes. The trade-off: while it lasts the whole process has no CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.overrides import TorchFunctionMode

from nemo_fp8.numerics.bf16 import bf16_products
from nemo_fp8.train import rng
from nemo_fp8.train.adam import FusedAdam
from nemo_fp8.train.compiled import compiled_for_this_cpu
from nemo_fp8.train.norm import Norm
from nemo_fp8.train.patching import Patch, patched

_CPU = torch.device("cpu")


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Megatron takes the CPU for its GPU until the context closes. Entered again inside, it changes nothing."""
    if is_megatron_on_cpu():
        yield
        return
    with patched(_TABLE, "Running Megatron on a CPU"), CudaIsCpu(), bf16_products(), compiled_for_this_cpu():
        yield


def is_megatron_on_cpu() -> bool:
    """Whether such a context is open."""
    return vars(torch.cuda)["current_device"] is _current_device


class CudaIsCpu(TorchFunctionMode):
    """Every torch call that names a CUDA device is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # there is no transfer that pinned memory could speed up
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by strings such as 'torch.cuda.BFloat16Tensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


class _Order:
    """A CUDA stream, or an event in one, where there is nothing to order: the CPU does one thing after the other."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _Order:
        return self

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...


def _current_device() -> torch.device:
    return _CPU


def _current_stream(device: object = None) -> _Order:
    return _Order()


def _stream(stream: object) -> AbstractContextManager[None]:
    return nullcontext()


def _synchronize(device: object = None) -> None: ...


def _is_available() -> bool:
    return False


def _device_count() -> int:
    return 1


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _layer_norm(self: object, rms_norm: bool = False, for_qk: bool = False) -> type:
    return Norm


def sequential_experts(self: Any, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, MLPSubmodules]:
    """Experts as a row of MLPs, of the linears that this provider has: those the emulation knows."""
    return SequentialMLP, MLPSubmodules(linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear())


def _maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _no_kernel(self: object, mask: object, b: int, np: int, sq: int, sk: int) -> bool:
    return False


def _no_timers(
    self: object, names: list[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
) -> str | None:
    return None


def _unchanged(ckpt: dict[str, Any]) -> dict[str, Any]:
    return ckpt


def _one_bucket_per_group(buffers: Iterable[Any], force_single_bucket_group: bool = False) -> list[Any]:
    return [
        _ParamAndGradBucketGroup([bucket], buffer.ddp_config, buffer.data_parallel_group, buffer.data_parallel_world_size)
        for buffer in buffers
        for bucket in buffer.buckets
    ]


def _cuda(name: str, replacement: Callable[..., Any], why: str) -> Patch:
    return Patch("torch.cuda", name, replacement, why)


_RANDOM = "megatron.core.tensor_parallel.random"
_OPTIMIZER = "megatron.core.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_GLOO = "gloo corrupts a coalesced all-gather of mixed dtypes, such as FP8 and BF16 weights together"

_NORM = "torch's norms refuse sequence parallelism"
_LOCAL = "megatron.core.models.backends:LocalSpecProvider"

_TABLE = (
    _cuda("current_device", _current_device, "buffers are allocated on it"),
    _cuda("is_available", _is_available, "the answer must not depend on whether this machine has a GPU that is not used"),
    _cuda("device_count", _device_count, "NeMo seeds Megatron's random streams only where there is a device"),
    _cuda("synchronize", _synchronize, "timers and the pipeline schedule wait for the device"),
    _cuda("Stream", _Order, "DDP opens a stream for its communication, and the token dispatcher one for its copies"),
    _cuda("Event", _Order, "streams wait for each other's events"),
    _cuda("current_stream", _current_stream, "the communication stream waits for it"),
    _cuda("stream", _stream, "DDP enters its stream"),
    _cuda("manual_seed", _manual_seed, "Megatron seeds the device's generator"),
    Patch(
        "megatron.core.timers:Timers",
        "get_all_timers_string",
        _no_timers,
        "NeMo's progress printer asks for it on rank 0 alone, and gloo waits forever for the other ranks' part of the gather",
    ),
    Patch(_RANDOM, "CudaRNGStatesTracker", rng.CpuRngStatesTracker, "it keeps states of CUDA generators"),
    Patch(_RANDOM, "_get_cuda_rng_state", rng.get_rng_state, "activation recompute saves the device's generator"),
    Patch(_RANDOM, "_set_cuda_rng_state", rng.set_rng_state, "activation recompute restores the device's generator"),
    Patch(_RANDOM, "_CUDA_RNG_STATE_TRACKER", None, "a tracker from before would be one of CUDA generators"),
    Patch(_RANDOM, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False, "so that the tracker is made anew"),
    Patch(_OPTIMIZER, "Adam", FusedAdam, "resuming with torch's own Adam is silently wrong"),
    Patch(_OPTIMIZER, "USING_PYTORCH_OPTIMIZER", False, "it would choose torch's own Adam"),
    Patch(_DISTRIBUTED, "Adam", FusedAdam, "the distributed optimizer accepts no other class"),
    Patch(_DISTRIBUTED, "HAVE_APEX_OR_TE", True, "FusedAdam has the state layout that this stands for"),
    Patch(_DISTRIBUTED, "USING_TE_OPTIMIZER", True, "FusedAdam has the state layout that this stands for"),
    Patch(_DISTRIBUTED, "partition_buckets", _one_bucket_per_group, _GLOO),
    Patch("megatron.core.distributed.distributed_data_parallel", "partition_buckets", _one_bucket_per_group, _GLOO),
    Patch(_LOCAL, "layer_norm", _layer_norm, _NORM),
    Patch("megatron.core.transformer.transformer_block", "LayerNormImpl", Norm, _NORM),
    Patch("megatron.core.models.gpt.gpt_layer_specs", "LNImpl", Norm, _NORM),
    Patch(_LOCAL, "grouped_mlp_modules", sequential_experts, "grouped GEMMs are CUDA kernels, and the fallback knows plain linears only"),
    Patch("megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax", "is_kernel_available", _no_kernel, "it is a CUDA kernel"),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _maybe_move_tensor_to_cpu,
        "it makes lists of split sizes from CUDA tensors only",
    ),
    Patch("megatron.core.transformer.moe.moe_utils", "te_general_gemm", None, "the router asks whether it is there", optional=True),
    Patch("nemo.lightning.io.pl", "_fix_tensors_device", _unchanged, "it asserts that CUDA is initialized"),
)
