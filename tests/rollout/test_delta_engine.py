"""Pushes of changes into real engines: bitwise a push of everything, and what is answered when a sender dies."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from support import ROOT, TESTS
from support.rollout import servers
from support.rollout.engines import SMALL, fp8, log_probs
from support.rollout.models import stepped, weights_of

from nemo_fp8.contract import Precision
from nemo_fp8.rollout import Refit


def _dying(tensors, after):
    yield from [*tensors.items()][:after]
    raise ConnectionError("the trainer went away")


def test_changes_in_an_engine(engine, checkpoint):
    """As a push of everything leaves it; taken back, and served, where the sender dies between two patches."""
    llm = engine(checkpoint("qwen3", 0), apart=True, **fp8())
    tensors = weights_of(checkpoint("qwen3", 0))
    Refit(llm).push(stepped(tensors, size=1e-4)).require()
    expected = log_probs(llm, 1, 200)

    refit = Refit(llm, chunk=2**20)
    assert refit.push(tensors, delta=True).require().delta.instead
    assert torch.equal(log_probs(llm, 1, 200), llm.as_started)
    receipt = refit.push(stepped(tensors, size=1e-4), delta=True).require()
    assert (receipt.delta.instead, receipt.verified, receipt.prefix_cache_reset) == ("", True, True)
    assert receipt.bytes < receipt.delta.full_bytes / 4
    assert torch.equal(log_probs(llm, 1, 200), expected)

    with pytest.raises(ConnectionError):
        refit.push(_dying(stepped(tensors, size=1.0), 40), delta=True)
    assert torch.equal(log_probs(llm, 1, 200), expected)
    again = refit.push(tensors, delta=True).require()
    assert again.delta.instead
    assert again.after_failure == ""  # nothing was left to repair
    assert torch.equal(log_probs(llm, 1, 200), llm.as_started)


@pytest.mark.long
def test_changes_in_an_engine_on_a_loop(checkpoint):
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    tensors = weights_of(checkpoint("qwen3", 0))

    async def ask(llm, number):
        asked = SamplingParams(max_tokens=4, temperature=0.0, logprobs=5)
        outputs = [out async for out in llm.generate({"prompt_token_ids": [5] * 20}, asked, str(number))]
        return [{token: one.logprob for token, one in place.items()} for place in outputs[-1].outputs[0].logprobs]

    async def main():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(checkpoint("qwen3", 0)), **(SMALL | fp8())))
        try:
            refit, before = Refit(llm, chunk=2**20), await ask(llm, 0)
            for number, (weights, all_) in enumerate(
                ((tensors, True), (stepped(tensors, size=1e-4), False), (tensors, False))
            ):
                receipt = (await asyncio.to_thread(refit.push, weights, delta=True)).require()
                assert bool(receipt.delta.instead) == all_
                assert (await ask(llm, number + 1) == before) == (weights is tensors)
            await llm.pause_generation(mode="keep")  # its owner resumes it
            (await asyncio.to_thread(refit.push, tensors, delta=True)).require()
            (await asyncio.to_thread(Refit(llm).push, tensors)).require()
            assert await llm.is_paused()
            await llm.resume_generation()
            (await asyncio.to_thread(refit.push, tensors, delta=True)).require()
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(refit.push, _dying(stepped(tensors, size=1.0), 40), delta=True)
            assert await ask(llm, 9) == before
        finally:
            llm.shutdown()

    asyncio.run(main())


# A sender that pushes changes to a server, and is killed between two buffers of them.
SENDER = """
import os, signal, sys
from safetensors.torch import load_file
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit.wire import Body, SharedMemory
from support.rollout.models import stepped, weights_of

tensors = load_file(sys.argv[2])
refit = Refit(sys.argv[1], chunk=2**20, transport=sys.argv[3])
refit.push(tensors, delta=True).require()
way = {"memory": SharedMemory, "http": Body}[sys.argv[3]]
send, sent = way.send, []

def die_after_two(self, pieces, used):
    if sent[1:]:
        os.kill(os.getpid(), signal.SIGKILL)
    sent.append(send(self, pieces, used))

way.send = die_after_two
refit.push(stepped(tensors, size=1.0), delta=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("transport", ["memory", "http"])
def test_a_server_whose_sender_was_killed_answers_with_the_weights_of_before(checkpoint, transport):
    """Once the sender counts as dead its patches are taken back. Nothing else is ever answered, and the next push
    repairs."""
    folder = checkpoint("qwen3", 0)
    served = servers.Served(folder, Precision(rollout="fp8"))
    try:
        before = served.log_probs(1, 24)
        weights, path = str(folder / "model.safetensors"), os.pathsep.join(map(str, (ROOT, TESTS)))
        sender = subprocess.run(
            [sys.executable, "-c", SENDER, served.url, weights, transport],
            env=os.environ | {"PYTHONPATH": path},
            check=False,
        )
        assert sender.returncode == -signal.SIGKILL
        assert torch.equal(served.log_probs(1, 24), before)  # it waited for a minute
        refit = Refit(served.url, transport=transport)
        tensors = load_file(weights)
        assert refit.push(stepped(tensors, size=1e-4), delta=True).require().after_failure == ""
        changed = served.log_probs(1, 24)
        assert not torch.equal(changed, before)
        assert refit.push(tensors, delta=True).require().delta.instead == ""
        assert torch.equal(served.log_probs(1, 24), before)
    finally:
        served.stop()
