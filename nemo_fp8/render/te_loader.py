"""Load TransformerEngine's real recipe classes, with or without a GPU.

TE's recipes are plain Python, but ``import transformer_engine`` loads CUDA libraries first and fails without them.
If that import fails, the one file that holds the recipes is loaded by its path. The same way reads a TE in a folder of
its own, since the pure-Python wheel in site-packages would break ``import megatron.core``.

TE reads its ``NVTE_*`` variables when this module is loaded, so set them before (see ``te_environment``).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from nemo_fp8.contract.te_variables import TE_RECIPES
from nemo_fp8.errors import PrecisionError

_FILE = Path(*TE_RECIPES.split("."), "__init__.py")
_REMEDY = (
    "pip install --no-deps --target .te transformer-engine==2.20.2, and give that folder ('.te'); on a GPU machine "
    "install TE itself."
)


def load_recipe_module(folder: str | Path | None = None) -> ModuleType:
    """Return TE's recipe module: from ``folder`` if given, else from the installed TE.

    Raises PrecisionError if there is none.
    """
    if folder is not None:
        path = Path(folder) / _FILE
        if not path.is_file():
            raise PrecisionError(f"No TransformerEngine in {folder}.", f"{path} does not exist.", _REMEDY)
        return _load_file(path)
    before = set(sys.modules)
    try:
        return importlib.import_module(TE_RECIPES)
    except Exception:  # TE's loading of CUDA libraries raises RuntimeError, OSError or ImportError
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine" and n not in before]:
            del sys.modules[name]
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        raise PrecisionError(
            "TransformerEngine is not installed.", "Its recipe classes are needed to build a recipe.", _REMEDY
        )
    return _load_file(Path(next(iter(spec.submodule_search_locations))).parent / _FILE)


def _load_file(path: Path) -> ModuleType:
    # pydantic looks annotations up in sys.modules, so the module needs an entry there under a name of its own.
    name = f"_transformer_engine_recipe_{abs(hash(path.resolve())):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PrecisionError(f"{path} cannot be loaded.", "It is no Python source file.", _REMEDY)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
