"""An engine that dies in the middle of a push: the push ends with an error that says so, and soon, on every way to an
engine.

vLLM by itself waits for ever for what its EngineCore was doing.
"""

import asyncio
import contextlib
import signal
import time

import psutil
import pytest
import torch
from support.rollout import engines, servers
from support.rollout.engines import SMALL, fp8
from support.rollout.models import stepped, weights_of

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import Refit


def dying(tensors, victim, seen):
    """The tensors; in their midst the engine's process of that name is killed: the youngest, since other tests may have
    left engines that run."""
    children = [c for c in psutil.Process().children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE]
    named = (child for child in children if "".join(child.cmdline()[:1]).startswith(f"VLLM::{victim}"))
    process = max(named, key=psutil.Process.create_time)
    for i, pair in enumerate(tensors.items()):
        if i == len(tensors) // 2:
            process.send_signal(signal.SIGKILL)
            seen.append(time.monotonic())
        yield pair


def push_and_see_it_die(refit, tensors, victim, delta):
    seen = []
    refit.push(tensors, delta=delta).require()
    others = {name: tensor * 1.1 for name, tensor in tensors.items()}  # changes enough for several buffers
    with pytest.raises(PrecisionError, match="The engine is dead"):
        refit.push(dying(others, victim, seen), manifest=tensors, delta=delta)
    assert time.monotonic() - seen[0] < 30
    with pytest.raises(PrecisionError, match="The engine is dead"):
        refit.push(tensors, delta=delta)


@pytest.mark.parametrize(
    ("victim", "delta"),
    [
        ("EngineCore", False),
        pytest.param("EngineCore", True, marks=pytest.mark.long),
        pytest.param("Worker", False, marks=pytest.mark.long),
        pytest.param("Worker", True, marks=pytest.mark.long),
    ],
)
def test_a_push_into_an_llm(checkpoint, victim, delta):
    from vllm.v1.engine.exceptions import EngineDeadError

    folder = checkpoint("qwen3")
    llm = engines.start(folder, **fp8())
    try:
        refit = Refit(llm, chunk=2**20)
        push_and_see_it_die(refit, weights_of(folder), victim, delta)
        assert refit.ledger is None  # what is pushed into the next engine is everything
        with pytest.raises(EngineDeadError):  # its own words: no push restores a dead engine
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
    finally:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("delta", [False, True], ids=["everything", "changes"])
def test_a_push_into_an_async_llm(checkpoint, delta):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    folder = checkpoint("qwen3")

    async def scenario():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **(SMALL | fp8())))
        try:
            refit = Refit(llm, chunk=2**20)
            await asyncio.to_thread(push_and_see_it_die, refit, weights_of(folder), "EngineCore", delta)
            assert "add_request" not in vars(llm)
        finally:
            llm.shutdown()

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("transport", ["memory", "http"])
@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
@pytest.mark.parametrize("parallel", [(), ("--tensor-parallel-size", "2")], ids=["one", "two"])
def test_changes_pushed_into_a_server_and_into_the_next_one(checkpoint, victim, transport, parallel):
    """Nothing is answered after its engine was killed; the same trainer then pushes everything into the server that is
    started at the same address, which answers as a fresh one."""
    folder = checkpoint("qwen3_wide", 0)
    tensors = weights_of(folder)
    after, port = stepped(tensors, size=1e-4), servers.free_port()
    served = servers.Served(folder, Precision(rollout="fp8"), *parallel, port=port)
    refit = Refit(served.url, chunk=2**20, transport=transport)
    try:
        refit.push(tensors, delta=True).require()
        assert refit.push(after, delta=True).require().delta.instead == ""
        expected, seen = served.log_probs(1, 24), []
        with pytest.raises(PrecisionError):
            refit.push(dying(tensors, victim, seen), manifest=tensors, delta=True)
        assert time.monotonic() - seen[0] < 30
        with pytest.raises((AssertionError, OSError)):
            served.log_probs(1, 24)
    finally:
        served.stop()
    served = servers.Served(folder, Precision(rollout="fp8"), *parallel, port=port)
    try:
        assert not torch.equal(served.log_probs(1, 24), expected)
        assert refit.push(after, delta=True).require().delta.instead
        assert torch.equal(served.log_probs(1, 24), expected)
        assert refit.push(tensors, delta=True).require().delta.instead == ""
    finally:
        served.stop()
