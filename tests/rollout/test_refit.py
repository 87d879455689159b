"""Pushes into real engines: bitwise a fresh engine's, refused before the first byte, restored after a death, over HTTP too."""

import json
import re
from pathlib import Path

import pytest
import torch
from rollout import servers
from rollout.engines import fp8, log_probs
from safetensors.torch import load_file

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import quantize
from nemo_fp8.rollout import Refit, serve
from nemo_fp8.rollout.mismatch.engine import read_back
from nemo_fp8.rollout.mismatch.weights import told_by
from nemo_fp8.rollout.refit import Manifest, fingerprint
from nemo_fp8.rollout.refit.control import Offline
from nemo_fp8.rollout.refit.memory import Shared

K_PROJ = "model.layers.2.self_attn.k_proj.weight"
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
    """The engine of a row of ENGINES, and a function for the log-probs of one prompt: a batch of one is the same each time."""

    def give(row):
        kind, fields = ENGINES[row]
        llm = engine(checkpoint(kind, 0), **fp8(**fields))
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
    "ignored by vLLM": (lambda t: t | {"model.layers.2.self_attn.k_proj.bias": torch.zeros(128).bfloat16()}, "no place for .*k_proj.bias"),
    "unknown": (lambda t: t | {"model.layers.0.bogus.weight": torch.zeros(3).bfloat16()}, "bogus.weight is not what"),
    "shape": (lambda t: t | {K_PROJ: t[K_PROJ][:-1]}, "k_proj.weight is not what"),
    "dtype": (lambda t: t | {K_PROJ: t[K_PROJ].float()}, "comes in float32"),
    "codes without scales": (lambda t: t | {K_PROJ: t[K_PROJ].to(torch.float8_e4m3fn)}, "comes as FP8 codes"),
    "scale without cache": (lambda t: t | {"model.layers.0.self_attn.k_scale": torch.tensor(0.1)}, "scale of an FP8 KV cache"),
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


def test_old_prefixes_are_forgotten(run, weights):
    """Hazard 5: keys and values that were computed with old weights must not be used."""
    from vllm import SamplingParams

    llm, _ = run("qwen3")
    prompt = [{"prompt_token_ids": [5] * 200}]
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)

    def first():
        return {t: p.logprob for t, p in llm.generate(prompt, asked, use_tqdm=False)[0].outputs[0].logprobs[0].items()}

    Refit(llm).push(weights("qwen3", 0))
    llm.reset_prefix_cache()
    first()  # what it left in the cache is of these weights
    assert Refit(llm).push(weights("qwen3", 1)).prefix_cache_reset
    told = first()
    llm.reset_prefix_cache()
    assert told == first()


@pytest.mark.parametrize(
    ("method", "guard"),
    [("refuse", test_a_push_that_dies_is_refused_until_the_next_one), ("forget", test_old_prefixes_are_forgotten)],
    ids=["refuse", "forget"],
)
def test_it_is_seen_if_the_engine_is_not_told(method, guard, run, weights, monkeypatch):
    """The fixes of hazards 3 and 5 taken out; the others' are in test_hazards.py."""
    monkeypatch.setattr(Offline, method, lambda *_: True)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        guard(run, weights)


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


def test_memory_stays_flat_over_pushes(run, weights):
    llm, _ = run("qwen3")
    (answer,) = llm.collective_rpc("nemo_fp8_refit_expected", args=({},))
    assert Manifest.from_plain(answer["tensors"]) == Manifest.of(weights("qwen3", 0))
    refit, both = Refit(llm), [weights("qwen3", seed) for seed in (0, 1)]
    prints = {refit.push(both[i % 2]).fingerprint for i in range(10)}
    assert len(prints) == 2


def test_a_server_takes_pushes_from_who_brings_the_token(run, checkpoint, weights):
    """It listens on every address, so nobody pushes without the token; log-probs are those of an engine of this process."""
    server = serve.server_for(
        str(checkpoint("qwen3", 0)), Precision(rollout="fp8"), host="0.0.0.0", port=servers.free_port(), token="secret", more=servers.MORE
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
        assert Refit(server.url, token="secret", transport="http", chunk=2**20).push(weights("qwen3", 0)).fingerprint == sent.fingerprint
        with pytest.raises(PrecisionError, match="lacks"):
            refit.push(_without(weights("qwen3", 1)))
        with pytest.raises(ConnectionError):
            Refit(server.url, token="secret", chunk=2**20).push(_dying(weights("qwen3", 1), 20), manifest=weights("qwen3", 1))
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

    So one engine serves for both; engines started from what is pushed are compared in ``test_refit_long.py``. The last of
    this file, since these are the rows that no other test asks.
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
