"""The end of a ``vllm.LLM``, after which Python may exit.

An engine's client has threads in this process: one takes the engine's answers, and closes its socket when the engine
ends; one looks after the engine's processes. Both may still run when ``shutdown`` returns (the first did in 11 of 12
runs), and Python that exits meanwhile ends them wherever they are: in the midst of C++ that is "terminate called
without an active exception" and exit code 134, after everything was done. One demo of some dozen ended so; now they are
waited for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

# As vLLM 0.28 to 0.32 call them. Every engine has one of each.
THREADS = ("EngineCoreOutputQueueThread", "MPClientEngineMonitor")


def end(llm: Any, patience: float = 5.0) -> bool:
    """End the engine and its processes, and wait until its threads are gone; those of other engines stay.

    Returns whether they are gone. An engine without a process of its own has none.
    """
    core = llm.llm_engine.engine_core
    before = alive() if hasattr(core, "call_utility") else Counter[str]()
    core.shutdown()
    deadline = time.monotonic() + patience
    while not (gone := all(alive()[name] < count for name, count in before.items())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone


def alive() -> Counter[str]:
    """Count the threads of engines that run in this process, by name."""
    return Counter(thread.name for thread in threading.enumerate() if thread.name in THREADS)
