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
    from nemo_fp8.rollout import Refit
    from nemo_fp8.rollout.refit.worker import session
    from support.rollout import models
    from support.rollout.in_process import Worker, build, weights_of

    shape = {"hidden": 1024, "layers": 1, "intermediate": 12288}
    paths = [models.write(Path(folder) / str(i), "qwen3", i, **shape) for i in (0, 1)]
    worker, tensors = Worker(build(paths[0], quantized=False)), [weights_of(path) for path in paths]
    refit, keep_freed = Refit(worker), session.keep_freed

    def counted(pushes):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for i in range(pushes):
            refit.push(tensors[i % 2]).require()
        assert worker._refit_plan.largest_packed == LARGEST
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / pushes

    found = []
    for way in (lambda largest: None, keep_freed):
        session.keep_freed = way
        counted(2)
        found.append(counted(4))
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
