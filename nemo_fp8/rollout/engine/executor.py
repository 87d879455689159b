"""Sleep while vLLM's workers compute: vLLM's executor for worker processes, without its spin. For CPUs.

    vLLM                an engine asks its workers' queue without a pause, for a second after each answer
    SleepingExecutor    it asks for 10 ms, and then sleeps until a worker has written

The second pays where an engine has a processor of its own. On a CPU its workers compute on all of them, and on two
processors an engine that asks takes a third of what there is: from tokens, and more from pushes, in which sender and
workers are busy at once. vLLM takes an executor by its import path (``distributed_executor_backend``), so nothing is
patched; ``engine_args`` names this one for a CPU.

Why 10 ms and not none: a worker's wake-up call is lost if it comes within a millisecond or two of the one before
(ZeroMQ's queue for them holds one), and the engine then sleeps for seconds. An answer that soon is found while it still
asks. The trade-off: an answer that takes longer is seen about 0.1 ms later.
"""

from __future__ import annotations

from nemo_fp8.extras import require

__needs__ = require("rollout")

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

AWAKE = 0.01  # seconds of asking after an answer


class SleepingExecutor(MultiprocExecutor):
    """vLLM's own, but for how its engine waits."""

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            queue._spin_condition.busy_loop_s = AWAKE
