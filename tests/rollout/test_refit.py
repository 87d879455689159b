"""Pushes into real engines: bitwise a fresh engine's, refused before the first byte, restored after a death, over HTTP
too."""

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.rollout import servers, unfinished
from support.rollout.engines import SMALL, fp8, log_probs
from support.rollout.models import K_PROJ

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch.engine import read_back
from nemo_fp8.mismatch.weights import told_by
from nemo_fp8.numerics import quantize
from nemo_fp8.rollout import Refit, serve
from nemo_fp8.rollout.refit import Manifest, fingerprint
from nemo_fp8.rollout.refit.control import Offline
from nemo_fp8.rollout.refit.memory import Shared

ENGINES = {
    "qwen3": ("qwen3", {}),
    "llama_tied": ("llama_tied", {"weight_scale": "pow2", "first_layers": 1}),
    "qwen3_moe": ("qwen3_moe", {"last_layers": 1}),
}


@pytest.fixture(scope="module")
def weights(checkpoint):
    return lambda kind, seed: load_file(checkpoint(kind, seed) / "model.safetensors")


@pytest.fixture(scope="module")
def run(engine, checkpoint):
    """The engine of a row of ENGINES, and a function for the log-probs of one prompt: a batch of one is the same each
    time."""

    def give(row):
        kind, fields = ENGINES[row]
        llm = engine(checkpoint(kind, 0), apart=True, **fp8(**fields))
        return llm, lambda: log_probs(llm, 1, 200)

    return give


def test_fingerprints_are_those_of_the_reference(run, weights):
    llm, _ = run("qwen3")
    tensors = weights("qwen3", 1)
    told = {t.name: t for t in Refit(llm).push(tensors).tensors}
    quantized = quantize(tensors[K_PROJ], Operand("e4m3", (128, 128), "fp32"))
    assert told[K_PROJ].fingerprint == fingerprint(quantized.data, quantized.scale_inv)
    assert told["model.norm.weight"].fingerprint == fingerprint(tensors["model.norm.weight"])


def test_codes_of_the_trainer_are_the_same_to_the_bit(run, weights):
    llm, ask = run("qwen3")
    tensors = weights("qwen3", 1)
    in_bf16 = Refit(llm).push(tensors)
    expected = ask()
    Refit(llm).push(weights("qwen3", 0))
    coded = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            quantized = quantize(tensor, Operand("e4m3", (128, 128), "fp32"))
            coded |= {name: quantized.data, f"{name}_scale_inv": quantized.scale_inv}
        else:
            coded[name] = tensor
    receipt = Refit(llm).push(coded, verify=True).require()
    assert receipt.bytes < 0.7 * in_bf16.bytes
    assert receipt.fingerprint == in_bf16.fingerprint
    assert torch.equal(ask(), expected)


def _without(tensors):
    return {name: t for name, t in tensors.items() if name not in (K_PROJ, "model.layers.1.input_layernorm.weight")}


# What is wrong with a manifest -> how the tensors become so, and the words of the refusal.
WRONG = {
    "missing": (_without, f"model.layers.1.input_layernorm.weight, {K_PROJ}"),
    "ignored by vLLM": (
        lambda t: t | {"model.layers.2.self_attn.k_proj.bias": torch.zeros(128).bfloat16()},
        "no place for .*k_proj.bias",
    ),
    "unknown": (lambda t: t | {"model.layers.0.bogus.weight": torch.zeros(3).bfloat16()}, "bogus.weight is not what"),
    "shape": (lambda t: t | {K_PROJ: t[K_PROJ][:-1]}, "k_proj.weight is not what"),
    "dtype": (lambda t: t | {K_PROJ: t[K_PROJ].float()}, "comes in float32"),
    "codes without scales": (lambda t: t | {K_PROJ: t[K_PROJ].to(torch.float8_e4m3fn)}, "comes as FP8 codes"),
    "scale without cache": (
        lambda t: t | {"model.layers.0.self_attn.k_scale": torch.tensor(0.1)},
        "scale of an FP8 KV cache",
    ),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_manifest_is_refused_and_changes_nothing(run, weights, change, words):
    llm, ask = run("qwen3")
    Refit(llm).push(weights("qwen3", 0))
    before = ask()
    with pytest.raises(PrecisionError, match=words):
        Refit(llm).push(change(weights("qwen3", 1)))
    assert torch.equal(ask(), before)


def _dying(tensors, after):
    yield from [*tensors.items()][:after]
    raise ConnectionError("the trainer went away")


def test_memory_that_a_worker_cannot_open_is_known_before_the_first_byte(run, weights, monkeypatch):
    """As where trainer and engine are in two containers."""
    llm, ask = run("qwen3")
    Refit(llm).push(weights("qwen3", 0))
    before = ask()
    with monkeypatch.context() as patch:
        patch.setattr(Shared, "handle", {"pid": 1, "fd": 10_000, "size": 64, "name": "nemo_fp8-refit"})
        with pytest.raises(PrecisionError, match="cannot be opened") as refused:
            Refit(llm).push(weights("qwen3", 1))
    assert "transport='http'" in str(refused.value)
    assert torch.equal(ask(), before)


def test_a_push_that_dies_is_refused_until_the_next_one(run, weights):
    llm, ask = run("qwen3")
    tensors = weights("qwen3", 1)
    expected = Refit(llm).push(tensors)
    answers = ask()

    refit = Refit(llm, chunk=2**20)
    with pytest.raises(ConnectionError):
        refit.push(_dying(weights("qwen3", 0), 0), manifest=tensors)
    assert torch.equal(ask(), answers)  # nothing had been written
    for after in (17, 20, 23):
        with pytest.raises(ConnectionError):
            refit.push(_dying(weights("qwen3", 0), after), manifest=tensors)
        with pytest.raises(PrecisionError, match="old and new weights"):
            ask()
    restored = refit.push(iter(tensors.items()))  # the manifest is the engine's own checkpoint's
    assert "half-way" in restored.after_failure
    assert restored.fingerprint == expected.fingerprint
    assert torch.equal(ask(), answers)


def _after_a_long_prompt(llm):
    """The log-probs of what follows a prompt of many blocks, which vLLM's prefix cache keeps."""
    from vllm import SamplingParams

    prompt = [{"prompt_token_ids": [5] * 200}]
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    return {t: p.logprob for t, p in llm.generate(prompt, asked, use_tqdm=False)[0].outputs[0].logprobs[0].items()}


def test_old_prefixes_are_forgotten(run, weights):
    """Hazard 5: keys and values that were computed with old weights must not be used."""
    llm, _ = run("qwen3")
    Refit(llm).push(weights("qwen3", 0))
    llm.reset_prefix_cache()
    _after_a_long_prompt(llm)  # what it left in the cache is of these weights
    assert Refit(llm).push(weights("qwen3", 1)).prefix_cache_reset
    told = _after_a_long_prompt(llm)
    llm.reset_prefix_cache()
    assert told == _after_a_long_prompt(llm)


@pytest.mark.parametrize("asleep", [0, 1])
def test_a_push_does_not_wake_an_engine(run, weights, asleep):
    """Its owner put it to sleep, or paused it, and wakes it; with changes as with everything. A push that died wakes
    nobody either, and the one that repairs does."""
    llm, ask = run("qwen3")
    refit = Refit(llm, chunk=2**20)

    def paused():
        return llm.llm_engine.engine_core.call_utility("is_scheduler_paused")

    def through_sleep(seed):
        llm.sleep(level=asleep)
        receipt = refit.push(weights("qwen3", seed), delta=True).require()
        assert paused()
        llm.wake_up()
        assert not paused()
        return receipt, ask()

    old = through_sleep(0)[1]
    receipt, new = through_sleep(1)
    assert receipt.delta.instead == ""
    assert not torch.equal(new, old)
    llm.sleep(level=asleep)
    with pytest.raises(ConnectionError):
        refit.push(_dying(weights("qwen3", 0), 20), manifest=weights("qwen3", 0))
    llm.wake_up()
    with pytest.raises(PrecisionError, match="old and new weights"):
        ask()
    refit.push(weights("qwen3", 0)).require()
    assert not paused()
    assert torch.equal(ask(), old)


@pytest.fixture(scope="module")
def fresh(run, engine, checkpoint, weights):
    """What engines of the weights of both seeds answer to ``unfinished.PROMPT``: a pushed one, and one that was started
    from them."""
    llm, _ = run("qwen3")
    Refit(llm).push(weights("qwen3", 0))
    return [unfinished.answer(llm), unfinished.answer(engine(checkpoint("qwen3", 1), apart=True, **fp8()))]


@pytest.mark.parametrize("running", unfinished.MODES)
def test_a_push_meets_what_a_ctrl_c_left(run, weights, fresh, running):
    """Requests of an interrupted generate lie in the engine, and what they left in the prefix cache is of the old
    weights."""
    llm, _ = run("qwen3")
    unfinished.after_ctrl_c(llm, [weights("qwen3", seed) for seed in (0, 1)], fresh, running)


@pytest.mark.parametrize("running", unfinished.MODES)
def test_a_push_meets_a_loop_of_steps(run, weights, fresh, running):
    llm, _ = run("qwen3")
    unfinished.within_steps(llm, [weights("qwen3", seed) for seed in (0, 1)], fresh, running)


def test_an_engine_without_a_process_of_its_own_does_the_same(checkpoint):
    unfinished.in_this_process(checkpoint("qwen3", 0), checkpoint("qwen3", 1))


def test_a_push_meets_a_generate_of_another_thread(run, weights, fresh):
    llm, _ = run("qwen3")
    Refit(llm).push(weights("qwen3", 0))
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(unfinished.generate, llm)
        while not llm.llm_engine.has_unfinished_requests():
            assert not asked.done()
            time.sleep(0.001)
        Refit(llm).push(weights("qwen3", 1)).require()
        assert asked.result(60) == fresh[0]
    assert unfinished.answer(llm) == fresh[1]


class Watched:
    """In the place of an engine's socket: slow, writes nothing, and counts those who came while another one wrote."""

    def __init__(self):
        self.counting, self.inside, self.messages, self.met = threading.Lock(), 0, 0, 0

    def send_multipart(self, *arguments, **named):
        with self.counting:
            self.met += self.inside > 0
            self.inside += 1
            self.messages += 1
        time.sleep(0.005)
        with self.counting:
            self.inside -= 1


@pytest.mark.parametrize("with_a_refit", [True, False])
def test_two_threads_never_write_one_message(run, monkeypatch, with_a_refit):
    """ZeroMQ aborts the process where their frames mix, or an answer never comes."""
    from vllm.v1.engine import EngineCoreRequestType

    llm, _ = run("qwen3")
    core, watched = llm.llm_engine.engine_core, Watched()
    Refit(llm)
    monkeypatch.setattr(core, "input_socket", watched)
    if not with_a_refit:  # what vLLM's client does by itself
        monkeypatch.delitem(vars(core), "_send_input")

    def tell():
        for number in range(20):
            core._send_input(EngineCoreRequestType.UTILITY, (0, number, "nothing", ()))

    with ThreadPoolExecutor(2) as others:
        for each in [others.submit(tell), others.submit(tell)]:
            each.result(60)
    assert watched.messages == 40
    assert (watched.met == 0) == with_a_refit


def test_a_message_that_was_begun_before_is_waited_for(run, monkeypatch):
    llm, _ = run("qwen3")
    core = llm.llm_engine.engine_core
    socket, begun, ended = core.input_socket, threading.Event(), []
    monkeypatch.delitem(vars(core), "_send_input", raising=False)

    class Slow:
        def send_multipart(self, *arguments, **named):
            begun.set()
            time.sleep(0.5)
            ended.append(socket.send_multipart(*arguments, **named))

    monkeypatch.setattr(core, "input_socket", Slow())
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(llm.collective_rpc, "nemo_fp8_report")
        assert begun.wait(60)
        Refit(llm)
        assert ended
        asked.result(60)


def test_a_push_that_dies_leaves_unfinished_requests_waiting(run, weights, fresh):
    """No step computes with a mixture; the next push that ends well lets them go on."""
    llm, _ = run("qwen3")
    Refit(llm).push(weights("qwen3", 0))
    unfinished.interrupt(llm)
    with pytest.raises(ConnectionError):
        Refit(llm, chunk=2**20, running="keep").push(_dying(weights("qwen3", 1), 20), manifest=weights("qwen3", 1))
    with pytest.raises(PrecisionError, match="old and new weights"):
        llm.llm_engine.step()
    Refit(llm).push(weights("qwen3", 1)).require()  # running="wait" would have a mixture end them
    kept, _ = llm.generate(unfinished.PROMPT, unfinished.asked(), use_tqdm=False)
    assert unfinished.told(kept)[:3] == fresh[0][:3]
    assert unfinished.told(kept) != fresh[0]
    assert unfinished.answer(llm) == fresh[1]


@pytest.mark.parametrize(
    ("method", "when", "first"),
    [
        ("hold", lambda *_: True, Offline.hold),
        ("call", lambda _, named, message: named == "finish", Offline.call),
        ("forget", lambda *_: True, lambda *_: None),
        ("forget", lambda *_: True, Offline.forget),
    ],
    ids=["hold", "finish", "before the reset", "after the reset"],
)
def test_an_interrupted_wait_leaves_the_engine_answering(method, when, first, run, weights, monkeypatch):
    """Ctrl-C while a push waits for requests, while the workers end it, or while it resets the cache: the engine is not
    held, and what it computed of a prompt with old weights is not used with new ones."""
    llm, answered = run("qwen3")
    Refit(llm).push(weights("qwen3", 1))
    new = answered()
    Refit(llm).push(weights("qwen3", 0))
    assert not torch.equal(answered(), new)
    told = _after_a_long_prompt(llm)
    real, done = getattr(Offline, method), []

    def interrupted(*arguments):
        if done or not when(*arguments):
            return real(*arguments)
        done.append(method)
        first(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Offline, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            Refit(llm).push(weights("qwen3", 1))
    assert done
    again = _after_a_long_prompt(llm)
    assert (again == told) == (method == "hold")
    llm.reset_prefix_cache()
    assert again == _after_a_long_prompt(llm)
    assert torch.equal(answered(), new) == (method != "hold")


@pytest.mark.parametrize(
    ("method", "without", "guard"),
    [
        ("refuse", lambda self, why: self.free(), test_a_push_that_dies_is_refused_until_the_next_one),
        ("forget", lambda self: True, test_old_prefixes_are_forgotten),
    ],
    ids=["refuse", "forget"],
)
def test_it_is_seen_if_the_engine_is_not_told(method, without, guard, run, weights, monkeypatch):
    """The fixes of hazards 3 and 5 taken out; the others' are in test_hazards.py."""
    monkeypatch.setattr(Offline, method, without)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        guard(run, weights)


@pytest.mark.parametrize(
    ("method", "without", "running"),
    [
        ("hold", lambda self, running: None, "wait"),
        ("forget", lambda self: bool(self.llm.reset_prefix_cache()), "keep"),
    ],
    ids=["hold", "forget"],
)
def test_it_is_seen_if_unfinished_requests_are_not_thought_of(
    method, without, running, run, weights, fresh, monkeypatch
):
    llm, _ = run("qwen3")
    both = [weights("qwen3", seed) for seed in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(Offline, method, without)
        with pytest.raises((AssertionError, PrecisionError)):
            unfinished.after_ctrl_c(llm, both, fresh, running)
    Refit(llm, running="abort").push(both[0]).require()


def test_an_engine_on_a_loop_says_why_it_refuses(checkpoint, weights):
    """``AsyncLLM.generate`` would wrap the reason into an error without words."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def ask(llm, number):
        asked = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        return (
            [out async for out in llm.generate({"prompt_token_ids": [5] * 20}, asked, str(number))][-1]
            .outputs[0]
            .token_ids
        )

    async def main():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(checkpoint("qwen3", 0)), **(SMALL | fp8())))
        try:
            refit, before = Refit(llm, chunk=2**20), await ask(llm, 0)
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(refit.push, _dying(weights("qwen3", 1), 20), manifest=weights("qwen3", 1))
            with pytest.raises(PrecisionError, match="the trainer went away"):
                await ask(llm, 1)
            assert (await asyncio.to_thread(refit.push, weights("qwen3", 0))).require().prefix_cache_reset
            assert await ask(llm, 2) == before
        finally:
            llm.shutdown()

    asyncio.run(main())


def test_bad_weights_are_told(run, weights):
    llm, _ = run("qwen3")
    tensors = weights("qwen3", 1)
    tensors[K_PROJ][0, 0] = float("nan")
    receipt = Refit(llm).push(tensors)
    assert not receipt.ok
    assert K_PROJ in receipt.problems[0].what
    with pytest.raises(PrecisionError, match="NaN"):
        receipt.require()
    Refit(llm).push(weights("qwen3", 0)).require()


def test_pushes_of_the_same_weights_have_one_fingerprint(run, weights):
    llm, _ = run("qwen3")
    (answer,) = llm.collective_rpc("nemo_fp8_refit_expected", args=({},))
    assert Manifest.from_plain(answer["tensors"]) == Manifest.of(weights("qwen3", 0))
    refit, both = Refit(llm), [weights("qwen3", seed) for seed in (0, 1)]
    prints = {refit.push(both[i % 2]).fingerprint for i in range(10)}
    assert len(prints) == 2


def test_a_server_takes_pushes_from_who_brings_the_token(run, checkpoint, weights):
    """It listens on every address, so nobody pushes without the token; log-probs are those of an engine of this
    process."""
    server = serve.server_for(
        str(checkpoint("qwen3", 0)),
        Precision(rollout="fp8"),
        host="0.0.0.0",
        port=servers.free_port(),
        token="secret",
        more=servers.MORE,
    )
    llm, _ = run("qwen3")
    with serve.running(server) as process:
        serve.wait_until_ready(server, process)
        for token in (None, "wrong"):
            with pytest.raises(PrecisionError, match=r"answers a push with 40[13]"):
                Refit(server.url, token=token).push(weights("qwen3", 1))
            assert servers.complete(server.url, token)[0] == 401
        refit = Refit(server.url, token="secret")
        for seed in (1, 0):
            Refit(llm).push(weights("qwen3", seed))
            sent = refit.push(weights("qwen3", seed), verify=True).require()
            assert servers.complete(server.url, "secret") == (200, servers.complete_offline(llm))
        assert read_back(server.url, "secret") == told_by(sent)
        assert (
            Refit(server.url, token="secret", transport="http", chunk=2**20).push(weights("qwen3", 0)).fingerprint
            == sent.fingerprint
        )
        with pytest.raises(PrecisionError, match="lacks"):
            refit.push(_without(weights("qwen3", 1)))
        with pytest.raises(ConnectionError):
            Refit(server.url, token="secret", chunk=2**20).push(
                _dying(weights("qwen3", 1), 20), manifest=weights("qwen3", 1)
            )
        status, answer = servers.complete(server.url, "secret")
        assert status == 503
        assert "died half-way" in answer["error"]["message"]
        assert refit.push(weights("qwen3", 0)).fingerprint == sent.fingerprint
        assert servers.complete(server.url, "secret") == (200, servers.complete_offline(llm))
        assert servers.ask(server.url, "/nemo_fp8/refit/expected", token="secret", Origin="http://somewhere")[0] == 403


def test_the_page_is_true(run, weights):
    """Every snippet of docs/refit.md that needs vLLM, from the top, against one engine."""
    page = (Path(__file__).parents[2] / "docs/refit.md").read_text()
    names = {"llm": run("qwen3")[0], "weights": weights("qwen3", 1)}
    for snippet in re.findall(r"^```python rollout\n(.*?)^```", page, re.M | re.S):
        exec(compile(snippet, "docs/refit.md", "exec"), names)


@pytest.mark.parametrize("row", ENGINES)
def test_a_push_is_bitwise_a_fresh_engine(run, weights, row):
    """Other weights, and then those that it was started from: it answers as it did when it was fresh, bit by bit.

    So one engine serves for both; engines started from what is pushed are compared in ``test_refit_long.py``. The last
    of this file, since these are the rows that no other test asks.
    """
    llm, ask = run(row)
    kind, _ = ENGINES[row]
    receipt = Refit(llm, chunk=2**20).push(weights(kind, 1), verify=True).require()
    new = ask()
    assert receipt.verified is True
    assert receipt.chunks > 1
    assert {t.name for t in receipt.tensors} == set(weights(kind, 1))
    assert all(len(line) <= 80 for line in str(receipt).splitlines())
    json.dumps(receipt.to_dict())
    Refit(llm).push(weights(kind, 0))
    assert torch.equal(ask(), llm.as_started)
    assert not torch.equal(new, llm.as_started)
