"""NVFP4 weights that are pushed: the bytes of a fresh engine, fingerprints that a trainer computes by itself, and a
receipt that sees a bit."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.rollout import engines, models
from support.rollout.engines import MX
from support.rollout.in_process import Worker, build, same_bits
from support.rollout.models import weights_of

from nemo_fp8 import Precision, PrecisionError
from nemo_fp8.contract import Operand
from nemo_fp8.mismatch.weights import compare_weights, told_by
from nemo_fp8.numerics import kernels, quantize
from nemo_fp8.rollout import Refit, engine_args
from nemo_fp8.rollout.refit import Manifest, SharedWeights
from nemo_fp8.rollout.refit.fingerprint import fingerprint
from nemo_fp8.rollout.refit.memory import Shared
from nemo_fp8.rollout.refit.worker.four_bits import FourBitWeights
from nemo_fp8.rollout.refit.worker.routes import Route
from nemo_fp8.rollout.refit.worker.session import Session

NVFP4 = Precision(rollout="nvfp4")
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def pushed(checkpoint):
    """An engine's model of seed 0 under NVFP4, and the weights of seed 1 that are pushed into it."""

    def give(kind="llama", **fields):
        return build(checkpoint(kind), rollout="nvfp4", **fields), weights_of(checkpoint(kind, 1))

    return give


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_a_push_leaves_the_bytes_of_a_fresh_start(pushed, checkpoint, kind):
    model, weights = pushed(kind)
    places = {name: p.data_ptr() for name, p in model.named_parameters() if "proj" in name or "experts" in name}
    receipt = Refit(Worker(model), chunk=2**20).push(weights, verify=True).require()
    fresh = dict(build(checkpoint(kind, 1), rollout="nvfp4").named_parameters())
    held = dict(model.named_parameters())
    assert all(same_bits(held[name].data.view(-1), value.data.view(-1)) for name, value in fresh.items())
    assert {name: held[name].data_ptr() for name in places} == places
    coded = {t.name for t in receipt.tensors if t.kind == "nvfp4"}
    assert coded == {name for name in weights if "_proj" in name}
    assert receipt.verified
    assert receipt.misaligned == ()
    assert receipt.never_written == ()
    assert all(15 < t.snr_db < 25 for t in receipt.fp8)
    held_bytes, wide = receipt.four_bit_bytes
    live = [p for n, p in held.items() if p.dtype in (torch.uint8, torch.float8_e4m3fn)]
    assert held_bytes == sum(p.nbytes for p in live)
    assert wide == 2 * sum(weights[name].numel() for name in coded)
    assert "3.6 times less than in BF16" in str(receipt)


@pytest.mark.parametrize(("kind", "given"), [("llama", dict), ("qwen3_moe", dict), ("qwen3_moe", models.stacked)])
def test_what_stays_in_shared_memory_is_quantized_from_there(pushed, checkpoint, monkeypatch, kind, given):
    """With the bytes, the fingerprints and the numbers of a push that gathers; and all is gathered where a part of a
    matrix was given other memory."""
    gathered = []
    gather = FourBitWeights._gather

    def noted(self, *arguments):
        gathered.append(self.name)
        gather(self, *arguments)

    monkeypatch.setattr(FourBitWeights, "_gather", noted)
    model, weights = pushed(kind)
    worker, weights = Worker(model), given(weights)
    usual = Refit(worker, chunk=2**20).push(weights, verify=True).require()
    assert len(gathered) > 8
    gathered.clear()
    Refit(worker).push(weights_of(checkpoint(kind)))
    gathered.clear()
    shared = SharedWeights(weights)
    receipt = Refit(worker).push(shared, verify=True).require()
    assert (gathered, receipt.chunks) == ([], 0)
    assert receipt.verified
    assert receipt.held_bytes < usual.held_bytes
    fresh = dict(build(checkpoint(kind, 1), rollout="nvfp4").named_parameters())
    held = dict(model.named_parameters())
    assert all(same_bits(held[name].data.view(-1), value.data.view(-1)) for name, value in fresh.items())
    assert receipt.tensors == usual.tensors  # fingerprints, and all that is told of a cast
    name = next(name for name in weights if name.endswith("k_proj.weight"))
    shared._tensors[name] = weights[name].clone()
    again = Refit(worker).push(shared, verify=True).require()
    assert len(gathered) == 3  # q, k and v of one layer
    assert {t.name: t.fingerprints for t in again.tensors} == {t.name: t.fingerprints for t in usual.tensors}


def test_memory_that_ends_with_a_call_is_not_kept_whatever_the_message_says(pushed, monkeypatch):
    """A server hands a request's body on in memory of its own, with what else the request said."""
    model, weights = pushed()
    worker, said = Worker(model), []
    monkeypatch.setattr(Session, "write", lambda self, memory, pieces, stays=False: said.append(stays))
    begun = worker.nemo_fp8_refit_begin({"push": "one", "tensors": Manifest.of(weights).to_plain()})
    assert begun["accepted"]
    shared = Shared(64)
    message = {"push": "one", "memory": shared.handle, "pieces": [], "stays": True}
    assert "problems" not in worker.nemo_fp8_refit_write(message)
    shared.close()
    assert said == [False]


@pytest.mark.parametrize(
    ("to", "high", "stands"),
    [
        (((0, 64), (0, 32)), 1, True),
        (((5, 64), (0, 32)), 1, True),
        (((16, 70), (0, 32)), 16, True),
        (((5, 64), (0, 32)), 16, False),
        (((0, 60), (0, 32)), 16, False),
        (((0, 64), (0, 16)), 1, False),
        (((0, 3), (0, 70), (0, 32)), 1, True),
        (((2, 3), (0, 35), (0, 32)), 1, True),
        (((0, 3), (0, 35), (0, 32)), 1, False),
    ],
)
def test_parts_that_share_a_block_or_a_row_of_codes_with_others_are_gathered(to, high, stands):
    values = torch.zeros([stop - start for start, stop in to])
    route = Route(0, values.shape, tuple((0, n) for n in values.shape), ((), (), 0), None, to)
    layer = SimpleNamespace(quant_method=SimpleNamespace(operand=Operand("e2m1", (high, 16), "e4m3")))
    live = SimpleNamespace(weight=torch.zeros((*(3,) * (len(to) - 2), 70, 16), dtype=torch.uint8))
    sink = SimpleNamespace(layer=layer, live=live, constants=[(None, [])])
    assert FourBitWeights._stands_alone(sink, route, values) is stands
    assert FourBitWeights._stands_alone(sink, route, values[:-1]) is False
    sink.constants = [(None, [(to, 0.0)])]
    assert FourBitWeights._stands_alone(sink, route, values) is False


def test_the_trainer_computes_the_fingerprints_by_itself(pushed):
    model, weights = pushed()
    receipt = Refit(Worker(model)).push(weights)
    told = {t.name: t for t in receipt.tensors}
    gate, up = weights[UP.replace("up_proj", "gate_proj")], weights[UP]
    assert gate.abs().max() != up.abs().max()
    q = quantize(up, Operand("e2m1", (1, 16), "e4m3"), amax=torch.maximum(gate.abs().max(), up.abs().max()).float())
    mine = fingerprint(q.data, q.scale_inv, q.weight_scale_2.view(1))
    assert told[UP].fingerprints == {"0:512,0:256": mine}
    alone = quantize(up, Operand("e2m1", (1, 16), "e4m3"))
    if gate.abs().max() > up.abs().max():
        assert mine != fingerprint(alone.data, alone.scale_inv, alone.weight_scale_2.view(1))
    assert told[UP].scales == up.numel() // 16 + 1


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_weights_that_are_others_are_named(pushed, kind):
    """By the receipt, and by what lies in memory later: after one bit of a code or of a scale."""
    model, weights = pushed(kind)
    worker = Worker(model)
    receipt = Refit(worker).push(weights)
    assert compare_weights(weights, told_by(receipt), NVFP4) == []
    other = dict(weights)
    name = next(name for name in weights if "layers.1" in name and "down_proj" in name)
    other[name] = -weights[name]
    assert [problem.where for problem in compare_weights(other, told_by(receipt), NVFP4)] == [name]
    live = dict(model.named_parameters())
    for at, parameter in live.items():
        if "layers.1" not in at or parameter.dtype not in (torch.uint8, torch.float8_e4m3fn):
            continue
        seen = parameter.data.view(-1).view(torch.uint8)
        seen[0] ^= 1
        found = compare_weights(weights, worker.nemo_fp8_refit_held({})["held"], NVFP4)
        assert len(found) == 1
        assert "layers.1" in found[0].where
        seen[0] ^= 1
    assert compare_weights(weights, worker.nemo_fp8_refit_held({})["held"], NVFP4) == []


def test_a_push_that_did_not_arrive_is_told(pushed, monkeypatch):
    """A byte that changes between the copy and the end of the push."""
    model, weights = pushed()
    finish = FourBitWeights.finish

    def damaged(self):
        finish(self)
        self.live.weight.view(-1)[5] ^= 16

    with monkeypatch.context() as patch:
        patch.setattr(FourBitWeights, "finish", damaged)
        receipt = Refit(Worker(model)).push(weights, verify=True)
    assert receipt.verified is False
    assert not receipt.ok
    assert Refit(Worker(model)).push(weights, verify=True).require().verified


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("of", ["codes", "scales"])
def test_a_cast_that_is_not_the_specification_is_told(pushed, monkeypatch, kind, of):
    """One bit of what a kernel makes of each matrix; without ``verify`` nobody looks."""
    cast = kernels.quantize_fp4

    def wrong(*arguments, **named):
        made = cast(*arguments, **named)
        made[of == "scales"].view(torch.uint8).view(-1)[7] ^= 1
        return made

    model, weights = pushed(kind)
    monkeypatch.setattr(kernels, "quantize_fp4", wrong)
    assert Refit(Worker(model)).push(weights).ok
    receipt = Refit(Worker(model)).push(weights, verify=True)
    assert not receipt.ok
    assert {t.name for t in receipt.tensors if t.verified is False} == {name for name in weights if "_proj" in name}


DOWN = "model.layers.1.mlp.down_proj.weight"
HARD = {
    "all zero": (torch.zeros_like, ["Weights that are all zero"]),
    "subnormal": (lambda x: (x.float() * 2.0**-125).bfloat16(), []),
    "smallest": (lambda x: torch.zeros_like(x).index_fill_(1, torch.tensor(3), 2.0**-133), []),
    "huge": (lambda x: torch.full_like(x, 3e38), ["Values of 1.8e+19 and more"]),
    "no number": (lambda x: x.index_fill(1, torch.tensor(3), float("nan")), ["Scales that are", "Infinite values or"]),
    "infinite": (lambda x: x.index_fill(1, torch.tensor(3), float("inf")), ["Scales that are", "Infinite values or"]),
}


@pytest.mark.parametrize("given", [dict, SharedWeights])
@pytest.mark.parametrize(("of", "problems"), HARD.values(), ids=HARD)
def test_hard_weights_are_held_as_quantized_and_bad_ones_told(pushed, of, problems, given):
    """A scale beneath that is zero is right where all weights are, and one that is subnormal holds them."""
    model, weights = pushed()
    x = weights[DOWN] = of(weights[DOWN])
    receipt = Refit(Worker(model)).push(given(weights), verify=True)
    found = [problem.what for problem in receipt.problems]
    assert [any(what in one and DOWN in one for one in found) for what in problems] == [True] * len(problems)
    assert len(found) == len(problems)
    assert len(str(receipt)) > 0
    assert json.loads(json.dumps(receipt.to_dict())) is not None
    if not {"Infinite values or", "Values of 1.8e+19 and more"} & {*problems}:
        layer = model.get_submodule(DOWN.removesuffix(".weight"))
        right = quantize(x, Operand("e2m1", (1, 16), "e4m3"))
        assert same_bits(layer.weight.data, right.data)
        assert same_bits(layer.weight_scale.data, right.scale_inv)
        assert layer.weight_global_scale == right.weight_scale_2
        answer = layer.quant_method.apply(layer, torch.ones(2, x.shape[1]).bfloat16())
        assert answer.isfinite().all()
        assert problems == [] or not answer.any()


# What a product is of, behind one value of a weight that is none: the rows of up_proj that are not finite, of 512.
BROKEN = {
    "nvfp4": ({"rollout": "nvfp4"}, {"nan": 512, "inf": 512}),
    "128x128": ({"rollout": "fp8"}, {"nan": 1, "inf": 0}),
    "mxfp8": ({"rollout": "fp8", **MX}, {"nan": 1, "inf": 1}),
}


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(("fields", "rows"), BROKEN.values(), ids=BROKEN)
def test_what_the_receipt_says_of_values_that_are_none_is_so(checkpoint, here, fields, rows, value):
    model, weights = build(checkpoint("llama"), **fields), weights_of(checkpoint("llama", 1))
    weights[UP] = weights[UP].clone()
    weights[UP][3, 5] = float(value)
    receipt = Refit(Worker(model)).push(weights)
    (why,) = [problem.why for problem in receipt.problems if problem.what.startswith("Infinite values or NaNs")]
    assert "In NVFP4 the scale of a whole matrix is made of its largest value" in why
    fused = model.get_submodule("model.layers.0.mlp.gate_up_proj")
    answer = fused.quant_method.apply(fused, torch.ones(1, weights[UP].shape[1]).bfloat16())[0]
    gate, up = answer.chunk(2)
    # vLLM's kernel for AMX reads the code of a NaN as a number.
    lost = here.amx and fields == {"rollout": "fp8"} and value == "nan"
    assert int((~up.isfinite()).sum()) == (0 if lost else rows[value])
    assert int((~gate.isfinite()).sum()) == (rows[value] if "nvfp4" in fields.values() else 0)


def test_columns_that_16_does_not_divide_are_pushed_in_bf16(checkpoint):
    folder = checkpoint("llama", intermediate=328)
    model = build(folder, rollout="nvfp4")
    receipt = Refit(Worker(model)).push(weights_of(folder), verify=True).require()
    kinds = {t.name: t.kind for t in receipt.tensors}
    assert kinds[DOWN] == "bfloat16"
    assert kinds[DOWN.replace("down", "up")] == "nvfp4"
    with pytest.raises(PrecisionError, match="328 columns are not a multiple of 16"):
        build(folder, rollout="nvfp4", strict=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_an_engine_answers_as_a_fresh_one_after_a_push_and_after_a_push_of_changes(engine, checkpoint, kind):
    """Changed tensors come whole, since one scale is made of them; the others are confirmed from memory."""
    llm = engine(checkpoint(kind), **engine_args(NVFP4))
    before, weights = llm.as_started, weights_of(checkpoint(kind))
    refit = Refit(llm)
    refit.push(weights_of(checkpoint(kind, 1)), delta=True).require()
    assert not torch.equal(engines.log_probs(llm, 1, 200), before)
    changed = weights_of(checkpoint(kind, 1))
    name = next(name for name in weights if "down_proj" in name)
    changed[name] = weights[name]
    receipt = refit.push(changed, delta=True).require()
    assert receipt.delta.instead == ""
    assert name in receipt.delta.whole
    assert "One scale is made of the whole weight" in receipt.delta.whole.values()
    assert compare_weights(changed, told_by(receipt), NVFP4) == []
    refit.push(weights).require()
    assert torch.equal(engines.log_probs(llm, 1, 200), before)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_wide", "qwen3_moe"])
def test_two_workers_hold_the_codes_of_the_whole_weight(checkpoint, kind):
    """One scale over both workers, at load and after a push; and the trainer knows both parts' fingerprints."""
    from support.rollout.several_workers import ask

    both = [checkpoint(kind, seed) for seed in (0, 1)]
    answer = ask("mp", both[0], {"rollout": "nvfp4", "pushed": str(both[1])})
    for checks in (answer["checks"], answer["after"]):
        assert [(worker["rank"], worker["differ"]) for worker in checks] == [(0, []), (1, [])]
        assert all(worker["compared"] == (16 if kind == "qwen3_wide" else 72) for worker in checks)
    assert all(len(worker["differ"]) == worker["compared"] for worker in answer["stale"])
    assert answer["finite"]
    assert answer["receipt"]["misaligned"] == []
    assert compare_weights(weights_of(both[1]), told_by(answer["receipt"]), NVFP4) == []
    assert compare_weights(weights_of(both[0]), told_by(answer["receipt"]), NVFP4) != []


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_push_goes_into_each_layer_as_the_rule_for_its_module_says(checkpoint, kind):
    rules = (("*.layers.0.*", "bf16"), ("*.linear_qkv", "blockwise"), ("*.self_attention.linear_proj", "mxfp8"))
    model, weights = build(checkpoint(kind), rollout="nvfp4", modules=rules), weights_of(checkpoint(kind, 1))
    receipt = Refit(Worker(model)).push(weights, verify=True).require()
    fresh = dict(build(checkpoint(kind, 1), rollout="nvfp4", modules=rules).named_parameters())
    held = dict(model.named_parameters())
    assert all(same_bits(held[name].data.view(-1), value.data.view(-1)) for name, value in fresh.items())
    kinds = {t.name: t.kind for t in receipt.tensors if "_proj" in t.name}
    assert {kind for name, kind in kinds.items() if ".layers.0." in name} == {"bfloat16"}
    assert {kind for name, kind in kinds.items() if ".layers.1." in name and "attn" in name} == {"fp8"}
    assert {kind for name, kind in kinds.items() if ".layers.1.mlp" in name} == {"nvfp4"}
    again = Refit(Worker(model)).push(weights, verify=True).require()
    assert {t.name: t.fingerprints for t in again.tensors} == {t.name: t.fingerprints for t in receipt.tensors}


@pytest.mark.parametrize("pattern", ["*.experts.linear_fc2", "*.experts.1.*", "*.mlp.experts"])
def test_a_rule_for_a_part_of_the_experts_is_for_all_of_them(checkpoint, pattern):
    """In the engine, in what the trainer expects of it, and at every expert."""
    contract = NVFP4.replace(modules=((pattern, "mxfp8"),))
    model, weights = (
        build(checkpoint("qwen3_moe"), rollout="nvfp4", modules=contract.modules),
        weights_of(checkpoint("qwen3_moe", 1)),
    )
    receipt = Refit(Worker(model)).push(weights, verify=True).require()
    assert {t.kind for t in receipt.tensors if "experts." in t.name} == {"fp8"}
    assert {t.kind for t in receipt.tensors if "self_attn.o_proj" in t.name} == {"nvfp4"}
    assert compare_weights(weights, told_by(receipt), contract) == []
