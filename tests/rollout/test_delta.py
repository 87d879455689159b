"""Pushes of changes into vLLM's models, in this process: bitwise a full push, refused where they do not fit, taken back
where they die."""

import threading
import time
from collections import Counter

import pytest
import torch
from support.rollout.in_process import Worker, build, weights_of
from support.rollout.models import stacked
from test_reload import MX, differing, held

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import quantize
from nemo_fp8.rollout import Refit, engine_args
from nemo_fp8.rollout.engine.kv import scales_of, set_scales
from nemo_fp8.rollout.refit import wire
from nemo_fp8.rollout.refit.manifest import Manifest
from nemo_fp8.rollout.refit.memory import Shared
from nemo_fp8.rollout.refit.planes import Cast, changes
from nemo_fp8.rollout.refit.wire import Body, SharedMemory
from nemo_fp8.rollout.refit.worker.layouts import Tally
from nemo_fp8.rollout.refit.worker.packing import pack

K_PROJ, NORM = "model.layers.2.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"
POW2 = {"weight_scale": "pow2", "first_layers": 1}


def stepped(tensors, seed=0, size=1e-5):
    """The tensors after a step of an optimizer, as far as a push can tell: most BF16 values stay."""
    draws = torch.Generator().manual_seed(seed)
    return {name: (t.float() + size * torch.randn(t.shape, generator=draws)).to(t.dtype) for name, t in tensors.items()}


def of(worker):
    return held(worker.model_runner.get_model())


def fresh(folder, tensors, **contract):
    """What a model holds that was given these tensors by a push of everything."""
    worker = Worker(build(folder, **contract))
    return Refit(worker).push(tensors), of(worker)


@pytest.mark.parametrize(
    ("kind", "contract"),
    [("qwen3", {}), ("llama_tied", POW2), ("qwen3_moe", {}), ("qwen3_moe", {"last_layers": 1}), ("qwen3", MX),
     ("qwen3_odd", {}), ("qwen3", {"rollout_block": "tensor"}),
     ("llama_tied", {"rollout": "compute", "unquantized": "rows"}), ("qwen3_odd", {"unquantized": "rows"})],
    ids=str,
)  # fmt: skip
def test_changes_leave_every_bit_as_everything_does(here, checkpoint, kind, contract):
    """Dense and experts, FP32 and power-of-2 scales, MXFP8, shapes that stay in BF16, one scale for a weight, BF16 that
    is multiplied by rows."""
    folder = checkpoint(kind, 0)
    worker, tensors = Worker(build(folder, **contract)), weights_of(folder)
    refit = Refit(worker, chunk=2**20)
    last = refit.push(tensors, delta=True).require()
    assert "No ledger" in last.delta.instead
    for i in range(3):
        tensors = stepped(tensors, i)
        receipt = refit.push(tensors, delta=True, verify=i == 1).require()
        whole, bits = fresh(folder, tensors, **contract)
        assert differing(of(worker), bits) == []
        assert receipt.fingerprint == whole.fingerprint
        assert {t.name: (t.kind, t.scales, t.aligned) for t in receipt.tensors} == {
            t.name: (t.kind, t.scales, t.aligned) for t in whole.tensors
        }
        assert (receipt.delta.instead, receipt.delta.base) == ("", last.push)
        last = receipt
        assert receipt.verified
        assert 0 < receipt.delta.share < 0.1
        # Whole: a layer with one scale for a weight, and what a kernel packs: experts in BF16 and, with BF16 units in
        # the processor, every linear in BF16 that is not multiplied by rows.
        one_scale = contract.get("rollout_block") == "tensor"
        packs = here.packs_bf16 and contract.get("unquantized") != "rows"
        linears = [t for t in receipt.tensors if t.name.endswith(("_proj.weight", "mlp.gate.weight"))]
        packed = {t.name for t in linears if one_scale or (t.kind == "bfloat16" and (packs or ".experts." in t.name))}
        assert receipt.delta.whole.keys() == packed
        assert packed or receipt.bytes < receipt.delta.full_bytes / 10


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_changes_are_the_same_without_a_compiler(checkpoint, monkeypatch, kind):
    """Found and added in numpy, on either side."""
    tensors, held_by = weights_of(checkpoint(kind, 0)), []
    for find, add in ((True, False), (False, True)):
        with monkeypatch.context() as patched:
            for name, has in (("find", find), ("add", add)):
                if not has:
                    patched.setattr(f"nemo_fp8.numerics.kernels.patches.{name}", lambda *_, **__: None)
                    patched.setattr(Cast, "job", lambda *_: None)  # no kernel, and so no job for one
            worker = Worker(build(checkpoint(kind, 0)))
            refit = Refit(worker)
            refit.push(tensors, delta=True).require()
            assert refit.push(stepped(tensors), delta=True).require().delta.instead == ""
            held_by.append(of(worker))
    bits = fresh(checkpoint(kind, 0), stepped(tensors))[1]
    assert [differing(held, bits) for held in held_by] == [[], []]


def test_nothing_changed_is_nothing_sent(checkpoint):
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True)
    receipt = refit.push(tensors, delta=True).require()
    assert (receipt.bytes, receipt.chunks, receipt.delta.changed, receipt.delta.confirmed) == (0, 0, 0, 47)


@pytest.mark.parametrize("once", [False, True], ids=["mapping", "iterator"])
def test_changes_are_looked_for_while_the_engine_answers(checkpoint, pushed, monkeypatch, once):
    """But not in an iterator, of which everything would have to be pushed if the engine refuses."""
    worker, refit, tensors = pushed
    looked, call = threading.Event(), worker.call
    seen = []

    def slowly(method, message):
        if method == "delta":
            seen.append(looked.wait(0.2 if once else 20))
        return call(method, message)

    def looking(*arguments):
        looked.set()
        return changes(*arguments)

    monkeypatch.setattr(worker, "call", slowly)
    monkeypatch.setattr("nemo_fp8.rollout.refit.ledger.changes", looking)
    for base in (refit.ledger.version, "another"):
        looked.clear()
        refit.ledger.version = base
        after = stepped(tensors, len(seen))
        receipt = refit.push(iter(after.items()) if once else after, delta=True).require()
        assert (receipt.delta.instead == "") == (base != "another")
        assert receipt.fingerprint == fresh(checkpoint("qwen3", 0), after)[0].fingerprint
    assert seen == [not once] * 2


class Carrying(Worker):
    """Also takes the bytes of a message, as a server does."""

    local = False

    def carry(self, message, body):
        with Shared.holding(body) as memory:
            return self.call("write", message | {"memory": memory.handle})


@pytest.mark.parametrize(("name", "way"), [("memory", SharedMemory), ("http", Body)])
def test_buffers_that_are_filled_while_the_engine_answers_go_to_it_in_their_order(checkpoint, monkeypatch, name, way):
    """No more of them are filled than there are."""
    worker, tensors = Carrying(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20, transport=name)
    refit.push(tensors, delta=True).require()
    given, all_given, filled, call, buffer = [], threading.Event(), [], worker.call, way.buffer

    def slowly(method, message):
        if method == "delta":
            assert all_given.wait(20)
            time.sleep(0.1)  # one more would be asked for
            filled.append(len(given))
        return call(method, message)

    def counted(self):
        given.append(self)
        if len(given) == way.buffers:
            all_given.set()
        return buffer(self)

    monkeypatch.setattr(worker, "call", slowly)
    monkeypatch.setattr(way, "buffer", counted)
    monkeypatch.setattr("nemo_fp8.rollout.refit.ledger.FIRST", 1)  # many buffers of few patches
    after = stepped(tensors)
    receipt = refit.push(after, delta=True).require()
    assert filled == [way.buffers]
    assert (receipt.delta.instead, receipt.chunks) == ("", len(given))
    assert receipt.chunks > way.buffers
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), after)[1]) == []


def test_a_push_that_its_tensors_end_has_the_engine_s_answer(checkpoint, monkeypatch):
    """Else the engine could hear of it after the next one has begun."""
    tensors = weights_of(checkpoint("llama_tied", 0))
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    worker = Worker(build(checkpoint("llama_tied", 0), **POW2))
    refit, call, answers = Refit(worker), worker.call, []
    refit.push(tensors | head, delta=True).require()

    def slowly(method, message):
        if method == "delta":
            time.sleep(0.2)
        answers.append(method)
        return call(method, message)

    with monkeypatch.context() as patched:
        patched.setattr(worker, "call", slowly)
        with pytest.raises(PrecisionError, match=r"lm_head\.weight is not"):
            refit.push(tensors | {"lm_head.weight": head["lm_head.weight"] + 1}, delta=True)
    assert answers == ["delta", "abandon"]
    assert refit.push(tensors | head, delta=True).require().delta.instead == ""


def test_one_tensor_that_cannot_be_patched_brings_those_of_its_layer(checkpoint):
    worker, tensors = Worker(build(checkpoint("qwen3", 0), rollout_block="tensor")), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True)
    tensors = tensors | {K_PROJ: tensors[K_PROJ] * 2}
    receipt = refit.push(tensors, delta=True).require()
    assert set(receipt.delta.whole) == {K_PROJ.replace("k_proj", which) for which in ("q_proj", "k_proj", "v_proj")}
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors, rollout_block="tensor")[1]) == []


def test_blocks_of_two_tensors_come_whole(checkpoint):
    """Of a fused matrix in which a block lies in two tensors, all of them are sent if one changed."""
    changed = {"kv_heads": 1}
    folder = checkpoint("qwen3", 0, **changed)
    worker, tensors = Worker(build(folder)), weights_of(folder)
    refit = Refit(worker)
    refit.push(tensors, delta=True).require()
    tensors = stepped(tensors)
    receipt = refit.push(tensors, delta=True).require()
    whole, bits = fresh(folder, tensors)
    assert differing(of(worker), bits) == []
    assert receipt.fingerprint == whole.fingerprint


def test_an_iterator_brings_changes_too(checkpoint):
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(iter(tensors.items()), manifest=tensors, delta=True)
    tensors = stepped(tensors)
    assert refit.push(iter(tensors.items()), delta=True).delta.instead == ""
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


def test_an_iterator_may_use_its_memory_again(checkpoint, monkeypatch):
    """As one that gathers the shards of each tensor where it has gathered the last one. Tensors of a mapping stay, and
    several are looked at together."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit, room, looks = Refit(worker), torch.empty(max(t.nbytes for t in tensors.values()), dtype=torch.uint8), []

    def gathered(tensors):
        for name, tensor in tensors.items():
            here = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            yield name, here.copy_(tensor)
            here.fill_(7)

    def looking(some, out):
        looks[-1].append(len(some))
        return changes(some, out)

    refit.push(tensors, delta=True)
    monkeypatch.setattr("nemo_fp8.rollout.refit.ledger.changes", looking)
    for once in (True, False):
        looks.append([])
        tensors = stepped(tensors, 1 + once)
        receipt = refit.push(gathered(tensors) if once else tensors, delta=True).require()
        assert receipt.delta.instead == ""
        assert receipt.delta.changed > 0
        assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []
    assert max(looks[0]) == 1  # no tensor here is more than a strip
    assert max(looks[1]) > 2


def test_codes_of_the_trainer_are_patched_as_they_are(checkpoint):
    def coded(tensors):
        found = {}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                quantized = quantize(tensor, Operand("e4m3", (128, 128), "fp32"))
                found |= {name: quantized.data, f"{name}_scale_inv": quantized.scale_inv}
            else:
                found[name] = tensor
        return found

    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(coded(tensors), delta=True).require()
    tensors = stepped(tensors)
    receipt = refit.push(coded(tensors), delta=True).require()
    assert receipt.delta.instead == ""
    assert receipt.delta.whole == {}
    assert receipt.delta.changed > 0
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


def test_bad_weights_are_told_of_a_push_of_changes(checkpoint):
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True).require()
    for change, words in (
        ({K_PROJ: torch.zeros_like(tensors[K_PROJ])}, f"all zero: {K_PROJ}."),
        ({NORM: torch.full_like(tensors[NORM], 3e38)}, f"and more: {NORM}."),
        ({NORM: torch.full_like(tensors[NORM], float("nan"))}, f"NaNs: {NORM}."),
    ):
        receipt = refit.push(tensors | change, delta=True)
        assert receipt.delta.instead == ""
        assert [words in problem.what for problem in receipt.problems] == [True]
        refit.push(tensors, delta=True).require()
    one = tensors[K_PROJ].clone()
    one[5, 6] = float("nan")
    assert "NaNs" in refit.push(tensors | {K_PROJ: one}, delta=True).problems[0].what
    refit.push(tensors, delta=True).require()


@pytest.mark.parametrize("contract", [{}, POW2, MX], ids=str)
def test_infinities_are_told_of_a_push_of_changes(checkpoint, contract):
    """As of a push of everything, though no code and no scale is infinite: each became the format's largest value."""
    folder = checkpoint("qwen3", 1)
    worker, tensors = Worker(build(folder, **contract)), weights_of(folder)
    refit = Refit(worker)
    refit.push(tensors, delta=True).require()
    one = tensors[K_PROJ].clone()
    one[5, 6], one[6, 7], one[7, 8] = float("inf"), -float("inf"), float("nan")
    for _ in range(2):  # as it changes, and where it stays
        receipt = refit.push(tensors | {K_PROJ: one}, delta=True)
        assert receipt.delta.instead == ""
        assert receipt.problems == fresh(folder, tensors | {K_PROJ: one}, **contract)[0].problems
        (told,) = (t for t in receipt.tensors if t.name == K_PROJ)
        assert (told.nonfinite, told.largest) == (3, float("inf"))
    refit.push(tensors, delta=True).require()


# ---------------------------------------------------------------------- what does not fit


@pytest.fixture
def pushed(checkpoint):
    """A worker, a Refit whose ledger is of it, and the tensors that both hold."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20)
    refit.push(tensors, delta=True).require()
    return worker, refit, tensors


def repaired(checkpoint, worker, refit, tensors, words):
    """A push of changes becomes one of everything, says so, and leaves every bit right; the next one fits again."""
    receipt = refit.push(tensors, delta=True).require()
    assert words in receipt.delta.instead
    assert "  all, since    " in str(receipt)
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []
    assert worker.refuses == ""
    assert refit.push(stepped(tensors, 9), delta=True).delta.instead == ""


def test_another_version_is_refused(checkpoint, pushed):
    worker, refit, tensors = pushed
    Refit(worker).push(weights_of(checkpoint("qwen3", 0)))
    repaired(checkpoint, worker, refit, stepped(tensors), "It holds")


def test_an_engine_that_was_started_again_is_refused(checkpoint, pushed):
    _, refit, tensors = pushed
    refit.control = again = Worker(build(checkpoint("qwen3", 0)))
    repaired(checkpoint, again, refit, stepped(tensors), "no push, or was started again")


def test_other_tensors_are_refused(checkpoint):
    """The same experts, each under a name of its own, and then in stacks."""
    worker, tensors = Worker(build(checkpoint("qwen3_moe", 0))), weights_of(checkpoint("qwen3_moe", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True)
    receipt = refit.push(stacked(tensors), delta=True).require()
    assert "That push brought other tensors" in receipt.delta.instead
    assert differing(of(worker), fresh(checkpoint("qwen3_moe", 0), tensors)[1]) == []
    assert refit.push(stepped(stacked(tensors)), delta=True).delta.instead == ""


@pytest.mark.parametrize("how", [dict, list, iter], ids=["mapping", "pairs", "iterator"])
def test_changes_come_in_any_order(checkpoint, pushed, how):
    worker, refit, tensors = pushed
    for seed, order in ((1, reversed), (2, sorted)):
        tensors = dict(order(stepped(tensors, seed).items()))
        manifest = Manifest.of(tensors) if how is iter else None
        assert refit.push(how(tensors.items()), manifest=manifest, delta=True).require().delta.instead == ""
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


def test_a_flipped_bit_in_the_engine_is_seen(checkpoint, pushed):
    """Of a code that no patch touches; of a scale; of a norm."""
    worker, refit, tensors = pushed
    model = worker.model_runner.get_model()
    for name in ("mlp.gate_up_proj.weight", "self_attn.o_proj.weight_scale_inv", "input_layernorm.weight"):
        parameter = dict(model.named_parameters())[f"model.layers.1.{name}"].data
        parameter.view(torch.uint8).view(-1)[15] ^= 4
        repaired(checkpoint, worker, refit, tensors, "not what the trainer has")
        refit.push(tensors, delta=True)


@pytest.mark.parametrize("contract", [{"first_layers": 1}, {"rollout_block": "tensor"}], ids=str)
def test_a_layer_that_somebody_else_packed_is_seen(checkpoint, contract):
    """Nobody can read what a kernel packed. No other bit of the engine is written here."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0), **contract)), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True).require()
    assert refit.push(tensors, delta=True).require().delta.instead == ""  # what a push packs is its own
    layer = worker.model_runner.get_model().get_submodule("model.layers.0.mlp.down_proj")
    if layer.weight.numel():
        layer.weight.data.view(torch.uint8).view(-1)[15] ^= 4
    else:
        layer.weight = torch.nn.Parameter(tensors["model.layers.0.mlp.down_proj.weight"] * 2, requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)
    receipt = refit.push(tensors, delta=True).require()
    assert "layers.0.mlp.down_proj.weight is not what the trainer has" in receipt.delta.instead
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors, **contract)[1]) == []
    assert refit.push(tensors, delta=True).require().delta.instead == ""


@pytest.mark.parametrize("dies", [False, True])
def test_a_packed_copy_that_is_of_other_weights_is_packed_again(here, checkpoint, pushed, monkeypatch, dies):
    """An output head's weight is as it was pushed, and what a CPU multiplies with is not: somebody else packed it, or a
    push that died after it packed and was taken back."""
    if not here.packs_bf16:
        pytest.skip("this processor multiplies with the weight itself")
    worker, refit, tensors = pushed
    head = worker.model_runner.get_model().lm_head
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    answer = head.quant_method.apply(head, x, None)
    if dies:
        with monkeypatch.context() as patch:
            patch.setattr(Tally, "settle", lambda self: 1 / 0)
            with pytest.raises(PrecisionError, match="ZeroDivisionError"):
                refit._push_changes(refit.ledger, stepped(tensors, size=1.0), None, False, None)
        assert worker.call("abandon", {})[0]["mixed"] == ""
    else:
        head.weight.data.mul_(2)
        head.quant_method.process_weights_after_loading(head)
        head.weight.data.div_(2)
        assert not torch.equal(head.quant_method.apply(head, x, None), answer)
        assert refit.push(tensors, delta=True).require().delta.instead == ""
    assert torch.equal(head.quant_method.apply(head, x, None), answer)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_copy_is_packed_once_when_its_weight_has_come(checkpoint, monkeypatch, last):
    """While the sender goes on, unless it is the last tensor; and not at all if its weight has not changed."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    head = "lm_head.weight"
    rest = {name: tensor for name, tensor in tensors.items() if name != head}
    tensors = rest | {head: tensors[head]} if last else {head: tensors[head]} | rest
    refit, call, at, packed = Refit(worker), worker.call, [], []
    layer_of_head = worker.model_runner.get_model().lm_head

    def calling(method, message):
        at.append(method)
        return call(method, message)

    def packing(layer):
        packed.extend([at[-1]] if layer is layer_of_head else [])
        pack(layer)

    as_pushed = [tensors, stepped(tensors, size=1e-3), stepped(tensors, 1) | {head: stepped(tensors, size=1e-3)[head]}]
    for weights, expected in zip(as_pushed, ("stream", "finish" if last else "stream", ""), strict=True):
        with monkeypatch.context() as patched:
            patched.setattr(worker, "call", calling)
            for module in ("session", "patches"):
                patched.setattr(f"nemo_fp8.rollout.refit.worker.{module}.pack", packing)
            packed.clear()
            refit.push(weights, delta=True).require()
        # Of changes nobody knows that a tensor's last one has come before the first one of another tensor does.
        assert packed == ([expected] if expected else [])
        assert differing(of(worker), fresh(checkpoint("qwen3", 0), weights)[1]) == []


def test_changes_that_are_refused_end_no_push_of_another_trainer(checkpoint, pushed):
    """Be it one of everything, or of changes, that has written already."""
    worker, refit, tensors = pushed
    other = Refit(worker, chunk=2**20)
    asked = []

    def disturbed(after, manifest):
        for i, pair in enumerate(after.items()):
            if i == 30:
                asked.append(worker.call("delta", {"push": "x", "base": "y", "manifest": manifest.digest})[0])
            yield pair

    for delta, size in ((False, 0.0), (True, 0.0), (True, 1.0)):
        after = stepped(tensors, size=size)
        receipt = other.push(disturbed(after, refit.ledger.manifest), manifest=after, delta=delta).require()
        assert receipt.delta is None or (receipt.delta.instead == "") == (size > 0)
        assert differing(of(worker), fresh(checkpoint("qwen3", 0), after)[1]) == []
    assert [answer["problems"][0][0] for answer in asked] == ["A patch of push y is not for this engine."] * 3


def test_scales_of_a_cache_come_with_changes_and_are_seen_if_somebody_else_sets_them(checkpoint):
    worker = Worker(build(checkpoint("qwen3", 0), engine_args(Precision(rollout="fp8", kv_cache="fp8"))))
    names = [f"model.layers.{i}.self_attn.{which}_proj.{which}_scale" for i in range(4) for which in "kv"]
    tensors = weights_of(checkpoint("qwen3", 1)) | {name: torch.tensor(0.5) for name in names}
    refit, model = Refit(worker), worker.model_runner.get_model()
    refit.push(tensors, delta=True).require()
    tensors[names[0]] = torch.tensor(0.25)
    receipt = refit.push(tensors, delta=True).require()
    assert (receipt.delta.instead, {*receipt.delta.whole}) == ("", {*names[:2]})
    assert [*scales_of(model).values()] == [0.25, *[0.5] * 7]
    set_scales(model, {"model.layers.1.self_attn.attn.k_scale": 0.25})
    instead = refit.push(tensors, delta=True).require().delta.instead
    assert "layers.1.self_attn.k_proj.k_scale and 1 more are not what the trainer has" in instead
    assert [*scales_of(model).values()] == [0.25, *[0.5] * 7]


@pytest.mark.parametrize("contract", [{"rollout_block": "tensor"}, {}], ids=str)
def test_a_trainer_that_writes_on_is_not_believed(checkpoint, monkeypatch, contract):
    """Its optimizer steps while a push of everything is under way: what was sent is what the ledger must have."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0), **contract)), weights_of(checkpoint("qwen3", 1))
    copy, before, refit = wire._copy, tensors[K_PROJ].clone(), Refit(worker)

    def copy_and_step(source, *place):
        copy(source, *place)
        if torch.equal(source, before):
            tensors[K_PROJ].mul_(2)

    monkeypatch.setattr(wire, "_copy", copy_and_step)
    refit.push(tensors, delta=True).require()
    assert torch.equal(tensors[K_PROJ], before * 2)
    receipt = refit.push(tensors, delta=True).require()
    assert [*receipt.delta.whole] == [K_PROJ] or contract
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors, **contract)[1]) == []


class Damaging(Worker):
    """A worker to whom every piece comes as ``damage`` makes it, once."""

    damage = None

    def _refit_write(self, session, message):
        if message["pieces"] and self.damage:
            damage, self.damage = self.damage, None
            message = message | {"pieces": damage([list(piece) for piece in message["pieces"]])}
        super()._refit_write(session, message)


class Late(Worker):
    """A worker to whom the last patch of one tensor comes after those of others."""

    held_back = 0

    def _refit_write(self, session, message):
        pieces = message["pieces"]
        number = next((one for one, times in Counter(piece[0] for piece in pieces).items() if times > 1), None)
        last = max((at for at, piece in enumerate(pieces) if piece[0] == number), default=None)
        if last is None or {piece[0] for piece in pieces[last + 1 :]} == set():
            return super()._refit_write(session, message)
        self.held_back += 1
        super()._refit_write(session, message | {"pieces": pieces[:last] + pieces[last + 1 :]})
        return super()._refit_write(session, message | {"pieces": [pieces[last]]})


def test_a_tensor_that_is_patched_again_is_read_again(checkpoint):
    """It was read when the patches of others came, and is another since."""
    worker, tensors = Late(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20)
    refit.push(tensors, delta=True)
    receipt = refit.push(stepped(tensors, size=1e-2), delta=True).require()
    assert worker.held_back > 0
    assert receipt.delta.instead == ""
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), stepped(tensors, size=1e-2))[1]) == []


def _with(**changes):
    at = {"i": 0, "what": 1, "row": 2, "rows": 3, "steps": 4, "others": 5, "offset": 6}

    def damage(pieces):
        for name, value in changes.items():
            pieces[-1][at[name]] = value(pieces[-1]) if callable(value) else value
        return pieces

    return damage


DAMAGE = {
    "another tensor": (_with(i=10**6), "The manifest has"),
    "a negative tensor": (_with(i=-1), "The manifest has"),
    "no plane": (_with(what=2), "values and scales"),
    "scales of a norm": (lambda pieces: [[1, 1, 0, 1, 1, 0, 0]], "has no scales here"),
    "rows beyond the end": (_with(rows=10**6), "rows, of which"),
    "no rows": (_with(rows=0), "rows, of which"),
    "rows that were there": (lambda pieces: [*pieces, pieces[-1]], "are done"),
    "more changes than elements": (_with(steps=10**12), "It has"),
    "fewer than none": (_with(others=-1), "It has"),
    "none": (_with(steps=0, others=0), "It has"),
    "another count": (_with(steps=lambda piece: piece[4] - 1), "A patch cannot be read|does not lie inside"),
    "beyond the memory": (_with(offset=2**20 - 1), "does not lie inside"),
    "no numbers": (_with(steps="1"), "no seven whole numbers"),
    "whole rows of what was patched": (
        lambda pieces: [*pieces, [pieces[0][0], 0, 1, 0]],
        "was patched already|cut there",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_patch_is_refused_and_repaired(checkpoint, damage, words):
    worker, tensors = Damaging(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20)
    refit.push(tensors, delta=True).require()
    worker.damage, tensors = damage, stepped(tensors)
    receipt = refit.push(tensors, delta=True).require()
    assert worker.damage is None
    assert any(word in receipt.delta.instead for word in words.split("|")), receipt.delta.instead
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


def test_bytes_that_were_changed_on_the_way_are_seen(checkpoint, pushed, monkeypatch):
    """A patch that can be read, and is another: the fingerprint refuses it."""
    worker, refit, tensors = pushed
    call = Worker.call

    def flip(self, method, message):
        if method == "finish" and "expected" in message:
            message["expected"][str(refit_place)] = {}
        return call(self, method, message)

    refit_place = refit.ledger.manifest.places[K_PROJ]
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "call", flip)
        receipt = refit.push(stepped(tensors), delta=True).require()
    assert K_PROJ in receipt.delta.instead
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), stepped(tensors))[1]) == []


class Held(Damaging):
    """A worker whose engine computes no request from ``hold`` on, and whose next full push is refused at its start."""

    holds, refuses_all = False, False

    def hold(self, running):
        self.holds = True

    def free(self):
        self.holds = False

    def call(self, method, message):
        if method == "begin" and self.refuses_all:
            return [{"problems": [["The manifest is refused.", "", ""]]}]
        return super().call(method, message)


def test_changes_that_are_refused_hold_nobody_up(checkpoint):
    """Also where the push of everything that follows is refused, before it held the engine itself."""
    worker, tensors = Held(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20)
    refit.push(tensors, delta=True).require()
    before = of(worker)
    worker.damage, worker.refuses_all = DAMAGE["no rows"][0], True
    with pytest.raises(PrecisionError, match="The manifest is refused"):
        refit.push(stepped(tensors), delta=True)
    assert worker.damage is None
    assert not worker.holds
    assert differing(of(worker), before) == []
    worker.refuses_all = False
    repaired(checkpoint, worker, refit, stepped(tensors), "its last push died")


def test_what_is_refused_before_the_first_byte_loses_no_ledger(checkpoint, pushed):
    """Whether everything or changes were to be pushed: the engine holds what the ledger says."""
    worker, refit, tensors = pushed
    before, name = of(worker), next(iter(tensors))
    for delta in (True, False):
        for wrong in (
            {"named_tensors": tensors | {name: tensors[name][:1]}},
            {"named_tensors": {one: tensor for one, tensor in tensors.items() if one != name}},
            {"named_tensors": tensors, "weight_version": 5},
            {"named_tensors": tensors, "weight_version": "a\nb"},
        ):
            with pytest.raises(PrecisionError):
                refit.push(**wrong, delta=delta)
    assert differing(of(worker), before) == []
    receipt = refit.push(stepped(tensors), delta=True).require()
    assert not receipt.delta.instead
    assert receipt.delta.share


# ---------------------------------------------------------------------- what dies


def test_changes_that_one_worker_ended_and_another_took_back_are_served_by_nobody(checkpoint, monkeypatch):
    """The second worker is told here: it cannot end the push, and is at the version of before again."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit, call = Refit(worker, chunk=2**20), Worker.call
    base = refit.push(tensors, delta=True).require().push
    told = {"finish": {"problems": [["There is no memory.", "", ""]]}, "abandon": {"mixed": "", "version": base}}
    with monkeypatch.context() as patch:

        def both(self, method, message):
            return call(self, method, message) + ([told[method]] if method in told else [])

        patch.setattr(Worker, "call", both)
        with pytest.raises(PrecisionError, match="There is no memory"):
            refit._push_changes(refit.ledger, stepped(tensors), None, False, None)
    assert "workers hold different pushes" in worker.refuses
    refit.push(stepped(tensors)).require()
    assert worker.refuses == ""


@pytest.mark.parametrize("delta", [False, True])
def test_a_push_that_is_interrupted_once_the_workers_ended_it_has_ended(checkpoint, pushed, monkeypatch, delta):
    """Its weights are served, so what was computed with the old ones is dropped."""
    worker, refit, tensors = pushed
    done, call = [], Worker.call

    def interrupted(self, method, message):
        answers = call(self, method, message)
        done.append((method, message.get("weight_version")))
        if method == "finish":
            raise KeyboardInterrupt
        return answers

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "call", interrupted)
        patch.setattr(Worker, "forget", lambda self: done.append("forgotten"))
        with pytest.raises(KeyboardInterrupt):
            refit.push(stepped(tensors), delta=delta, weight_version="seventh")
    assert done[-3:] == [("finish", "seventh"), ("abandon", "seventh"), "forgotten"]
    assert worker.refuses == ""
    assert refit.push(stepped(tensors, 9), delta=True).require().delta.instead


@pytest.mark.parametrize("times", [1, 2])
def test_a_cache_of_which_nobody_knows_answers_nobody(checkpoint, pushed, monkeypatch, times):
    """An interrupted reset is asked for again; one that fails again leaves an engine that refuses."""
    worker, refit, tensors = pushed
    asked = []

    def forget(self):
        asked.append(1)
        if len(asked) <= times:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "forget", forget)
        with pytest.raises(KeyboardInterrupt):
            refit.push(stepped(tensors))
    assert len(asked) == 2
    assert ("prefix cache was not dropped" in worker.refuses) == (times == 2)
    refit.push(tensors).require()
    assert worker.refuses == ""


def test_a_second_interrupt_is_the_worst_case(checkpoint, pushed, monkeypatch):
    worker, refit, tensors = pushed
    call = Worker.call

    def interrupted(self, method, message):
        if method in ("finish", "abandon"):
            raise KeyboardInterrupt
        return call(self, method, message)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            refit.push(stepped(tensors))
    assert "so did asking the engine" in worker.refuses


def _dying(tensors, after):
    yield from [*tensors.items()][:after]
    raise ConnectionError("the trainer went away")


def test_a_push_that_dies_between_two_patches_is_taken_back(checkpoint, pushed):
    """Bit for bit the weights of before, which are served; the next push is of everything, since the ledger is gone."""
    worker, refit, tensors = pushed
    before, after = of(worker), stepped(tensors, size=1.0)  # so much that a buffer is full before the end
    with pytest.raises(ConnectionError):
        refit.push(_dying(after, 40), delta=True)
    assert worker.refuses == ""
    assert differing(of(worker), before) == []
    repaired(checkpoint, worker, refit, after, "its last push died")


def test_an_interrupt_while_buffers_are_filled_ahead_changes_nothing(checkpoint, pushed, monkeypatch):
    """The engine answers afterwards, and hears of the end; what was filled is sent by nobody."""
    worker, refit, tensors = pushed
    before, after, call, buffer = of(worker), stepped(tensors, size=1.0), worker.call, SharedMemory.buffer
    interrupted, filled, heard = threading.Event(), [], []

    def slowly(method, message):
        if method == "delta":
            assert interrupted.wait(20)
        heard.append(method)
        return call(method, message)

    def interrupt(self):
        filled.append(self)
        if len(filled) == SharedMemory.buffers:
            interrupted.set()
            raise KeyboardInterrupt
        return buffer(self)

    with monkeypatch.context() as patched:
        patched.setattr(worker, "call", slowly)
        patched.setattr(SharedMemory, "buffer", interrupt)
        patched.setattr("nemo_fp8.rollout.refit.ledger.FIRST", 1)
        with pytest.raises(KeyboardInterrupt):
            refit.push(after, delta=True)
    assert heard == ["delta", "abandon"]
    assert worker.refuses == ""
    assert differing(of(worker), before) == []
    repaired(checkpoint, worker, refit, after, "its last push died")


def test_patches_were_there_before_they_were_taken_back(pushed, monkeypatch):
    """The test above would see patches that are not taken back."""
    worker, refit, tensors = pushed
    before = of(worker)
    monkeypatch.setattr("nemo_fp8.rollout.refit.worker.patches.MOST_KEPT", 0)
    with pytest.raises(ConnectionError):
        refit.push(_dying(stepped(tensors, size=1.0), 40), delta=True)
    assert "half-way" in worker.refuses
    assert differing(of(worker), before)
    receipt = refit.push(tensors, delta=True).require()
    assert "half-way" in receipt.after_failure
    assert differing(of(worker), before) == []


def test_a_sender_that_is_gone_is_taken_back_by_the_next(checkpoint, pushed):
    """Nobody abandons what a killed sender has begun: the next push does."""
    worker, refit, tensors = pushed
    before, ledger = of(worker), refit.ledger
    begin = {"push": "dead", "manifest": ledger.manifest.digest, "base": ledger.version}
    assert worker.call("delta", begin)[0]["accepted"]
    shared = Shared(2**20)
    chunks = ledger.changes(stepped(tensors, size=1.0).items(), lambda: shared.tensor, 2**20)
    pieces, _ = next(chunks)
    worker.call("write", {"push": "dead", "memory": shared.handle, "pieces": [list(piece) for piece in pieces]})
    assert differing(of(worker), before)
    assert worker.call("delta", begin)[0]["accepted"]  # its version is that of before again
    assert differing(of(worker), before) == []
    assert worker.call("abandon", {"push": "dead"})[0]["mixed"] == ""
    shared.close()


def test_an_iterator_that_is_used_up_says_push_again(checkpoint, pushed):
    worker, refit, tensors = pushed
    worker.model_runner.get_model().model.layers[1].input_layernorm.weight.data[3] = 5.0
    with pytest.raises(PrecisionError, match="their iterator is used up"):
        refit.push(iter(tensors.items()), delta=True)
    assert "half-way" in worker.refuses
    repaired(checkpoint, worker, refit, tensors, "its last push died")


def test_whole_tensors_are_not_what_came_before(checkpoint, monkeypatch):
    """What a kernel packed cannot be read back, so the worker compares what came with what the trainer sent."""
    worker, tensors = (
        Damaging(build(checkpoint("qwen3", 0), rollout_block="tensor")),
        weights_of(checkpoint("qwen3", 1)),
    )
    refit = Refit(worker)
    refit.push(tensors, delta=True)
    tensors = tensors | {K_PROJ: tensors[K_PROJ] * 2}
    worker.damage = lambda pieces: [[*piece[:3], 0] for piece in pieces]  # the rows of another tensor
    receipt = refit.push(tensors, delta=True).require()
    assert "not what the trainer has" in receipt.delta.instead
    assert differing(of(worker), fresh(checkpoint("qwen3", 0), tensors, rollout_block="tensor")[1]) == []


def test_whole_tensors_that_stayed_away_are_missed(checkpoint, monkeypatch):
    worker, tensors = Worker(build(checkpoint("qwen3", 0), rollout_block="tensor")), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True)
    monkeypatch.setattr(type(refit.ledger), "going", lambda self: [self.manifest.places[K_PROJ]])
    receipt = refit.push(tensors | {K_PROJ: tensors[K_PROJ] * 2}, delta=True).require()
    assert "did not come" in receipt.delta.instead
