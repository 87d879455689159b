"""The pages that pushes touch for the first time, in a process of its own: what other tests have freed in one would be
taken for it.

    python kept_memory.py one ANSWER FOLDER      [as glibc does by itself, as a push has it keep what it frees]
"""

import json
import resource
import sys
from pathlib import Path

from support.rollout import settings
from support.rollout.alone import answer_of

LARGEST = 2 * 12288 * 1024 * 2
"""Bytes of a layer's gate and up in BF16."""


def faults():
    """What such a process answers: the faults of a push, by either way."""
    return answer_of(__file__, "one", timeout=300)


def main(_executor, answer, folder):
    settings.put_in_place()
    import torch
    from vllm.config import set_current_vllm_config

    from nemo_fp8.rollout.refit import Manifest
    from nemo_fp8.rollout.refit.worker import session
    from nemo_fp8.rollout.refit.worker.plan import Plan
    from support.rollout import models
    from support.rollout.in_process import build
    from support.rollout.models import weights_of

    shape = {"hidden": 1024, "layers": 1, "intermediate": 12288}
    paths = [models.write(Path(folder) / str(i), "qwen3", i, **shape) for i in (0, 1)]
    model, tensors, found = build(paths[0], quantized=False), [weights_of(path) for path in paths], []
    plan, keep_freed = Plan(model, Manifest.of(tensors[0])), session.keep_freed
    assert plan.largest_packed == LARGEST

    def counted(pushes):
        """In this thread, as in a worker: another one has a heap of its own."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for i in range(pushes):
            push = session.Session(plan, "test", verify=False)
            for n, tensor in enumerate(tensors[i % 2].values()):
                push.write_rows(n, 0, tensor)
            push.finish()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / pushes

    with set_current_vllm_config(model.vllm_config), torch.no_grad():
        for way in (lambda largest: None, keep_freed):
            session.keep_freed = way
            counted(2)
            found.append(counted(4))
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
