"""Values that come in pieces are copied by jobs that a plan keeps: the same bits and facts as by their sinks.

Codes that come in pieces are in test_casting.py."""

import pytest
import torch
from support.rollout.held import differing, held
from support.rollout.in_process import Worker, build
from support.rollout.models import weights_of

from nemo_fp8.numerics.kernels import build as build_of_kernels
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import casting
from nemo_fp8.rollout.refit.wire import SharedMemory
from nemo_fp8.rollout.refit.worker.arrived import Copied
from nemo_fp8.rollout.refit.worker.session import Session

ROWS = {"rollout": "compute", "unquantized": "rows"}
EMBEDDING, O_PROJ = "model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"

pytestmark = pytest.mark.skipif(build_of_kernels.library() is None, reason="no C compiler on this machine")


@pytest.fixture(autouse=True)
def copied(monkeypatch):
    """Tensors go as values, in small buffers; and what is copied: the first row, and how many."""
    monkeypatch.setattr(SharedMemory, "most", 2**17)
    monkeypatch.setattr(casting, "LEAST", 1 << 60)
    pieces, write = [], Copied.write
    monkeypatch.setattr(Copied, "write", lambda *a: (pieces.append(a[1:3]), write(*a)))
    return pieces


def with_bad_values(tensors):
    for name, place, bad in ((EMBEDDING, (-1, 3), "inf"), (O_PROJ, (130, 5), "nan"), (O_PROJ, (2, 2), "-inf")):
        tensors[name][place] = float(bad)
    return tensors


@pytest.mark.parametrize("given", [dict, with_bad_values], ids=["good", "bad"])
@pytest.mark.parametrize(
    ("kind", "contract"), [("qwen3", ROWS), ("llama_tied", {}), ("qwen3_moe", {"last_layers": 1})],
    ids=["by rows", "tied", "experts"],
)  # fmt: skip
def test_bits_and_facts_are_those_of_the_sinks(checkpoint, kind, contract, given, copied, monkeypatch):
    """In the second push, whose sums are not added to those of the first."""
    tensors = given(weights_of(checkpoint(kind, 1)))
    by_ways, by_sinks = (build(checkpoint(kind, 0), **contract) for _ in range(2))
    refit = Refit(Worker(by_ways))
    refit.push(weights_of(checkpoint(kind, 2))).require()
    copied.clear()
    found = refit.push(tensors)
    assert any(row > 0 for row, _ in copied)
    copied.clear()
    monkeypatch.setattr(Session, "tabled", False)
    expected = Refit(Worker(by_sinks)).push(tensors)
    assert copied == []
    assert found.fingerprint == expected.fingerprint
    assert [*map(repr, found.tensors)] == [*map(repr, expected.tensors)]  # a NaN is no other's equal
    assert found.ok == (given is dict)
    assert [p.what for p in found.problems] == [p.what for p in expected.problems]
    assert differing(held(by_ways), held(by_sinks)) == []


def test_values_go_to_where_a_parameter_has_moved(checkpoint, copied):
    model, tensors = build(checkpoint("qwen3", 0), **ROWS), weights_of(checkpoint("qwen3", 1))
    refit = Refit(Worker(model))
    refit.push(weights_of(checkpoint("qwen3", 2))).require()
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    old, before = layer.weight.data, layer.weight.data.clone()
    layer.weight.data = before.clone()
    copied.clear()
    refit.push(tensors).require()
    assert copied
    assert torch.equal(old, before)
    assert torch.equal(layer.weight.data, tensors[DOWN])


def test_values_beyond_the_sender_s_memory_are_refused(checkpoint, monkeypatch):
    model, tensors = build(checkpoint("qwen3", 0), **ROWS), weights_of(checkpoint("qwen3", 1))
    refit, send = Refit(Worker(model)), SharedMemory.send
    refit.push(tensors).require()

    def beyond(self, pieces, used):
        send(self, [(*piece[:3], piece[3] + (1 << 40)) for piece in pieces], used)

    monkeypatch.setattr(SharedMemory, "send", beyond)
    with pytest.raises(Exception, match="does not lie inside"):
        refit.push(tensors)
