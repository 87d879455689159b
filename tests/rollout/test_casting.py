"""Tensors that a trainer casts on their way into a buffer: the engine holds the same bits, the receipt tells the same,
half the bytes come, and whatever cannot come as codes comes as values."""

from dataclasses import replace

import pytest
import torch
from rollout.far_cases import told
from support.rollout.engines import MX, fp8
from support.rollout.held import differing, held
from support.rollout.in_process import Remote, Worker, build
from support.rollout.models import stacked, weights_of
from support.rollout.servers import Served

from nemo_fp8 import Precision
from nemo_fp8.contract import Operand
from nemo_fp8.numerics import quantize
from nemo_fp8.numerics.kernels import build as build_of_kernels
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import Manifest, casting
from nemo_fp8.rollout.refit.casting import Cast, Casts
from nemo_fp8.rollout.refit.manifest import Entry
from nemo_fp8.rollout.refit.memory import Opened, Shared
from nemo_fp8.rollout.refit.wire import SharedMemory, cut
from nemo_fp8.rollout.refit.worker.blocks import Blocks

K_PROJ, NORM = "model.layers.2.self_attn.k_proj.weight", "model.norm.weight"
STACK = "model.layers.1.mlp.experts.down_proj"
BLOCK, MXFP8 = Operand("e4m3", (128, 128), "fp32"), Operand("e4m3", (1, 32), "e8m0")

pytestmark = pytest.mark.skipif(build_of_kernels.library() is None, reason="no C compiler: the engine casts all")


@pytest.fixture
def small(monkeypatch):
    """Tensors of tiny models are cast in the trainer, too."""
    monkeypatch.setattr(casting, "LEAST", 0)


@pytest.fixture
def put(monkeypatch):
    """The names of the tensors that were cast into buffers, piece by piece."""
    names, real = [], Cast.put
    monkeypatch.setattr(
        Cast, "put", lambda cast, *a, **more: (names.append(cast.entry.name), real(cast, *a, **more))[1]
    )
    return names


CASES = [
    ("qwen3", {}, dict),
    ("qwen3", MX, dict),
    ("llama_tied", {"weight_scale": "pow2"}, dict),
    ("qwen3_odd", {}, dict),
    ("qwen3_moe", {"last_layers": 1}, dict),
    ("qwen3_moe", {"last_layers": 1}, stacked),
]
NAMES = ["blocks", "mxfp8", "pow2", "odd", "experts", "stacks"]


@pytest.mark.parametrize("chunk", [2**20, 2**28])
@pytest.mark.parametrize(("kind", "contract", "given"), CASES, ids=NAMES)
def test_bits_and_receipt_are_those_of_a_push_of_values(checkpoint, kind, contract, given, chunk, monkeypatch, put):
    tensors = given(weights_of(checkpoint(kind, 1)))
    monkeypatch.setattr(casting, "LEAST", 1 << 60)
    worker = Worker(build(checkpoint(kind, 0), **contract))
    expected = Refit(worker, chunk=chunk).push(tensors).require()
    bits = held(worker.model_runner.get_model())
    assert put == []
    monkeypatch.setattr(casting, "LEAST", 0)
    other = Worker(build(checkpoint(kind, 0), **contract))
    found = Refit(other, chunk=chunk).push(tensors).require()
    assert put
    assert differing(held(other.model_runner.get_model()), bits) == []
    assert found.fingerprint == expected.fingerprint
    assert told(found) == {t.name: vars(t) for t in expected.tensors}
    assert found.bytes < expected.bytes


def without_their_sinks(monkeypatch):
    def refuse(*_):
        raise AssertionError("codes took their sink")

    monkeypatch.setattr(Blocks, "write_cast", refuse)


@pytest.mark.parametrize(("kind", "contract", "given"), CASES, ids=NAMES)
def test_codes_take_the_ways_of_the_last_push_however_they_are_cut(
    checkpoint, kind, contract, given, small, monkeypatch
):
    """Codes, scales and what is told are those of this push alone, of a worker and a trainer that know all pieces."""
    worker, model = Worker(build(checkpoint(kind, 0), **contract)), build(checkpoint(kind, 0), **contract)
    without_their_sinks(monkeypatch)
    refit = Refit(worker)
    for seed, most in ((1, 2**30), (2, 2**18), (1, 2**18), (2, 2**30)):
        monkeypatch.setattr(SharedMemory, "most", most)
        tensors = given(weights_of(checkpoint(kind, seed)))
        found = refit.push(tensors).require()
        monkeypatch.setattr(casting, "LEAST", 1 << 60)
        expected = Refit(Worker(model)).push(tensors).require()
        monkeypatch.setattr(casting, "LEAST", 0)
        assert differing(held(worker.model_runner.get_model()), held(model)) == []
        assert found.fingerprint == expected.fingerprint
        assert told(found) == {t.name: vars(t) for t in expected.tensors}


def test_codes_go_to_where_a_parameter_has_moved(checkpoint, small, monkeypatch):
    without_their_sinks(monkeypatch)
    model, tensors = build(checkpoint("qwen3", 0)), weights_of(checkpoint("qwen3", 1))
    refit = Refit(Worker(model))
    refit.push(weights_of(checkpoint("qwen3", 2))).require()
    (layer,) = [m for name, m in model.named_modules() if name.endswith("layers.1.mlp.down_proj")]
    old = layer.weight.data
    before = old.view(torch.uint8).clone()
    layer.weight.data = old.clone()
    refit.push(tensors).require()
    assert torch.equal(old.view(torch.uint8), before)
    other = build(checkpoint("qwen3", 0))
    Refit(Worker(other)).push(tensors).require()
    assert differing(held(model), held(other)) == []


def test_a_tensor_that_came_in_part_comes_again_from_its_first_row(checkpoint, small, monkeypatch):
    """The sums of a push that died are not added to."""
    monkeypatch.setattr(SharedMemory, "most", 2**18)
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit, real, rows = Refit(worker), SharedMemory.send, []
    expected = refit.push(tensors).require().fingerprint

    def send(self, pieces, used):
        rows.extend(pieces)
        if any(len(piece) == 5 and piece[2] < tensors[[*tensors][piece[0]]].shape[0] for piece in pieces):
            real(self, pieces, used)
            raise KeyboardInterrupt
        real(self, pieces, used)

    monkeypatch.setattr(SharedMemory, "send", send)
    with pytest.raises(KeyboardInterrupt):
        refit.push(tensors)
    assert rows[-1][1] == 0
    monkeypatch.setattr(SharedMemory, "send", real)
    assert refit.push(tensors).require().fingerprint == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize(("name", "at"), [(K_PROJ, (7, 9)), (STACK, (5, 7, 9))])
def test_bad_values_are_told_as_the_engine_tells_them(checkpoint, name, at, value, monkeypatch, put):
    """No code tells of an infinity; who has seen the values does."""
    kind = "qwen3" if name == K_PROJ else "qwen3_moe"
    worker = Worker(build(checkpoint(kind, 0), last_layers=1))
    tensors = stacked(weights_of(checkpoint(kind, 1)))
    tensors[name][at] = value
    expected = Refit(worker).push(tensors)
    monkeypatch.setattr(casting, "LEAST", 0)
    found = Refit(Worker(worker.model_runner.get_model())).push(tensors)
    assert name in put
    assert [p.what for p in found.problems] == [p.what for p in expected.problems] != []
    assert found.fingerprint == expected.fingerprint


def test_large_tensors_alone_are_cast(checkpoint, put):
    """An engine writes small ones several at once."""
    tensors = weights_of(checkpoint("qwen3", 1, hidden=1024, layers=1, intermediate=1152))
    worker = Worker(build(checkpoint("qwen3", 0, hidden=1024, layers=1, intermediate=1152)))
    receipt = Refit(worker).push(tensors).require()
    large = {name for name, t in tensors.items() if t.nbytes > 2 << 20 and "_proj" in name}
    assert {*put} == large
    assert 0 < len(large) < sum("_proj" in name for name in tensors)
    saved = sum(t.nbytes // 2 for name, t in tensors.items() if name in large)
    scales = sum(4 * -(-t.shape[0] // 128) * -(-t.shape[1] // 128) for name, t in tensors.items() if name in large)
    whole = sum(t.nbytes for t in tensors.values())
    assert whole - saved + scales <= receipt.bytes <= whole - saved + scales + 64 * len(tensors)


def test_half_the_bytes_go_to_another_host(checkpoint, small, put):
    worker, tensors = Remote(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    receipt = Refit(worker, chunk=2**20).push(tensors).require()
    assert put
    assert worker.carried == receipt.bytes < 0.8 * sum(t.nbytes for t in tensors.values())
    assert receipt.fingerprint == Refit(Worker(build(checkpoint("qwen3", 0)))).push(tensors).fingerprint


@pytest.mark.parametrize("why", ["verified", "no kernel", "a worker needs values", "an older engine"])
def test_values_go_where_codes_cannot(checkpoint, small, put, monkeypatch, why):
    """To be held against the reference, or to an engine that cannot take codes; slow casts stay with the engine."""

    class Needing(Worker):
        def call(self, method, message):
            answers = super().call(method, message)
            if method == "begin" and why == "a worker needs values":
                numbers = [i for _, some in answers[0]["castable"] for i in some]
                return [*answers, answers[0] | {"castable": [[None, numbers]]}]
            if method == "begin" and why == "an older engine":
                del answers[0]["castable"]
            return answers

    model, tensors = build(checkpoint("qwen3", 0)), weights_of(checkpoint("qwen3", 1))
    if why == "no kernel":
        monkeypatch.setattr(casting.build, "library", lambda: None)
    if why == "a worker needs values":
        monkeypatch.setattr("nemo_fp8.rollout.refit.push.Refit._stream", streams_to_one(Refit._stream))
    Refit(Needing(model)).push(tensors, verify=why == "verified").require()
    assert put == []
    monkeypatch.undo()
    assert differing(held(model), held(build(checkpoint("qwen3", 1)))) == []


def streams_to_one(stream):
    """Stream to the one worker that there is, though two answered."""
    return lambda refit, push, transport, _, *rest: stream(refit, push, transport, 1, *rest)


def test_tensors_that_are_no_plain_values_go_as_they_are(checkpoint, small, put):
    """A view that is negated lazily, one whose rows do not lie in one piece, and codes of the trainer's own."""
    tensors = weights_of(checkpoint("qwen3", 1))
    expected = Refit(Worker(build(checkpoint("qwen3", 0)))).push(tensors).require()
    coded = quantize(tensors[K_PROJ], BLOCK)
    turned = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in tensors.items()}
    lazily = turned["model.layers.1.mlp.up_proj.weight"]
    turned["model.layers.1.mlp.up_proj.weight"] = torch._neg_view(-lazily)
    turned |= {K_PROJ: coded.data, f"{K_PROJ}_scale_inv": coded.scale_inv}
    put.clear()
    receipt = Refit(Worker(build(checkpoint("qwen3", 0)))).push(turned).require()
    assert put
    assert {K_PROJ, "model.layers.1.mlp.up_proj.weight"}.isdisjoint(put)
    assert {t.name: t.fingerprint for t in receipt.tensors}.items() >= {
        t.name: t.fingerprint for t in expected.tensors
    }.items()


def test_parameters_with_gradients_are_cast(checkpoint, small, put):
    tensors = {name: torch.nn.Parameter(t) for name, t in weights_of(checkpoint("qwen3", 1)).items()}
    model = build(checkpoint("qwen3", 0))
    Refit(Worker(model)).push(tensors).require()
    assert put
    assert differing(held(model), held(build(checkpoint("qwen3", 1)))) == []


# ---------------------------------------------------------------------- changes that follow


def test_changes_follow_a_push_of_codes(checkpoint, small, put):
    worker = Worker(build(checkpoint("qwen3", 0)))
    refit, tensors = Refit(worker), weights_of(checkpoint("qwen3", 1))
    first = refit.push(tensors, delta=True).require()
    assert put
    put.clear()
    tensors[K_PROJ][3, 5] += 1
    second = refit.push(tensors, delta=True).require()
    assert (second.delta.instead, second.delta.changed > 0, put) == ("", True, [])
    assert second.fingerprint != first.fingerprint
    assert second.fingerprint == Refit(Worker(build(checkpoint("qwen3", 0)))).push(tensors).fingerprint


def test_a_trainer_that_writes_on_after_a_cast_is_not_believed(checkpoint, small, monkeypatch):
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    real, before, refit = Cast.put, tensors[K_PROJ].clone(), Refit(worker)

    def put_and_step(cast, row, values, *rest, **more):
        real(cast, row, values, *rest, **more)
        if cast.entry.name == K_PROJ and row + len(values) == len(before) and torch.equal(tensors[K_PROJ], before):
            tensors[K_PROJ].mul_(2)

    monkeypatch.setattr(Cast, "put", put_and_step)
    refit.push(tensors, delta=True).require()
    assert torch.equal(tensors[K_PROJ], before * 2)
    receipt = refit.push(tensors, delta=True).require()
    assert [*receipt.delta.whole] == [K_PROJ]
    fresh = build(checkpoint("qwen3", 0))
    Refit(Worker(fresh)).push(tensors).require()
    assert differing(held(worker.model_runner.get_model()), held(fresh)) == []


# ---------------------------------------------------------------------- what comes from outside


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ((NORM, 0, 256, 64, 0), "does not come as codes"),
        ((K_PROJ, 0, 64, 64, 0), "cannot be cut there"),
        ((K_PROJ, 128, 128, 64, 0), "have come"),
        ((K_PROJ, 0, 128, 1 << 40, 0), "does not lie inside"),
        ((K_PROJ, 0, 128, -(1 << 20), 0), "does not lie inside"),
        ((K_PROJ, 0, 128, 65537, 0), "does not lie inside"),
        ((K_PROJ, 0, 128, 64, 1 << 40), "does not lie inside"),
        ((K_PROJ, 0, 128, True, 0), "nor five"),
        ((K_PROJ, 0, 128, 64, 0, 0), "nor five"),
    ],
    ids=str,
)
def test_no_piece_of_codes_is_believed(checkpoint, small, piece, words):
    worker, manifest = Worker(build(checkpoint("qwen3", 0))), Manifest.of(weights_of(checkpoint("qwen3", 1)))
    before = {name: values.clone() for name, values in held(worker.model_runner.get_model()).items()}
    (begun,) = worker.call("begin", {"push": "a", "tensors": manifest.to_plain()})
    assert begun["accepted"]
    name, *numbers = piece
    memory = Shared(1 << 20)
    message = {"push": "a", "memory": memory.handle, "pieces": [[manifest.places[name], *numbers]]}
    (answer,) = worker.call("write", message)
    assert words in str(answer["problems"])
    assert not worker._refit_mixed  # so the engine may go on
    assert differing(held(worker.model_runner.get_model()), before) == []


@pytest.mark.parametrize("method", ["begin", "delta"])
def test_codes_that_were_not_asked_for_are_refused(checkpoint, small, method):
    """In a push that holds casts against the reference, and in one of changes, which keeps a way back."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    manifest, version = Manifest.of(tensors), Refit(worker).push(tensors).push
    begin = {"push": "a", "tensors": manifest.to_plain(), "verify": True, "manifest": manifest.digest, "base": version}
    (begun,) = worker.call(method, begin)
    assert begun["accepted"]
    assert not begun.get("castable")
    memory = Shared(1 << 20)
    pieces = [[manifest.places[K_PROJ], 0, 128, 1 << 16, 0]]
    (answer,) = worker.call("write", {"push": "a", "memory": memory.handle, "pieces": pieces})
    assert "does not come as codes" in str(answer["problems"])


def test_operands_from_workers_must_agree():
    manifest = Manifest([Entry(name, "bfloat16", (256, 256)) for name in "abcd"])
    block, pow2 = ["e4m3", [128, 128], "fp32"], ["e4m3", [128, 128], "pow2"]
    answers = [
        [[block, [0, 1, 2]], [None, [3]]],
        [[block, [0]], [pow2, [1]], [None, [2]]],
        [],
    ]
    casts, values = Casts(manifest, answers), torch.zeros(256, 256).bfloat16()
    assert [casts.of(i, values) is not None for i in range(4)] == [True, False, False, False]
    assert casts.of(0, values).operand == BLOCK
    assert casts.told() == {}


# ---------------------------------------------------------------------- pieces


@pytest.mark.parametrize("operand", [BLOCK, MXFP8], ids=["blocks", "mxfp8"])
@pytest.mark.parametrize("shape", [(300, 200), (1000, 64), (6, 256, 96)], ids=str)
@pytest.mark.parametrize("size", [1 << 16, 1 << 17, 1 << 22])
def test_pieces_are_cut_at_blocks_and_lie_apart(operand, shape, size):
    """Whatever the buffer, they give the codes and scales of the whole tensor."""
    tensor = torch.randn(shape).bfloat16()
    manifest = Manifest([Entry("a", "bfloat16", shape), Entry("b", "bfloat16", (7,))])
    plain = [operand.format, list(operand.block), operand.scale]
    casts, room = Casts(manifest, [[[plain, [0]]]]), torch.zeros(size, dtype=torch.uint8)
    after = torch.randn(7).bfloat16()
    codes, scales, rows = [], [], 0
    buffers = cut([("a", tensor), ("b", after)], manifest, lambda: room.zero_(), casts=casts)
    for pieces, used in buffers:
        assert used <= size
        for i, row, count, *gap, at in pieces:
            if i == 1:
                assert torch.equal(room[at : at + 14].view(torch.bfloat16), after)
                continue
            assert row == rows
            rows += count
            part = quantize(tensor[row : row + count].reshape(-1, shape[-1]), operand)
            codes.append(part.data.view(torch.uint8))
            assert torch.equal(room[at : at + part.data.numel()], codes[-1].reshape(-1))
            raw = part.scale_inv.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(room[at + gap[0] : at + gap[0] + raw.numel()], raw)
            scales.append(part.scale_inv)
    whole = quantize(tensor.reshape(-1, shape[-1]), operand)
    assert rows == shape[0]
    assert torch.equal(torch.cat(codes), whole.data.view(torch.uint8))
    counted = casts.told()[0]
    assert len(counted["signal"]) == (6 if len(shape) == 3 else 1)
    assert sum(counted["signal"]) == pytest.approx(float(tensor.double().square().sum()), rel=1e-5)
    assert max(counted["largest"]) == float(tensor.abs().max())


def test_a_worker_that_holds_a_part_takes_its_rows(checkpoint, small):
    """As under tensor parallelism: rows 128:256 of all that come."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    manifest, name = Manifest.of(tensors), "model.layers.2.mlp.up_proj.weight"
    worker.call("begin", {"push": "a", "tensors": manifest.to_plain()})
    session, i = worker._refit_session, manifest.places[name]
    (route,) = session.plan.routes.by_entry[i]
    sink, rows = session.sinks[route.target], len(tensors[name])
    first = route.to[0][0] + 128
    part = replace(route, source=((128, 256), route.source[1]), to=((first, first + 128), route.to[1]))
    session.plan.routes.by_entry[i] = [part]
    session.arrivals = {}  # they were made of the route that was there
    expected = sink._read(sink.codes[0], 0, sink.matrix[0]).view(torch.uint8).clone()
    coded, memory = quantize(tensors[name], BLOCK), Shared(1 << 20)
    expected[first : first + 128] = coded.data[128:256].view(torch.uint8)
    gap = coded.data.numel()
    both = torch.cat([one.contiguous().view(torch.uint8).view(-1) for one in (coded.data, coded.scale_inv)])
    memory.tensor[: len(both)].copy_(both)
    session.write(Opened(memory.handle), [[i, 0, rows, gap, 0]])
    assert torch.equal(sink._read(sink.codes[0], 0, sink.matrix[0]).view(torch.uint8), expected)
    assert torch.equal(sink.scales[0, first // 128], coded.scale_inv[1])
    assert not torch.equal(sink.scales[0, first // 128 - 1], coded.scale_inv[0])


# ---------------------------------------------------------------------- engines

LARGE = {"hidden": 1024, "layers": 1, "intermediate": 1152}


def test_a_server_holds_what_was_cast_before_it_came(checkpoint, put):
    """Through memory and over HTTP; what it holds is read back, and is what it casts by itself."""
    tensors = [weights_of(checkpoint("qwen3", seed, **LARGE)) for seed in (1, 2)]
    served = Served(checkpoint("qwen3", 0, **LARGE), Precision(rollout="fp8"))
    try:
        for given, transport in zip(tensors, ("memory", "http"), strict=True):
            refit = Refit(served.url, transport=transport)
            receipt = refit.push(given).require()
            assert {*put} == {name for name, t in given.items() if t.nbytes > 2 << 20 and "_proj" in name}
            assert receipt.bytes < 0.8 * sum(t.nbytes for t in given.values())
            put.clear()
            assert refit.push(given, verify=True).require().fingerprint == receipt.fingerprint
            assert put == []
    finally:
        served.stop()


@pytest.mark.long
def test_workers_of_tensor_parallelism_take_their_parts(engine, checkpoint, put):
    """Of matrices that are cut between blocks, by rows and by columns."""
    shape = {"hidden": 1024, "layers": 2, "intermediate": 1280}
    tensors = weights_of(checkpoint("qwen3", 1, **shape))
    several = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    llm = engine(checkpoint("qwen3", 0, **shape), **fp8() | several)
    receipt = Refit(llm).push(tensors).require()
    assert {name.split(".")[-2] for name in put} >= {"gate_proj", "up_proj", "down_proj"}
    put.clear()
    again = Refit(llm).push(tensors, verify=True).require()
    assert (put, again.fingerprint) == ([], receipt.fingerprint)
    assert [t.fingerprints for t in again.tensors] == [t.fingerprints for t in receipt.tensors]
