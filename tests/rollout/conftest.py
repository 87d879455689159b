"""For every rollout test: checkpoints, and real vLLM engines that are started once for each set of arguments.

An engine start in processes of its own costs 15 to 20 seconds, and in the test's process one. So a test asks for one
that runs ``apart`` where this is what it is about: messages, threads, signals, memory that two processes share. Tests
share engines as well: ``engine`` gives the running one where the arguments are the same, and ends the one that was used
longest ago where there are too many for a small machine. vLLM starts its processes by spawning, which imports the main
module again; pytest's own is safe to import.
"""

import importlib.util
import logging
from collections import OrderedDict

import pytest
from support.rollout import settings
from support.scheduling import one_worker_for

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]  # these run in .venv-rollout

if HAS_VLLM:
    settings.put_in_place()

SHARING = ("test_weight_transfer.py", "test_executor.py", "test_delta_engine.py", "test_refit.py")
"""Whose tests ask for the same engines ``apart``. Under xdist one worker has them all, in the order of
``tests/conftest.py``, and starts six engines where workers with a file each would start eight."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return one_worker_for(SHARING, config, log)


@pytest.fixture(autouse=True)
def nobodys_leavings(monkeypatch):
    """vLLM sets this variable in its own process when it reads a checkpoint with power-of-2 scales, and keeps it
    set."""
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM_E8M0", raising=False)


class Here:
    """What vLLM has on this processor, which is what a test may expect: by the support table, which a test holds to
    vLLM's own answers."""

    def __init__(self):
        from nemo_fp8.preflight.answers import answer
        from nemo_fp8.preflight.machine import Machine
        from nemo_fp8.preflight.support import AMX, CPU

        self.machine, self.answer = Machine.here(), answer
        self.amx = answer("rollout-fp8", self.machine).way == AMX
        self.caches_fp8 = answer("kv-cache-fp8", self.machine).way == CPU
        """Whether vLLM has an FP8 KV cache; else ours is rounded."""
        self.linear = "CPUFp8BlockScaledMMKernel" if self.amx else "DecodeKernel"
        """The kernel of a linear in 128x128 blocks."""
        self.experts = "NemoFp8MoEMethod" if self.amx else "DecodedMoEMethod"

    def can(self, recipe):
        """Whether a row of the support table holds here."""
        return self.answer(recipe, self.machine).verdict != "unsupported"

    def needs(self, recipe):
        """Skip a test of what vLLM cannot do here, by the reason."""
        if not self.can(recipe):
            pytest.skip(self.answer(recipe, self.machine).reason)

    @property
    def packs_bf16(self):
        """Whether vLLM multiplies with a copy of a BF16 weight that it made once, and that a new weight leaves behind:
        seen, not read."""
        import torch
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.ones(512, 256, dtype=torch.bfloat16), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        layer.weight.zero_()
        return bool(layer.cpu_linear(torch.ones(1, 256, dtype=torch.bfloat16), layer.weight, None).any())


@pytest.fixture(scope="session")
def here():
    """``here.linear``, ``here.can(recipe)``, ``here.needs(recipe)``: see :class:`Here`."""
    return Here()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """``checkpoint(kind, seed)`` is the folder of a tiny model; see ``models.KINDS``."""
    from support.rollout import models

    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def give(kind, seed=0, **changes):
        name = "-".join([kind, str(seed), *(f"{k}{v}" for k, v in changes.items())])
        if name not in made:
            made[name] = models.write(root / name, kind, seed, **changes)
        return made[name]

    return give


@pytest.fixture(scope="session")
def engine():
    """``engine(folder, apart=False, **arguments)`` is a running ``vllm.LLM``, and ``.as_started`` what it answered
    first. At most two run at once."""
    from support.rollout import engines

    running = OrderedDict()

    def give(folder, *, apart=False, **arguments):
        key = repr((str(folder), apart, sorted(arguments.items())))
        if key not in running:
            while len(running) > 1:
                engines.stop(running.popitem(last=False)[1])
            running[key] = engines.start(folder, apart=apart, **arguments)
            running[key].as_started = engines.log_probs(running[key], 1, 200)  # before anything was pushed
        running.move_to_end(key)
        return running[key]

    yield give
    for llm in running.values():
        engines.stop(llm)


@pytest.fixture(scope="session")
def model(checkpoint):
    """``model(kind, **contract)`` is vLLM's model in this process, each built once: nobody changes it."""
    from support.rollout.in_process import build

    built = {}

    def give(kind, **contract):
        key = repr((kind, sorted(contract.items())))
        if key not in built:
            built[key] = build(checkpoint(kind), **contract)
        return built[key]

    return give


@pytest.fixture
def said():
    """What nemo_fp8 writes to vLLM's log from here on, even if it was said before."""
    import vllm.logger

    vllm.logger._print_info_once.cache_clear()
    vllm.logger._print_warning_once.cache_clear()
    lines = []

    def listen(record):
        lines.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.nemo_fp8")
    logger.addFilter(listen)  # a handler would be gone where vLLM configures its logging with a process's first engine
    yield lines
    logger.removeFilter(listen)
