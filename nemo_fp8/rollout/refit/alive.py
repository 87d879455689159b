"""Waits for an engine's answers that end when the engine dies.

vLLM learns within a second that EngineCore ended, or that one of its workers did, and says so to whoever asks next; but
a call that is under way waits for ever for the answer. So who waits here looks once a second whether vLLM has seen its
engine die.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any

from nemo_fp8.errors import PrecisionError

LOOK = 1.0  # seconds between two looks
GRACE = 10.0  # seconds


def in_thread(ask: Callable[[], Any]) -> Future[Any]:
    """What ``ask()`` returns, asked in a thread that a wait without end may keep: Python's exit does not wait for
    it."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="nemo_fp8-refit-asks").start()
    return answer


def answered(answer: Future[Any], is_dead: Callable[[], bool]) -> Any:
    """The answer, or an error if the engine dies before it comes."""
    while not answer.done():
        wait([answer], LOOK)
        if is_dead() and not answer.done():
            raise dead_engine()
    try:
        return answer.result()
    except Exception as error:
        deadline = time.monotonic() + _grace(error)
        while not is_dead() and time.monotonic() < deadline:
            time.sleep(LOOK / 10)
        if is_dead():
            raise dead_engine() from error
        raise


async def answered_on_loop(ask: Awaitable[Any], is_dead: Callable[[], bool]) -> Any:
    """The same, for who waits on the engine's loop."""
    answer = asyncio.ensure_future(ask)
    try:
        while not answer.done():
            await asyncio.wait([answer], timeout=LOOK)
            if is_dead() and not answer.done():
                raise dead_engine()
    finally:
        answer.cancel()  # of no effect on one that is done
    try:
        return answer.result()
    except Exception as error:
        deadline = time.monotonic() + _grace(error)
        while not is_dead() and time.monotonic() < deadline:
            await asyncio.sleep(LOOK / 10)
        if is_dead():
            raise dead_engine() from error
        raise


def _grace(error: Exception) -> float:
    """How long an engine may take to be dead after an error: vLLM gives up what a worker was doing before it ends the
    engine.

    What fails in EngineCore comes as a bare Exception, and any other error is none of a worker's.
    """
    return GRACE if type(error) is Exception else 0.0


def dead_engine() -> PrecisionError:
    """What a push to an engine without EngineCore, or without one of its workers, is answered with."""
    return PrecisionError(
        "The engine is dead.",
        "Its EngineCore or one of its workers ended; vLLM's output above says which, and often why (killed, out of "
        "memory, /dev/shm full).",
        "Start the engine again, from the weights that it shall have, and push to the new one.",
    )
