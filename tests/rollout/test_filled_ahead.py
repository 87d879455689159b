"""The first buffers of a push are filled while the engine still answers to its begin, by what it answered the last
time: they are sent if it answers the same, and thrown away if not."""

import threading
import time

import pytest
from support.rollout.held import differing, fresh, held_by
from support.rollout.in_process import Remote, build
from support.rollout.models import stepped, weights_of

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.kernels import build as build_of_kernels
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import casting
from nemo_fp8.rollout.refit.wire import Body, SharedMemory

WAYS = {"memory": SharedMemory, "http": Body}


class Slow(Remote):
    """Answers to ``begin`` when ``answers_after`` says so, as ``changed`` makes of it, and notes what it was asked."""

    def __init__(self, model):
        super().__init__(model)
        self.heard = []
        self.answers_after = lambda: None
        self.changed = lambda answer: answer

    def call(self, method, message):
        self.heard.append(method)
        if method != "begin":
            return super().call(method, message)
        self.answers_after()
        return [self.changed(answer) for answer in super().call(method, message)]


@pytest.fixture(params=WAYS)
def pushed(request, checkpoint, monkeypatch):
    """An engine, a Refit of many small buffers that has pushed once, its tensors, and the buffers it asks for next."""
    monkeypatch.setattr(casting, "LEAST", 0)
    worker, tensors, way = Slow(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1)), WAYS[request.param]
    monkeypatch.setattr(way, "most", 2**18)
    refit = Refit(worker, transport=request.param)
    refit.push(tensors).require()
    given, buffer = [], way.buffer
    monkeypatch.setattr(way, "buffer", lambda self: (given.append(self), buffer(self))[1])
    worker.heard.clear()
    return worker, refit, tensors, given


def until_all_are_given(given):
    """Wait until as many buffers are asked for as there are; then a while longer, for one more."""
    end = time.monotonic() + 20
    while not given or (len(given) < given[0].buffers and time.monotonic() < end):
        time.sleep(0.01)
    time.sleep(0.1)


def holds(worker, receipt, checkpoint, tensors):
    """Whether an engine has, and tells of, what one has that was pushed into but once."""
    expected, bits = fresh(checkpoint("qwen3", 0), tensors)
    return differing(held_by(worker), bits) == [] and receipt.fingerprint == expected.fingerprint


def test_all_buffers_are_filled_and_then_sent_in_their_order(checkpoint, pushed):
    worker, refit, tensors, given = pushed
    filled = []
    worker.answers_after = lambda: (until_all_are_given(given), filled.append(len(given)))
    after = stepped(tensors)
    receipt = refit.push(after).require()
    assert filled == [given[0].buffers]
    assert len(given) == receipt.chunks > given[0].buffers
    assert len({*map(id, given)}) == 1
    assert holds(worker, receipt, checkpoint, after)


def test_nothing_is_filled_before_the_first_answer(checkpoint):
    """Nobody knows then what may be cast, and what is not sent."""
    worker, tensors = Slow(build(checkpoint("qwen3", 0))), weights_of(checkpoint("qwen3", 1))
    refit = Refit(worker)
    worker.answers_after = lambda: (time.sleep(0.2), worker.heard.append(refit._buffers))
    refit.push(tensors).require()
    assert worker.heard[:2] == ["begin", None]


@pytest.mark.parametrize("how", ["iterator", "verify", "delta", "others"])
def test_nothing_is_filled_where_the_last_answer_may_not_do(checkpoint, pushed, how):
    worker, refit, tensors, given = pushed
    filled = []
    worker.answers_after = lambda: (time.sleep(0.2), filled.append(len(given)))
    after = stepped(tensors)
    if how == "others":
        after = dict(reversed(after.items()))
    receipt = refit.push(
        iter(after.items()) if how == "iterator" else after, verify=how == "verify", delta=how == "delta"
    ).require()
    assert filled == [0]
    assert holds(worker, receipt, checkpoint, after)


@pytest.mark.skipif(build_of_kernels.library() is None, reason="no C compiler: the engine casts all")
def test_another_answer_than_the_last_throws_away_what_was_filled(checkpoint, pushed):
    """Here the engine no longer lets anything be cast, so that all goes as values."""
    worker, refit, tensors, given = pushed
    worker.answers_after = lambda: until_all_are_given(given)
    worker.changed = lambda answer: answer | {"castable": []}
    after = stepped(tensors)
    receipt = refit.push(after).require()
    assert len(given) == receipt.chunks + given[0].buffers
    assert receipt.bytes == sum(t.nbytes for t in after.values())
    assert holds(worker, receipt, checkpoint, after)
    worker.changed = lambda answer: answer
    given.clear()
    again = refit.push(tensors).require()  # which has to be cast again
    assert again.bytes < receipt.bytes
    assert holds(worker, again, checkpoint, tensors)


def test_a_refusal_leaves_what_was_filled_and_nobody_hears_of_an_end(pushed):
    worker, refit, tensors, given = pushed
    before = held_by(worker)
    worker.answers_after = lambda: until_all_are_given(given)
    worker.changed = lambda answer: answer | {"problems": [["what", "why", "remedy"]]}
    with pytest.raises(PrecisionError, match="what"):
        refit.push(stepped(tensors))
    assert worker.heard == ["begin"]
    assert worker.refuses == ""
    assert differing(held_by(worker), before) == []


def test_an_interrupt_changes_nothing(checkpoint, pushed, monkeypatch):
    """The engine answers afterwards, hears of the end, and serves; nobody sends what was filled. A ledger stays."""
    worker, refit, tensors, _ = pushed
    refit.push(tensors, delta=True).require()
    worker.heard.clear()
    before, after, interrupted = held_by(worker), stepped(tensors, size=1.0), threading.Event()
    worker.answers_after = lambda: interrupted.wait(20)
    way = WAYS[refit.transport]
    with monkeypatch.context() as patched:
        patched.setattr(way, "buffer", lambda self: (interrupted.set(), _interrupt()))
        with pytest.raises(KeyboardInterrupt):
            refit.push(after)
    assert worker.heard == ["begin", "abandon"]
    assert worker.refuses == ""
    assert differing(held_by(worker), before) == []
    worker.answers_after = lambda: None
    receipt = refit.push(after, delta=True).require()
    assert receipt.delta.instead == ""
    assert holds(worker, receipt, checkpoint, after)


def _interrupt():
    raise KeyboardInterrupt
