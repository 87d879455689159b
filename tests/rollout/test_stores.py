"""What old weights computed, and an engine keeps beside its prefix cache: in a connector's store, of its encoders."""

from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from support.rollout import engines
from support.rollout.engines import fp8
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import control
from nemo_fp8.rollout.refit.control import Offline
from nemo_fp8.rollout.refit.worker.session import refuse_stores

HERE = {"kv_connector_module_path": "support.rollout.connectors"}


def _answer(llm):
    """A prompt of nine blocks, of which a connector brings eight."""
    asked = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5)
    answer = llm.generate({"prompt_token_ids": [*range(5, 150)]}, asked, use_tqdm=False)[0].outputs[0]
    return [{token: one.logprob for token, one in place.items()} for place in answer.logprobs]


@pytest.fixture
def connected(checkpoint, tmp_path):
    """``connected(connector)`` is an engine with a KV connector, in this process, which has room for one at a time."""
    started = []

    def give(connector, **more):
        told = {"kv_connector": connector, "kv_role": "kv_both", **more}
        told["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
        started.append(engines.start(checkpoint("llama", 0), apart=False, kv_transfer_config=told, **fp8()))
        return started[-1]

    yield give
    for llm in started:
        engines.stop(llm)
    ensure_kv_transfer_shutdown()
    engines.one_worker()  # of whom an engine that ends in this process leaves nothing to the others


@pytest.fixture
def fresh(engine, checkpoint):
    """What an engine answers that was started from the weights that tests push."""
    llm = engine(checkpoint("llama", 1), **fp8())
    llm.reset_prefix_cache()
    return _answer(llm)


def test_what_a_connector_keeps_is_dropped_with_the_prefix_cache(fresh, connected, checkpoint, tmp_path):
    llm = connected("Emptied", **HERE)
    assert _answer(llm) != fresh
    assert [*tmp_path.iterdir()]
    assert Refit(llm).push(load_file(checkpoint("llama", 1) / "model.safetensors")).require().prefix_cache_reset
    assert _answer(llm) == fresh


def test_an_engine_with_a_store_that_cannot_be_emptied_takes_no_push(connected, checkpoint):
    llm = connected("ExampleConnector")
    _, old = _answer(llm), _answer(llm)  # from the store
    with pytest.raises(PrecisionError, match=r"with ExampleConnector\.(.|\n)*has reset_cache\(\)"):
        Refit(llm).push(load_file(checkpoint("llama", 1) / "model.safetensors"))
    assert _answer(llm) == old


def _config(connector=None, encoders=None, **extra):
    transfer = connector and KVTransferConfig(kv_connector=connector, kv_role="kv_both", **extra)
    return SimpleNamespace(kv_transfer_config=transfer, ec_transfer_config=encoders)


def test_which_stores_can_be_emptied():
    one, other = ({"kv_connector": name, "kv_role": "kv_both"} for name in ("OffloadingConnector", "ExampleConnector"))
    for sound in (
        _config(),
        _config("OffloadingConnector"),
        _config("NixlConnector"),
        _config("Emptied", **HERE),
        _config("MultiConnector", kv_connector_extra_config={"connectors": [one]}),
    ):
        refuse_stores(sound)
    for words, wrong in {
        "ExampleConnector": _config("MultiConnector", kv_connector_extra_config={"connectors": [one, other]}),
        "ECExampleConnector": _config(encoders=SimpleNamespace(ec_connector="ECExampleConnector")),
    }.items():
        with pytest.raises(PrecisionError, match=f"with {words}"):
            refuse_stores(wrong)


def test_the_scheduler_no_longer_counts_on_what_encoders_made(engine, checkpoint):
    """Workers drop the outputs of encoders at the end of a push. A scheduler that counts on one ends the engine."""
    llm = engine(checkpoint("llama", 0), **fp8())
    known = llm.llm_engine.engine_core.engine_core.scheduler.encoder_cache_manager.cached
    known["an image"] = set()
    Refit(llm).push(load_file(checkpoint("llama", 0) / "model.safetensors")).require()
    assert not known


@pytest.mark.parametrize("fix", ["the store", "the encoders"])
def test_it_is_seen_if_vllm_is_asked_for_less(fix, engine, fresh, connected, checkpoint, tmp_path, monkeypatch):
    """Each fix taken out, as docs/refit.md says."""
    if fix == "the store":
        monkeypatch.setattr(control, "EVERYTHING", {"reset_running_requests": True})
        with pytest.raises(AssertionError):
            test_what_a_connector_keeps_is_dropped_with_the_prefix_cache(fresh, connected, checkpoint, tmp_path)
    else:
        monkeypatch.setattr(Offline, "forget", lambda self: bool(self.llm.reset_prefix_cache(**control.EVERYTHING)))
        with pytest.raises(AssertionError):
            test_the_scheduler_no_longer_counts_on_what_encoders_made(engine, checkpoint)
