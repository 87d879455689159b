"""Export again and again, killed with SIGKILL at every place where something is written, and gone on with once. Writes
what it saw.

Runs in a process of its own, which forks before torch has started a thread. Arguments: source, folder for the exports.
"""

import json
import os
import signal
import sys
from pathlib import Path

from nemo_fp8 import preset
from nemo_fp8.export import HuggingFace, export, run

PRECISION = preset("bf16_with_fp8_blockwise_mixed")


def attempt(source, folder, kill_at):
    """One export in a fork, killed at its ``kill_at``-th event. Returns its exit status and the events that it saw."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def event(*_):
            nonlocal seen
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        def before_and_after(function):
            def called(*args, **kwargs):
                event()
                out = function(*args, **kwargs)
                event()
                return out

            return called

        # What a process wrote outlives it without a sync, which is for a machine that dies; and syncs are slow.
        os.fsync, os.replace = event, before_and_after(os.replace)
        run.bytes_of = before_and_after(run.bytes_of)
        export(HuggingFace.open(source), folder, PRECISION)
        os.write(tells, str(seen).encode())
        os._exit(0)
    os.close(tells)
    _, status = os.waitpid(child, 0)
    said = os.read(told, 100)
    os.close(told)
    return status, int(said or 0)


def main(source, work):
    status, events = attempt(source, work / "whole", 0)
    assert status == 0
    killed = 0
    for at in range(1, events + 1):
        status, _ = attempt(source, work / f"{at}", at)
        assert os.WIFSIGNALED(status), f"event {at} of {events} did not come"
        killed += 1
        done = (work / f"{at}/nemo_fp8_export.json").exists()
        loadable = (work / f"{at}/config.json").exists()
        weights = len(list((work / f"{at}").glob("*.safetensors")))
        status, _ = attempt(source, work / f"{at}", 0)
        assert status == 0
        sys.stdout.write(json.dumps({"at": at, "done": done, "loadable": loadable, "weights": weights}) + "\n")
    sys.stdout.write(json.dumps({"events": events, "killed": killed}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
