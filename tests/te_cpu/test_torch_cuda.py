"""Every public name of ``torch.cuda`` is answered by the CPU, or refuses by its name with the remedy.

A name that a new torch brings fails here until it is one or the other: in ``nemo_fp8.te_cpu.device`` or ``refusals``,
and with what it is called with in ``ARGUMENTS``.
"""

import importlib
import inspect

import pytest
import torch

MODULES = [
    f"torch.cuda{part}"
    for part in ("", ".memory", ".streams", ".random", ".nccl", ".comm", ".nvtx", ".profiler", ".graphs", ".tunable")
]
WITHOUT_ALL = {
    "torch.cuda.profiler": ["start", "stop"],
    "torch.cuda.graphs": ["is_current_stream_capturing"],
    "torch.cuda.nccl": ["is_available", "version", "unique_id", "init_rank"],
}
STATE = torch.cuda.get_rng_state()
ARGUMENTS = {
    "CudaError": (1,),
    "StreamContext": (None,),
    "can_device_access_peer": (0, 0),
    "check_error": (0,),
    "device": (0,),
    "device_of": (torch.ones(1),),
    "get_stream_from_external": (0,),
    "manual_seed": (1,),
    "manual_seed_all": (1,),
    "mark": ("a",),
    "range": ("a",),
    "range_end": (0,),
    "range_push": ("a",),
    "range_start": ("a",),
    "set_device": (0,),
    "set_per_process_memory_fraction": (1.0,),
    "set_rng_state": (STATE,),
    "set_rng_state_all": ([STATE],),
    "set_stream": (torch.cuda.current_stream(),),
    "set_sync_debug_mode": ("default",),
    "stream": (None,),
}


def names():
    for module in MODULES:
        found = importlib.import_module(module)
        for name in sorted({*getattr(found, "__all__", ()), *WITHOUT_ALL.get(module, ())}):
            if callable(getattr(found, name)):
                yield module, name


def needs(thing):
    """What it cannot be called without."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # torch's own C classes, which take anything
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


@pytest.fixture(autouse=True)
def _chance_stays():
    before = torch.cuda.get_rng_state()
    yield
    torch.cuda.set_rng_state(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name"), names())
def test_every_public_name_answers_or_refuses_by_its_name(module, name):
    thing = getattr(importlib.import_module(module), name)
    assert name in ARGUMENTS or not needs(thing), f"{module}.{name} is new: it needs {needs(thing)}"
    assert refusal(thing, *ARGUMENTS.get(name, ())) in (None, f".{name} has no CPU implementation, or run on a GPU.")


def refusal(call, *arguments):
    """The beginning from the name on and the end of what a call refuses with, or None."""
    try:
        call(*arguments)
    except NotImplementedError as refused:
        name, _, why = str(refused).partition(" has no CPU implementation: ")
        return f".{name.rpartition('.')[2]} has no CPU implementation, {why.rpartition(', ')[2]}"
    return None


def test_a_limit_of_memory_and_a_warning_of_waits_are_not_promised():
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    assert torch.cuda.get_sync_debug_mode() == 0
    with pytest.raises(NotImplementedError, match=r"set_per_process_memory_fraction\(0.5\).*ulimit"):
        torch.cuda.set_per_process_memory_fraction(0.5, device=0)
    with pytest.raises(NotImplementedError, match=r"set_sync_debug_mode\('error'\)"):
        torch.cuda.set_sync_debug_mode("error")


def test_the_runtime_says_that_a_number_is_an_error():
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    torch.cuda.profiler.start()
    with pytest.raises(torch.cuda.CudaError, match="CUDA's"):
        torch.cuda.check_error(2)


def test_statistics_nest_as_they_are_named():
    held = torch.ones(1 << 18)
    nested, flat = torch.cuda.memory_stats_as_nested_dict(), torch.cuda.memory_stats()
    assert nested["allocated_bytes"]["all"]["current"] == flat["allocated_bytes.all.current"] >= held.nbytes
    assert nested["num_ooms"] == 0
    assert 0 < torch.cuda.device_memory_used() < torch.cuda.mem_get_info()[1]


def test_storages_of_a_gpus_names_are_the_cpus():
    assert torch.cuda.FloatStorage(3).size() == 3
    assert torch.cuda.ByteStorage is torch.ByteStorage


def test_one_device_has_one_number():
    x = torch.ones(3, device="cuda")
    assert x.get_device() == torch.cuda.current_device()
    assert torch.ones(1, device="meta").get_device() == -1
    assert torch.empty(2, device=x.get_device()).is_cuda
    with torch.cuda.device_of(x):
        assert x.new([1.0], device="cuda").tolist() == [1.0]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("make", [torch.nested.nested_tensor, torch.nested.as_nested_tensor])
def test_tensors_are_nested_where_they_are_asked_for(make, layout):
    made = make([torch.ones(2), torch.ones(3)], device="cuda", layout=layout)
    assert made.device.type == "cpu"
    assert [part.tolist() for part in made.unbind()] == [[1, 1], [1, 1, 1]]


def test_nothing_is_spread_over_one_device():
    layer, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
    for ids in (None, [0]):
        assert torch.equal(torch.nn.parallel.data_parallel(layer, x, device_ids=ids), layer(x))
    spread = importlib.import_module("torch.nn.parallel.scatter_gather").scatter
    for call in (
        lambda: torch.nn.parallel.data_parallel(layer, x, device_ids=[0, 1]),
        lambda: torch.nn.parallel.replicate(layer, [0, 1]),
        lambda: spread(x, [0, 1]),
        lambda: torch.nn.parallel.parallel_apply([layer], [x]),
    ):
        with pytest.raises(NotImplementedError, match=r"torch.nn.parallel\.\w+ .*DistributedDataParallel"):
            call()
