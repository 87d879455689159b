"""An engine that waits for its workers leaves the processors to them, and workers that are killed leave no memory."""

import mmap
import os
import re
import secrets
import time
from pathlib import Path

import psutil
import pytest
from support.processes import left_of
from support.rollout import engines
from support.rollout.engines import fp8
from support.rollout.models import tensors_of

from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.engine.executor import take_names_of_shared_memory


def test_an_engine_sleeps_while_its_workers_take_a_push(engine, checkpoint):
    """And its workers once they have taken it. vLLM's own ask for a second without a pause."""
    llm = engine(checkpoint("qwen3", 0), apart=True, **fp8())
    tensors = [*tensors_of(checkpoint("qwen3", 1))]

    def slowly():
        for i, pair in enumerate(tensors):
            time.sleep(0.5 if i in (1, 2) else 0)
            yield pair

    def computed(by):
        return sum(sum(p.cpu_times()[:2]) for p in psutil.Process().children(recursive=True) if by in p.name())

    refit = Refit(llm)
    refit.push(tensors)  # plans
    before = computed("Engine")
    assert refit.push(slowly(), manifest=dict(tensors)).require().seconds > 1
    assert computed("Engine") - before < 0.3
    before = computed("Worker")
    time.sleep(1)  # in which the workers have nothing to do
    assert computed("Worker") - before < 0.3


def test_only_what_a_worker_sums_in_loses_its_name():
    """What another engine sums in keeps it, and so does a queue, which processes open when they want."""
    sums, queue, another = (
        f"/dev/shm/{secrets.token_hex(16)}{end}" for end in ("-tp:0-[0-1]-cpushm_0", "", "-cpushm_1")
    )
    try:
        for name in (sums, queue, another):
            Path(name).write_bytes(b"a word")
        mapped = []
        for name in (sums, queue):
            with open(name, "r+b") as file:
                mapped.append(mmap.mmap(file.fileno(), 0))
        for _ in range(2):  # the second finds it gone
            take_names_of_shared_memory(os.getpid())
            assert [Path(name).exists() for name in (sums, queue, another)] == [False, True, True]
        assert mapped[0][:] == b"a word"
    finally:
        for name in (sums, queue, another):
            Path(name).unlink(missing_ok=True)


@pytest.mark.long
def test_no_memory_is_left_of_workers_that_are_killed(checkpoint):
    """vLLM kills workers that end slowly, and the memory of their sums would stay until the machine starts anew."""
    llm = engines.start(checkpoint("qwen3", 0), tensor_parallel_size=2, **fp8())
    try:
        workers = [p for p in psutil.Process().children(recursive=True) if _memory_of_sums(p.pid)]
        assert len(workers) == 2
        shared = set().union(*(_memory_of_sums(worker.pid) for worker in workers))
        assert len(shared) == 2
        assert engines.log_probs(llm, 1).isfinite().all()
        for worker in workers:
            worker.kill()
        assert left_of(workers) == []
    finally:
        engines.stop(llm)
    assert not shared & set(os.listdir("/dev/shm"))


def _memory_of_sums(pid):
    """What vLLM calls the memory in which a process sums with others, whether it has that name still or not."""
    return set(re.findall(r"/dev/shm/(\S+-cpushm_\d+)(?: \(deleted\))?$", Path(f"/proc/{pid}/maps").read_text(), re.M))
