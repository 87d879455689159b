"""What the server of ``harness`` imports once, so that its forks need not."""

import gc
import os

import torch

torch.set_num_threads(1)

import nemo.collections.llm  # noqa: E402
import nemo.collections.llm.recipes.precision.mixed_precision  # noqa: E402
import nemo.lightning  # noqa: E402, F401

import nemo_fp8.experiments.stories  # noqa: E402
import nemo_fp8.train.accelerator  # noqa: E402
import nemo_fp8.train.first_weights  # noqa: E402
import nemo_fp8.train.megatron_cpu  # noqa: E402
import nemo_fp8.train.plugin  # noqa: E402, F401

gc.freeze()  # or a fork's collector walks it all, and to do so copies it
os.environ.pop("PYTHONWARNINGS", None)
