"""Tensors that come whole are written by a table, in one call for a message: to the bits and facts of their sinks."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.rollout.held import differing, held
from support.rollout.in_process import Worker, build
from support.rollout.models import stacked, weights_of

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import quantize
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import Manifest, SharedWeights, fingerprint
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.layouts import AMX, ROWS, Tally
from nemo_fp8.rollout.refit.worker.plan import Plan
from nemo_fp8.rollout.refit.worker.routes import Route, Target
from nemo_fp8.rollout.refit.worker.session import Session
from nemo_fp8.rollout.refit.worker.sinks import InPlace
from nemo_fp8.rollout.refit.worker.whole import Table

BLOCK = Operand("e4m3", (128, 128), "fp32")
NORM, Q_PROJ = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def moe(checkpoint):
    return build(checkpoint("qwen3_moe", 0), last_layers=1), weights_of(checkpoint("qwen3_moe", 1))


def facts_of(receipt):
    return {t.name: t for t in receipt.tensors}


@pytest.mark.parametrize("large", [1 << 12, 1 << 21], ids=["large", "small"])
@pytest.mark.parametrize("shared", [False, True], ids=["buffers", "shared"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "stacks"])
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
def test_bits_and_facts_are_those_of_the_sinks(checkpoint, scale, kind, shared, large, monkeypatch):
    """Whether one thread writes a tensor, or all do; a stack's facts are those of each of its experts."""
    is_stacked, kind = kind == "stacks", kind.replace("stacks", "qwen3_moe")
    tensors, written = weights_of(checkpoint(kind, 1)), []
    tensors[NORM][3], tensors[Q_PROJ][5, 7] = float("nan"), float("inf")
    tensors = stacked(tensors) if is_stacked else tensors
    tensors = SharedWeights(tensors) if shared else tensors
    monkeypatch.setattr("nemo_fp8.numerics.kernels.several.BYTES_FOR_THREADS", large)
    by_table, by_sinks = (build(checkpoint(kind, 0), last_layers=1, weight_scale=scale) for _ in range(2))
    write = Table.write
    monkeypatch.setattr(Table, "write", lambda table, places: (written.append(len(places)), write(table, places)))
    found = Refit(Worker(by_table)).push(tensors)
    assert sum(written) > len(tensors) / 2
    monkeypatch.setattr("nemo_fp8.rollout.refit.worker.whole._held", lambda sink: ())
    expected = Refit(Worker(by_sinks)).push(tensors)
    assert found.fingerprint == expected.fingerprint
    assert [*map(repr, found.tensors)] == [*map(repr, expected.tensors)]  # a NaN is no other's equal
    assert any(t.experts for t in found.tensors) == is_stacked
    assert facts_of(found)[NORM].nonfinite == facts_of(found)[Q_PROJ].nonfinite == 1
    assert [p.what for p in found.problems] == [p.what for p in expected.problems]
    assert differing(held(by_table), held(by_sinks)) == []


def test_what_comes_whole_takes_no_sink(moe, monkeypatch):
    """A message of experts that come one by one is a call, however many they are, and so is one of stacks."""
    from nemo_fp8.numerics.kernels import cpu, several

    model, tensors = moe
    calls, run = Counter(), several._Several._run
    monkeypatch.setattr(several._Several, "_run", lambda *a: (calls.update([a[0]._function]), run(*a)))
    refit, weights = Refit(Worker(model)), SharedWeights(tensors)
    refit.push(weights)
    calls.clear()
    cast = cpu.quantize_summed
    monkeypatch.setattr(cpu, "quantize_summed", lambda *a: (calls.update(["alone"]), cast(*a))[1])
    refit.push(weights).require()
    assert calls == {"nemo_fp8_quantize_several": 1, "nemo_fp8_sums_several": 2}  # copies, and scales in the end
    calls.clear()
    refit.push(SharedWeights(stacked(tensors))).require()
    assert calls == {"nemo_fp8_quantize_several": 1, "nemo_fp8_sums_several": 2}


def test_the_table_is_kept_until_a_parameter_moves(moe, monkeypatch):
    model, tensors = moe
    made, init = [], Table.__init__
    monkeypatch.setattr(Table, "__init__", lambda *a: (made.append(1), init(*a))[1])
    refit = Refit(Worker(model))
    first = refit.push(tensors).require()
    refit.push(tensors).require()
    assert len(made) == 1
    layer = model.get_submodule("model.layers.1.input_layernorm")
    layer.weight.data, left = torch.zeros_like(layer.weight.data), layer.weight.data
    left.fill_(7)
    assert refit.push(tensors).require().fingerprint == first.fingerprint
    assert len(made) == 2
    assert torch.equal(layer.weight.data, tensors[NORM])
    assert bool((left == 7).all())


def test_what_a_message_brings_a_part_of_takes_its_sink(checkpoint):
    """Cut into pieces of a block of rows, most tensors still come whole, and the receipt is the same."""
    tensors = weights_of(checkpoint("qwen3", 1))
    model, other = build(checkpoint("qwen3", 0)), build(checkpoint("qwen3", 0))
    whole, cut = Refit(Worker(model)).push(tensors), Refit(Worker(other), chunk=2**20).push(tensors)
    assert cut.chunks > 20
    assert whole.fingerprint == cut.fingerprint
    assert differing(held(model), held(other)) == []


@pytest.mark.parametrize("layout", [ROWS, AMX], ids=["rows", "amx"])
def test_a_worker_of_several_writes_its_part(layout):
    """Rows 128 to 256 of one tensor, columns 128 to 256 of another, and the second half of a vector."""
    draws = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(256, 256, generator=draws).bfloat16() for n in ("rows", "columns")}
    tensors["vector"] = torch.randn(300, generator=draws).bfloat16()
    manifest, parts, sinks, tally = Manifest.of(tensors), {}, {}, Tally()
    boxes = {"rows": ((128, 256), (0, 256)), "columns": ((0, 256), (128, 256)), "vector": ((150, 300),)}
    for i, (name, source) in enumerate(boxes.items()):
        shape = tuple(b - a for a, b in source)
        target, to = Target(name, "weight", shape, torch.bfloat16), tuple((0, n) for n in shape)
        view = (shape, tensors[name].stride(), 0)
        route = Route(i, tuple(tensors[name].shape), source, view, target, to)
        if name == "vector":
            sinks[target] = InPlace(tally, torch.zeros(shape).bfloat16(), (), manifest)
        else:
            codes, scales = torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty([n // 128 for n in shape])
            sinks[target] = Blocks(tally, codes, scales, layout, BLOCK, [route], False)
        parts[i] = [route]
    table = Table(SimpleNamespace(routes=SimpleNamespace(by_entry=parts), manifest=manifest, stacks={}), sinks)
    assert table.entries == {0, 1, 2}
    table.write([(i, tensor.data_ptr()) for i, tensor in enumerate(tensors.values())])
    table.tell([0, 1, 2], tally)
    for i, (sink, name) in enumerate(zip(sinks.values(), boxes, strict=True)):
        mine = tensors[name][tuple(slice(*one) for one in boxes[name])]
        if name == "vector":
            assert torch.equal(sink.live, mine)
            expected = fingerprint(mine)
        else:
            good = quantize(mine, BLOCK)
            codes = layout.load(sink.codes[0], 0, len(mine))
            assert torch.equal(codes.view(torch.uint8), good.data.view(torch.uint8))
            expected = fingerprint(good.data, good.scale_inv)
        assert [*tally.facts[i].fingerprints.values()] == [expected]


@pytest.mark.parametrize("mine", [(0, 4), (2, 4)], ids=["all experts", "some experts"])
def test_a_worker_of_some_experts_takes_their_sink(mine):
    """Numbers are told of every expert of a stack, and a sink knows which ones came."""
    stack = {"experts": torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()}
    source, shape = (mine, (0, 128), (0, 256)), (mine[1] - mine[0], 128, 256)
    target, tally = Target("experts", "w2_weight", shape, torch.bfloat16), Tally()
    route = Route(0, (4, 128, 256), source, (shape, (128 * 256, 256, 1), 0), target, tuple((0, n) for n in shape))
    codes, scales = torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(shape[0], 1, 2)
    sinks = {target: Blocks(tally, codes, scales, ROWS, BLOCK, [route], False)}
    routes, manifest = SimpleNamespace(by_entry={0: [route]}), Manifest.of(stack)
    table = Table(SimpleNamespace(routes=routes, manifest=manifest, stacks={0: 4}), sinks)
    assert table.entries == ({0} if shape[0] == 4 else set())


def test_vectors_of_many_elements_are_fingerprinted_as_anywhere():
    long = {"norm": torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    target, tally, live = Target("norm", "weight", (5000,), torch.bfloat16), Tally(), torch.zeros(5000).bfloat16()
    route = Route(0, (5000,), ((0, 5000),), ((5000,), (1,), 0), target, ((0, 5000),))
    manifest = Manifest.of(long)
    sinks = {target: InPlace(tally, live, (), manifest)}
    table = Table(SimpleNamespace(routes=SimpleNamespace(by_entry={0: [route]}), manifest=manifest, stacks={}), sinks)
    table.write([(0, long["norm"].data_ptr())])
    table.tell([0], tally)
    assert [*tally.facts[0].fingerprints.values()] == [fingerprint(long["norm"])]


def test_a_push_that_verifies_takes_every_sink(moe):
    model, tensors = moe
    plan = Plan(model, Manifest.of(tensors))
    assert Session(plan, "test", verify=True).table is None
    assert Session(plan, "test", verify=False).table.entries
