"""What makes a push fast, and that it changes nothing: memory that is not copied, one call for a whole push, one pass
over the bytes, stacks of experts that are written whole, and no waiting for a device."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.rollout.held import differing, held
from support.rollout.in_process import Worker, build
from support.rollout.models import K_PROJ, stacked, weights_of

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels, quantize
from nemo_fp8.numerics.kernels import build as build_of_kernels
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import Manifest, SharedWeights, fingerprint, wire
from nemo_fp8.rollout.refit.channel import Channel, Ended, Line
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, _sums
from nemo_fp8.rollout.refit.memory import Opened
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.layouts import AMX, ROWS, Facts, Tally
from nemo_fp8.rollout.refit.worker.plan import Plan
from nemo_fp8.rollout.refit.worker.routes import Route, Target
from nemo_fp8.rollout.refit.worker.session import Session

BLOCK = Operand("e4m3", (128, 128), "fp32")


@pytest.fixture(scope="module")
def qwen3(checkpoint):
    return build(checkpoint("qwen3", 0)), weights_of(checkpoint("qwen3", 1))


# ---------------------------------------------------------------------- memory that is not copied


def test_shared_weights_are_quantized_from_where_they_lie(checkpoint, monkeypatch):
    model, tensors = build(checkpoint("qwen3", 0)), weights_of(checkpoint("qwen3", 1))
    expected = Refit(Worker(build(checkpoint("qwen3", 0)))).push(tensors)
    weights = SharedWeights(tensors)

    def no_copy(*_):
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(wire, "_copy", no_copy)
    receipt = Refit(Worker(model), chunk=2**20).push(weights, verify=True).require()
    assert receipt.fingerprint == expected.fingerprint
    assert (receipt.chunks, receipt.bytes) == (0, expected.bytes)
    assert differing(held(model), held(build(checkpoint("qwen3", 1)))) == []
    with pytest.raises(AssertionError, match="was copied"):
        Refit(Worker(model)).push(tensors)


def test_what_lies_elsewhere_is_copied(qwen3):
    """A tensor that was given other memory, a transpose, and memory that torch shares, which is not sealed."""
    model, tensors = qwen3
    weights = SharedWeights(tensors)
    assert weights.shared.place_of(weights[K_PROJ]) is not None
    assert weights.shared.place_of(weights[K_PROJ].t()) is None
    assert weights.shared.place_of(tensors[K_PROJ].clone().share_memory_()) is None
    weights[K_PROJ].data = torch.flip(tensors[K_PROJ], (0,))
    receipt = Refit(Worker(model)).push(weights, verify=True).require()
    told = {t.name: t.fingerprint for t in receipt.tensors}
    codes = quantize(torch.flip(tensors[K_PROJ], (0,)), BLOCK)
    assert told[K_PROJ] == fingerprint(codes.data, codes.scale_inv)
    assert receipt.chunks == 1


def test_weights_that_change_in_shared_memory_are_the_next_push(qwen3):
    model, tensors = qwen3
    weights = SharedWeights(tensors)
    before = Refit(Worker(model)).push(weights).fingerprint
    weights[K_PROJ].mul_(2)
    assert Refit(Worker(model)).push(weights).fingerprint != before
    weights[K_PROJ].div_(2)
    assert Refit(Worker(model)).push(weights).fingerprint == before


def test_shared_weights_leave_no_descriptor_behind(qwen3):
    """A tensor that is kept keeps its memory, and the memory's own descriptor."""

    def opened():
        return sum("memfd" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd))

    before = opened()
    weights = SharedWeights(qwen3[1])
    kept = weights[K_PROJ]
    handle = weights.shared.handle
    del weights
    with pytest.raises(PrecisionError, match="refused"):
        Opened(handle)
    assert torch.equal(kept, qwen3[1][K_PROJ])
    del kept
    assert opened() == before


def _is_open(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


# ---------------------------------------------------------------------- buffers that stay


def test_buffers_of_a_push_are_those_of_the_next(qwen3, checkpoint):
    """All kinds of pushes fill the same memory, after one that died too; a push that needs another size has its own."""
    model, tensors = build(checkpoint("qwen3", 0)), qwen3[1]

    class Noting(Worker):
        memory, dies = (), False

        def call(self, method, message):
            if method == "write":  # asked of memory that no earlier push had
                self.memory = (*self.memory, message["memory"])
            if method == "finish" and self.dies:
                raise RuntimeError("it died")
            return super().call(method, message)

    worker = Noting(model)
    refit = Refit(worker, chunk=2**20)
    first = refit.push(tensors, delta=True).require()
    worker.dies = True
    with pytest.raises(RuntimeError, match="it died"):
        refit.push(tensors)
    worker.dies = False
    second = refit.push(tensors, delta=True).require()
    changed = tensors | {K_PROJ: tensors[K_PROJ].flip(0)}
    third = refit.push(changed, delta=True, verify=True).require()
    assert not third.delta.instead
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert len(worker.memory) == 1
    refit.chunk = 2**21
    refit.push(tensors).require()
    assert len(worker.memory) == 2
    assert differing(held(model), held(build(checkpoint("qwen3", 1)))) == []


def test_workers_that_were_started_again_map_what_the_last_ones_had_mapped(qwen3, checkpoint, monkeypatch):
    """They are not asked beforehand. One that cannot says so, and has written nothing."""
    refit = Refit(Worker(qwen3[0]))
    first = refit.push(qwen3[1]).require()
    fresh, other = build(checkpoint("qwen3", 0)), build(checkpoint("qwen3", 0))
    before = {name: values.clone() for name, values in held(other).items()}
    refit.control = Worker(fresh)
    assert refit.push(qwen3[1]).require().fingerprint == first.fingerprint
    assert differing(held(fresh), held(build(checkpoint("qwen3", 1)))) == []

    refit.control = worker = Worker(other)
    monkeypatch.setattr("nemo_fp8.rollout.refit.memory.fcntl.fcntl", lambda *_: 0)
    with pytest.raises(PrecisionError, match="It is not sealed"):
        refit.push(qwen3[1])
    assert differing(held(other), before) == []
    assert not getattr(worker, "refuses", "")


# ---------------------------------------------------------------------- one call for a whole push


def test_a_push_makes_as_few_calls_however_many_buffers_it_fills(qwen3):
    class Counting(Worker):
        calls = ()

        def call(self, method, message):
            self.calls = (*self.calls, method)
            return super().call(method, message)

    worker = Counting(qwen3[0])
    receipt = Refit(worker, chunk=2**20).push(qwen3[1]).require()
    assert receipt.chunks > 20
    assert worker.calls == ("begin", "write", "stream", "finish")


def test_what_a_worker_finds_in_mid_stream_is_raised_with_its_words(qwen3, monkeypatch):
    def wrong(*arguments):
        for n, (pieces, used) in enumerate(cut(*arguments)):
            yield ([(i, row + 128, rows, at) for i, row, rows, at in pieces] if n == 3 else pieces), used

    cut, worker = wire.cut, Worker(qwen3[0])
    monkeypatch.setattr("nemo_fp8.rollout.refit.push.cut", wrong)
    with pytest.raises(PrecisionError, match="rows, of which"):
        Refit(worker, chunk=2**20).push(qwen3[1])
    assert "half-way" in worker.refuses
    monkeypatch.undo()
    assert "half-way" in Refit(worker).push(qwen3[1]).require().after_failure


SENDER = """
import sys, time
from nemo_fp8.rollout.refit.channel import Channel
channel = Channel(lambda: False)
print(channel.name, flush=True)
channel.connect(1)
channel.send({"n": 1})
channel.wait()
print("answered", flush=True)
time.sleep(60)
"""


def test_a_killed_sender_ends_the_call_of_a_worker():
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    name = sender.stdout.readline().strip()
    line, came = Line(name), []
    threading.Timer(1.0, sender.send_signal, [signal.SIGKILL]).start()
    start = time.monotonic()
    for message in line.messages():
        came.append(message)
    assert came == [{"n": 1}]
    assert time.monotonic() - start < 30
    line.close()
    sender.wait()
    assert name not in Path("/proc/net/unix").read_text()
    with pytest.raises(PrecisionError, match="cannot be reached"):
        Line(name)


def test_a_worker_that_is_gone_ends_the_sender_s_waiting():
    channel = Channel(lambda: False)
    line = Line(channel.name)
    channel.connect(1)
    channel.send({"n": 1})
    line.close()
    with pytest.raises(Ended):
        channel.wait()
    channel.close()
    alone = Channel(lambda: True)
    with pytest.raises(Ended):
        alone.connect(1)
    alone.close()


@pytest.mark.parametrize("name", [None, 7, "", "/tmp/socket", "other-1", "nemo_fp8-refit-" + "1" * 100])
def test_only_sockets_of_a_push_are_reached(name):
    with pytest.raises(PrecisionError, match="is refused"):
        Line(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_socket_of_another_user_is_refused():
    channel = Channel(lambda: True)
    code = (
        "import os, sys; from nemo_fp8.rollout.refit.channel import Line; os.setuid(65534)\n"
        "try: Line(sys.argv[1]); print('reached')\nexcept Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, channel.name], capture_output=True, text=True, check=False)
    assert "belongs to another user" in done.stdout, done.stderr
    with pytest.raises(Ended):  # who knocked is none of this user's workers
        channel.connect(1)
    channel.close()


@pytest.mark.parametrize("text", [b"[1]", b"{", b"x" * 70_000, b"[" * 50_000])
def test_no_message_is_believed(text):
    channel = Channel(lambda: False)
    line = Line(channel.name)
    channel.connect(1)
    channel._send(text)
    with pytest.raises((PrecisionError, ValueError, RecursionError)):  # each becomes an answer of the worker
        next(line.messages())
    line.fail()
    with pytest.raises(Ended):
        channel.wait()
    channel.close()
    line.close()


def test_a_silent_sender_is_given_up_where_a_door_waits():
    channel = Channel(lambda: False)
    line = Line(channel.name, silence=0.2)
    channel.connect(1)
    with pytest.raises(PrecisionError, match="is silent"):
        next(line.messages())
    channel.close()
    line.close()


# ---------------------------------------------------------------------- one pass over the bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(300, 48), (7, 1), (1, 5), (3, 129), (640, 3), (1000, 2048)], ids=str)
def test_sums_of_the_kernel_are_those_of_torch(dtype, shape):
    values = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    wide = torch.zeros(shape[0], shape[1] + 5, dtype=dtype)
    for into in (None, torch.zeros_like(values), wide[:, 2 : 2 + shape[1]]):
        found = kernels.sums(values, into)
        assert found is not None, "there is a C compiler where tests run"
        assert all(torch.equal(a, b) for a, b in zip(found, _sums(values), strict=True))
        if into is not None:
            assert torch.equal(into.contiguous().view(torch.uint8), values.view(torch.uint8))
    assert not wide[:, :2].float().any()
    assert not wide[:, 2 + shape[1] :].float().any()


def test_large_copies_that_pass_the_caches_are_whole():
    values = torch.randn(4096, 1024).bfloat16()
    values[7, 5], values[9, 1] = float("-inf"), float("nan")
    into = torch.zeros_like(values)
    largest = Fingerprint().copy(values, into)
    assert torch.equal(into.view(torch.int16), values.view(torch.int16))
    assert largest[7] == float("inf")
    assert largest[9].isnan()
    assert torch.equal(largest[:7], values[:7].abs().amax(1).float())


# ---------------------------------------------------------------------- stacks of experts


STACK = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def moe(checkpoint):
    return build(checkpoint("qwen3_moe", 0), last_layers=1), weights_of(checkpoint("qwen3_moe", 1))


@pytest.mark.parametrize("chunk", [2**20, 2**28])
def test_a_stack_of_experts_is_as_good_as_its_experts(moe, checkpoint, chunk):
    """Bit for bit, cut between experts or not; some layers are in FP8, and one is kept in BF16."""
    model, tensors = moe
    Refit(Worker(model)).push(tensors, verify=True).require()
    expected = held(model)
    Refit(Worker(model)).push(weights_of(checkpoint("qwen3_moe", 0)))
    assert differing(held(model), expected)
    Refit(Worker(model), chunk=chunk).push(stacked(tensors), verify=True).require()
    assert differing(held(model), expected) == []


def test_every_expert_of_a_stack_is_told_of(moe):
    """What a receipt says of an expert that comes by itself, it says of the one in the stack."""
    model, tensors = moe
    alone = {t.name: t for t in Refit(Worker(model)).push(tensors).tensors}
    receipt = Refit(Worker(model)).push(stacked(tensors)).require()
    told = {t.name: t for t in receipt.tensors}[STACK]
    one_by_one = [alone[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(8)]
    for number in ("largest", "saturated", "underflow", "nonfinite", "bad_scales"):
        assert told.experts[number] == [getattr(one, number) for one in one_by_one]
    assert told.experts["snr_db"] == pytest.approx([one.snr_db for one in one_by_one])
    assert told.snr_db == min(told.experts["snr_db"])
    assert receipt.snr_db[1].endswith("]")
    json.dumps(receipt.to_dict())


BROKEN = {
    "no number": (float("nan"), "Infinite values or NaNs"),
    "infinite": (float("inf"), "Infinite values or NaNs"),
    "too large": (3e38, "1.8e+19 and more"),
    "zero": (None, "all zero"),
}


@pytest.mark.parametrize("layer", [1, 3], ids=["FP8", "BF16"])
@pytest.mark.parametrize(("value", "words"), BROKEN.values(), ids=BROKEN)
def test_a_bad_expert_is_named(moe, layer, value, words):
    model, tensors = moe
    name = STACK.replace("1", str(layer))
    broken = stacked(tensors)
    if value is None:
        broken[name][5] = 0
    else:
        broken[name][5, 7, 9] = value
    problems = [p.what for p in Refit(Worker(model)).push(broken).problems]
    assert [what for what in problems if words in what and f"{name}[5]." in what], problems
    assert Refit(Worker(model)).push(stacked(tensors)).ok


def test_an_expert_and_its_stack_are_not_both_taken(moe):
    model, tensors = moe
    twice = stacked(tensors) | {
        n: t for n, t in tensors.items() if n.endswith("layers.1.mlp.experts.3.down_proj.weight")
    }
    with pytest.raises(PrecisionError, match="are one tensor of the engine"):
        Refit(Worker(model)).push(twice)


def test_no_work_is_done_expert_by_expert(moe, monkeypatch):
    """As many casts as stacks, however many experts are in them, where stacks take their sinks, as those that come in
    pieces do. (What comes whole is one call: test_whole_tensors.)"""
    model, tensors = moe
    casts = []
    monkeypatch.setattr(Session, "tabled", False)

    def counting(sink, values, *arguments):
        casts.append(tuple(values.shape))
        return cast(sink, values, *arguments)

    cast = Blocks._cast
    monkeypatch.setattr(Blocks, "_cast", counting)
    weights = stacked(tensors)
    Refit(Worker(model)).push(weights)
    in_fp8 = [n for n in weights if n.endswith("_proj") and "layers.3" not in n]
    of_stacks = [shape for shape in casts if shape[0] > 1024]
    assert len(of_stacks) == len(in_fp8) == 6
    plan = Plan(model, Manifest.of(weights))
    assert {len(routes) for routes in plan.routes.by_entry.values()} == {1}
    casts.clear()
    Refit(Worker(model)).push(tensors, verify=True)
    assert len(casts) > 3 * 8 * 3


@pytest.mark.skipif(build_of_kernels.library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("layout", [ROWS, AMX], ids=["rows", "amx"])
@pytest.mark.parametrize(("verify", "casts"), [(False, 1), (True, 3)])
def test_a_matrix_is_one_cast_unless_its_codes_are_read_again(layout, verify, casts, monkeypatch):
    """Between two calls of the kernel all threads but one wait. Of more than two strips, the last with half a block."""
    operand, x = Operand("e4m3", (128, 128), "fp32"), torch.randn(8256, 1024).bfloat16()
    target = Target("layer", "weight", tuple(x.shape), torch.bfloat16)
    box = ((0, 8256), (0, 1024))
    route = Route(0, tuple(x.shape), box, (tuple(x.shape), (), 0), target, box)
    codes, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(65, 8)
    tally = Tally()
    sink, found = Blocks(tally, codes, scales, layout, operand, [route], verify), []
    cast = sink._cast
    monkeypatch.setattr(sink, "_cast", lambda *arguments: found.append(cast(*arguments)))
    monkeypatch.setattr(sink, "layout", replace(layout, store=layout.store if verify else None))
    sink.write(route, 0, x)
    expected = quantize(x, operand)
    assert len(found) == casts
    assert torch.equal(layout.load(codes, 0, len(x)).view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scale_inv)
    sink.finish()
    (told,) = tally.facts[0].fingerprints.values()
    assert told == sink.read(route) == fingerprint(expected.data, expected.scale_inv)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("layout", [ROWS, AMX], ids=["rows", "amx"])
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
def test_a_part_of_every_expert_is_written_as_one(scale, layout, verify, monkeypatch):
    """As a worker of two has it: gate and up of its rows, side by side in each expert."""
    operand, stack = Operand("e4m3", (128, 128), scale), torch.randn(8, 512, 256).bfloat16()
    target = Target("experts", "w13_weight", (8, 256, 256), torch.bfloat16)
    routes = [
        Route(0, (8, 512, 256), ((0, 8), (first, first + 128), (0, 256)), ((8, 128, 256), (), 0), target, to)
        for first, to in ((128, ((0, 8), (0, 128), (0, 256))), (384, ((0, 8), (128, 256), (0, 256))))
    ]
    codes, scales, tally = torch.empty(8, 256, 256, dtype=torch.float8_e4m3fn), torch.empty(8, 2, 2), Tally()
    tally.facts[0].experts = 8
    sink, casts = Blocks(tally, codes, scales, layout, operand, routes, verify), []
    cast = sink._cast
    monkeypatch.setattr(sink, "_cast", lambda *arguments: casts.append(cast(*arguments)))
    for first, last in ((0, 3), (3, 8)):
        for route in routes:
            rows = slice(*route.source[1])
            sink.write(route, first, stack[first:last, rows])
    sink.finish()
    if verify:
        sink.verify()
    tally.settle()
    mine = torch.cat([stack[:, slice(*route.source[1])] for route in routes], 1)
    expected = quantize(mine.reshape(-1, 256), operand)
    assert len(casts) == 4
    assert [sink.read(route) for route in routes] == [*tally.facts[0].fingerprints.values()]
    assert torch.equal(layout.load(codes.flatten(0, 1), 0, 2048).view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales.flatten(0, 1), expected.scale_inv)
    assert tally.facts[0].verified is (True if verify else None)
    assert tally.facts[0].largest == mine.flatten(1).abs().amax(1).tolist()


@pytest.mark.skipif(build_of_kernels.library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("layout", [ROWS, AMX], ids=["rows", "amx"])
@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("rows", [256, 128])
def test_codes_that_come_are_read_once_and_arranged_by_one_call(layout, experts, rows, monkeypatch):
    """Of a matrix and of a stack whose rows come whole; a part of every expert takes a call for each. What is told of
    NaNs and of the largest is that of each expert."""
    one_piece = rows == 256 or not experts
    whole = torch.randn(max(1, experts), 256, 192).to(torch.float8_e4m3fn)
    whole.view(torch.uint8)[0, 3, 5], whole.view(torch.uint8)[-1, 7, 1] = 0xFF, 0x7F
    whole.view(torch.uint8)[-1, 9, 1] = 0x7F
    stack = whole if experts else whole[0]
    box = tuple((0, n) for n in stack.shape)
    target = Target("layer", "weight", tuple(stack.shape), torch.bfloat16)
    shape = (*stack.shape[:-2], rows, 192)
    route = Route(0, shape, tuple((0, n) for n in shape), (shape, (), 0), target, (*box[:-2], (0, rows), box[-1]))
    codes, scales, tally = torch.zeros_like(whole), torch.full((len(whole), 2, 2), 0.5), Tally()
    tally.facts[0].experts = experts
    sink, calls = Blocks(tally, codes, scales, layout, Operand("e4m3", (128, 128), "fp32"), [route], False), []
    for name in ("sums", "turn"):
        one = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, _one=one, _n=name, **more: (calls.append(_n), _one(*a, **more))[1]
        )
    sink.write(route, 0, stack[..., :rows, :])
    assert calls == ["sums"] * (1 if one_piece else experts)
    sink.finish()
    assert tally.facts[0].fingerprints.popitem()[1] == sink.read(route)
    tally.settle()
    held = torch.stack([layout.load(matrix, 0, rows) for matrix in codes])
    assert torch.equal(held.view(torch.uint8), whole[:, :rows].contiguous().view(torch.uint8))
    nan = [1, *(0 for _ in whole[2:]), 2] if experts else [3]
    largest = (whole[:, :rows].float().abs().amax((1, 2)) / 2).tolist()
    told = tally.facts[0]
    assert told.nonfinite == (nan if experts else nan[0])
    assert told.largest == pytest.approx(largest if experts else largest[0], nan_ok=True)


@pytest.mark.skipif(build_of_kernels.library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("layout", [ROWS, AMX], ids=["rows", "amx"])
def test_a_stack_of_experts_is_read_by_one_call(layout, monkeypatch):
    operand, stack = Operand("e4m3", (128, 128), "fp32"), torch.randn(8, 256, 256).bfloat16()
    target, box = Target("experts", "w2_weight", tuple(stack.shape), torch.bfloat16), ((0, 8), (0, 256), (0, 256))
    route = Route(0, tuple(stack.shape), box, (tuple(stack.shape), (), 0), target, box)
    codes, scales, tally = torch.empty(stack.shape, dtype=torch.float8_e4m3fn), torch.empty(8, 2, 2), Tally()
    tally.facts[0].experts = 8
    sink, calls = Blocks(tally, codes, scales, layout, operand, [route], False), []
    sink.write(route, 0, stack)
    sink.finish()
    for name in ("sums", "sums_of_amx"):
        one = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _one=one, **more: (calls.append(a[0].shape), _one(*a, **more))[1])
    (told,) = tally.facts[0].fingerprints.values()
    assert sink.read(route) == told
    assert [*map(tuple, calls)] == [(2048, 256), (16, 2)]  # codes, and then their scales
    codes.view(torch.uint8)[5, 77, 8] ^= 1
    assert sink.read(route) != told


@pytest.mark.long
def test_128_experts_in_48_layers_cost_at_most_twice_as_much_as_a_dense_model(tmp_path):
    """By the byte, in processor time of one thread, which other processes disturb less than the clock on the wall, in
    turns."""
    from support.rollout import models

    from benchmarks import refit as benchmark

    engines, took = {}, {"dense": [], "experts": []}
    for name, kind, shape in (("dense", "qwen3", benchmark.AS_MANY), ("experts", "qwen3_moe", benchmark.EXPERTS)):
        path = models.write(tmp_path / name, kind, 0, **shape)
        engines[name] = Refit(Worker(build(path, {"load_format": "dummy"}))), SharedWeights(stacked(weights_of(path)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(10):
            for name, (refit, weights) in engines.items():
                start = time.process_time()
                receipt = refit.push(weights)
                took[name].append((time.process_time() - start) / receipt.bytes)
    finally:
        torch.set_num_threads(threads)
    took = {name: min(times[1:]) for name, times in took.items()}
    assert took["experts"] < 2 * took["dense"], took


def test_a_run_of_the_benchmark_is_one_object_of_numbers():
    """What ``benchmarks/refit.py --json`` prints, of the run whose record lies in docs."""
    from benchmarks import refit as benchmark

    record = json.loads(benchmark.PAGE.with_suffix(".json").read_text())
    told = json.loads(json.dumps(benchmark.in_short(record)))
    assert {"fp8_push_s", "delta_push_s", "bf16_push_s", "vllm_reload_fp8_s", "engine_start_s", "copy_s"} <= set(told)
    assert all(number > 0 for number in told.values())
    assert told["full_bytes"] >= 10 * told["delta_bytes"]


@pytest.mark.long
def test_the_benchmark_prints_one_object():
    """And nothing else, whatever vLLM and its workers say."""
    command = [sys.executable, str(ROOT / "benchmarks/refit.py"), "--json", "--rounds", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1500)
    told = json.loads(ran.stdout)
    asked = "fp8_push_s delta_push_s bf16_push_s vllm_reload_fp8_s engine_start_s copy_s full_bytes delta_bytes"
    assert {*asked.split()} <= told.keys()
    assert all(number > 0 for number in told.values())


# ---------------------------------------------------------------------- no waiting for a device


def test_no_piece_waits_for_its_device(checkpoint, monkeypatch):
    """A tensor on the meta device has no values: whatever asks for one raises, where a GPU's work would be waited
    for."""
    from vllm.config import set_current_vllm_config

    monkeypatch.setattr(kernels, "check_out", lambda *_: None)  # it compares addresses, which are all 0 there
    model, tensors = build(checkpoint("qwen3", 0)), weights_of(checkpoint("qwen3", 1))
    coded = quantize(tensors[K_PROJ], BLOCK)
    tensors |= {K_PROJ: coded.data, f"{K_PROJ}_scale_inv": coded.scale_inv}
    manifest = Manifest.of(tensors)
    with set_current_vllm_config(model.vllm_config):
        session = Session(Plan(model, manifest), "test", verify=False)
        for sink in {*session.sinks.values()}:
            for name in ("codes", "scales", "live"):
                if hasattr(sink, name):
                    setattr(sink, name, getattr(sink, name).to("meta"))
        for i, entry in enumerate(manifest):
            for row in range(0, entry.rows, entry.step):
                session.write_rows(i, row, tensors[entry.name][row : row + entry.step].to("meta"))
    assert all(rows == entry.rows for rows, entry in zip(session.rows, manifest, strict=True))


def test_counts_of_a_tensor_on_a_device_are_not_asked_for():
    """Nor when a layer is complete; that the test sees what waits, its last lines show."""
    facts, values = Facts(), torch.zeros(256, 128, device="meta")
    facts.see(values.abs().amax(1))
    facts.count_nonfinite(values)
    facts.count_scales(torch.ones(2, 1, device="meta"), "pow2")
    facts.count_nan_codes(values.to(torch.float8_e4m3fn))
    with pytest.raises(RuntimeError, match="meta"):
        bool(values.isfinite().all())
