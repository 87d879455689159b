"""A push through vLLM's weight-transfer API, by the name ``nemo_fp8``: the receipt and the bits of any other push."""

import io
import os
import struct
from pathlib import Path

import pytest
import torch
from support.rollout.engines import fp8, log_probs
from support.rollout.models import stepped, tensors_of
from support.rollout.servers import Served, ask
from support.rollout.trainers import Weights, trainer_of, versions_of

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.engine.compatibility import FEATURES
from nemo_fp8.rollout.refit import mailbox
from nemo_fp8.rollout.refit.memory import Shared

BACKEND = {"weight_transfer_config": {"backend": "nemo_fp8"}}


class FourCalls:
    """A framework's own client: vLLM's protocol and nothing else."""

    def __init__(self, llm):
        self.llm = llm

    def init_weight_transfer_engine(self, init_info):
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self):
        self.llm.start_weight_update()

    def update_weights(self, update_info):
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self.llm.finish_weight_update(weight_version)


def test_what_this_vllm_has_is_what_the_table_says():
    import vllm

    def number(version):
        return tuple(int(part) for part in version.split(".")[:2])

    has = {name: internal.misfit() is None for name, (_, internal) in FEATURES.items()}
    assert has == {name: number(vllm.__version__) >= number(since) for name, (since, _) in FEATURES.items()}


@pytest.fixture
def llm(engine, checkpoint):
    llm = engine(checkpoint("qwen3", 0), apart=True, **fp8(), **BACKEND)
    Refit(llm).push(dict(tensors_of(checkpoint("qwen3", 0)))).require()
    return llm


def test_a_push_by_name_is_any_push(llm, engine, checkpoint):
    old, source = log_probs(llm, 1, 200), Weights(checkpoint("qwen3", 1))
    trainer = trainer_of(llm, source, verify=True)
    receipt = trainer.send_weights().require()
    new = log_probs(llm, 1, 200)
    assert receipt.verified
    assert receipt.prefix_cache_reset
    assert receipt.weight_version == receipt.push == llm.get_weight_version()
    assert versions_of(llm) == ({receipt.push} if FEATURES["weight_versions"][1].misfit() is None else None)
    plain = Refit(llm).push(source.tensors, verify=True, weight_version="step 7")
    assert llm.get_weight_version() == plain.weight_version == "step 7"
    assert (plain.fingerprint, plain.tensors) == (receipt.fingerprint, receipt.tensors)
    assert trainer.send_weights("step 8").weight_version == llm.get_weight_version() == "step 8"
    fresh = engine(checkpoint("qwen3", 1), apart=True, **fp8())
    assert torch.equal(new, log_probs(fresh, 1, 200))
    assert not torch.equal(new, old)
    trainer.shutdown()


def test_a_push_that_is_refused_or_dies_is_told_and_repaired(llm, checkpoint):
    old, version = log_probs(llm, 1, 200), llm.get_weight_version()
    source = Weights(checkpoint("qwen3", 1))
    trainer = trainer_of(llm, source)
    left_out = source.tensors.pop("model.layers.2.mlp.up_proj.weight")
    with pytest.raises(PrecisionError, match=r"lacks model\.layers\.2\.mlp\.up_proj"):
        trainer.send_weights()
    assert torch.equal(log_probs(llm, 1, 200), old)
    source.tensors["model.layers.2.mlp.up_proj.weight"] = left_out
    source.ends_after = 40
    refit = Refit(llm)
    trainer.refit.chunk = 1 << 20  # so that much is written before the end
    with pytest.raises(OSError, match="fell over"):
        trainer.send_weights()
    with pytest.raises(PrecisionError, match="old and new weights"):
        log_probs(llm, 1, 200)
    assert llm.get_weight_version() == version
    source.ends_after = None
    after = refit.push(source.tensors)  # the other way: both know of the push that died
    assert "died half-way" in after.after_failure
    new = log_probs(llm, 1, 200)
    llm.start_weight_update()  # of a trainer that was killed then
    assert trainer.send_weights().require().fingerprint == after.fingerprint
    assert torch.equal(log_probs(llm, 1, 200), new)


def test_changes_go_by_name_too(llm, checkpoint):
    """From the second push on, of the trainer that has the ledger; and one trainer waits for a push by another way."""
    source = Weights(checkpoint("qwen3", 0))
    trainer = trainer_of(llm, source, delta=True)
    assert Refit(llm)._alone is trainer.refit._alone
    assert "No ledger" in trainer.send_weights().require().delta.instead
    source.tensors = stepped(source.tensors)
    receipt = trainer.send_weights().require()
    assert receipt.delta.instead == ""
    assert receipt.verified
    assert receipt.bytes < receipt.delta.full_bytes / 10
    found = log_probs(llm, 1, 200)
    assert Refit(llm).push(source.tensors).require().fingerprint == receipt.fingerprint
    assert torch.equal(log_probs(llm, 1, 200), found)
    assert "is not for this engine" in trainer.send_weights().require().delta.instead


def test_no_update_from_outside_is_believed(llm, checkpoint):
    old = log_probs(llm, 1, 200)
    strange = Shared(4096)
    good = {"pid": os.getpid(), "fd": 0, "size": mailbox.MOST_WORKERS * mailbox.SLOT, "name": "x", "number": 1}
    for address in (None, {}, good, strange.handle | {"number": 1}, good | {"fd": strange.handle["fd"]}):
        llm.start_weight_update()
        with pytest.raises(Exception, match=r"[Mm]ailbox|memory|refused"):
            llm.update_weights({"update_info": {"call": "begin", "message": {}, "mailbox": address}})
    assert not strange.tensor.any()  # nothing was written to memory that is no mailbox
    box = mailbox.Mailbox()
    for call in ("__class__", "../begin", 7, "shutdown"):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"call": call, "message": {}, "mailbox": box.address()}})
        assert "is no call of a push" in box.answers()[0]["problems"][0][0]
        llm.finish_weight_update()
    llm.start_weight_update()
    with pytest.raises(Exception, match="Invalid update_info"):
        llm.update_weights({"update_info": {"ipc_handles_pickled": "gASVAAAA"}})
    assert torch.equal(log_probs(llm, 1, 200), old)
    box.close()


@pytest.mark.long
def test_an_engine_without_our_extension_and_a_client_of_a_framework(engine, checkpoint):
    arguments = {name: value for name, value in fp8().items() if name != "worker_extension_cls"}
    llm = engine(checkpoint("qwen3", 0), apart=True, **arguments, **BACKEND)
    source = Weights(checkpoint("qwen3", 1))
    told = trainer_of(FourCalls(llm), source, verify=True).send_weights()
    assert told.verified
    assert told.weight_version == ""
    assert [p.what for p in told.problems] == ["The prefix cache was not reset."]  # nobody said that it was
    llm.reset_prefix_cache()
    assert (
        trainer_of(FourCalls(llm), source, caller_pauses=True).send_weights().require().fingerprint == told.fingerprint
    )
    fresh = engine(checkpoint("qwen3", 1), apart=True, **fp8())
    assert torch.equal(log_probs(llm, 1, 200), log_probs(fresh, 1, 200))


@pytest.mark.long
def test_through_a_server_and_its_door(engine, checkpoint, monkeypatch):
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    served = Served(checkpoint("qwen3", 0), "bf16_with_fp8_blockwise_mixed", "--weight-transfer-config",
                    '{"backend": "nemo_fp8"}')  # fmt: skip
    try:
        old, source = served.log_probs(1, 200), Weights(checkpoint("qwen3", 1))
        for path, body in (
            ("/update_weights", {"update_info": {}}),
            ("/pause", {}),
            ("/collective_rpc", {"method": "nemo_fp8_refit_held"}),
        ):
            assert ask(served.url, path, body, Origin="http://127.0.0.1")[0] == 403
        pickled = {"update_info": {"ipc_handles_pickled": "gASVAAAA"}}
        assert "pickled" in ask(served.url, "/update_weights", pickled)[1]["problems"][0][0]
        checksums = FEATURES["weight_checker"][1].misfit() is None
        before = ask(served.url, "/weight_checker", {"action": "checksum"})
        assert before[0] == (200 if checksums else 404)
        receipt = trainer_of(served.url, source, verify=True).send_weights().require()
        assert receipt.verified
        new = served.log_probs(1, 200)
        assert not torch.equal(new, old)
        if checksums:  # vLLM's own word that other weights lie there
            told = ask(served.url, "/weight_checker", {"action": "compare", "baseline": before[1]["checksums"]})[1]
            assert not told["match"]
        by_theirs = trainer_of(HTTPVLLMWeightSyncClient(served.url), Weights(checkpoint("qwen3", 0))).send_weights()
        assert by_theirs.require().prefix_cache_reset
        assert torch.equal(served.log_probs(1, 200), old)
        if checksums:
            told = ask(served.url, "/weight_checker", {"action": "compare", "baseline": before[1]["checksums"]})[1]
            assert told["match"], told
        own = Refit(served.url).push(source.tensors, weight_version="seventh")
        assert (own.weight_version, own.fingerprint) == ("seventh", receipt.fingerprint)
        assert torch.equal(served.log_probs(1, 200), new)
    finally:
        served.stop()


# ---------------------------------------------------------------------- the mailbox


def test_letters_are_not_believed():
    box = mailbox.Mailbox()

    def put(head, text, rank=0):
        raw = head + text
        box._shared.tensor[rank * mailbox.SLOT : rank * mailbox.SLOT + len(raw)] = torch.tensor(
            [*raw], dtype=torch.uint8
        )

    def head(number, length):
        return struct.pack("<QQ", number, length)

    box.number = 3
    for letter, words in (
        ((head(2, 2), b"{}"), "wrote nothing"),
        ((head(3, 2**63), b"{}"), "more than there is room for"),
        ((head(3, 2), b"[]"), "no JSON object"),
        ((head(3, 2), b"\xff{"), "did not answer"),
        ((head(3, 200_000), b"[" * 200_000), "did not answer"),
        ((head(3, 16), b'{"workers": 999}'), "one of 999 workers"),
        ((head(3, 14), b'{"workers": 2}'), "Worker 1 did not answer"),
    ):
        put(*letter)
        with pytest.raises(PrecisionError, match=words):
            box.answers()
    address = box.address()
    mailbox.write(address, 1, {"workers": 2})
    mailbox.write(address, 0, {"workers": 2, "first": True})
    assert box.answers() == [{"workers": 2, "first": True}, {"workers": 2}]
    mailbox.write(address, 1, {"workers": 2})
    assert box.answers()[1]["problems"][0][0] == "Two engines answer one trainer."
    for change in (
        {"number": -1},
        {"number": "1"},
        {"number": 1 << 64},
        {"size": 4096},
        {"name": "nemo_fp8-refit-other"},
        {"pid": 1 << 30},
    ):
        with pytest.raises(PrecisionError):
            mailbox.write(address | change, 0, {})
    with pytest.raises(PrecisionError, match="no mailbox for worker 256"):
        mailbox.write(address, mailbox.MOST_WORKERS, {})
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert resident < 8 << 30  # 32 GiB of slots, of which a few pages exist
    box.close()


class Noting(FourCalls):
    """Such a client that can pause as well, and notes what it was asked."""

    def __init__(self):
        self.paused, self.asked = False, []

    def init_weight_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        pass

    def update_weights(self, update_info):
        self.asked.append(update_info)

    def pause_generation(self, mode):
        self.paused = True

    def resume_generation(self):
        self.paused = False

    def is_paused(self):
        return self.paused


def test_an_engine_that_its_owner_has_paused_stays_so():
    """But for a push that repairs one which died half-way: nobody knows who has paused that."""
    from nemo_fp8.rollout.refit.transfer import Calls, NemoFp8TrainerInit

    client = Noting()
    calls = Calls(client, NemoFp8TrainerInit(rank=0))
    for paused in (False, True):
        client.paused = paused
        for _ in range(2):
            calls.scheduler.hold("wait")
            assert client.paused
            calls.free()
            assert client.paused == paused
        calls.free()  # of a push that died before it had paused
        assert client.paused == paused
    calls.scheduler.hold("wait")
    calls.refuse("it died")
    for one in (calls, Calls(client, NemoFp8TrainerInit(rank=0))):  # of the same trainer, and of the next
        client.paused = True
        one.refuse("it holds weights of two pushes")
        one.scheduler.hold("keep")
        one.free()
        assert not client.paused
    calls.mailbox.close()


def test_a_trainer_that_hangs_does_not_hold_the_engine_for_ever(monkeypatch):
    """A worker is told after how many seconds of silence its sender counts as dead, and ends its call then."""
    from nemo_fp8.rollout.refit.channel import Channel, Line
    from nemo_fp8.rollout.refit.transfer import Calls, NemoFp8TrainerInit

    monkeypatch.setattr("nemo_fp8.rollout.refit.transfer.SILENCE", 0.2)
    client = Noting()
    calls, channel = Calls(client, NemoFp8TrainerInit(rank=0)), Channel(lambda: False)
    with pytest.raises(PrecisionError, match="did not answer"):
        calls.call("stream", {"push": "a", "socket": channel.name})
    said = client.asked[-1]["message"]
    line = Line(said["socket"], said["silence"])
    with pytest.raises(PrecisionError, match="is silent"):
        next(line.messages())
    line.close()
    channel.close()
    calls.mailbox.close()


def test_a_pause_of_a_trainer_that_was_killed_ends_with_the_next_push():
    """The engine is paused and not mixed, as its owner may have left it; workers know whose push began last, and never
    ended."""
    from nemo_fp8.rollout.refit.transfer import Calls, NemoFp8TrainerInit

    class Answering(Noting):
        def update_weights(self, update_info):
            mailbox.write(update_info["mailbox"], 0, {"workers": 1, "interrupted": interrupted})

    for interrupted in (True, False):
        client = Answering()
        calls, client.paused = Calls(client, NemoFp8TrainerInit(rank=0)), True
        calls.call("begin", {"push": "b"})
        calls.hold("wait")
        calls.free()
        assert client.paused is not interrupted
        calls.mailbox.close()


def test_a_client_whose_methods_are_coroutines_is_refused():
    """Nobody would run them: the engine would compute while weights change, and any coroutine is true."""
    from nemo_fp8.rollout.refit.transfer import Calls, NemoFp8TrainerInit

    class OnLoop(Noting):
        async def pause_generation(self, mode):
            pass

        async def reset_prefix_cache(self):
            pass

        async def init_weight_transfer_engine(self, init_info):
            pass

    calls = Calls(OnLoop(), NemoFp8TrainerInit(rank=0))
    for call in (calls.meet, calls.forget, lambda: calls.scheduler.hold("wait")):
        with pytest.raises(PrecisionError, match="of the client is a coroutine"):
            call()
    calls.mailbox.close()


def test_a_client_of_two_engines_is_refused():
    """As vLLM's own for Ray with two handles: the answer of the second would stand where that of the first does, and
    one of them would be left with weights of two pushes."""

    class FanOut(Noting):
        def init_weight_transfer_engine(self, init_info):
            for _ in range(engines):
                mailbox.write(init_info["mailbox"], 0, {"rank": 0, "workers": 1})

    engines = 1
    trainer_of(FanOut(), []).shutdown()
    engines = 2
    with pytest.raises(PrecisionError, match="Two engines answer one trainer"):
        trainer_of(FanOut(), [])


def test_vllm_s_own_client_for_http_waits_as_long_as_a_push_and_brings_the_token(monkeypatch):
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from nemo_fp8.rollout.refit import transfer

    asked = {}

    def reply_of(request, timeout):
        asked[request.full_url.rpartition("/")[2]] = (timeout, request.get_header("Authorization"))
        return io.BytesIO(b"{}")

    monkeypatch.setattr(transfer, "reply_of", reply_of)
    calls = transfer.Calls(
        HTTPVLLMWeightSyncClient("http://127.0.0.1:1"), transfer.NemoFp8TrainerInit(rank=0, token="t")
    )
    with pytest.raises(PrecisionError, match="did not answer"):
        calls.call("stream", {"push": "a"})
    calls.scheduler.hold("wait")
    calls.client.start_weight_update()
    calls.mailbox.close()
    assert {bearer for _, bearer in asked.values()} == {"Bearer t"}
    assert asked["update_weights"][0] is None
    assert asked["pause?mode=wait"][0] is None
    assert asked["start_weight_update"][0] == transfer.PATIENCE


def test_what_is_no_client_is_refused():
    with pytest.raises(PrecisionError, match="object is no client of a weight transfer"):
        trainer_of(object(), [])
    with pytest.raises(PrecisionError, match="without a source"):
        trainer_of(object(), None)
    with pytest.raises(PrecisionError, match="does not answer 'init_weight_transfer_engine'"):
        trainer_of("http://127.0.0.1:1", [])
