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
from safetensors.torch import load_file
from support.rollout import engines
from support.rollout.engines import SMALL, fp8

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import Refit


def dying(tensors, victim, seen):
    """The tensors; in their midst the engine's process of that name is killed: the youngest, since other tests may have
    left engines that run."""
    named = (child for child in psutil.Process().children(recursive=True) if f"VLLM::{victim}" in child.cmdline()[:1])
    process = max(named, key=psutil.Process.create_time)
    for i, pair in enumerate(tensors.items()):
        if i == len(tensors) // 2:
            process.send_signal(signal.SIGKILL)
            seen.append(time.monotonic())
        yield pair


def push_and_see_it_die(refit, tensors, victim, delta=False):
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
        push_and_see_it_die(refit, load_file(folder / "model.safetensors"), victim, delta)
        assert refit.ledger is None  # what is pushed into the next engine is everything
        with pytest.raises(EngineDeadError):  # its own words: no push restores a dead engine
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
    finally:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()


@pytest.mark.long
def test_a_push_into_an_async_llm(checkpoint):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    folder = checkpoint("qwen3")

    async def scenario():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **(SMALL | fp8())))
        try:
            refit = Refit(llm, chunk=2**20)
            await asyncio.to_thread(push_and_see_it_die, refit, load_file(folder / "model.safetensors"), "EngineCore")
            assert "add_request" not in vars(llm)
        finally:
            llm.shutdown()

    asyncio.run(scenario())
