"""Pushes of changes that do not fit are refused and become pushes of everything; those that die are taken back."""

import random
import threading
from collections import Counter

import pytest
import torch
from support.rollout.held import differing, fresh, held_by, pushed_once
from support.rollout.in_process import Worker, build
from support.rollout.models import K_PROJ, stacked, stepped, weights_of

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import Refit, engine_args
from nemo_fp8.rollout.engine.kv import scales_of, set_scales
from nemo_fp8.rollout.refit import wire
from nemo_fp8.rollout.refit.manifest import Manifest
from nemo_fp8.rollout.refit.memory import Shared
from nemo_fp8.rollout.refit.patch import VALUES
from nemo_fp8.rollout.refit.wire import SharedMemory
from nemo_fp8.rollout.refit.worker.layouts import Tally

# ---------------------------------------------------------------------- what does not fit


@pytest.fixture
def pushed(checkpoint):
    return pushed_once(checkpoint)


def repaired(checkpoint, worker, refit, tensors, words):
    """A push of changes becomes one of everything, says so, and leaves every bit right; the next one fits again."""
    receipt = refit.push(tensors, delta=True).require()
    assert words in receipt.delta.instead
    assert "  all, since    " in str(receipt)
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []
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
    assert differing(held_by(worker), fresh(checkpoint("qwen3_moe", 0), tensors)[1]) == []
    assert refit.push(stepped(stacked(tensors)), delta=True).delta.instead == ""


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
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors, **contract)[1]) == []
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
        assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), after)[1]) == []
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
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors, **contract)[1]) == []


class Damaging(Worker):
    """A worker to whom every piece comes as ``damage`` makes it, once."""

    damage = None

    def _refit_write(self, session, message):
        if message["pieces"] and self.damage:
            damage, self.damage = self.damage, None
            message = message | {"pieces": damage([list(piece) for piece in message["pieces"]])}
        super()._refit_write(session, message)


def _with(**changes):
    at = {"i": 0, "what": 1, "row": 2, "rows": 3, "coding": 4, "ups": 5, "downs": 6, "others": 7, "offset": 8}

    def damage(pieces):
        for name, value in changes.items():
            pieces[-1][at[name]] = value(pieces[-1]) if callable(value) else value
        return pieces

    return damage


DAMAGE = {
    "another tensor": (_with(i=10**6), "The manifest has"),
    "a negative tensor": (_with(i=-1), "The manifest has"),
    "no plane": (_with(what=2), "values and scales"),
    "scales of a norm": (lambda pieces: [[1, 1, 0, 1, 0, 1, 0, 0, 0]], "has no scales here"),
    "rows beyond the end": (_with(rows=10**6), "rows, of which"),
    "no rows": (_with(rows=0), "rows, of which"),
    "rows that were there": (lambda pieces: [*pieces, pieces[-1]], "are done"),
    "more changes than elements": (_with(ups=10**12), "It has"),
    "fewer than none": (_with(others=-1), "It has"),
    "none": (_with(ups=0, downs=0, others=0), "It has"),
    "another count": (_with(ups=lambda piece: piece[5] - 1), "A patch cannot be read|does not lie inside"),
    "no coding": (_with(coding=2), "No patch is coded as 2"),
    "another coding": (_with(coding=lambda piece: 1 - piece[4]), "A patch cannot be read|does not lie inside"),
    "beyond the memory": (_with(offset=2**20 - 1), "does not lie inside"),
    "no numbers": (_with(ups="1"), "no nine whole numbers"),
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
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


def test_bytes_that_were_changed_on_the_way_are_seen(checkpoint, pushed, monkeypatch):
    """Wherever a bit flips: what comes is no patch, or it is another one, which the fingerprint refuses."""
    worker, refit, tensors = pushed
    send, draws, words = SharedMemory.send, random.Random(0), Counter()
    for number in range(12):
        flipped = []

        def flip(self, pieces, used, flipped=flipped):
            if used and not flipped:
                first = (self.turn - self.filled + 1) % self.buffers * self.size
                flipped.append(first + draws.randrange(used))
                self.shared.tensor[flipped[0]] ^= 1 << draws.randrange(8)
            send(self, pieces, used)

        tensors = stepped(tensors, number)
        with monkeypatch.context() as patch:
            patch.setattr(SharedMemory, "send", flip)
            words[refit.push(tensors, delta=True).require().delta.instead[:26]] += 1
        assert flipped
    assert "" not in words
    assert len(words) > 1, words
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors)[1]) == []


def test_patches_that_lie_on_one_another_are_refused(checkpoint):
    """A worker copies all of a message before it reads any, and no more than the sender has."""
    worker, tensors = Damaging(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker, chunk=2**20)
    refit.push(tensors, delta=True).require()
    planes = {i: kept.planes[VALUES] for i, kept in refit.ledger.kept.items()}
    worker.damage = lambda _: [[i, VALUES, 0, p.rows, 0, 0, 0, p.rows * p.columns, 0] for i, p in planes.items()]
    receipt = refit.push(stepped(tensors), delta=True).require()
    assert "cannot lie side by side" in receipt.delta.instead
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), stepped(tensors))[1]) == []


@pytest.mark.parametrize("number", ["x" * 2000, None, 7, ["a"], "a\nb"], ids=lambda number: str(number)[:9])
def test_a_push_has_a_short_number(pushed, number):
    """It stands in what an engine says of a push that died."""
    worker, refit, tensors = pushed
    manifest = Manifest.of(tensors)
    for method, about in (
        ("begin", {"tensors": manifest.to_plain()}),
        ("delta", {"manifest": manifest.digest, "base": refit.ledger.version}),
    ):
        (answer,) = worker.call(method, about | {"push": number})
        assert "is no number of a push" in answer["problems"][0][0]
    assert refit.push(stepped(tensors), delta=True).require().delta.instead == ""


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
    before = held_by(worker)
    worker.damage, worker.refuses_all = DAMAGE["no rows"][0], True
    with pytest.raises(PrecisionError, match="The manifest is refused"):
        refit.push(stepped(tensors), delta=True)
    assert worker.damage is None
    assert not worker.holds
    assert differing(held_by(worker), before) == []
    worker.refuses_all = False
    repaired(checkpoint, worker, refit, stepped(tensors), "its last push died")


def test_what_is_refused_before_the_first_byte_loses_no_ledger(checkpoint, pushed):
    """Whether everything or changes were to be pushed: the engine holds what the ledger says."""
    worker, refit, tensors = pushed
    before, name = held_by(worker), next(iter(tensors))
    for delta in (True, False):
        for wrong in (
            {"named_tensors": tensors | {name: tensors[name][:1]}},
            {"named_tensors": {one: tensor for one, tensor in tensors.items() if one != name}},
            {"named_tensors": tensors, "weight_version": 5},
            {"named_tensors": tensors, "weight_version": "a\nb"},
        ):
            with pytest.raises(PrecisionError):
                refit.push(**wrong, delta=delta)
    assert differing(held_by(worker), before) == []
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
    before, after = held_by(worker), stepped(tensors, size=1.0)  # so much that a buffer is full before the end
    with pytest.raises(ConnectionError):
        refit.push(_dying(after, 40), delta=True)
    assert worker.refuses == ""
    assert differing(held_by(worker), before) == []
    repaired(checkpoint, worker, refit, after, "its last push died")


def test_an_interrupt_while_buffers_are_filled_ahead_changes_nothing(checkpoint, pushed, monkeypatch):
    """The engine answers afterwards, and hears of the end; what was filled is sent by nobody."""
    worker, refit, tensors = pushed
    before, after, call, buffer = held_by(worker), stepped(tensors, size=1.0), worker.call, SharedMemory.buffer
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
    assert differing(held_by(worker), before) == []
    repaired(checkpoint, worker, refit, after, "its last push died")


def test_patches_were_there_before_they_were_taken_back(pushed, monkeypatch):
    """The test above would see patches that are not taken back."""
    worker, refit, tensors = pushed
    before = held_by(worker)
    monkeypatch.setattr("nemo_fp8.rollout.refit.worker.patches.MOST_KEPT", 0)
    with pytest.raises(ConnectionError):
        refit.push(_dying(stepped(tensors, size=1.0), 40), delta=True)
    assert "half-way" in worker.refuses
    assert differing(held_by(worker), before)
    receipt = refit.push(tensors, delta=True).require()
    assert "half-way" in receipt.after_failure
    assert differing(held_by(worker), before) == []


def test_a_sender_that_is_gone_is_taken_back_by_the_next(checkpoint, pushed):
    """Nobody abandons what a killed sender has begun: the next push does."""
    worker, refit, tensors = pushed
    before, ledger = held_by(worker), refit.ledger
    begin = {"push": "dead", "manifest": ledger.manifest.digest, "base": ledger.version}
    assert worker.call("delta", begin)[0]["accepted"]
    shared = Shared(2**20)
    chunks = ledger.changes(stepped(tensors, size=1.0).items(), lambda: shared.tensor, 2**20)
    pieces, _ = next(chunks)
    worker.call("write", {"push": "dead", "memory": shared.handle, "pieces": [list(piece) for piece in pieces]})
    assert differing(held_by(worker), before)
    assert worker.call("delta", begin)[0]["accepted"]  # its version is that of before again
    assert differing(held_by(worker), before) == []
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
    assert differing(held_by(worker), fresh(checkpoint("qwen3", 0), tensors, rollout_block="tensor")[1]) == []


def test_whole_tensors_that_stayed_away_are_missed(checkpoint, monkeypatch):
    worker, tensors = Worker(build(checkpoint("qwen3", 0), rollout_block="tensor")), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    refit.push(tensors, delta=True)
    monkeypatch.setattr(type(refit.ledger), "going", lambda self: [self.manifest.places[K_PROJ]])
    receipt = refit.push(tensors | {K_PROJ: tensors[K_PROJ] * 2}, delta=True).require()
    assert "did not come" in receipt.delta.instead
