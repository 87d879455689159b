"""Engines that break, and the processes and shared memory of a run, for the tests that run the whole loop."""

import os
import re
import signal
from pathlib import Path

import torch

from nemo_fp8.experiments.rl.rollout import RolloutEngine

BROKEN_AT = 2
BROKEN_LAYER = "model.layers.0.mlp.down_proj"


class BreaksAfterAPush(RolloutEngine):
    """The scales of one layer become zero behind the receipt's back, as a loader that drops them would leave them."""

    def pushed(self, version):
        super().pushed(version)
        if version == BROKEN_AT:
            model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
            with torch.no_grad():
                model.get_submodule(BROKEN_LAYER).weight_scale_inv.zero_()


FILLED = "filled"


class TellsHowItIsFilled(RolloutEngine):
    """Writes down how bytes come to it."""

    def carry(self, message, body):
        self._note("over Ray")
        return super().carry(message, body)

    def control(self, what, *args):
        if args[:1] == ("write",) and args[1]["memory"]["pid"] != os.getpid():
            self._note("through shared memory")
        return super().control(what, *args)

    def _note(self, what):
        with Path(self.settings.folder, FILLED).open("a") as file:
            file.write(f"{what}\n")


def processes(word, root=None):
    """The processes below this one whose title has a word in it."""
    root = root or os.getpid()
    return [
        pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if word in _title(pid) and _below(pid, root)
    ]


def kill(word, root=None):
    """Kill them, as the kernel does when memory is short."""
    found = processes(word, root)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return len(found)


def shared_memory(root=None):
    """Names in /dev/shm that processes below this one have open."""
    names = set()
    for pid in processes("", root):
        try:
            names |= set(re.findall(r"/dev/shm/(\S+)(?! \(deleted\))$", Path(f"/proc/{pid}/maps").read_text(), re.M))
        except OSError:
            continue  # it has ended
    return names


def _title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "\0"


def _below(pid, root):
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
        if pid == root:
            return True
    return False
