"""What the CPU answers in the place of a CUDA device."""

import copy
import os
import pickle
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.fx.experimental.proxy_tensor import make_fx

from nemo_fp8.te_cpu.device import _tables


def test_every_factory_allocates_on_the_cpu():
    for made in (
        torch.normal(0.0, 1.0, (2, 3), device="cuda"),
        torch.empty_permuted((2, 3), (1, 0), device="cuda"),
        torch.ones(2, device="cuda"),
    ):
        assert made.device.type == "cpu"


def test_memory_is_the_machines():
    free, total = torch.cuda.memory.mem_get_info()
    assert 0 < free < total == torch.cuda.get_device_properties(0).total_memory
    assert total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_every_rank_of_a_machine_has_a_device(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert torch.cuda.device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4


def test_the_current_device_is_a_number_of_which_a_device_is_made():
    """Megatron, Lightning and Ray write it into a name or beside one, TE compares it with 0, FSDP makes a device of
    it."""
    current = torch.cuda.current_device()
    assert (type(current), current) == (int, 0)
    named = torch.device(f"cuda:{current}"), torch.device("cuda", current), torch.device(type="cuda", index=current)
    assert {(device.type, device.index) for device in named} == {("cuda", 0)}
    assert torch.device(current) == torch.device(device=current) == torch.device("cpu")
    with torch.device(current), torch.cuda.device(current), torch.device("cuda", current):
        for where in (current, *named):
            assert torch.ones(1).to(where).device == torch.empty(1, device=where).device == torch.device("cpu")
    assert torch.nn.Linear(2, 2, device=current).to(current).cuda(current).weight.is_cuda
    assert torch.get_device_module("cuda") is torch.get_device_module(named[0]) is torch.cuda
    with pytest.raises(RuntimeError, match="negative"):
        torch.device(-1)


@pytest.mark.parametrize("fetch", [lambda t: t.cpu(), lambda t: t.to("cpu"), lambda t: t.detach().to(device="cpu")])
def test_what_was_fetched_stays_what_it_was(fetch):
    """Before and after a step are compared so: on one memory a step would seem to change nothing."""
    layer = torch.nn.Linear(4, 4, device="cuda")
    before, buffer = fetch(layer.weight), fetch(torch.zeros(2, device="cuda"))
    layer(torch.ones(1, 4, device="cuda")).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert (layer.weight - before).abs().max() == 1.0
    assert buffer.data_ptr() != fetch(buffer).data_ptr()
    fetched = fetch(weight := torch.ones(2, device="cuda", requires_grad=True))
    if fetched.requires_grad:
        fetched.sum().backward()
        assert weight.grad.tolist() == [1, 1]


def test_a_module_stays_where_its_buffers_hold_it():
    """A second fit of Lightning's: ``module.cpu()`` came between, and DDP's buffer holds the parameters."""
    buffer, layer = torch.zeros(16, device="cuda"), torch.nn.Linear(4, 4, device="cuda")
    layer.weight.data = buffer.view(4, 4)
    assert layer.cpu() is layer
    assert layer.to("cuda") is layer
    buffer.fill_(2.0)
    assert (layer.weight == 2).all()


def test_devices_stay_torchs_own(tmp_path):
    """Whoever makes one, and where its class is asked about, written down, or an argument's type."""
    for device in (torch.device("cuda", 1), torch.ones(1).device, torch.device("meta"), torch.device(0)):
        assert isinstance(device, torch.device)
        assert issubclass(type(device), torch.device)
        assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
        torch.save(device, tmp_path / "device.pt")
        assert torch.load(tmp_path / "device.pt") == device
    assert not isinstance("cuda", torch.device)
    assert not issubclass(str, torch.device)
    assert pickle.loads(pickle.dumps(torch.device)) is torch.device
    assert b"nemo_fp8" not in pickle.dumps(torch.device("cuda", 0))
    assert repr(torch.device("cuda", 0)) == "device(type='cuda', index=0)"

    @torch.jit.script
    def place(x: torch.Tensor, where: torch.device):
        return x.to(where), torch.device("cpu")

    @torch.library.custom_op("nemo_fp8_tests::made", mutates_args=())
    def made(n: int, device: torch.device, other: torch.device | None = None) -> torch.Tensor:
        return torch.ones(n, device=device)

    assert place(torch.ones(1), torch.device("cpu"))[1] == torch.device("cpu")
    assert made(2, torch.device("cpu")).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("arguments", [{"backend": "nccl", "device_id": "cuda:0"}, {"backend": "cpu:gloo,cuda:nccl"}])
def test_nccls_name_means_gloo(arguments, tmp_path):
    assert dist.is_nccl_available()
    arguments = {name: torch.device(value) if name == "device_id" else value for name, value in arguments.items()}
    dist.init_process_group(init_method=f"file://{tmp_path}/store", rank=0, world_size=1, **arguments)
    try:
        assert dist.get_backend() == "gloo"
        dist.barrier(device_ids=[torch.cuda.current_device()])
        assert dist.barrier(async_op=True, device_ids=[0]).wait()
        group = dist.new_group([0], None, "nccl")
        assert dist.get_backend(group) == "gloo"
        # A piece of a tensor is written to as NCCL writes to it: autograd would refuse the pieces of a split.
        pieces = torch.zeros(4).requires_grad_().clone().split(2)
        dist.all_gather_into_tensor(pieces[1], torch.tensor([5.0, 7.0]))
        assert pieces[1].tolist() == [5.0, 7.0]
        with pytest.raises(AssertionError, match="no such backend"):
            dist.new_group([0], backend="no such backend")
    finally:
        dist.destroy_process_group()


def test_a_rank_that_is_alone_asks_gloo_for_nothing(tmp_path):
    """NCCL copies its input, or does nothing where input and output are one; gloo copies twice, in a thread."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        before = backend._get_sequence_number_for_group()
        x = torch.tensor([5.0, -0.0, float("nan"), 7.0])
        bits, into = x.view(torch.int32).clone(), torch.zeros(4)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            dist.all_reduce(x, op)
        old, new = "reduce_scatter_tensor all_gather_into_tensor", "reduce_scatter_single all_gather_single"
        for scatter, gather in (names.split() for names in (old, new) if hasattr(dist, names.split()[0])):
            assert getattr(dist, scatter)(x, x, group=dist.group.WORLD, async_op=True).wait()
            assert torch.equal(x.view(torch.int32), bits)
            work = getattr(dist, gather)(output_tensor=into.zero_(), input_tensor=x, async_op=True)
            assert work.is_completed()
            assert work.wait()
            assert torch.equal(into.view(torch.int32), bits)
        assert backend._get_sequence_number_for_group() == before
        with pytest.raises((ValueError, RuntimeError)):  # gloo says what is wrong
            dist.all_gather_into_tensor(into, x[:3])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("name", "kind"), [("meta", "meta"), ("cuda", "cpu"), ("cuda:0", "cpu")])
def test_a_device_as_a_context(name, kind):
    """transformers and Accelerate build models of many gigabytes on meta."""
    with torch.device(name):
        assert {torch.empty(2).device.type, torch.nn.Linear(2, 2).weight.device.type, torch.zeros(2).device.type} == {
            kind
        }


@pytest.mark.parametrize("where", [0, "cuda", torch.device("cuda", 1)])
def test_a_model_goes_where_its_rank_is_sent(where, tmp_path):
    """torchrun's scripts send a model to the number of the rank's GPU, and tell DDP that number."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(4, 2).to(where).to(device=where, dtype=torch.float64)
        x = torch.ones(1, 4, dtype=torch.float64).to(where)
        for ddp in (
            torch.nn.parallel.DistributedDataParallel(model, device_ids=[where], output_device=where),
            torch.nn.parallel.DistributedDataParallel(model, [where], where, 0, find_unused_parameters=True),
        ):
            model.zero_grad()
            ddp(x).sum().backward()
            assert torch.equal(model.weight.grad, x.expand(2, 4))
        # What is the last to hold the group ends its threads: DDP holds the GIL then, for which one of them may wait.
        del ddp
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "where", [None, "cuda", torch.device("cuda", 0), {"cuda:3": "cuda:0"}, lambda storage, at: storage.cuda(0)]
)
def test_files_that_a_gpu_has_written_are_read(where, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    torch.save({"weight": torch.arange(3)}, tmp_path / "model.pt")
    assert b"cuda:3" in (tmp_path / "model.pt").read_bytes()
    assert torch.load(tmp_path / "model.pt", map_location=where)["weight"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "where", [{}, {"device_id": 0}, {"device_id": torch.device("cuda", 0)}, {"device_id": torch.device("cuda")}]
)
def test_fsdp_of_torchs_first_kind_trains_wherever_a_rank_puts_it(where, tmp_path):
    """Its scripts name the GPU of a rank, or have moved the model to it, and broadcast what rank 0 has loaded."""

    def step(wrap):
        torch.manual_seed(0)
        model = wrap(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)).cuda()
        )
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        for _ in range(3):
            loss = model(torch.randn(4, 8, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy = ModuleWrapPolicy({torch.nn.Linear})
        sharded = step(
            lambda model: FullyShardedDataParallel(model, auto_wrap_policy=policy, sync_module_states=True, **where)
        )
    finally:
        dist.destroy_process_group()
    assert torch.equal(sharded, step(lambda model: model))


@pytest.mark.parametrize("name", "Adadelta Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop".split())
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_a_graph_could_capture_steps_as_any_other(name, foreach):
    def step(capturable):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 8, device="cuda"))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.01, capturable=capturable, foreach=foreach)
        for _ in range(6):
            parameter.grad = parameter.detach().sin() + 0.5
            optimizer.step()
        return parameter.detach()

    # Its corrections of the moments are FP32's, where the other's are Python's numbers.
    torch.testing.assert_close(step(True), step(False), rtol=1e-4, atol=1e-5)


def test_data_parallel_has_one_device():
    model = torch.nn.DataParallel(torch.nn.Linear(4, 2))
    assert model(torch.ones(3, 4, device="cuda")).shape == (3, 2)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fsdp2_shards_a_module_of_te_and_changes_no_bit(device, tmp_path):
    """FSDP2 takes the device from its mesh, and would ask CUDA for the number of one."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    def gradients(shard):
        torch.manual_seed(0)
        layer = te.Linear(64, 32, params_dtype=torch.float32)
        shard(layer)
        with te.autocast(recipe=Float8CurrentScaling()):
            output = layer(torch.randn(16, 64))
        output.pow(2).sum().backward()
        whole = (each.grad for each in layer.parameters())
        return [getattr(each, "full_tensor", lambda each=each: each)() for each in whole]

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        assert mesh.device_type == "cpu"
        sharded = gradients(lambda layer: fully_shard(layer, mesh=mesh))
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(sharded, gradients(lambda layer: None), strict=True))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("fetch", [lambda t: t.cpu(), lambda t: t.to("cpu")])
def test_a_shard_of_fsdp2_goes_to_the_host(fetch, quantized, tmp_path):
    """As ``get_model_state_dict(full_state_dict=True)`` asks of it: torch names a DTensor's mesh among its parts."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with te.quantized_model_init(enabled=quantized, recipe=Float8CurrentScaling()):
            layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
        fully_shard(layer, mesh=init_device_mesh("cuda", (1,)))
        local = layer.weight.to_local()
        kept, values = fetch(layer.weight).to_local(), local.dequantize().clone() if quantized else local.clone()
        if quantized:
            assert type(kept) is type(local)
            assert kept._scale_inv.data_ptr() != local._scale_inv.data_ptr()
        with torch.no_grad():
            local.copy_(torch.full_like(values, 3.0))
        assert torch.equal(kept.dequantize() if quantized else kept, values)
        whole = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))["weight"]
        assert (whole.dequantize() if quantized else whole).unique().tolist() == [3.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("by", ["seed", "state"])
def test_who_restores_cudas_chance_gets_it_to_the_bit_whatever_a_data_loader_drew(by):
    """A loader draws from the CPU's generator, which torch's own operators draw from; TE's kernels do not."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    quantizer, x = NVFP4Quantizer(stochastic_rounding=True, columnwise=False), torch.randn(64, 64).bfloat16()
    state = torch.cuda.get_rng_state()

    def restore():
        torch.manual_seed(3) if by == "seed" else torch.cuda.set_rng_state(state)

    def drawn():
        return quantizer(x)._rowwise_data.clone(), tex.dropout_fwd(x, 0.5)[1], torch.rand(8)

    def equal(some, others):
        return [torch.equal(a, b) for a, b in zip(some, others, strict=True)]

    restore()
    first = drawn()
    assert equal(first, drawn()) == [False, False, False]
    restore()
    assert equal(first, drawn()) == [True, True, True]
    restore()
    next(iter(torch.utils.data.DataLoader([0])))
    assert equal(first, drawn()) == [True, True, False]


def test_a_state_of_before_is_that_of_both():
    """nemo_fp8 0.2.0 had one generator for both, whose state is in its checkpoints."""
    torch.cuda.set_rng_state(torch.Generator().manual_seed(5).get_state())
    own = torch.cuda.default_generators[0]
    assert torch.equal(torch.rand(8), torch.rand(8, generator=own))


def test_a_stream_is_one_to_operators_of_torch_too():
    """They read it from memory, and look at no class."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    stream = torch.cuda.Stream(priority=-1)
    assert isinstance(stream, torch.Stream)
    assert stream == torch.cuda.current_stream()
    tensor = NVFP4Quantizer()(torch.ones(64, 64).bfloat16())
    assert torch.ops.aten.record_stream.default(tensor, stream) is None
    with torch.cuda.stream(stream), stream:
        assert stream.record_event().query()


def test_events_tell_the_time_between_them():
    """A throughput is a number divided by it."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        began.elapsed_time(ended)
    before = time.perf_counter()
    began.record()
    time.sleep(0.01)
    ended.record(torch.cuda.current_stream())
    assert 10 <= began.elapsed_time(ended) <= 1e3 * (time.perf_counter() - before)
    assert isinstance(ended, torch.Event)


def test_streams_and_events_by_torchs_own_names():
    began, ended = (
        torch.Event(device="cuda", enable_timing=True),
        torch.Event(torch.device("cuda", 0), enable_timing=True),
    )
    stream = torch.Stream(device="cuda")
    began.record(stream)
    with stream:
        stream.wait_event(began)
        ended = stream.record_event(ended)
    assert began.elapsed_time(ended) >= 0
    assert torch.Stream("cuda:0", priority=-1) == torch.cuda.current_stream() == stream
    for event in (began, torch.cuda.Event()):
        assert isinstance(event, torch.Event)
        assert not isinstance(event, torch.Stream)
    assert isinstance(stream, torch.Stream)


def test_there_is_no_pool_of_a_gpus_memory():
    """Where there is one, Megatron compiles an extension at its import."""
    with pytest.raises(ImportError, match="MemPool"):
        from torch.cuda.memory import MemPool  # noqa: F401
    with pytest.raises(AttributeError, match=r"has no CPU implementation.* or run on a GPU"):
        torch.cuda.MemPool()
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        torch.cuda.nothing  # noqa: B018


def test_marks_for_cudas_profilers_mark_nothing():
    """Megatron makes them whoever looks on, where it overlaps the exchange of tokens between experts."""
    torch.cuda.nvtx.range_push("forward")
    with torch.cuda.nvtx.range("linear"):
        torch.cuda.nvtx.mark("here")
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("step"))
    torch.cuda.cudart().cudaProfilerStart()


def test_tensors_by_the_names_of_their_types():
    """NeMo's datasets and Accelerate's Megatron make counters so."""
    assert torch.cuda.LongTensor([3]).dtype == torch.long
    assert isinstance(torch.ones(1, device="cuda"), torch.cuda.FloatTensor)
    assert not isinstance(torch.ones(1, device="cuda"), torch.cuda.HalfTensor)


def test_every_factory_of_torchs_knows_the_device():
    """torch names them all for ``with torch.device(...)``; it makes nested tensors in Python, of tensors."""
    names = [factory.__name__ for factory in torch.utils._device._device_constructors()]
    missing = [
        name
        for name in names
        if hasattr(torch, name) and not hasattr(getattr(torch, name), "__wrapped__") and name != "from_file"
    ]
    assert missing == []
    assert torch.hann_window(4, device="cuda").device.type == "cpu"


def test_generators_are_generators():
    for generator in (torch.Generator("cuda"), torch.default_generator, torch.cuda.default_generators[0]):
        assert isinstance(generator, torch.Generator)
    assert not isinstance(torch, torch.Generator)


def test_torch_may_ask_whether_something_is_a_device():
    assert not isinstance(0, torch.cuda.device)
    with torch.cuda.device(0), torch.cuda.device_of(torch.ones(1)):
        assert "MiB" in torch.cuda.memory_summary()


def test_a_cuda_graph_says_that_there_is_none():
    with pytest.raises(NotImplementedError, match="CUDAGraph has no CPU implementation"):
        torch.cuda.CUDAGraph()


BUILT_FOR_CUDA = """
import torch
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")  # what torch built for CUDA says, GPU or not
import transformer_engine.pytorch as te
model = te.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(32, 64)).sum().backward()
optimizer.step()
print(torch.accelerator.is_available(), torch.accelerator.current_accelerator())
"""


def test_an_optimizer_steps_where_torch_was_built_for_cuda():
    """Without a GPU too PyPI gives a torch that takes CUDA for its accelerator, and asks its driver in every step."""
    done = subprocess.run([sys.executable, "-c", BUILT_FOR_CUDA], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["False", "None"]


def test_a_default_device_is_kept_but_cuda(request):
    """``torch.set_default_device("meta")`` builds a model that needs no memory."""
    request.addfinalizer(lambda: torch.set_default_device(None))
    torch.set_default_device("meta")
    assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    for cuda in ("cuda", torch.device("cuda", 1), 0):
        torch.set_default_device(cuda)
        assert {torch.nn.Linear(2, 2).weight.device.type, torch.get_default_device().type} == {"cpu"}


def test_factories_are_scripted_and_pickled_as_torchs_own():
    @torch.jit.script
    def twice(x: torch.Tensor):
        return x + torch.ones([2]) + torch.zeros_like(x)

    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]
    for function in (torch.ones, torch.full_like, torch.load):
        assert pickle.loads(pickle.dumps(function)) is function
    assert b"nemo_fp8" not in pickle.dumps(torch.ones)


def test_a_graph_names_the_device_of_its_tensors():
    """What torch.export and torch.onnx trace and run again is Python source, with a device in it."""
    x = torch.randn(3)
    graph = make_fx(lambda x: x + torch.ones(3, device="cuda"))(x)
    assert "device(type='cpu')" in graph.code
    assert torch.equal(graph(x), x + 1)
    exported = torch.export.export(torch.nn.Linear(3, 3), (x,)).run_decompositions()
    assert exported.module()(x).shape == (3,)


def test_who_profiles_a_gpu_profiles_the_cpu(capfd):
    """Lightning's profiler="pytorch" asks for the times of CUDA's kernels wherever there is a GPU."""
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both, profile_memory=True) as profile:
        torch.ones(2, device="cuda")
    with torch.autograd.profiler.profile(use_device="cuda") as older:
        torch.ones(2, device="cuda")
    for found in (profile, older):
        assert "aten::ones" in found.key_averages().table()
    assert "CUDA event" not in capfd.readouterr().err


def test_operators_are_marked_for_nobody():
    """NeMo's callback for CUDA's profiler enters one and leaves another."""
    torch.autograd.profiler.emit_nvtx(record_shapes=True).__enter__()
    assert torch.ones(2).sum() == 2
    torch.autograd.profiler.emit_nvtx().__exit__(None, None, None)


def test_a_history_of_allocations_says_that_there_is_none():
    with pytest.raises(NotImplementedError, match="_record_memory_history has no CPU implementation"):
        torch.cuda.memory._record_memory_history(max_entries=100)


def test_every_name_of_the_tables_is_torchs():
    """A name that an older torch lacks is left out, so a misspelt one would be left out in silence everywhere."""
    told = [(owner, name) for owner, table in _tables() for name in table]
    assert len(told) > 200
    assert [f"{owner}.{name}" for owner, name in told if not hasattr(owner, name)] == []
