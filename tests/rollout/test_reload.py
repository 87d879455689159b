"""A push as a worker sees it, in this process: one model, pieces of tensors from one buffer that is used again and again."""

import random

import pytest
import torch
from rollout.in_process import Worker, build, weights_of

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import quantize
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.in_vllm.reload import Session
from nemo_fp8.rollout.in_vllm.reload_layers import Blocks
from nemo_fp8.rollout.in_vllm.reload_layouts import ROWS, Ledger
from nemo_fp8.rollout.in_vllm.reload_plan import Plan
from nemo_fp8.rollout.in_vllm.reload_routes import Route, Target
from nemo_fp8.rollout.refit import Manifest
from nemo_fp8.rollout.refit.memory import Shared
from nemo_fp8.rollout.refit.stream import capacity, cut

MX = {"rollout_block": "1x32", "weight_scale": "pow2", "activation_scale": "pow2"}
BLOCK = Operand("e4m3", (128, 128), "fp32")
K_PROJ, NORM = "model.layers.2.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"


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
                session.write(shared.handle, [list(piece) for piece in pieces])
                shared.tensor.fill_(0xFF)
            session.finish()
        finally:
            session.memory.clear()
            shared.close()
    return session


def held(model):
    """Every bit that a model holds: its parameters and buffers, and what a kernel packed beside them, by what it answers."""
    found = {name: tensor.detach().clone().reshape(-1).view(torch.uint8) for name, tensor in model.state_dict().items()}
    draws = torch.Generator().manual_seed(0)
    for name, layer in model.named_modules():
        if "cpu_linear" in vars(layer):
            columns = next(vars(layer)[key] for key in ("input_size_per_partition", "input_size", "embedding_dim") if key in vars(layer))
            x = torch.randn(3, columns, generator=draws).bfloat16()
            found[f"{name} answers"] = layer.quant_method.apply(layer, x).reshape(-1).view(torch.uint8)
    return found


def differing(a, b):
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name]))


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
    ],
    ids=str,
)
def test_a_push_leaves_every_bit_as_a_fresh_load_does(checkpoint, model, kind, contract):
    """In any order. Whatever waits for the rest of its layer is a copy: the buffer that it came in is used again at once."""
    pushed = build(checkpoint(kind, 1), **contract)
    wanted = [held(model(kind, **contract)), held(pushed)]
    assert differing(*wanted)
    for seed, order in ((0, list), (1, shuffled), (0, shuffled)):
        session = push(pushed, weights_of(checkpoint(kind, seed)), order=order)
        assert differing(held(pushed), wanted[seed]) == []
        assert session.ledger.held == 0
        assert all(facts.verified is not False for facts in session.ledger.facts.values())


def test_what_waits_beside_the_model_is_counted(checkpoint, qwen3):
    """Layer by layer it is one layer; in the worst order it is all of them."""
    model, tensors = build(checkpoint("qwen3", 0), rollout_block="tensor"), qwen3[1]
    by_layer = push(model, tensors).ledger.most_held
    assert by_layer == 1024 * 256 * 2  # gate and up of one layer
    scattered = push(model, tensors, order=lambda pairs: sorted(pairs, key=lambda pair: "up_proj" in pair[0])).ledger.most_held
    assert scattered >= 4 * by_layer
    assert push(qwen3[0], tensors).ledger.most_held == 0


def test_blocks_that_lie_in_two_tensors_wait_for_both():
    """Rows 64 to 191 of a worker's matrix are one tensor, so its first block is of both; and again the buffer is used again."""
    draws = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, 256, generator=draws).bfloat16() for rows in (64, 128, 64)]
    target = Target("layer", "weight", (256, 256), torch.bfloat16)
    routes = [
        Route(i, tuple(part.shape), ((0, len(part)), (0, 256)), (tuple(part.shape), (256, 1), 0), target, ((at, at + len(part)), (0, 256)))
        for i, (at, part) in enumerate(zip((0, 64, 192), parts, strict=True))
    ]
    codes, scales, ledger = torch.empty(256, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 2), Ledger()
    sink, buffer = Blocks(ledger, codes, scales, ROWS, BLOCK, routes, True), torch.empty(128, 256).bfloat16()
    for route, part in zip(routes, parts, strict=True):
        sink.write(route, 0, buffer[: len(part)].copy_(part))
        buffer.fill_(float("nan"))
    sink.finish()
    expected = quantize(torch.cat(parts), BLOCK)
    assert torch.equal(codes.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scale_inv)
    assert (ledger.held, ledger.most_held) == (0, 256 * 256 * 2)
    assert [facts.aligned for _, facts in sorted(ledger.facts.items())] == [False] * 3


def test_values_that_are_no_numbers_are_told_wherever_they_lie(qwen3):
    model, tensors = qwen3[0], {name: tensor.clone() for name, tensor in qwen3[1].items()}
    coded = quantize(tensors[K_PROJ], BLOCK)
    coded.data.view(torch.uint8)[5, 7:9] = 0x7F
    tensors |= {K_PROJ: coded.data, f"{K_PROJ}_scale_inv": coded.scale_inv}
    tensors[NORM][3] = float("-inf")
    tensors["model.embed_tokens.weight"][1, 2] = float("nan")
    session = push(model, tensors)
    names = {session.plan.manifest[i].name: facts.nonfinite for i, facts in session.ledger.facts.items() if facts.nonfinite}
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
            session.write(shared.handle, named)
        assert session.written == (words == "of which 128 have come")
    finally:
        session.memory.clear()
        shared.close()


@pytest.mark.parametrize(("field", "words"), [("data_parallel_size", "one engine"), ("_api_process_count", "--api-server-count 1")])
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


class Distant(Worker):
    """A worker on another host, as far as a push can tell."""

    local, carried = False, 0

    def carry(self, message, body):
        self.carried += len(body)
        with Shared.holding(body) as shared:
            return self.call("write", message | {"memory": shared.handle})


def test_bytes_go_along_to_another_host(checkpoint):
    worker, tensors = Distant(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    receipt = Refit(worker, chunk=2**20).push(tensors, verify=True).require()
    assert worker.carried >= receipt.bytes == sum(t.nbytes for t in tensors.values())
    assert receipt.fingerprint == Refit(Worker(build(checkpoint("qwen3", 0)))).push(tensors).fingerprint
