"""Sleep while vLLM's workers compute, and leave no memory: vLLM's executor for worker processes on a CPU.

    vLLM                an engine asks its workers' queue without a pause, for a second after each answer, and a worker
                        its engine's, for a second after each call
                        what its workers share has a name in /dev/shm, which they remove when they end
    SleepingExecutor    both ask for 10 ms, and then sleep until the other has written
                        the name is removed when the workers have started, and the memory goes with the last of them

Asking pays where an engine has a processor of its own. On a CPU its workers compute on all of them, and on two
processors an engine that asks takes a third of what there is: from tokens, and more from pushes, in which sender and
workers are busy at once. A worker that asks takes it from a server, which takes the next body of a push meanwhile. vLLM
takes an executor by its import path (``distributed_executor_backend``), so nothing is patched; ``engine_args`` names
this one for a CPU.

Why 10 ms and not none: a wake-up call is lost if it comes within a millisecond or two of the one before (ZeroMQ's queue
for them holds one), and who waits for it then sleeps for seconds. What comes that soon is found while it is still asked
for. The trade-off: what takes longer is seen about 0.1 ms later.

Why no name: a worker that has to be killed, as vLLM kills those that end slowly, removes nothing, and 8 MiB and more of
each stayed in memory until the next start of the machine. Workers open the memory of a group by its name once, while
they start, and start is over for none of them before all have it. Which names are ours is seen in what our workers have
mapped, so none of another engine's is touched. The trade-off: workers that are killed while they start leave theirs.
"""

from __future__ import annotations

import inspect
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("rollout")

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

AWAKE = 0.01  # seconds of asking after an answer, or a call
log = logging.getLogger("vllm.nemo_fp8")
_SHARED_BY_WORKERS = re.compile(r" (/dev/shm/\S+-cpushm_\d+)$", re.MULTILINE)
"""A line of ``/proc/PID/maps`` that names what vLLM's workers on a CPU share; not one whose name is gone."""


class SleepingExecutor(MultiprocExecutor):
    """vLLM's own, but for how its engine waits, and that its workers' memory has no name."""

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            queue._spin_condition.busy_loop_s = AWAKE
        if not all(self.collective_rpc(sleep_sooner)):
            log.warning("Workers of this vLLM ask for a second after each call: nemo_fp8 does not find their queue.")
        for worker in self.workers:
            take_names_of_shared_memory(worker.proc.pid)


def sleep_sooner(worker: Any) -> bool:
    """Have the process of a worker, which calls this, sleep as its engine does; return whether its queue was found.

    vLLM lets a worker see neither the queue that it is called through nor who has it: that is the caller.
    """
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), WorkerProc):
        frame = frame.f_back
    queue = None if frame is None else frame.f_locals["self"].rpc_broadcast_mq
    if queue is None:
        return False
    queue._spin_condition.busy_loop_s = AWAKE
    return True


def take_names_of_shared_memory(worker: int) -> None:
    """Remove the names of what a worker shares with others for their sums; who has it mapped keeps it."""
    with suppress(OSError):  # the worker has ended, or this is not Linux
        for name in _SHARED_BY_WORKERS.findall(Path(f"/proc/{worker}/maps").read_text()):
            Path(name).unlink(missing_ok=True)
