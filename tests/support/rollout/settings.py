"""vLLM's settings for a small machine, which it and OpenMP read when they are imported: put in place before anything
else."""

import os

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "2",
}


def put_in_place():
    """Where nothing else is said."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
