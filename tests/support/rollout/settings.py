"""vLLM's settings for a small machine, which it and OpenMP read when they are imported: put in place before anything
else."""

import os

from nemo_fp8.render.vllm import SMALL_ENGINE

ENVIRONMENT = SMALL_ENGINE | {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "2"}
"""What vLLM logs is read by tests."""


def put_in_place():
    """Where nothing else is said."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
