"""An engine that waits for its workers leaves the processors to them."""

import time

import psutil
from support.rollout.engines import fp8
from support.rollout.models import tensors_of

from nemo_fp8.rollout import Refit


def test_an_engine_sleeps_while_its_workers_take_a_push(engine, checkpoint):
    """vLLM's own asks for a second without a pause."""
    llm = engine(checkpoint("qwen3", 0), apart=True, **fp8())
    tensors = [*tensors_of(checkpoint("qwen3", 1))]

    def slowly():
        for i, pair in enumerate(tensors):
            time.sleep(0.5 if i in (1, 2) else 0)
            yield pair

    def computed():
        return sum(sum(p.cpu_times()[:2]) for p in psutil.Process().children(recursive=True) if "Engine" in p.name())

    refit = Refit(llm)
    refit.push(tensors)  # plans
    before = computed()
    assert refit.push(slowly(), manifest=dict(tensors)).require().seconds > 1
    assert computed() - before < 0.3
