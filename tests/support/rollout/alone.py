"""A script that starts an engine on an executor, in a process of its own, and what it writes as its answer.

Ray on a CPU needs the shim ``ray_on_cpu`` beside this file; on GPUs nothing of it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support import ROOT, TESTS

RAY_ON_CPU = Path(__file__).parent / "ray_on_cpu"


def answer_of(script, executor, *words, timeout):
    """The JSON that ``script executor *words ANSWER FOLDER`` writes to ANSWER; FOLDER is its own until it ends."""
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        paths = [os.environ.get("PYTHONPATH"), str(RAY_ON_CPU), str(TESTS), str(ROOT)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAY_USAGE_STATS_ENABLED": "0"}
        if executor == "ray_before_v2":
            environment["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "0"
        command = [sys.executable, script, executor, *words, str(answer), place]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert answer.exists(), (done.stdout + done.stderr)[-4000:]
        return json.loads(answer.read_text())


def start_ray(place):
    """Start Ray's head below a folder, with two processors that a shim calls GPUs; vLLM finds it by a variable."""
    import ray

    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, _temp_dir=place + "/ray", object_store_memory=200 << 20)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
