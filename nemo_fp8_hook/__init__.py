"""TransformerEngine on a CPU in every process, without a line of anybody's.

    nemo_fp8_hook.pth             Python reads it as it starts, in every process of an environment that has our wheel:
                                  register()
    import transformer_engine     the first in a process: te_cpu.install(), where TransformerEngine could not run
                                  otherwise

It has to be so early. Megatron decides when it is imported whether TransformerEngine is there, and torchrun's ranks,
Ray's actors and notebooks start processes in which nobody has written a line before. ``register`` puts one finder
before all others; for every module but one it has no answer. When somebody imports TransformerEngine, or anything of
it, one question is asked:

    would it run without us?      a driver of CUDA (DRIVERS), its compiled extension, or NEMO_FP8_TE_CPU=0: the finder
                                  takes itself away
    otherwise                     nemo_fp8.te_cpu is installed first, for the architecture that NEMO_FP8_TE_CPU names

Looking whether it is there (``importlib.util.find_spec``) is no import, and changes nothing. Where te_cpu refuses
(another version of TransformerEngine, a package that it needs), the import ends with that refusal, a PrecisionError,
and not with an ImportError: Megatron, NeMo and Accelerate take an ImportError for "there is none", and would train on
without FP8, in silence. Without us the same import would end with TransformerEngine's RuntimeError of an "empty meta
package", which no such caller survives either.

The price: this file, which imports what Python has imported already, and one call for each module that a process
imports. Without write access, or with PYTHONDONTWRITEBYTECODE, Python compiles it each time, so what is needed only
where TransformerEngine is imported lies in ``finding.py``.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would take longer than all the rest
    from typing import Any

VARIABLE = "NEMO_FP8_TE_CPU"
"""Read when TransformerEngine is imported: one of :data:`ARCHITECTURES` or :data:`OFF`. Where it is not set it is
Hopper for those who ask for FP32 scales of blocks, which only Hopper has, and the first for all others."""
OFF = "0"
HOPPER = 90
ARCHITECTURES = {100: "Blackwell", HOPPER: "Hopper"}
"""What a CPU can stand for: a GPU's compute capability, times ten."""
TRANSFORMER_ENGINE, EXTENSION = "transformer_engine", "transformer_engine_torch"

# What a process opens to reach a GPU. Not /proc/driver/nvidia, which a container shows of its host, with GPUs of its
# own or without; not a libcuda that can be loaded, which NVIDIA's images bring to machines that have no driver.
DRIVERS = (
    "/dev/nvidiactl",  # Linux, and containers that were given a GPU
    "/dev/nvhost-gpu",  # Jetson
    "/usr/lib/wsl/lib/libcuda.so.1",  # Windows' driver, from within WSL
)


def register() -> None:
    """Wait for the import of TransformerEngine. Once is enough."""
    if not any(isinstance(finder, Hook) for finder in sys.meta_path):
        sys.meta_path.insert(0, Hook())


def has_driver() -> bool:
    """Return whether this machine has a GPU, or this container was given one."""
    return any(map(os.path.exists, DRIVERS))


class Hook:
    """Finds TransformerEngine as everybody does, and has te_cpu installed before it is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Any":
        if name != TRANSFORMER_ENGINE:
            return None
        from nemo_fp8_hook.finding import found_by

        return found_by(self)
