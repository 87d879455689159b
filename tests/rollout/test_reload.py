"""A push as a worker sees it, in this process: one model, pieces of tensors from one buffer that is used again and
again."""

import gc
import platform
import random
import resource
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.rollout import kept_memory
from support.rollout.engines import MX
from support.rollout.held import differing, fresh, held, held_by
from support.rollout.in_process import Remote, Worker, build
from support.rollout.models import K_PROJ, NORM, weights_of
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import quantize
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import Manifest
from nemo_fp8.rollout.refit.memory import Opened, Shared
from nemo_fp8.rollout.refit.wire import capacity, cut
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.layouts import ROWS, Tally
from nemo_fp8.rollout.refit.worker.plan import Plan
from nemo_fp8.rollout.refit.worker.routes import Route, Target
from nemo_fp8.rollout.refit.worker.session import Session

BLOCK = Operand("e4m3", (128, 128), "fp32")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def qwen3(checkpoint):
    """A model that tests push into, and the tensors of another checkpoint."""
    return build(checkpoint("qwen3", 0)), weights_of(checkpoint("qwen3", 1))


def push(model, tensors, size=2**18, order=list):
    """Write these tensors as a worker does, through one buffer that is filled with NaNs after each use; the session."""
    from vllm.config import set_current_vllm_config

    manifest = Manifest.of(tensors)
    with set_current_vllm_config(model.vllm_config):
        session = Session(Plan(model, manifest), "test", verify=True)
        assert not session.plan.problems, session.plan.problems
        shared = Shared(capacity(manifest, size, session.plan.whole))
        try:
            for pieces, _ in cut(order(tensors.items()), manifest, lambda: shared.tensor, session.plan.whole):
                session.write(Opened(shared.handle), [list(piece) for piece in pieces])
                shared.tensor.fill_(0xFF)
            session.finish()
        finally:
            shared.close()
    return session


def shuffled(pairs):
    return random.Random(0).sample([*pairs], len([*pairs]))


@pytest.mark.parametrize(
    ("kind", "contract"),
    [
        ("llama_tied", {"first_layers": 1}),
        ("qwen3_moe", {"last_layers": 1}),
        ("qwen3_odd", {}),
        ("qwen3", MX),
        ("qwen3", {"rollout_block": "tensor"}),
        ("llama_tied", {"unquantized": "rows", "first_layers": 1}),
        ("qwen3_moe", {"unquantized": "rows", "rollout": "compute"}),
    ],
    ids=str,
)
def test_a_push_leaves_every_bit_as_a_fresh_load_does(checkpoint, model, kind, contract):
    """In any order. Whatever waits for the rest of its layer is a copy: the buffer that it came in is used again at
    once."""
    pushed = build(checkpoint(kind, 1), **contract)
    wanted = [held(model(kind, **contract)), held(pushed)]
    assert differing(*wanted)
    for seed, order in ((0, list), (1, shuffled), (0, shuffled)):
        session = push(pushed, weights_of(checkpoint(kind, seed)), order=order)
        assert differing(held(pushed), wanted[seed]) == []
        assert session.tally.held == 0
        assert all(facts.verified is not False for facts in session.tally.facts.values())


def test_what_onednn_packs_lies_by_columns(checkpoint, here, monkeypatch):
    """So it is packed in a fifth of the time, to the same bits: the test above compares what it answers."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import LinearBase

    if not here.packs_bf16:
        pytest.skip("A CPU without AVX-512 multiplies by the weight itself.")
    packs, seen = utils.dispatch_cpu_unquantized_gemm, []

    def packing(layer, **how):
        if isinstance(layer, LinearBase):
            rows_only = utils.check_cpu_sgl_kernel(*layer.weight.shape, layer.weight.dtype)
            seen.append((layer.weight.stride(1) == 1) == rows_only)
        packs(layer, **how)

    model = build(checkpoint("llama_tied", 0), first_layers=1)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", packing)
    push(model, weights_of(checkpoint("llama_tied", 1)))
    assert seen == [True] * 4  # one layer's qkv, o, gate and up, down


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="Another C library decides by itself what it keeps.")
def test_a_weight_is_packed_where_the_old_copy_was(here):
    """And not in fresh pages: a push touches fewer than half as many for the first time as the largest weight has, and
    each is a fault, which Linux counts. (glibc by itself has 12,000 of them, and seldom as few.)"""
    if not here.packs_bf16:
        pytest.skip("A CPU without AVX-512 multiplies by the weight itself.")
    fresh, kept = kept_memory.faults()
    assert kept < 0.5 * kept_memory.LARGEST / resource.getpagesize(), (fresh, kept)


def test_what_waits_beside_the_model_is_counted(checkpoint, qwen3):
    """Layer by layer it is one layer; in the worst order it is all of them."""
    model, tensors = build(checkpoint("qwen3", 0), rollout_block="tensor"), qwen3[1]
    by_layer = push(model, tensors).tally.most_held
    assert by_layer == 1024 * 256 * 2  # gate and up of one layer
    scattered = push(
        model, tensors, order=lambda pairs: sorted(pairs, key=lambda pair: "up_proj" in pair[0])
    ).tally.most_held
    assert scattered >= 4 * by_layer
    assert push(qwen3[0], tensors).tally.most_held == 0


def test_blocks_that_lie_in_two_tensors_wait_for_both():
    """Rows 64 to 191 of a worker's matrix are one tensor, so its first block is of both; and again the buffer is used
    again."""
    draws = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, 256, generator=draws).bfloat16() for rows in (64, 128, 64)]
    target = Target("layer", "weight", (256, 256), torch.bfloat16)
    routes = [
        Route(
            i,
            tuple(part.shape),
            ((0, len(part)), (0, 256)),
            (tuple(part.shape), (256, 1), 0),
            target,
            ((at, at + len(part)), (0, 256)),
        )
        for i, (at, part) in enumerate(zip((0, 64, 192), parts, strict=True))
    ]
    codes, scales, tally = torch.empty(256, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 2), Tally()
    sink, buffer = Blocks(tally, codes, scales, ROWS, BLOCK, routes, True), torch.empty(128, 256).bfloat16()
    for route, part in zip(routes, parts, strict=True):
        sink.write(route, 0, buffer[: len(part)].copy_(part))
        buffer.fill_(float("nan"))
    sink.finish()
    expected = quantize(torch.cat(parts), BLOCK)
    assert torch.equal(codes.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scale_inv)
    assert (tally.held, tally.most_held) == (0, 256 * 256 * 2)
    assert [facts.aligned for _, facts in sorted(tally.facts.items())] == [False] * 3


def test_values_that_are_no_numbers_are_told_wherever_they_lie(qwen3):
    model, tensors = qwen3[0], {name: tensor.clone() for name, tensor in qwen3[1].items()}
    coded = quantize(tensors[K_PROJ], BLOCK)
    coded.data.view(torch.uint8)[5, 7:9] = 0x7F
    tensors |= {K_PROJ: coded.data, f"{K_PROJ}_scale_inv": coded.scale_inv}
    tensors[NORM][3] = float("-inf")
    tensors["model.embed_tokens.weight"][1, 2] = float("nan")
    session = push(model, tensors)
    names = {
        session.plan.manifest[i].name: facts.nonfinite for i, facts in session.tally.facts.items() if facts.nonfinite
    }
    assert names == {K_PROJ: 2, NORM: 1, "model.embed_tokens.weight": 1}


def test_scales_of_a_cache_come_in_pairs(qwen3):
    model, tensors = qwen3
    (name, *_) = [name for name, layer in model.named_modules() if type(layer).__name__ == "Attention"]
    plan = Plan(model, Manifest.of(tensors | {f"{name}.k_scale": torch.tensor(0.1)}))
    assert [p.what for p in plan.problems if "without" in p.what] == [f"{name}.k_scale comes without {name}.v_scale."]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (None, "no list of pieces"),
        ([["0", 0, 1, 0]], "no four whole numbers"),
        ([[0, 0, 1]], "no four whole numbers"),
        ([[0, 0, True, 0]], "no four whole numbers"),
        ([[10**6, 0, 1, 0]], "The manifest has 47 tensors"),
        ([[-1, 0, 1, 0]], "The manifest has 47 tensors"),
        ([["k", 128, 128, 0]], "of which 0 have come"),
        ([["k", 0, 0, 0]], "of which 0 have come"),
        ([["k", 0, 256, 0]], "of which 0 have come"),
        ([["k", 0, 64, 0]], "cannot be cut there"),
        ([["k", 0, 128, 2**18]], "does not lie inside"),
        ([["k", 0, 128, -64]], "does not lie inside"),
        ([["k", 0, 128, 0]] * 2, "of which 128 have come"),
    ],
)
def test_no_piece_is_believed(qwen3, pieces, words):
    """What a sender says of its pieces is held against the manifest and the memory before a byte is read."""
    model, tensors = qwen3
    manifest = Manifest.of(tensors)
    session, shared = Session(Plan(model, manifest), "test", verify=False), Shared(2**18)
    numbers = {"k": manifest.places[K_PROJ]}
    named = pieces if pieces is None else [[numbers.get(piece[0], piece[0]), *piece[1:]] for piece in pieces]
    try:
        with pytest.raises(PrecisionError, match=words):
            session.write(Opened(shared.handle), named)
        assert session.written == (words == "of which 128 have come")
    finally:
        shared.close()


@pytest.mark.parametrize(
    ("field", "words"), [("data_parallel_size", "one engine"), ("_api_process_count", "--api-server-count 1")]
)
def test_a_push_that_would_reach_a_part_of_the_engine_only_is_refused(checkpoint, monkeypatch, field, words):
    model = build(checkpoint("qwen3", 0))
    before = held(model)
    monkeypatch.setattr(model.vllm_config.parallel_config, field, 2)
    with pytest.raises(PrecisionError, match=words):
        Refit(Worker(model)).push(weights_of(checkpoint("qwen3", 1)))
    assert differing(held(model), before) == []


def test_a_worker_takes_a_push_in_this_process(checkpoint):
    """What the tests above say of refusals, they say of a worker that takes pushes."""
    model = build(checkpoint("qwen3", 0))
    Refit(Worker(model), chunk=2**20).push(weights_of(checkpoint("qwen3", 1)), verify=True).require()
    assert differing(held(model), held(build(checkpoint("qwen3", 1)))) == []


class Waits(TorchDispatchMode):
    """Counts what a process would wait for a GPU for, by its place: a number, or a copy, that leaves it."""

    NAMES = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"})

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        leaves = name == "aten::_to_copy" and torch.device((kwargs or {}).get("device") or "meta").type == "cpu"
        if leaves or name in self.NAMES:
            self.places[f"{name} in {who_asks()}"] += 1
        return func(*args, **(kwargs or {}))


class Fetches(torch.overrides.TorchFunctionMode):
    """The same as it is written in Python: ``x.cpu()`` of a tensor that lies on a CPU does nothing, and is no
    operation."""

    NAMES = frozenset({"cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "equal", "nonzero"})

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := getattr(func, "__name__", "")) in self.NAMES:
            self.places[f"{name} in {who_asks()}"] += 1
        return func(*args, **(kwargs or {}))


def who_asks():
    """Return the innermost line outside of torch and of this file that is being run now."""
    frames = reversed(traceback.extract_stack())
    return next(f"{f.filename}:{f.lineno}" for f in frames if "/torch/" not in f.filename and f.filename != __file__)


@pytest.fixture
def nothing_is_collected():
    """vLLM's handle of a packed weight reads a number from a tensor when it is freed. Those of models that earlier
    tests left in cycles would be freed, and counted, whenever the collector runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("kind", "contract"), [("qwen3", {}), ("qwen3_moe", {"last_layers": 1})], ids=["qwen3", "qwen3_moe"]
)
@pytest.mark.usefixtures("nothing_is_collected")
def test_a_push_does_not_wait_for_its_device_piece_by_piece(checkpoint, kind, contract):
    """Pieces are counted where they lie. What is told of them is fetched at the end, and is the same however a tensor
    was cut."""
    from vllm.config import set_current_vllm_config

    model, tensors = build(checkpoint(kind, 0), **contract), weights_of(checkpoint(kind, 1))
    manifest, told, waits = Manifest.of(tensors), [], []
    coded = quantize(tensors[K_PROJ], BLOCK)
    tensors |= {K_PROJ: coded.data, f"{K_PROJ}_scale_inv": coded.scale_inv} if kind == "qwen3" else {}
    manifest = Manifest.of(tensors)
    for size in (2**30, 2**18):
        with set_current_vllm_config(model.vllm_config):
            session, written, pieces = Session(Plan(model, manifest), "test", verify=False), Counter(), 0
            session.table = None  # as on a device, like the next lines
            session._pack_what_waits_for = lambda i: None
            for sink in session.sinks.values():
                sink.tells_at_once = False
            shared = Shared(capacity(manifest, size, session.plan.whole))
            for some, _ in cut(tensors.items(), manifest, lambda shared=shared: shared.tensor, session.plan.whole):
                with Waits() as dispatched, Fetches() as asked:
                    session.write(Opened(shared.handle), [list(piece) for piece in some])
                written += dispatched.places + asked.places
                pieces += len(some)
            with Waits() as dispatched, Fetches() as asked:
                session.finish()
            shared.close()
        told.append({i: facts.to_plain() for i, facts in session.tally.facts.items()})
        waits.append((written, dispatched.places + asked.places, pieces))
    assert waits[0][2] < waits[1][2]
    assert waits[0][:2] == waits[1][:2]
    if not session.staged:  # a layer that its kernel packs as a whole may ask, once
        assert not waits[0][0]
    sums = ("signal", "noise")
    for one, other in zip(*(rows.values() for rows in told), strict=True):
        assert not any(torch.is_tensor(value) for value in one.values())
        assert [one.pop(name) for name in sums] == pytest.approx([other.pop(name) for name in sums], rel=1e-12)
        assert one == other


def test_what_is_counted_is_what_is_there(checkpoint, qwen3):
    """Against sums over the whole tensors, in FP64."""
    model, tensors = qwen3
    session = push(model, tensors)
    for i, facts in session.tally.facts.items():
        tensor = tensors[session.plan.manifest[i].name]
        assert facts.largest == float(tensor.abs().max())
        if facts.kind == "fp8":
            decoded = quantize(tensor, BLOCK).dequantize().double()
            assert facts.signal == pytest.approx(float(tensor.double().square().sum()), rel=1e-6)
            assert facts.noise == pytest.approx(float((tensor.double() - decoded).square().sum()), rel=1e-6)


# What weights no model has -> how they come to be so, and the tensors that are named.
NO_MODEL = {
    "all zero": (
        lambda t: {name: torch.zeros_like(x) for name, x in t.items()},
        "all zero: lm_head.weight and 29 more",
    ),
    "a zero projection": (lambda t: t | {K_PROJ: torch.zeros_like(t[K_PROJ])}, f"all zero: {K_PROJ}."),
    "zero codes": (lambda t: t | _coded(torch.zeros_like(t[K_PROJ])), f"all zero: {K_PROJ}."),
    "3e38 in a projection": (lambda t: t | {K_PROJ: _with(t[K_PROJ], 3e38)}, f"1.8e+19 and more: {K_PROJ}."),
    "-3e38 in embeddings": (
        lambda t: t | {EMBEDDINGS: _with(t[EMBEDDINGS], -3e38)},
        f"1.8e+19 and more: {EMBEDDINGS}.",
    ),
    "3e38 in a norm": (lambda t: t | {NORM: _with(t[NORM], 3e38)}, f"1.8e+19 and more: {NORM}."),
    "3e38 in codes": (lambda t: t | _coded(_with(t[K_PROJ], 3e38)), f"1.8e+19 and more: {K_PROJ}."),
}


def _with(tensor, value):
    changed = tensor.clone()
    changed.view(-1)[7] = value
    return changed


def _coded(tensor):
    coded = quantize(tensor, BLOCK)
    return {K_PROJ: coded.data, f"{K_PROJ}_scale_inv": coded.scale_inv}


@pytest.mark.parametrize(("change", "words"), NO_MODEL.values(), ids=NO_MODEL)
def test_weights_that_no_model_has_are_no_good_push(qwen3, change, words):
    receipt = Refit(Worker(qwen3[0])).push(change(qwen3[1]))
    assert not receipt.ok
    assert [words in problem.what for problem in receipt.problems] == [True]


@pytest.mark.parametrize(
    "change", [lambda x: torch.zeros_like(x), lambda x: torch.full_like(x, 1e18)], ids=["zeros", "1e18"]
)
def test_norms_may_be_zero_and_large_values_finite(qwen3, change):
    """Some families keep w of a norm that multiplies with 1 + w."""
    norms = {name: change(tensor) for name, tensor in qwen3[1].items() if "norm" in name}
    assert Refit(Worker(qwen3[0])).push(qwen3[1] | norms).ok


def test_tensors_that_turn_bad_on_the_way_leave_a_refusing_engine(checkpoint):
    """Tensors of an iterator are looked at when they come; the next push restores the engine. A mapping's are looked at
    before."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    before = held(worker.model_runner.get_model())
    bad = tensors | {K_PROJ: tensors[K_PROJ].to("meta"), NORM: tensors[NORM].to_sparse()}
    with pytest.raises(PrecisionError) as refused:
        Refit(worker).push(bad, manifest=tensors)
    assert {p.what for p in refused.value.problems} == {f"{K_PROJ} is on the meta device.", f"{NORM} is sparse_coo."}
    assert differing(held(worker.model_runner.get_model()), before) == []
    with pytest.raises(PrecisionError, match=f"{NORM} is sparse_coo"):
        Refit(worker, chunk=2**20).push(iter(bad.items()), manifest=tensors)
    assert "half-way" in worker.refuses
    Refit(worker).push(tensors).require()
    assert worker.refuses == ""
    assert differing(held(worker.model_runner.get_model()), held(build(checkpoint("qwen3", 1)))) == []


def test_a_push_that_brings_nothing_has_changed_nothing_and_says_so(qwen3):
    worker = Worker(qwen3[0])
    with pytest.raises(PrecisionError, match="did not come") as refused:
        Refit(worker).push(iter(()), manifest=qwen3[1])
    assert refused.value.problems[0].remedy == "Push again; nothing was written."
    with pytest.raises(PrecisionError, match="did not come") as refused:
        Refit(worker).push(iter([*qwen3[1].items()][:5]), manifest=qwen3[1])
    assert "old and new weights" in refused.value.problems[0].remedy
    Refit(worker).push(qwen3[1]).require()


def test_names_are_said_as_they_are(qwen3):
    tensors = qwen3[1]
    session = Session(Plan(qwen3[0], Manifest.of(tensors)), "test", verify=False)
    shared = Shared(2**18)
    with pytest.raises(PrecisionError, match=f"why:    {K_PROJ} has 128 rows, of which 0 have come"):
        session.write(Opened(shared.handle), [[session.plan.manifest.places[K_PROJ], 1, 1, 0]])
    shared.close()


def _mapped():
    return Path("/proc/self/maps").read_text().count("memfd:nemo_fp8-refit")


def test_a_worker_maps_what_a_sender_holds_and_no_longer(qwen3):
    """Memory stays mapped between pushes; the kernel has it back when its sender lets go of it, in a push or after."""
    worker, tensors = Worker(qwen3[0]), qwen3[1]
    manifest = Manifest.of(tensors)
    worker.call("begin", {"push": "dead", "tensors": manifest.to_plain()})
    gc.collect()  # a push of this process that failed leaves views of its own buffers in a traceback
    before = _mapped()
    shared = [Shared(manifest.bytes) for _ in range(2)]
    for one in shared * 2:
        worker.call("write", {"push": "dead", "memory": one.handle, "pieces": []})
    shared[0].close()
    _wait_until(lambda: _mapped() == before + 2)
    assert "mixed" in worker.call("abandon", {"push": "dead"})[0]
    time.sleep(0.2)
    assert _mapped() == before + 2  # the sender's, and the worker's
    shared[1].close()
    _wait_until(lambda: _mapped() == before)


def _wait_until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


class Forgetful(Worker):
    """A worker whose engine answers so when it is asked to forget; what else it is told is in ``log``."""

    def __init__(self, model, answer):
        super().__init__(model)
        self.answer, self.log = answer, []

    def hold(self, running):
        self.log.append(f"hold {running}")

    def free(self):
        self.log.append("free")

    def forget(self):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def test_a_cache_that_was_not_reset_is_no_good_push(qwen3):
    receipt = Refit(Forgetful(qwen3[0], False)).push(qwen3[1])
    assert not receipt.ok
    assert "NOT reset" in str(receipt)
    with pytest.raises(PrecisionError, match="prefix cache was not reset"):
        receipt.require()
    assert Refit(Forgetful(qwen3[0], True)).push(qwen3[1]).ok


@pytest.mark.parametrize("error", [RuntimeError("busy"), KeyboardInterrupt()], ids=type)
def test_an_engine_that_cannot_forget_is_not_held_and_says_so(qwen3, error):
    """It would answer with keys and values of the old weights."""
    worker = Forgetful(qwen3[0], error)
    with pytest.raises(type(error)):
        Refit(worker).push(qwen3[1])
    assert worker.log == ["hold wait", "free"]
    assert f"the prefix cache was not dropped ({type(error).__name__})" in worker.refuses


def test_a_mixed_engine_lets_no_request_end(qwen3):
    """What ``running="wait"`` waits for would be computed with weights of two pushes."""
    worker = Forgetful(qwen3[0], True)
    with pytest.raises(PrecisionError, match="did not come"):
        Refit(worker, running="keep").push(iter([*qwen3[1].items()][:5]), manifest=qwen3[1])
    Refit(worker).push(qwen3[1]).require()
    Refit(worker).push(qwen3[1]).require()
    assert worker.log == ["hold keep", "hold keep", "free", "hold wait", "free"]


@pytest.mark.parametrize("urls", [(), ("http://node7:8000", "http://node7:8000/")], ids=["engine", "url"])
def test_two_pushes_at_once_come_one_after_the_other(qwen3, monkeypatch, urls):
    """The first would resume an engine that the second has paused, and requests be computed while weights change."""
    worker, tensors = Forgetful(qwen3[0], True), qwen3[1]
    monkeypatch.setattr("nemo_fp8.rollout.refit.push.control_of", lambda engine, token: worker)
    refits = [Refit(engine) for engine in urls or (worker, worker)]
    begun, asked = threading.Event(), threading.Event()

    def slowly():
        for pair in tensors.items():
            yield pair
            begun.set()
            asked.wait(60)

    def second():
        begun.wait(60)
        threading.Timer(1.0, asked.set).start()
        return refits[1].push(tensors)

    with ThreadPoolExecutor(2) as pool:
        pushes = [pool.submit(refits[0].push, slowly(), manifest=tensors), pool.submit(second)]
        one, other = (push.result().require() for push in pushes)
    assert one.fingerprint == other.fingerprint
    assert worker.log == ["hold wait", "free"] * 2


@pytest.mark.parametrize("shape", [(528, 256), (512, 128)])
def test_a_head_that_nothing_was_compared_with_is_not_passed_over(checkpoint, shape):
    """The engine has one weight for head and embeddings. A head of another shape can be neither of them."""
    worker = Worker(build(checkpoint("llama_tied", 0)))
    tensors = weights_of(checkpoint("llama_tied", 1))
    Refit(worker).push(tensors | {HEAD: tensors[EMBEDDINGS]}).require()
    for head, words in (
        (tensors[EMBEDDINGS] + 1, "is not"),
        (torch.zeros(shape).bfloat16(), "nothing here could be it"),
    ):
        with pytest.raises(PrecisionError, match=f"{HEAD} .*{words}"):
            Refit(worker).push(tensors | {HEAD: head})


def test_buffers_are_filled_again_by_the_next_push(checkpoint):
    """The operating system takes long to find and clear the pages of new ones. Larger tensors take larger ones."""
    for made, transport in ((Worker, "memory"), (Remote, "http")):
        worker, tensors = made(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
        refit, seen = Refit(worker, chunk=2**20, transport=transport), []
        for delta in (False, False, True, True):
            receipt = refit.push(tensors, delta=delta).require()
            memory = refit._buffers
            seen.append({memory.handle["name"]} if transport == "memory" else {one.data_ptr() for one in memory})
        assert seen == [seen[0]] * 4
        assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []
        refit.chunk = 2**22
        assert refit.push(tensors).require().chunk_bytes > receipt.chunk_bytes


def test_bytes_go_along_to_another_host(checkpoint):
    worker, tensors = Remote(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    receipt = Refit(worker, chunk=2**20).push(tensors, verify=True).require()
    assert worker.carried >= receipt.bytes == sum(t.nbytes for t in tensors.values())
    assert receipt.fingerprint == Refit(Worker(build(checkpoint("qwen3", 0)))).push(tensors).fingerprint


def test_a_worker_knows_of_a_push_that_its_sender_never_ended(checkpoint):
    """vLLM's update may be ended by the trainer that comes next: the one before is gone all the same."""
    from nemo_fp8.rollout.refit.worker.transfer_engine import NemoFp8WeightTransferEngine

    worker = Worker(build(checkpoint("qwen3", 0)))
    engine = NemoFp8WeightTransferEngine.__new__(NemoFp8WeightTransferEngine)
    engine.pushes = worker
    tensors = Manifest.of(weights_of(checkpoint("qwen3", 1))).to_plain()

    def begin(push):
        return worker.call("begin", {"push": push, "tensors": tensors})[0]["interrupted"]

    assert not begin("a")
    assert not begin("b")  # nor had the first one paused the engine
    assert worker.call("hold", {"push": "b"})[0].get("problems") is None
    assert begin("c")
    engine.finish_weight_update()
    assert begin("d")
    worker.call("abandon", {"push": "d"})
    assert not begin("e")
    assert "is not open" in worker.call("hold", {"push": "d"})[0]["problems"][0][0]
