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
imports.
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
# Where TransformerEngine looks for its extension, from its own folder: a wheel, a build, an editable build.
_FOLDERS = ("wheel_lib", "", os.pardir)
_COMPILED = (".so", ".dylib", ".dll")


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
        spec = self._found(name)
        if spec is None or spec.origin is None:  # not there, or a mere folder of that name: a path may still be added
            return None
        if self._runs_without_us(spec.origin):
            self._leave()
            return spec
        create = spec.loader.create_module

        def install_and_create(spec: object) -> object:
            from nemo_fp8.te_cpu.switch import install_for_import

            install_for_import()
            self._leave()  # not before: the next import after a refusal is refused in the same words
            return create(spec)

        spec.loader.create_module = install_and_create
        return spec

    def _runs_without_us(self, origin: str) -> bool:
        return (
            os.environ.get(VARIABLE) == OFF
            or has_driver()
            or EXTENSION in sys.modules
            or self._found(EXTENSION) is not None
            or _is_compiled(os.path.dirname(origin))
            or self._found("torch") is None
        )

    def _found(self, name: str) -> "Any":
        """Return what the other finders say."""
        found = (
            finder.find_spec(name, None)
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        return next((spec for spec in found if spec is not None), None)

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _is_compiled(home: str) -> bool:
    """Return whether the extension lies where TransformerEngine would look for it: beside itself, or in
    site-packages."""
    import sysconfig

    homes = (home, os.path.join(sysconfig.get_path("purelib"), TRANSFORMER_ENGINE))
    folders = (os.path.join(home, folder) for home in homes for folder in _FOLDERS)
    names = (name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder))
    return any(name.startswith(EXTENSION) and name.endswith(_COMPILED) for name in names)
