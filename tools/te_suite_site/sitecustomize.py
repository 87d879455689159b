"""Put the CPU implementation in place in every process of a test run: pytest's own, and those that a test starts by
torchrun or spawn.

Python imports this file by itself at its start, where its folder is on the path.
"""

import os

if "TE_SUITE_ARCH" in os.environ:
    from nemo_fp8 import te_cpu

    te_cpu.install(int(os.environ["TE_SUITE_ARCH"]))
