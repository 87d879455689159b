"""What only a GPU could answer of ``torch.cuda``, refused by its name, with the reason and the remedy.

A row of :data:`REFUSED` is a reason and the names that it holds for. Without it such a function ends in an
``AttributeError`` of ``torch._C``, which tells nobody that it is the CPU that stands for the GPU. Names that a CPU can
answer truly are :mod:`~nemo_fp8.te_cpu.device`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LEAVE_OUT = "Leave it out"


@dataclass(frozen=True)
class Refusal:
    """Names of a module that are refused, why, and what to do instead."""

    module: str
    names: str
    why: str
    remedy: str = _LEAVE_OUT

    def rows(self, owner: object) -> dict[str, tuple[Any, str]]:
        """Return what takes the place of those of the names that this module has, with the reason."""
        return {
            name: (_replacement(self, name, isinstance(getattr(owner, name), type)), self.why)
            for name in self.names.split()
            if hasattr(owner, name)
        }


@functools.cache
def _replacement(refusal: Refusal, name: str, is_class: bool) -> Any:
    """Return one replacement for all modules that have the name, a class in the place of a class."""
    refuse = refusing(f"{refusal.module}.{name}", refusal.why, refusal.remedy)
    return type(name, (), {"__init__": refuse}) if is_class else refuse


def refusing(name: str, why: str, remedy: str = _LEAVE_OUT) -> Callable[..., Any]:
    """Return a function that refuses by that name, whatever it is given."""

    def refuse(*args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{name} has no CPU implementation: {why}. {remedy}, or run on a GPU.")

    return refuse


_SPREAD = "it spreads over the GPUs of one process, and the CPU is one"
_DDP = "Leave it out, or start a process for each part (DistributedDataParallel)"
_GLOO = "gloo takes NCCL's place"

REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "torch.cuda.memory",
        "_record_memory_history _snapshot _dump_snapshot memory_snapshot",
        "nobody writes down what a CPU allocates, and when",
        "Leave the history out (NeMo: MemoryProfileCallback, memory_profile)",
    ),
    Refusal(
        "torch.cuda",
        "caching_allocator_alloc caching_allocator_delete caching_allocator_enable caching_allocator_disabled "
        "change_current_allocator CUDAPluggableAllocator get_allocator_backend use_mem_pool",
        "the C library allocates and frees here",
        "Leave it out (Megatron: nccl_ub=False)",
    ),
    Refusal(
        "torch.cuda",
        "host_memory_stats host_memory_stats_as_nested_dict",
        "nothing is pinned, and nobody counts what the host allocates",
    ),
    Refusal(
        "torch.cuda",
        "CUDAGraph graph graph_pool_handle make_graphed_callables",
        "a graph starts a GPU's kernels without Python",
        "Leave CUDA graphs out (Megatron: enable_cuda_graph=False, TransformerEngine: no make_graphed_callables)",
    ),
    Refusal(
        "torch.cuda",
        "list_gpu_processes memory_usage temperature power_draw clock_rate utilization",
        "NVIDIA's management library tells it of a GPU, and there is none",
    ),
    Refusal("torch.cuda", "current_blas_handle current_solver_handle", "it is the address of a library's on a GPU"),
    Refusal(
        "torch.cuda.nccl",
        "version unique_id init_rank all_reduce reduce broadcast all_gather reduce_scatter",
        _GLOO,
        "Call torch.distributed",
    ),
    Refusal("torch.nn.parallel", "replicate scatter gather parallel_apply", _SPREAD, _DDP),
    Refusal(
        "torch.cuda.comm",
        "broadcast broadcast_coalesced reduce_add reduce_add_coalesced scatter gather",
        _SPREAD,
        "Leave it out, or call torch.distributed",
    ),
    Refusal(
        "torch.cuda.tunable",
        "enable tuning_enable record_untuned_enable set_max_tuning_duration get_max_tuning_duration "
        "set_max_tuning_iterations get_max_tuning_iterations set_filename get_filename get_results get_validators "
        "read_file tune_gemm_in_file mgpu_tune_gemm_in_file set_rotating_buffer_size "
        "get_rotating_buffer_size set_numerical_check_tolerances",
        "it chooses among a GPU's kernels by their speed",
    ),
)


def refused(module: str, owner: object) -> dict[str, tuple[Any, str]]:
    """Return what is refused of ``owner``, by the rows of that module."""
    return {name: row for refusal in REFUSED if refusal.module == module for name, row in refusal.rows(owner).items()}
