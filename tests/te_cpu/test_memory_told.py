"""What ``torch.cuda`` says of the memory in use is what tensors hold."""

import gc
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from support.te_cases import ARCH, CASES

from nemo_fp8.te_cpu import memory

MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def _objects_of_other_tests():
    """Memory in use is counted by a look at every object, and every count here is a difference: set aside what was
    there before, which is most of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nothing_left_over():
    gc.collect()


def _more(since):
    return torch.cuda.memory_allocated() - since


def test_each_storage_counts_once_and_until_the_last_tensor_of_it_is_gone():
    before = torch.cuda.memory_allocated()
    whole = torch.zeros(3, MIB, dtype=torch.uint8, device="cuda")
    part, also = whole[1], torch.nn.Parameter(whole.view(torch.float32))
    assert _more(before) == 3 * MIB == torch.cuda.memory_reserved("cuda:0") - before
    del whole, also
    assert _more(before) == 3 * MIB
    assert part.numel() == MIB
    del part
    assert _more(before) == 0


def test_what_holds_nothing_counts_nothing():
    before = torch.cuda.memory_allocated(device=0)
    held = torch.empty(MIB, device="meta"), te.Linear(512, 512, device="meta")
    assert _more(before) == 0, held


def test_a_quantized_weight_holds_its_codes_and_not_what_they_stand_for():
    before = torch.cuda.memory_allocated()
    with te.quantized_model_init(enabled=True):
        layer = te.Linear(1024, 2048, bias=False, params_dtype=torch.bfloat16)
    assert 2 * MIB <= _more(before) < 5 * MIB  # two copies of one byte, on Hopper, where BF16 would be 4 MiB
    assert layer.weight.nbytes >= 2 * MIB


def test_gradients_count_that_nobody_has_asked_for():
    layer = torch.nn.Linear(512, 1024, bias=False)
    x = torch.ones(1, 512)
    before = torch.cuda.memory_allocated()
    layer(x).sum().backward()
    assert _more(before) == 2 * MIB


def test_gradients_count_of_what_is_no_leaf():
    leaf = torch.ones(256, 1024, requires_grad=True)
    before = torch.cuda.memory_allocated()
    inner = leaf * 2
    inner.retain_grad()
    inner.sum().backward()
    assert _more(before) == 3 * MIB  # inner, and the gradients of both


def test_a_sparse_tensor_holds_its_indices_and_values():
    before = torch.cuda.memory_allocated()
    sparse = torch.sparse_coo_tensor(torch.arange(1000)[None], torch.ones(1000), (10**9,), device="cuda")
    assert _more(before) == 1000 * (8 + 4)
    rows = torch.sparse_csr_tensor(torch.zeros(11, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.ones(0))
    assert _more(before) == 1000 * (8 + 4) + 11 * 8
    assert sparse.is_sparse
    assert rows.layout == torch.sparse_csr


def test_what_torch_func_wraps_around_a_tensor_holds_nothing():
    def told(row):
        return row.sum() + 0 * torch.cuda.memory_allocated()

    x = torch.ones(4, 8)
    assert torch.vmap(told)(x).tolist() == [8.0] * 4
    assert torch.equal(torch.func.grad(told)(x[0]), torch.ones(8))


def test_statistics_have_the_names_that_callbacks_read():
    """NeMo's, and Megatron's inference engine."""
    stats = torch.cuda.memory_stats()
    assert stats["num_alloc_retries"] == stats["inactive_split_bytes.all.peak"] == 0
    held = torch.ones(3), torch.ones(4)
    assert torch.cuda.memory_stats()["allocation.all.current"] - stats["allocation.all.current"] == len(held)


@pytest.mark.parametrize("when", ["in between", "at the end"])
def test_the_most_is_that_since_the_reset(when):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = torch.ones(8 * MIB, device="cuda")
    if when == "in between":
        torch.cuda.memory_allocated()
        del held
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(32 * MIB, rel=0.05)
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    assert stats["allocated_bytes.all.peak"] == torch.cuda.max_memory_reserved()
    held = None
    torch.cuda.reset_peak_memory_stats("cuda")
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(0, abs=MIB)


SAVED = """
import ctypes, sys
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te

heap = ctypes.CDLL(None)
heap.malloc.argtypes, heap.malloc.restype, heap.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
pieces = [heap.malloc(2048 + 16 * (i % 64)) for i in range(2 * int(sys.argv[1]))]
for piece in pieces[::2]:
    heap.free(piece)

def step(checkpoint):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[te.LayerNormMLP(128, 512, checkpoint=checkpoint) for _ in range(6)])
    x = torch.randn(1024, 128)
    model(x).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x).sum().backward()
    assert torch.cuda.memory_allocated() - before < 2**20
    return torch.cuda.max_memory_allocated() - before

print(step(False) - step(True))
"""


@pytest.mark.parametrize("pieces", [0, 20_000], ids=["whole heap", "heap in pieces"])
def test_recomputing_activations_saves_what_they_hold(pieces):
    """The peak lies within a step, where nobody asks: calls of the extension see it, however long a look takes."""
    done = subprocess.run([sys.executable, "-c", SAVED, str(pieces)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    activation = 4 * 1024 * 512  # before and after the GELU, in each layer but the one at work
    assert int(done.stdout) == pytest.approx(5 * 2 * activation, rel=0.3)


def test_views_whose_base_has_changed_are_counted():
    """FSDP of torch's first kind holds parameters as such, and torch refuses every question about their history."""
    before = torch.cuda.memory_allocated()
    base = torch.zeros(MIB, requires_grad=True, device="cuda").clone()
    first, _ = torch.split(base, MIB // 2)
    base.add_(1)
    with pytest.raises(RuntimeError, match="is a view"):
        first.is_leaf  # noqa: B018
    assert _more(before) >= 4 * MIB


@pytest.mark.parametrize(
    "send",
    [
        lambda t: torch.empty(t.shape, device="cpu", pin_memory=True).copy_(t),
        lambda t: torch.empty_like(t, device="cpu", pin_memory=True).copy_(t),
        lambda t: t.cpu(),
        lambda t: t.to("cpu", non_blocking=True),
        lambda t: t.clone().pin_memory(),
    ],
)
def test_what_goes_to_the_host_leaves_the_gpu(send):
    """TE's offloading, both of its ways, Megatron's optimizer on the host, and a data loader that pins."""
    before = torch.cuda.memory_allocated()
    x = torch.arange(MIB // 4, dtype=torch.float32, device="cuda")
    kept, where = send(x), x.device
    assert _more(before) == MIB
    del x
    assert _more(before) == 0
    for bring in (lambda t: t.cuda(), lambda t: t.to("cuda", non_blocking=True), lambda t: t.to(where)):
        back = bring(kept[:])
        assert _more(before) == MIB
        assert torch.equal(back, torch.arange(MIB // 4, dtype=torch.float32))
        del back
    del kept
    assert _more(before) == 0


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if ARCH in case.archs])
@pytest.mark.parametrize("fetch", [lambda w: w.cpu(), lambda w: w.to("cpu"), lambda w: w.detach().to(device="cpu")])
def test_a_quantized_weight_goes_to_the_host(name, fetch):
    """Its codes, scales and amaxes: none of them is the weight's, and none counts."""
    with te.quantized_model_init(recipe=CASES[name].build()):
        weight = te.Linear(1024, 1024, bias=False, params_dtype=torch.bfloat16).weight
    before = torch.cuda.memory_allocated()
    kept = fetch(weight)
    parts = {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}
    fetched = {name: getattr(kept, name) for name in parts}
    assert _more(before) == 0
    assert type(kept) is type(weight)
    assert all(torch.equal(part, fetched[name]) for name, part in parts.items())
    assert not {part.data_ptr() for part in parts.values()} & {part.data_ptr() for part in fetched.values()}
    with torch.no_grad():
        values = weight.dequantize()
        weight.copy_(torch.full_like(values, 3.0))  # as an optimizer's step: other codes, and other scales
        assert torch.equal(kept.dequantize(), values)
    del values
    back = kept.detach().cuda()
    assert _more(before) == sum(getattr(back, name).nbytes for name in parts) > MIB


def test_memory_that_the_host_has_freed_may_be_a_gpus():
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        torch.ones(2).cpu()
    held = [torch.ones(2) for _ in range(300)]
    assert _more(before) == 8 * len(held)
    assert len(memory.HOST.storages) < 200


def test_te_offloads_activations_to_the_host():
    """And not parameters, nor what is small; the gradients are those without."""
    layer, x = te.LayerNormMLP(512, 512), torch.randn(2048, 512, device="cuda", requires_grad=True)

    def step(offloads):
        context, sync = te.get_cpu_offload_context(enabled=offloads, num_layers=1, model_layers=2)
        layer.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        out = x.clone()
        for run in (layer, torch.clone):  # the second gives TE the occasion to let go of what the first has kept
            with context:
                out = run(out)
            out = sync(out)
        held = _more(before)
        out.sum().backward()
        return held, [p.grad for p in layer.parameters()]

    step(False)
    (held, gradients), (less, same) = step(False), step(True)
    output = 4 * MIB  # 2048 x 512 in FP32
    assert held - less >= 3 * output, (held, less)
    for without, with_ in zip(gradients, same, strict=True):
        assert torch.equal(without, with_)


@pytest.mark.parametrize(
    "name", [name for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce") if hasattr(dist, name)]
)
def test_what_a_collective_still_holds_is_nobodys(name, tmp_path):
    """gloo's threads let go of a tensor some time after its work is done, which a work that is kept stands for; a test
    of TE's for leaks in FSDP2 failed whenever they were late with a layer's gradients."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = torch.cuda.memory_allocated()
        x = torch.ones(MIB, dtype=torch.uint8, device="cuda")
        given = [x] if name == "all_reduce" else [torch.empty_like(x), x]
        # An operation that goes to gloo though there is one rank.
        work = getattr(dist, name)(*given, dist.ReduceOp.BAND, async_op=True)
        assert work.wait()
        assert _more(before) == MIB * len(given)
        del x, given
        assert _more(before) == 0
    finally:
        dist.destroy_process_group()
