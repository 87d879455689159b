"""Wait for an engine's answer, and raise an error if the engine dies before it comes.

vLLM notices within a second that EngineCore or one of its workers ended, and the next call raises. A call that is under
way waits for ever, though. So the functions here check once a second whether vLLM has noticed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any

from nemo_fp8.errors import PrecisionError

LOOK = 1.0  # seconds between two checks
SILENCE = 60.0  # seconds without a sign of the sender after which a push counts as dead, and a body as given up
GRACE = 10.0  # seconds that an engine may take to die after an error of EngineCore


def in_thread(ask: Callable[[], Any]) -> Future[Any]:
    """Call ``ask()`` in a daemon thread, and return its future. A call that never ends does not keep Python alive."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="nemo_fp8-refit-asks").start()
    return answer


def answered(answer: Future[Any], is_dead: Callable[[], bool]) -> Any:
    """Wait for an answer, and return it. Raises what the call raised, or PrecisionError if the engine is dead."""
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
    """Do as :func:`answered` does, and raise what it raises, in a coroutine on the engine's loop."""
    answer = asyncio.ensure_future(ask)
    try:
        while not answer.done():
            await asyncio.wait([answer], timeout=LOOK)
            if is_dead() and not answer.done():
                raise dead_engine()
    finally:
        answer.cancel()  # does nothing to an answer that has come
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
    """Return for how many seconds an error may be the first sign of a dying engine.

    When a worker dies, vLLM first fails its calls, and ends the engine some seconds later. These errors come from
    EngineCore as bare Exceptions; any other type means something else.
    """
    return GRACE if type(error) is Exception else 0.0


def dead_engine() -> PrecisionError:
    """Return the error for a push to an engine whose EngineCore, or one of whose workers, ended."""
    return PrecisionError(
        "The engine is dead.",
        "Its EngineCore or one of its workers ended; vLLM's output above says which, and often why (killed, out of "
        "memory, /dev/shm full).",
        "Start the engine again, from the weights that it shall have, and push to the new one.",
    )
