"""What the hook does when TransformerEngine is imported, and not before."""

import os
import sys
import sysconfig
from typing import Any

from nemo_fp8_hook import EXTENSION, OFF, TRANSFORMER_ENGINE, VARIABLE, has_driver

# Where TransformerEngine looks for its extension, from its own folder: a wheel, a build, an editable build.
_FOLDERS = ("wheel_lib", "", os.pardir)
_COMPILED = (".so", ".dylib", ".dll")


def found_by(hook: Any) -> Any:
    """Return TransformerEngine's spec, or None if it is not there. Either the hook takes itself away, or loading it
    installs te_cpu first."""
    spec = _found(hook, TRANSFORMER_ENGINE)
    if spec is None or spec.origin is None:  # not there, or a mere folder of that name: a path may still be added
        return None
    if _runs_without_us(hook, spec.origin):
        _leave(hook)
        return spec
    create = spec.loader.create_module

    def install_and_create(spec: object) -> object:
        from nemo_fp8.te_cpu.switch import install_for_import

        install_for_import()
        _leave(hook)  # not before: the next import after a refusal is refused in the same words
        return create(spec)

    spec.loader.create_module = install_and_create
    return spec


def _runs_without_us(hook: Any, origin: str) -> bool:
    return (
        os.environ.get(VARIABLE) == OFF
        or has_driver()
        or EXTENSION in sys.modules
        or _found(hook, EXTENSION) is not None
        or _is_compiled(os.path.dirname(origin))
        or _found(hook, "torch") is None
    )


def _found(hook: Any, name: str) -> Any:
    """Return what the other finders say."""
    found = (
        finder.find_spec(name, None) for finder in sys.meta_path if finder is not hook and hasattr(finder, "find_spec")
    )
    return next((spec for spec in found if spec is not None), None)


def _leave(hook: Any) -> None:
    if hook in sys.meta_path:
        sys.meta_path.remove(hook)


def _is_compiled(home: str) -> bool:
    """Return whether the extension lies where TransformerEngine would look for it: beside itself, or in
    site-packages."""
    homes = (home, os.path.join(sysconfig.get_path("purelib"), TRANSFORMER_ENGINE))
    folders = (os.path.join(home, folder) for home in homes for folder in _FOLDERS)
    names = (name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder))
    return any(name.startswith(EXTENSION) and name.endswith(_COMPILED) for name in names)
