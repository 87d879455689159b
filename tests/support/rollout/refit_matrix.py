"""One case of the long matrix, in a process of its own: pushes into an engine, held against what it answered when it
was fresh.

    python tests/support/rollout/refit_matrix.py EXECUTOR KIND FIELDS PUSHES DELTA ANSWER FOLDER

Two checkpoints are pushed in turns; if DELTA is 1, what changed between one and itself after a step of an optimizer.
The engine was started from one of them: with its weights it must answer as it did then, bit by bit. Every push must
have the fingerprint of the first of its kind, and the workers' memory must not grow, nor the sender's.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from support.rollout.alone import answer_of, start_ray

# executor -> vLLM's name for it (None: one worker), and whether a server is asked over HTTP instead of an engine of
# this process.
EXECUTORS = {
    "one": (None, False),
    "mp": ("mp", False),
    "ray": ("ray", False),
    "ray_before_v2": ("ray", False),
    "server": (None, True),
    "server_mp": ("mp", True),
}


def run(executor, kind, fields, pushes=4, delta=False):
    """The answer of a case."""
    return answer_of(__file__, executor, kind, json.dumps(fields), str(pushes), str(int(delta)), timeout=1500)


def resident(pids):
    return sum(
        int(line.split()[1])
        for pid in pids
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )


def main(executor, kind, fields, pushes, delta, answer, place):
    import psutil
    import torch
    from safetensors.torch import load_file

    from nemo_fp8.contract import Precision
    from nemo_fp8.render.vllm import flags
    from nemo_fp8.rollout import Refit
    from support.rollout import engines, models, servers

    fields, pushes, delta, (backend, served) = json.loads(fields), int(pushes), delta == "1", EXECUTORS[executor]
    if backend == "ray":
        start_ray(place)
    folders = [models.write(Path(place) / f"seed{seed}", kind, seed) for seed in (0, 1)]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    if delta:
        weights[1] = models.stepped(weights[0], size=1e-4)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": backend} if backend else {}
    if served:
        options = {name: fields.pop(name) for name in ("unquantized",) if name in fields}
        contract = Precision(**{"rollout": "fp8"} | fields)
        server = servers.Served(folders[0], contract, *flags(parallel), **options)
        to, ask, stop = server.url, server.log_probs, server.stop
    else:
        to = engines.start(folders[0], **engines.fp8(**fields), **parallel)
        ask, stop = partial(engines.log_probs, to), partial(engines.stop, to)
    refit, prints, sizes = Refit(to, chunk=2**20), [set(), set()], []
    fresh = ask(1, 200)
    asked = [fresh, None]
    receipt, bitwise, instead, shares, whole, senders = None, [], [], [], set(), []
    for i in range(pushes):
        seed = (i + 1) % 2
        receipt = refit.push(weights[seed], verify=i < 2, delta=delta).require()
        if delta:
            instead.append(receipt.delta.instead)
            if not receipt.delta.instead:
                shares.append(receipt.bytes / receipt.delta.full_bytes)
                whole |= receipt.delta.whole.keys()
        prints[seed].add(receipt.fingerprint)
        workers = [p.pid for p in psutil.process_iter(["name", "cmdline"]) if _is_worker(p)]
        sizes.append(resident(workers))
        senders.append(resident([os.getpid()]))
        if i < 2 or i >= pushes - 2:
            now = ask(1, 200)
            bitwise.append(asked[seed] is None or torch.equal(now, asked[seed]))
            asked[seed] = now
    stop()
    told = {
        "bitwise": bitwise,
        "differ": not torch.equal(asked[0], asked[1]),
        "prints": [len(p) for p in prints],
        "rss_kb": sizes,
        "sender_rss_kb": senders,
        "workers": receipt.workers,
        "misaligned": len(receipt.misaligned),
        "instead": instead,
        "shares": shares,
        "whole": sorted(whole),
    }
    Path(answer).write_text(json.dumps(told))
    if backend == "ray":
        import ray

        ray.shutdown()


def _is_worker(process):
    """A worker of this engine, or its server: a child of this process, or of the Ray that it started."""
    import psutil

    try:
        mine = os.getpid() in [parent.pid for parent in process.parents()]
        is_server = "api_server" in " ".join(process.cmdline())
        return mine and (is_server or any(word in process.name() for word in ("VLLM::Worker", "RayWorker", "ray::")))
    except psutil.Error:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
