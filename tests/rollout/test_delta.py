"""Pushes of changes into vLLM's models, in this process: bitwise a full push, whatever changes and however it comes."""

import threading
import time
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from support.rollout.engines import MX
from support.rollout.held import differing, fresh, held_by, pushed_once
from support.rollout.in_process import Remote, Worker, build
from support.rollout.models import K_PROJ, NORM, stepped, weights_of

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import quantize
from nemo_fp8.numerics.kernels.patches import Coding
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit.manifest import Manifest
from nemo_fp8.rollout.refit.planes import Cast, changes
from nemo_fp8.rollout.refit.wire import Body, SharedMemory
from nemo_fp8.rollout.refit.worker.packing import pack

POW2 = {"weight_scale": "pow2", "first_layers": 1}


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
        assert differing(held_by(worker), bits) == []
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
    tensors, found = weights_of(checkpoint(kind, 0)), []
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
            found.append(held_by(worker))
    bits = fresh(checkpoint(kind, 0), stepped(tensors))[1]
    assert [differing(one, bits) for one in found] == [[], []]


def test_nothing_changed_is_nothing_sent(checkpoint):
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True)
    receipt = refit.push(tensors, delta=True).require()
    assert (receipt.bytes, receipt.chunks, receipt.delta.changed, receipt.delta.confirmed) == (0, 0, 0, 47)


@pytest.mark.parametrize(("made", "transport", "travels"), [
    (Worker, "auto", False), (Remote, "auto", True), (Remote, "memory", False), (Worker, "memory", False),
])  # fmt: skip
def test_auto_sends_changes_where_bytes_travel(checkpoint, made, transport, travels):
    """And everything through shared memory, without a ledger."""
    worker, tensors = made(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20, transport=transport)
    assert (refit.push(tensors, delta="auto").require().delta is not None) == travels
    after = stepped(tensors)
    receipt = refit.push(after, delta="auto").require()
    assert (refit.ledger is not None) == travels
    assert receipt.delta.instead == "" if travels else receipt.delta is None
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), after)[1]) == []


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("made", [Worker, Remote])
def test_patches_are_quick_where_nothing_travels(checkpoint, made, packs, monkeypatch):
    """If the processor packs elements of vectors, and if enough changed; to the same bits in any case."""
    codings = set()

    class Noting(made):
        def _refit_write(self, session, message):
            codings.update(piece[4] for piece in message["pieces"] if len(piece) == 9)
            super()._refit_write(session, message)

    monkeypatch.setattr("nemo_fp8.rollout.refit.push.packs", lambda: packs)
    worker, tensors = Noting(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20)
    refit.push(tensors, delta=True).require()
    few = dict(tensors)
    few[K_PROJ] = tensors[K_PROJ].clone()
    few[K_PROJ][3, 5] *= 1.2
    for after, quick in ((few, False), (stepped(few), packs and made is Worker)):
        codings.clear()
        assert refit.push(after, delta=True).require().delta.instead == ""
        assert (Coding.QUICK in codings) == quick
        assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), after)[1]) == []


def test_no_other_delta_is_known(checkpoint):
    worker = Worker(build(checkpoint("qwen3", 0)))
    with pytest.raises(PrecisionError, match="Did you mean 'auto'"):
        Refit(worker).push(weights_of(checkpoint("qwen3", 1)), delta="autos")


@pytest.mark.parametrize("once", [False, True], ids=["mapping", "iterator"])
def test_changes_are_looked_for_while_the_engine_answers(checkpoint, monkeypatch, once):
    """But not in an iterator, of which everything would have to be pushed if the engine refuses."""
    worker, refit, tensors = pushed_once(checkpoint)
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


@pytest.mark.parametrize(("name", "way"), [("memory", SharedMemory), ("http", Body)])
def test_buffers_that_are_filled_while_the_engine_answers_go_to_it_in_their_order(checkpoint, monkeypatch, name, way):
    """No more of them are filled than there are."""
    worker, tensors = Remote(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
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
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), after)[1]) == []


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
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors, rollout_block="tensor")[1]) == []


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
    assert differing(held_by(worker), bits) == []
    assert receipt.fingerprint == whole.fingerprint


def test_an_iterator_brings_changes_too(checkpoint):
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(iter(tensors.items()), manifest=tensors, delta=True)
    tensors = stepped(tensors)
    assert refit.push(iter(tensors.items()), delta=True).delta.instead == ""
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


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
        assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []
    assert max(looks[0]) == 1  # no tensor here is more than a strip
    assert max(looks[1]) > 2


def test_a_mapping_may_make_each_tensor_when_it_is_asked_for(checkpoint):
    """In memory that it uses again, as one does that gathers shards, or reads a file: what was looked at later would be
    found in the place of it, by ledger and engine alike, and every fingerprint would agree."""

    class Gathering(Mapping):
        def __init__(self, tensors):
            self.tensors, self.room = tensors, torch.empty(max(t.numel() for t in tensors.values())).bfloat16()

        def __getitem__(self, name):
            tensor = self.tensors[name]
            return self.room[: tensor.numel()].view(tensor.shape).copy_(tensor)

        def __iter__(self):
            return iter(self.tensors)

        def __len__(self):
            return len(self.tensors)

    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    for step in range(3):
        tensors = stepped(tensors, step)
        receipt = refit.push(Gathering(tensors), delta=True).require()
        assert (receipt.delta.instead == "") == (step > 0)
        assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


def test_weights_from_which_others_were_made_have_no_way_back(checkpoint, monkeypatch):
    """Attention derives matrices from the new weights at the end of a push: one that dies then has not the weights of
    before, whatever its patches are."""
    worker, tensors = Worker(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True)

    def failing(layers, config):
        raise RuntimeError("no memory")

    monkeypatch.setattr("nemo_fp8.rollout.refit.worker.session.process_attention", failing)
    with pytest.raises(PrecisionError, match="no memory"):
        refit.push(iter(stepped(tensors).items()), delta=True)
    assert "died half-way" in worker._refit_mixed
    assert "died half-way" in worker.refuses


@pytest.mark.parametrize("how", [dict, list, iter], ids=["mapping", "pairs", "iterator"])
def test_changes_come_in_any_order(checkpoint, how):
    worker, refit, tensors = pushed_once(checkpoint)
    for seed, order in ((1, reversed), (2, sorted)):
        tensors = dict(order(stepped(tensors, seed).items()))
        manifest = Manifest.of(tensors) if how is iter else None
        assert refit.push(how(tensors.items()), manifest=manifest, delta=True).require().delta.instead == ""
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


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
        assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), weights)[1]) == []


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
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), stepped(tensors, size=1e-2))[1]) == []


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
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


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
